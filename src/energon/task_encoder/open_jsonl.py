"""What a dataset.yaml would say of JSONL files, which have none."""

from __future__ import annotations

from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Leaf

JSONL_SUFFIX = ".jsonl"


def is_jsonl_leaf(leaf: Leaf) -> bool:
    """Return whether a leaf is a JSONL file."""
    return leaf.path.endswith(JSONL_SUFFIX)


def jsonl_config(leaf: Leaf) -> DatasetConfig:
    """Return the description of a JSONL file: its samples are left to cookers."""
    return DatasetConfig(
        crude=True,
        sample_type=None,
        field_map=None,
        sample_loader=None,
        part_filter=None,
        subflavors={},
        split_config=None,
        split_part=None,
        shuffle_over_epochs=None,
        parallel_shard_iters=None,
        max_samples_per_sequence=None,
        subset=None,
        decoder=None,
        given=frozenset(),
        origin=leaf.path,
    )
