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
    return DatasetConfig(origin=leaf.path)
