"""Make the datasets that a program or a folder describes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError
from energon.metadataset.resolve import resolve
from energon.plan.leaf import PlanLeaf, choose_slice_samples
from energon.task_encoder.encoder import DefaultTaskEncoder
from energon.task_encoder.hook_maker import AnyTaskEncoder
from energon.task_encoder.leaf_dataset import LeafDataset, loaded_datasets
from energon.task_encoder.leaves import OpenedLeaf, Source, open_leaves
from energon.task_encoder.train_plan import PARALLEL_SLICES
from energon.worker import WorkerConfig


def plan_leaf_of(
    source: Source,
    *,
    split_part: str,
    slice_samples: int | None,
    parallel_slices: int | None,
    shuffle_over_epochs: int | None,
) -> PlanLeaf:
    """Return how the samples of `source` are ordered; None chooses, as the getters do."""
    return PlanLeaf(
        uid=f"{source.path.name}/{split_part}",
        num_samples=len(source),
        slice_samples=slice_samples or choose_slice_samples(source.mean_sample_bytes),
        parallel_slices=parallel_slices or PARALLEL_SLICES,
        shuffle_over_epochs=shuffle_over_epochs,
    )


def take_over(
    factory: LeafDataset,
    opened: OpenedLeaf,
    decoder: SampleDecoder | None,
    worker_config: WorkerConfig,
    *,
    training: bool,
) -> None:
    """Make `factory` the dataset that was opened."""
    encoder: AnyTaskEncoder = DefaultTaskEncoder()
    encoder.decoder = decoder
    (loaded,) = loaded_datasets([opened], None, encoder, worker_config, training=training)
    found: LeafDataset = loaded.dataset
    LeafDataset.__init__(factory, **vars(found))


def get_dataset_from_config(
    path: str | os.PathLike[str],
    *,
    dataset_config: str | None = None,
    split_config: str | None = None,
    split_part: str = "train",
    training: bool = True,
    subflavors: Mapping[str, Any] | None = None,
    worker_config: WorkerConfig,
) -> LeafDataset:
    """Return the dataset that a prepared folder with its `dataset.yaml` describes.

    Args:
        path: The folder.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        split_part: Which split.
        training: Whether each pass is shuffled, or samples come in order.
        subflavors: Merged over those of the dataset.
        worker_config: Who loads it.

    Raises:
        ConfigError: If a document makes no sense.
        DatasetNotFoundError: If there is no prepared dataset.
        EmptyDatasetError: If there are no samples.
    """
    leaves = resolve(
        path,
        split_part=split_part,
        training=training,
        dataset_config=dataset_config,
        split_config=split_config,
    ).leaves
    encoder: AnyTaskEncoder = DefaultTaskEncoder()
    opened = open_leaves(leaves, subflavors)
    loaded = loaded_datasets(opened, None, encoder, worker_config, training=training)
    if len(loaded) != 1:
        raise ConfigError(
            f"{path}: {len(loaded)} datasets; use get_train_dataset for a metadataset"
        )
    dataset: LeafDataset = loaded[0].dataset
    return dataset
