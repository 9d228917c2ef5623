"""What is behind a path or a document: to list, to prepare, or to open leaf by leaf."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon.errors import ConfigError
from energon.metadataset.document import read_mapping, read_metadataset
from energon.metadataset.inherit import multiply_shuffle, narrow
from energon.metadataset.kind import dataset_kind
from energon.metadataset.leaf import BlendMode, Subset, TraversedDatasetReference
from energon.metadataset.resolve import DatasetPath, resolve, traverse_metadataset
from energon.plan.subset import resolve_range
from energon.sources.shards import ShardPool
from energon.task_encoder.build import LoadedDataset
from energon.task_encoder.encoder import DefaultTaskEncoder, TaskEncoder
from energon.task_encoder.leaf_dataset import loaded_datasets
from energon.task_encoder.leaves import open_leaves, open_members
from energon.task_encoder.open_join import (
    build_index,
    cache_folders,
    find_index,
    index_name,
    join_digest,
)
from energon.worker import WorkerConfig


@dataclass(frozen=True)
class LoadedDatasetList:
    """The leaves of a split, opened, and how they are mixed."""

    datasets: list[LoadedDataset]
    blend_mode: BlendMode


@dataclass(frozen=True)
class DatasetLoader:
    """A dataset, a metadataset, or a document in memory. Nothing is opened before it is asked for.

    Args:
        path: Where it is, or the document as a dict.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        split_part: Which split is opened, whatever is asked for; None for what is asked for.
        subflavors: Merged over those of the leaves.
        shuffle_over_epochs_multiplier: Multiplied with those of the leaves.
    """

    path: DatasetPath
    dataset_config: str | None = None
    split_config: str | None = None
    split_part: str | None = None
    subflavors: Mapping[str, Any] | None = None
    shuffle_over_epochs_multiplier: int | None = 1

    @property
    def splits(self) -> list[str]:
        """The names of the splits of a metadataset, without those that are empty.

        Raises:
            ConfigError: If this is a single dataset.
        """
        if isinstance(self.path, Mapping):
            document = read_mapping(self.path)
        elif dataset_kind(self.path) == "metadataset":
            document = read_metadataset(os.fspath(self.path))
        else:
            raise ConfigError(f"{self.path} is no metadataset; wanted is a .yaml file")
        return [part for part, node in document.content.splits.items() if node is not None]

    def get_datasets(
        self,
        *,
        training: bool,
        split_part: str,
        worker_config: WorkerConfig | None = None,
        subflavors: Mapping[str, Any] | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        subset: Subset | None = None,
    ) -> LoadedDatasetList:
        """Return the leaves of a split, opened.

        Args:
            training: False ignores weights and repetitions.
            split_part: Which split.
            worker_config: Who loads them: then each `dataset` is a pipeline to be built, with
                `dataset.build()`. None gives the opened leaf, with its samples by number in
                `dataset.source`.
            subflavors: Merged over those of the leaves.
            shuffle_over_epochs_multiplier: Multiplied with those of the leaves.
            subset: A range in percent to narrow each leaf to.

        Raises:
            ConfigError: If a document makes no sense.
            DatasetNotFoundError: If something is not there.
            EmptyDatasetError: If there are no samples.
        """
        found = resolve(
            self.path,
            split_part=self.split_part or split_part,
            training=training,
            dataset_config=self.dataset_config,
            split_config=self.split_config,
        )
        if subset is not None:
            resolve_range(0, [subset])
        multiplier = multiply_shuffle(
            self.shuffle_over_epochs_multiplier, shuffle_over_epochs_multiplier
        )
        leaves = [narrow(leaf, subset, multiplier) for leaf in found.leaves]
        mode = found.blend_mode
        opened_leaves = open_leaves(leaves, {**(self.subflavors or {}), **(subflavors or {})})
        datasets: Sequence[Any] = opened_leaves
        if worker_config is not None:
            encoder: TaskEncoder[Any, Any, Any, Any] = DefaultTaskEncoder()
            loaded = loaded_datasets(opened_leaves, None, encoder, worker_config, training=training)
            datasets = [each.dataset for each in loaded]
        return LoadedDatasetList(
            [
                LoadedDataset(
                    dataset,
                    weight=leaf.weight if mode is BlendMode.DATASET_WEIGHT else None,
                    repetitions=leaf.repetitions if mode is BlendMode.SAMPLE_REPETITIONS else None,
                    aux=leaf.aux,
                )
                for leaf, dataset in zip(leaves, datasets, strict=True)
            ],
            mode,
        )

    def traverse(self, *, split_part: str) -> list[TraversedDatasetReference]:
        """Return which datasets a split consists of, without opening them."""
        return traverse_metadataset(self.path, split_part=self.split_part or split_part)

    def prepare(self, split_part: str | None = None) -> list[Path]:
        """Build the join indexes of a split, or of all, where they are missing.

        Returns:
            Where they are.
        """
        parts = self.splits if split_part is None else [split_part]
        leaves = [
            leaf
            for part in parts
            for leaf in resolve(
                self.path,
                split_part=part,
                training=False,
                dataset_config=self.dataset_config,
                split_config=self.split_config,
            ).leaves
        ]
        paths = []
        pool = ShardPool()
        for leaf in leaves:
            if leaf.join:
                sources = open_members(leaf, pool)
                digest = join_digest(leaf, sources)
                if find_index(leaf, digest) is None:
                    build_index(leaf, sources, digest)
                candidates = (folder / index_name(digest) for folder in cache_folders(leaf))
                paths.append(next(path for path in candidates if path.exists()))
        return paths


def load_dataset(
    path: DatasetPath, *, dataset_config: str | None = None, split_config: str | None = None
) -> DatasetLoader:
    """Return what is at `path`, a dataset or metadataset, or the document that it is.

    Args:
        path: Folder of a prepared dataset, a metadataset YAML, or the document as a dict, in
            which paths start from the working directory.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
    """
    return DatasetLoader(path, dataset_config, split_config)


def prepare_metadataset(path: str | os.PathLike[str]) -> list[Path]:
    """Build what a metadataset needs before a job starts: the indexes of its joins.

    They would be built when they are first needed; then all ranks would wait for it. The code
    of joiners is not looked at. Indexes of earlier versions of the document are deleted.

    Returns:
        Where the indexes are.

    Raises:
        ConfigError: If a document makes no sense, or samples have no match where that is an error.
        DatasetNotFoundError: If something is not there.
    """
    paths = load_dataset(path).prepare()
    folder = Path(f"{os.path.abspath(path)}.cache")
    for stale in set(folder.glob(index_name("*"))) - set(paths):
        stale.unlink(missing_ok=True)
    return paths
