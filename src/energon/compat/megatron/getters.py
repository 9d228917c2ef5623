"""The dataset getters, with the arguments that older programs pass."""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from energon.arguments import ARGUMENT_HOMES
from energon.compat.megatron.datasets.arguments import OF_DECODER, older_decoder
from energon.compat.megatron.datasets.leaf import DecodingEncoder, LeafDataset, recipe_of
from energon.compat.megatron.datasets.webdataset import GetterCall
from energon.compat.megatron.encoder import as_planned
from energon.compat.megatron.load_dataset import DatasetLoader
from energon.errors import ConfigError, UnknownArgumentError
from energon.metadataset.leaf import LeafList
from energon.metadataset.resolve import DatasetPath
from energon.samples.crude import CrudeSample
from energon.task_encoder import getters as core
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.encoder import AnyTaskEncoder, T_batch, TaskEncoder
from energon.task_encoder.leaves import OpenedLeaf
from energon.task_encoder.recipe import train_recipe, validation_recipe
from energon.task_encoder.train_plan import TrainSettings, ValidationSettings
from energon.worker import WorkerConfig

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
    known, encoder, resolved, opened = _open(core.get_train_dataset, path, task_encoder, arguments)
    settings = _settings(TrainSettings, known)
    recipe = train_recipe(resolved, opened, encoder, settings, known["worker_config"])
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
    known, encoder, _, opened = _open(core.get_val_dataset, path, task_encoder, arguments)
    return _validation(opened, encoder, known)  # type: ignore[no-any-return]


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
    known, encoder, _, opened = _open(core.get_val_datasets, path, task_encoder, arguments)
    recipe = recipe_of(opened, known["worker_config"], training=False, encoder=encoder)
    return [
        (_validation([leaf], encoder, known), dataset)
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
        check_known(name, signature.parameters)
    bound = signature.bind(path, **arguments)
    bound.apply_defaults()
    known = bound.arguments
    order = {name: known.get(name) for name in ("max_samples_per_sequence", "parallel_shard_iters")}
    resolved, opened = core.open_run_data(
        encoder=encoder,
        training=getter is core.get_train_dataset,
        call=lambda training, config, settings: GetterCall(
            training, config, {**settings, **order}, more
        ),
        **{name: known[name] for name in _OF_RUNS},
    )
    check_sample_type(opened, sample_type)
    return known, encoder, resolved, opened


_OF_RUNS = (
    *("path", "worker_config", "split_part", "dataset_config", "split_config"),
    *("subflavors", "exclude_from", "allow"),
)


def _settings(kind: Callable[..., T], known: Mapping[str, Any]) -> T:
    """Return the arguments that are fields of `kind`, a class of settings."""
    names = inspect.signature(kind).parameters
    return kind(**{name: known[name] for name in names if name in known})


def _validation(
    opened: Sequence[OpenedLeaf], encoder: AnyTaskEncoder, known: Mapping[str, Any]
) -> Any:
    settings = _settings(ValidationSettings, known)
    recipe = validation_recipe(opened, encoder, settings, known["worker_config"])
    return as_planned(encoder.assemble(recipe))


def check_sample_type(opened: Sequence[OpenedLeaf], sample_type: type | None) -> None:
    """Raise SampleTypeError unless all datasets yield samples of this type; None accepts any."""
    if sample_type is None:
        return
    for leaf in opened:
        found = getattr(leaf.dataset, "__sample_type__", None) or leaf.loading.samples.sample_type
        if not issubclass(found or CrudeSample, sample_type):
            raise SampleTypeError(
                f"{leaf.name}: samples are of type {(found or CrudeSample).__name__}, which is not "
                f"a subclass of {sample_type.__name__}; correct sample_type, or the dataset.yaml"
            )


def check_known(name: str, known: Mapping[str, Any]) -> None:
    """Raise UnknownArgumentError if a name looks misspelled, or belongs to another function."""
    if name in _OF_WORKER_CONFIG:
        raise UnknownArgumentError(
            f"dataset getters have no argument {name!r}; {ARGUMENT_HOMES[name]}"
        )
    near = difflib.get_close_matches(name, (*known, *_INSTEAD, "sample_type"), 1, cutoff=0.8)
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
