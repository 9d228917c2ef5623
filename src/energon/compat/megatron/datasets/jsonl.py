"""A JSONL file described in a program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from energon.compat.megatron.datasets.leaf import LeafDataset, decoding_encoder, plan_leaf_of
from energon.decode.sample_decoder import SampleDecoder
from energon.metadataset.dataset_config import DatasetConfig
from energon.prepare.jsonl import prepare_jsonl
from energon.sources.jsonl import JsonlFileStore, JsonlSource
from energon.task_encoder.leaves import OpenedLeaf
from energon.task_encoder.load import OpenLeaf
from energon.worker import WorkerConfig


class JsonlFactory(LeafDataset):
    """The lines of a JSONL file, as crude samples with the part `json`.

    Args:
        path: The file, indexed by `energon prepare`.
        split_part: Which split.
        training: Whether each pass is shuffled, or samples come in order.
        worker_config: Who loads it.
        subflavors: What the samples carry in `__subflavors__`.
        decoder: Decodes the lines; None leaves them as bytes.
        shuffle_over_epochs: See `shuffle_over_epochs_multiplier` of `get_train_dataset`.
        parallel_shard_iters: See `get_train_dataset`.
        max_samples_per_sequence: See `get_train_dataset`.
        subset: A range of samples, as (first, behind the last) or in percent.

    Raises:
        ConfigError: If the arguments make no sense.
        DatasetNotFoundError: If the file is missing, or not indexed.
        EmptyDatasetError: If there are no samples.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split_part: str = "train",
        training: bool = True,
        worker_config: WorkerConfig,
        subflavors: Mapping[str, Any] | None = None,
        decoder: SampleDecoder | None = SampleDecoder(),  # noqa: B008 - immutable
        shuffle_over_epochs: int | None = 1,
        parallel_shard_iters: int | None = None,
        max_samples_per_sequence: int | None = None,
        subset: Any = None,
    ) -> None:
        source = JsonlSource(
            path, split_part=split_part, subsets=() if subset is None else (subset,)
        )
        opened = OpenedLeaf(
            source,
            OpenLeaf(
                name=source.path.name,
                dataset_path=str(source.path),
                subflavors=dict(subflavors or {}),
                primary=partial(JsonlFileStore, path),
            ),
            plan_leaf_of(
                source,
                split_part=split_part,
                slice_samples=max_samples_per_sequence,
                parallel_slices=parallel_shard_iters,
                shuffle_over_epochs=shuffle_over_epochs,
            ),
            DatasetConfig(),
        )
        super().__init__(
            opened,
            encoder=decoding_encoder(decoder),
            worker_config=worker_config,
            training=training,
        )
        self.path = source.path

    @classmethod
    def prepare_dataset(cls, path: str | os.PathLike[str]) -> int:
        """Index a JSONL file; return how many samples it has."""
        return prepare_jsonl(path)
