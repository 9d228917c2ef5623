"""The dataset getters, with the arguments of older programs, and datasets opened leaf by leaf.

Programs that build documents do so of nodes: `NAME(key=value)` stands for the dict
`{"key": value}`, without values that are None. A tree of nodes is therefore a document, which the
grammar reads and checks.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from energon.arguments import ARGUMENT_HOMES
from energon.compat.megatron.datasets.arguments import OF_DECODER, older_decoder
from energon.compat.megatron.datasets.leaf import DecodingEncoder, LeafDataset, recipe_of
from energon.compat.megatron.datasets.webdataset import GetterCall
from energon.compat.megatron.encoder import LoadedDataset, as_planned
from energon.compat.megatron.helpers import EPath
from energon.compat.megatron.worker import note_ignored
from energon.errors import ConfigError, UnknownArgumentError
from energon.metadataset import resolve as core_resolve
from energon.metadataset.leaf import (
    BlendMode,
    Leaf,
    LeafList,
    Subset,
    TraversedDatasetReference,
    absolute,
    absolute_aux,
    multiply_shuffle,
    narrow,
)
from energon.metadataset.resolve import DatasetPath, resolve
from energon.samples.crude import CrudeSample
from energon.sources.files.open import open_file_store
from energon.sources.files.store import FileStore
from energon.task_encoder import getters as core
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.encoder import AnyTaskEncoder, T_batch, TaskEncoder
from energon.task_encoder.leaves import (
    OpenedLeaf,
    build_join_indexes,
    metadataset_splits,
    open_leaves,
)
from energon.task_encoder.recipe import train_recipe, validation_recipe
from energon.task_encoder.train_plan import TrainSettings, ValidationSettings
from energon.worker import WorkerConfig


@dataclass(frozen=True)
class LoadedDatasetList:
    """The opened leaves of a split, and how they are mixed.

    Example:
        >>> loaded = load_dataset("photos").get_datasets(training=True, split_part="train")
        >>> len(loaded.datasets), loaded.blend_mode
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
        >>> loaded = DatasetLoader("photos").get_datasets(training=False, split_part="val")
        >>> len(loaded.datasets[0].dataset.source)
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
        resolved = resolve(
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
        leaves = [narrow(leaf, subset, multiplier) for leaf in resolved.leaves]
        mode = resolved.blend_mode
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
            {
                name: EPath(address.removeprefix("filesystem://"))  # type: ignore[misc]
                for name, address in each.aux.items()
            },
            each.subflavors,
        )
        for each in core_resolve.traverse_metadataset(
            path, split_part=split_part, allow=allow, must_exist=False
        )
    ]


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

    def with_addresses(node: Any, key: str = "") -> Any:
        if isinstance(node, list | tuple):
            return [with_addresses(each) for each in node]
        if isinstance(node, Mapping):
            # Auxiliary data is listed by name.
            return {
                name: with_addresses(each, key if key == "aux" else name)
                for name, each in node.items()
            }
        if key == "path":
            return absolute(str(node), folder)
        return absolute_aux(str(node), folder) if key == "aux" else node

    return {"__module__": "megatron.energon", "__class__": kind, "splits": with_addresses(splits)}


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


T = TypeVar("T")

_INSTEAD = dict.fromkeys(OF_DECODER, "`decoder = SampleDecoder(...)` of the task encoder") | {
    "auto_decode": "`decoder` of the task encoder, which is None for raw bytes",
    "handler": "`global_error_handler` of WorkerConfig. It has no effect here",
    "ignore_decoder_errors": "`@stateless(failure_tolerance=...)` on hooks. It has no effect here",
}


