"""What is behind a path or a document: to list, to prepare, or to open leaf by leaf."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon.compat.megatron.datasets.leaf import LeafDataset
from energon.compat.megatron.encoder import LoadedDataset
from energon.compat.megatron.load_config import GetterCall
from energon.metadataset.inherit import multiply_shuffle, narrow
from energon.metadataset.leaf import BlendMode, Subset, TraversedDatasetReference
from energon.metadataset.resolve import DatasetPath, resolve, traverse_metadataset
from energon.plan.subset import resolve_range
from energon.task_encoder.encoder import DefaultTaskEncoder
from energon.task_encoder.leaves import open_leaves
from energon.task_encoder.prepare_metadataset import build_join_indexes, split_names
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
        allow: What data may do, see `get_train_dataset`.
    """

    path: DatasetPath
    dataset_config: str | None = None
    split_config: str | None = None
    split_part: str | None = None
    subflavors: Mapping[str, Any] | None = None
    shuffle_over_epochs_multiplier: int | None = 1
    allow: Collection[str] = ()

    @property
    def splits(self) -> list[str]:
        """The names of the splits of a metadataset, without those that are empty.

        Raises:
            ConfigError: If this is a single dataset.
        """
        return split_names(self.path, self.allow)

    def get_datasets(
        self,
        *,
        training: bool,
        split_part: str,
        worker_config: WorkerConfig | None = None,
        subflavors: Mapping[str, Any] | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        subset: Subset | None = None,
        **kwargs: Any,
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
            kwargs: More for the datasets, see `get_dataset_from_config`.

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
            allow=self.allow,
        )
        if subset is not None:
            resolve_range(0, [subset])
        multiplier = multiply_shuffle(
            self.shuffle_over_epochs_multiplier, shuffle_over_epochs_multiplier
        )
        leaves = [narrow(leaf, subset, multiplier) for leaf in found.leaves]
        mode = found.blend_mode
        opened_leaves = open_leaves(
            leaves,
            {**(self.subflavors or {}), **(subflavors or {})},
            allow=self.allow,
            call=GetterCall(training, worker_config, arguments=kwargs),
        )
        datasets: Sequence[Any] = opened_leaves
        if worker_config is not None:
            datasets = [
                opened.dataset.within(opened, among=opened_leaves)
                if isinstance(opened.dataset, LeafDataset)
                else LeafDataset(
                    opened,
                    encoder=DefaultTaskEncoder(),
                    worker_config=worker_config,
                    training=training,
                    among=opened_leaves,
                )
                for opened in opened_leaves
            ]
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
        return traverse_metadataset(
            self.path, split_part=self.split_part or split_part, allow=self.allow
        )

    def prepare(self, split_part: str | None = None) -> list[Path]:
        """Build the join indexes of a split, or of all, where they are missing.

        Returns:
            Where they are.
        """
        parts = self.splits if split_part is None else [split_part]
        return build_join_indexes(
            self.path,
            parts,
            dataset_config=self.dataset_config,
            split_config=self.split_config,
            allow=self.allow,
        )


def load_dataset(
    path: DatasetPath,
    *,
    dataset_config: str | None = None,
    split_config: str | None = None,
    allow: Collection[str] = (),
) -> DatasetLoader:
    """Return what is at `path`, a dataset or metadataset, or the document that it is.

    Args:
        path: Folder of a prepared dataset, a metadataset YAML, or the document as a dict, in
            which paths start from the working directory.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        allow: What data may do, see `get_train_dataset`.
    """
    return DatasetLoader(path, dataset_config, split_config, allow=allow)
