"""The datasets behind a path or a document: list them, prepare them, or open them leaf by leaf.

Programs that build documents do so of nodes: `NAME(key=value)` stands for the dict
`{"key": value}`, without values that are None. A tree of nodes is therefore a document, which the
grammar reads and checks.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from energon.compat.megatron.datasets.leaf import LeafDataset, recipe_of
from energon.compat.megatron.datasets.webdataset import GetterCall
from energon.compat.megatron.encoder import LoadedDataset
from energon.compat.megatron.helpers import EPath
from energon.compat.megatron.worker import note_ignored
from energon.errors import ConfigError
from energon.metadataset import resolve as core
from energon.metadataset.leaf import (
    BlendMode,
    Leaf,
    Subset,
    TraversedDatasetReference,
    absolute,
    absolute_aux,
    multiply_shuffle,
    narrow,
)
from energon.metadataset.resolve import DatasetPath, resolve
from energon.sources.files.open import open_file_store
from energon.sources.files.store import FileStore
from energon.task_encoder.leaves import open_leaves
from energon.task_encoder.prepare_joins import build_join_indexes, metadataset_splits
from energon.worker import WorkerConfig


@dataclass(frozen=True)
class LoadedDatasetList:
    """The opened leaves of a split, and how they are mixed.

    Example:
        >>> found = load_dataset("photos").get_datasets(training=True, split_part="train")
        >>> len(found.datasets), found.blend_mode
        (1, <BlendMode.NONE: 'none'>)
    """

    datasets: list[LoadedDataset]
    blend_mode: BlendMode = BlendMode.NONE

    def __iter__(self) -> Iterator[Any]:
        """Yield the kind of blend and the datasets: the pair of Megatron-Energon 5."""
        return iter((self.blend_mode, self.datasets))


@dataclass(frozen=True)
class DatasetLoader:
    """A dataset, a metadataset, or a document in memory. Datasets are opened on demand.

    Args:
        path: Its path, or the document as a dict.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        split_part: The split to open, overriding that of calls; None does not override it.
        subflavors: Merged over those of the leaves.
        shuffle_over_epochs_multiplier: Multiplied with those of the leaves.
        allow: What data may do, see `get_train_dataset`.

    Example:
        >>> found = DatasetLoader("photos").get_datasets(training=False, split_part="val")
        >>> len(found.datasets[0].dataset.source)
        2
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
        return metadataset_splits(self.path, self.allow)

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
            training: Whether each pass is shuffled, or samples come in order.
            split_part: The split to read.
            worker_config: Rank and workers: then each `dataset` is a pipeline, to be built with
                `dataset.build()`. None returns the opened leaf, with its samples by number in
                `dataset.source`.
            subflavors: Merged over those of the leaves.
            shuffle_over_epochs_multiplier: Multiplied with those of the leaves.
            subset: A range to narrow each leaf to.
            kwargs: Arguments for the datasets, see `get_dataset_from_config`.

        Raises:
            ConfigError: If a document is invalid.
            DatasetNotFoundError: If something is missing.
            EmptyDatasetError: If there are no samples.
        """
        found = resolve(
            self.path,
            split_part=self.split_part or split_part,
            training=True,  # validation also has weights, and ignores them
            dataset_config=self.dataset_config,
            split_config=self.split_config,
            allow=self.allow,
        )
        multiplier = multiply_shuffle(
            self.shuffle_over_epochs_multiplier, shuffle_over_epochs_multiplier
        )
        leaves = [narrow(leaf, subset, multiplier) for leaf in found.leaves]
        mode = found.blend_mode
        opened_leaves = open_leaves(
            leaves,
            {**(self.subflavors or {}), **(subflavors or {})},
            allow=self.allow,
            call=GetterCall(
                training, worker_config, arguments=kwargs, as_factories=worker_config is not None
            ),
        )
        datasets: Sequence[Any] = opened_leaves
        if worker_config is not None:
            datasets = LeafDataset.of(recipe_of(opened_leaves, worker_config, training=training))
        return LoadedDatasetList(
            [_loaded(leaf, dataset, mode) for leaf, dataset in zip(leaves, datasets, strict=True)],
            mode,
        )

    def get_dataset(self, *, split_part: str | None = None, **settings: Any) -> Any:
        """Return the only dataset of a split; arguments are those of `get_datasets`.

        Raises:
            ConfigError: If there are several.
        """
        datasets = self.get_datasets(split_part=split_part or "train", **settings).datasets
        if len(datasets) != 1:
            raise ConfigError(f"{self.path}: {len(datasets)} datasets; use get_datasets")
        return datasets[0].dataset

    def post_initialize(self, mds_path: Any = None) -> None:
        """Do nothing: the path is checked when it is needed."""

    def traverse(
        self, mds_path: Any = None, *, split_part: str, _subflavors: Any = None
    ) -> list[TraversedDatasetReference]:
        """Return the datasets that a split consists of, without opening them."""
        return traverse_metadataset(
            self.path, split_part=self.split_part or split_part, allow=self.allow
        )

    def prepare(self, split_part: str | None = None) -> list[Path]:
        """Build the missing join indexes of a split, or of all splits.

        Returns:
            Their paths.
        """
        parts = self.splits if split_part is None else [split_part]
        return build_join_indexes(
            self.path,
            parts,
            dataset_config=self.dataset_config,
            split_config=self.split_config,
            allow=self.allow,
        )


def _loaded(leaf: Leaf, dataset: Any, mode: BlendMode) -> LoadedDataset:
    """Return a dataset with the blend settings of its leaf."""
    return LoadedDataset(
        dataset,
        weight=leaf.weight if mode is BlendMode.DATASET_WEIGHT else None,
        repetitions=leaf.repetitions if mode is BlendMode.SAMPLE_REPETITIONS else None,
        aux=leaf.aux,
    )


def traverse_metadataset(
    path: DatasetPath, *, split_part: str, allow: Collection[str] = (), **kwargs: Any
) -> list[TraversedDatasetReference]:
    """Return the datasets that a split of a metadataset consists of, without opening them.

    Paths, and addresses of auxiliary data, are `EPath`. See `energon.traverse_metadataset`.

    Args:
        path: The metadataset, or the document as a dict.
        split_part: The split to read.
        allow: "env" lets documents refer to environment variables.
        kwargs: Have no effect, as is logged once.
    """
    note_ignored("no dataset is opened", **dict.fromkeys(kwargs, True))
    return [
        TraversedDatasetReference(
            EPath(each.path),  # type: ignore[arg-type]
            each.split_part,
            {name: _aux_path(address) for name, address in each.aux.items()},  # type: ignore[misc]
            each.subflavors,
        )
        for each in core.traverse_metadataset(
            path, split_part=split_part, allow=allow, must_exist=False
        )
    ]


def _aux_path(address: str) -> EPath:
    """Return the path of auxiliary data; `filesystem://x` is the folder x."""
    return EPath(address.removeprefix("filesystem://"))


@dataclass(frozen=True)
class Metadataset(DatasetLoader):
    """A metadataset whose splits are known.

    Args:
        path: Its file; paths in `splits` are relative to its folder.
        splits: Its content, by the names of the splits; None reads the file.
    """

    def __init__(self, path: DatasetPath, splits: Mapping[str, Any] | None = None) -> None:
        document = path if splits is None else _document(path, splits, type(self).__name__)
        DatasetLoader.__init__(self, document)


class MetadatasetV2(Metadataset):
    """A metadataset of version 2 whose splits are known, see `Metadataset`."""


def _document(path: Any, splits: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the document of a metadataset, with paths relative to the folder of a file."""
    folder = os.path.dirname(os.fspath(path))

    def found(node: Any, key: str = "") -> Any:
        if isinstance(node, list | tuple):
            return [found(each) for each in node]
        if isinstance(node, Mapping):
            # Auxiliary data is listed by name.
            return {name: found(each, key if key == "aux" else name) for name, each in node.items()}
        if key == "path":
            return absolute(str(node), folder)
        return absolute_aux(str(node), folder) if key == "aux" else node

    return {"__module__": "megatron.energon", "__class__": kind, "splits": found(splits)}