def get_train_dataset(
    path: DatasetPath,
    *,
    task_encoder: TaskEncoder[Any, Any, Any, T_batch] | None = None,
    **arguments: Any,
) -> SavableDataset[T_batch]:
    """Return the training pipeline over a dataset or metadataset, ready for a loader.

    Arguments and errors are those of `energon.get_train_dataset`, and these:

    Args:
        path: Folder of a prepared dataset, a metadataset YAML, or the document as a dict.
        task_encoder: The user's hooks; None for those of `DefaultTaskEncoder`.
        arguments: `sample_type`, the required type of samples. Arguments that no getter knows are
            passed to the datasets, unless set in their `dataset.yaml`: `field_map`, `part_filter`,
            `subset` and those of dataset classes of the program. Deprecated decoder arguments
            (`image_decode`, `av_decode`, `video_decode_audio`, `auto_decode`) work with a warning.
    """
    values, encoder, resolved, opened = _open(core.get_train_dataset, path, task_encoder, arguments)
    settings = _settings(TrainSettings, values)
    recipe = train_recipe(resolved, opened, encoder, settings, values["worker_config"])
    return as_planned(encoder.assemble(recipe))  # type: ignore[no-any-return]


def get_val_dataset(
    path: DatasetPath,
    *,
    task_encoder: TaskEncoder[Any, Any, Any, T_batch] | None = None,
    **arguments: Any,
) -> SavableDataset[T_batch]:
    """Return the validation pipeline: each sample once, in the order of the datasets.

    Arguments and errors are those of `energon.get_val_dataset`, and those of `get_train_dataset`
    here.
    """
    values, encoder, _, opened = _open(core.get_val_dataset, path, task_encoder, arguments)
    return _validation(opened, encoder, values)  # type: ignore[no-any-return]


def get_val_datasets(
    path: DatasetPath,
    *,
    task_encoder: TaskEncoder[Any, Any, Any, T_batch] | None = None,
    **arguments: Any,
) -> list[tuple[SavableDataset[T_batch], Any]]:
    """Return a validation pipeline for each leaf, with the leaf as a separate dataset.

    Arguments and errors are those of `energon.get_val_dataset`, and those of `get_train_dataset`
    here.
    """
    values, encoder, _, opened = _open(core.get_val_datasets, path, task_encoder, arguments)
    recipe = recipe_of(opened, values["worker_config"], training=False, encoder=encoder)
    return [
        (_validation([leaf], encoder, values), dataset)
        for leaf, dataset in zip(opened, LeafDataset.of(recipe), strict=True)
    ]


for _name in ("get_train_dataset", "get_val_dataset", "get_val_datasets"):
    # So that editors and `inspect` show the accepted arguments.
    _known = inspect.signature(getattr(core, _name))
    _more = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD, annotation=Any)
    globals()[_name].__signature__ = _known.replace(parameters=[*_known.parameters.values(), _more])


class SampleTypeError(ConfigError, AssertionError):
    """A dataset yields samples of another type than a program requests."""


def _open(
    getter: Callable[..., Any],
    path: DatasetPath,
    task_encoder: AnyTaskEncoder | None,
    arguments: dict[str, Any],
) -> tuple[Mapping[str, Any], AnyTaskEncoder, LeafList, Sequence[OpenedLeaf]]:
    """Return the arguments that a getter of the core knows, the encoder, and the datasets."""
    signature = inspect.signature(getter)
    encoder: AnyTaskEncoder = task_encoder or DecodingEncoder()
    older = {name: arguments.pop(name) for name in _INSTEAD if name in arguments}
    if older:
        encoder = with_legacy_arguments(encoder, older)
    sample_type = arguments.pop("sample_type", None)
    more = {name: arguments.pop(name) for name in arguments.keys() - signature.parameters.keys()}
    for name in more:
        check_argument(name, signature.parameters)
    bound = signature.bind(path, **arguments)
    bound.apply_defaults()
    values = bound.arguments
    order = {
        name: values.get(name) for name in ("max_samples_per_sequence", "parallel_shard_iters")
    }
    resolved, opened = core.open_run_data(
        encoder=encoder,
        training=getter is core.get_train_dataset,
        call=lambda training, config, settings: GetterCall(
            training, config, {**settings, **order}, more
        ),
        **{name: values[name] for name in _OF_RUNS},
    )
    check_sample_type(opened, sample_type)
    return values, encoder, resolved, opened


