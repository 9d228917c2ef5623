"""The dataset that a folder describes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from energon.compat.megatron.datasets.leaf import LeafDataset
from energon.compat.megatron.getters import check_sample_type
from energon.compat.megatron.load_config import GetterCall
from energon.errors import ConfigError
from energon.metadataset.resolve import resolve
from energon.task_encoder.encoder import DefaultTaskEncoder
from energon.task_encoder.leaves import open_leaves
from energon.worker import WorkerConfig


def get_dataset_from_config(
    path: str | os.PathLike[str],
    *,
    dataset_config: str | None = None,
    split_config: str | None = None,
    split_part: str | None = "train",
    training: bool = True,
    subflavors: Mapping[str, Any] | None = None,
    worker_config: WorkerConfig,
    sample_type: type | None = None,
    allow: Collection[str] = (),
    **kwargs: Any,
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
        sample_type: Of which type its samples have to be; None for any.
        allow: What data may do, see `get_train_dataset`.
        kwargs: More for the dataset, where `dataset.yaml` does not say it: `field_map`,
            `part_filter`, `subset`, `decoder` and what a class of the program takes.

    Raises:
        ConfigError: If a document makes no sense.
        DatasetNotFoundError: If there is no prepared dataset.
        EmptyDatasetError: If there are no samples.
    """
    leaves = resolve(
        path,
        split_part=split_part or "train",
        training=training,
        dataset_config=dataset_config,
        split_config=split_config,
        allow=allow,
    ).leaves
    call = GetterCall(training, worker_config, arguments=kwargs, as_factories=True)
    opened = open_leaves(leaves, subflavors, allow=allow, call=call)
    if len(opened) != 1:
        raise ConfigError(
            f"{path}: {len(opened)} datasets; use get_train_dataset for a metadataset"
        )
    check_sample_type(opened, sample_type)
    dataset = opened[0].dataset
    if isinstance(dataset, LeafDataset):
        return dataset.within(opened[0])
    return LeafDataset(
        opened[0], encoder=DefaultTaskEncoder(), worker_config=worker_config, training=training
    )