def load_dataset(
    path: DatasetPath,
    *,
    dataset_config: str | None = None,
    split_config: str | None = None,
    allow: Collection[str] = (),
) -> DatasetLoader:
    """Return the dataset or metadataset at a path or in a document.

    Args:
        path: Folder of a prepared dataset, a metadataset YAML, or the document as a dict, with
            paths relative to the working directory.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        allow: What data may do, see `get_train_dataset`.

    Example:
        >>> loader = load_dataset("photos")
        >>> [leaf.path.name for leaf in loader.traverse(split_part="train")]
        ['photos']
        >>> len(loader.get_dataset(training=False, split_part="val").source)
        2
    """
    return DatasetLoader(path, dataset_config, split_config, allow=allow)


class DocumentNode(dict[str, Any]):
    """A node of a document, with its keys as attributes."""

    keys_of: ClassVar[str] = ""
    """The keys that are allowed."""

    def __init_subclass__(cls) -> None:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind, default=None) for name in cls.keys_of.split()]
        )

    def __init__(self, *values: Any, **named: Any) -> None:
        given = inspect.signature(type(self)).bind(*values, **named).arguments
        super().__init__(
            {key: _plain(key, each) for key, each in given.items() if each is not None}
        )

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).keys_of.split():
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.get(name, _DEFAULTS.get(name))

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = _plain(name, value)

    def post_initialize(self, mds_path: Any = None) -> None:
        """Do nothing: paths are opened when they are needed."""

    def get_datasets(self, *, split_part: str, **settings: Any) -> LoadedDatasetList:
        """Return the opened leaves; paths are relative to the working directory."""
        return self._loader(split_part).get_datasets(split_part=split_part, **settings)

    def traverse(self, mds_path: Any = None, *, split_part: str) -> list[TraversedDatasetReference]:
        """Return the datasets that the node consists of, without opening them."""
        return self._loader(split_part).traverse(mds_path, split_part=split_part)

    def prepare(self, split_part: str | None = None) -> Any:
        """Build the join indexes of the node, where they are missing."""
        return self._loader(split_part or "train").prepare()

    def _loader(self, split_part: str) -> DatasetLoader:
        version = "Metadataset" if "datasets" in self else "MetadatasetV2"
        return DatasetLoader({"__class__": version, "splits": {split_part: self}})