_OF_RUNS = (
    *("path", "worker_config", "split_part", "dataset_config", "split_config"),
    *("subflavors", "exclude_from", "allow"),
)


def _settings(kind: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Return the arguments that are fields of `kind`, a class of settings."""
    names = inspect.signature(kind).parameters
    return kind(**{name: values[name] for name in names if name in values})


def _validation(
    opened: Sequence[OpenedLeaf], encoder: AnyTaskEncoder, values: Mapping[str, Any]
) -> Any:
    settings = _settings(ValidationSettings, values)
    recipe = validation_recipe(opened, encoder, settings, values["worker_config"])
    return as_planned(encoder.assemble(recipe))


def check_sample_type(opened: Sequence[OpenedLeaf], sample_type: type | None) -> None:
    """Raise SampleTypeError unless all datasets yield samples of this type; None accepts any."""
    if sample_type is None:
        return
    for leaf in opened:
        kind = getattr(leaf.dataset, "__sample_type__", None) or leaf.loading.samples.sample_type
        if not issubclass(kind or CrudeSample, sample_type):
            raise SampleTypeError(
                f"{leaf.name}: samples are of type {(kind or CrudeSample).__name__}, which is not "
                f"a subclass of {sample_type.__name__}; correct sample_type, or the dataset.yaml"
            )


def check_argument(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise UnknownArgumentError if a name looks misspelled, or belongs to another function."""
    if name in _OF_WORKER_CONFIG:
        raise UnknownArgumentError(
            f"dataset getters have no argument {name!r}; {ARGUMENT_HOMES[name]}"
        )
    near = difflib.get_close_matches(name, (*parameters, *_INSTEAD, "sample_type"), 1, cutoff=0.8)
    if near and name not in OF_DATASETS:
        raise UnknownArgumentError(
            f"dataset getters have no argument {name!r}; did you mean {near[0]!r}?"
        )


_OF_WORKER_CONFIG = frozenset({"num_workers", "world_size"})
OF_DATASETS = frozenset(
    {"field_map", "sample_loader", "part_filter", "subset", "shuffle_over_epochs", "decoder"}
)
"""Arguments of dataset classes that getters pass through."""


def with_legacy_arguments(encoder: AnyTaskEncoder, arguments: Mapping[str, Any]) -> AnyTaskEncoder:
    """Return the task encoder with the decoder that deprecated arguments describe.

    `image_decode`, `av_decode` and `video_decode_audio` set up a `SampleDecoder`;
    `auto_decode=False` leaves parts as bytes. `handler` and `ignore_decoder_errors` have no
    effect. The task encoder that was passed is not changed.
    """
    for name in arguments:
        warnings.warn(
            f"the argument {name!r} of dataset getters is deprecated; use {_INSTEAD[name]}",
            FutureWarning,
            stacklevel=4,
        )
    if arguments.keys() <= {"handler", "ignore_decoder_errors"}:
        return encoder
    encoder = copy.copy(encoder)
    encoder.decoder = older_decoder(encoder.decoder, dict(arguments))
    return encoder


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
        split_part: The split to read.
        training: Whether each pass is shuffled, or samples come in order.
        subflavors: Merged over those of the dataset.
        worker_config: Rank and workers.
        sample_type: The required type of its samples; None for any.
        allow: What data may do, see `get_train_dataset`.
        kwargs: Arguments for the dataset, unless set in `dataset.yaml`: `field_map`,
            `part_filter`, `subset`, `decoder` and those of a dataset class of the program.

    Raises:
        ConfigError: If a document is invalid.
        DatasetNotFoundError: If there is no prepared dataset.
        EmptyDatasetError: If there are no samples.
    """
    loader = DatasetLoader(path, dataset_config, split_config, subflavors=subflavors, allow=allow)
    dataset = loader.get_dataset(
        split_part=split_part, training=training, worker_config=worker_config, **kwargs
    )
    check_sample_type([dataset.opened], sample_type)
    return dataset  # type: ignore[no-any-return]