_DEFAULTS = {
    "weight": 1.0,
    "repetitions": 1,
    "shuffle_over_epochs_multiplier": 1,
    "nonmatch": "error",
}


def _plain(key: str, value: Any) -> Any:
    """Return a value as it appears in a document."""
    if key == "path":
        return str(value)
    if key == "joiner" and callable(value):
        what = "__class__" if inspect.isclass(value) else "__function__"
        return {"__module__": value.__module__, what: value.__qualname__}
    return value


_OF_ALL = "path split_part subflavors shuffle_over_epochs_multiplier dataset_config split_config"
_OF_JOINS = _OF_ALL.replace("path", "join joiner subset")


_OF_DATASETS = f"{_OF_ALL} subset aux"
_NODES = {
    "MetadatasetBlender": "datasets",
    "DatasetReferenceV1": f"{_OF_ALL} subflavor weight",
    "DatasetReference": _OF_DATASETS,
    "JoinDatasetReference": f"{_OF_DATASETS} nonmatch",
    "MetadatasetJoin": _OF_JOINS,
    "BlendDatasetReference": f"weight {_OF_DATASETS}",
    "BlendJoinDatasetReference": f"weight {_OF_JOINS}",
    "MetadatasetBlend": "blend subset",
    "BlendEpochizedDatasetReference": f"repetitions {_OF_DATASETS}",
    "BlendEpochizedJoinDatasetReference": f"repetitions {_OF_JOINS}",
    "MetadatasetBlendEpochized": "blend_epochized subset",
    "SubsetRange": "range",
}
"""The kinds of nodes, and the keys of each."""


def __getattr__(name: str) -> Any:
    """Return the class of a kind of node."""
    if name not in _NODES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names = {"keys_of": _NODES[name], "__module__": __name__}
    kind = globals()[name] = type(name, (DocumentNode,), names)
    return kind


class AuxDatasetReference(str):
    """The address of a dataset with auxiliary data."""

    def __new__(cls, path: Any) -> Self:
        return super().__new__(cls, path)

    def post_initialize(self, mds_path: Any = None) -> None:
        """Do nothing: it is opened when it is needed."""

    def get_file_store(self) -> FileStore[Any]:
        """Return its files by name."""
        return open_file_store(str(self))


class AuxFilesystemReference(AuxDatasetReference):
    """The address of a folder with auxiliary data."""

    def __new__(cls, fs_path: Any) -> Self:
        return super().__new__(cls, f"filesystem://{fs_path}")
