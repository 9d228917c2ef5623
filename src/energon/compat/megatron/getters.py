"""The dataset getters, with the arguments that older programs pass."""

from __future__ import annotations

import copy
import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from energon.compat.megatron.datasets.leaf import LeafDataset
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import UnknownArgumentError
from energon.metadataset.resolve import DatasetPath
from energon.task_encoder import getters as core
from energon.task_encoder.encoder import DefaultTaskEncoder
from energon.task_encoder.hook_maker import AnyTaskEncoder

_OF_DECODER = ("image_decode", "av_decode", "video_decode_audio")
_INSTEAD = dict.fromkeys(_OF_DECODER, "`decoder = SampleDecoder(...)` of the task encoder") | {
    "auto_decode": "`decoder` of the task encoder, which is None for raw bytes",
    "handler": "`global_error_handler` of WorkerConfig",
    "ignore_decoder_errors": "`@stateless(failure_tolerance=...)` on hooks",
}


def get_train_dataset(path: DatasetPath, **arguments: Any) -> Any:
    """Return the training pipeline over a dataset or metadataset, ready for a loader.

    Arguments and errors are those of `energon.get_train_dataset`; deprecated ones of the decoder
    (`image_decode`, `av_decode`, `video_decode_audio`, `auto_decode`) work with a warning.
    """
    return core.get_train_dataset(path, **_translated(core.get_train_dataset, arguments))


def get_val_dataset(path: DatasetPath, **arguments: Any) -> Any:
    """Return the validation pipeline: each sample once, leaf after leaf, in order.

    Arguments and errors are those of `energon.get_val_dataset`, see `get_train_dataset`.
    """
    return core.get_val_dataset(path, **_translated(core.get_val_dataset, arguments))


def get_val_datasets(path: DatasetPath, **arguments: Any) -> list[tuple[Any, LeafDataset]]:
    """Return a validation pipeline for each leaf, and the leaf as a dataset of its own.

    Arguments and errors are those of `energon.get_val_dataset`, see `get_train_dataset`.
    """
    translated = _translated(core.get_val_datasets, arguments)
    encoder: AnyTaskEncoder = translated.get("task_encoder") or DefaultTaskEncoder()
    config = translated["worker_config"]
    return [
        (pipeline, LeafDataset(leaf, encoder=encoder, worker_config=config, training=False))
        for pipeline, leaf in core.get_val_datasets(path, **translated)
    ]


for _name in ("get_train_dataset", "get_val_dataset", "get_val_datasets"):
    # So that editors and `inspect` show what may be passed.
    globals()[_name].__signature__ = inspect.signature(getattr(core, _name))


def _translated(getter: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a getter of energon, with what older ones say in the encoder."""
    known = inspect.signature(getter).parameters
    own = {name: value for name, value in arguments.items() if name in known}
    older = {name: value for name, value in arguments.items() if name not in known}
    if older:
        encoder = own.get("task_encoder")
        own["task_encoder"] = with_legacy_arguments(encoder, older, known=known)
    return own


def with_legacy_arguments(
    task_encoder: AnyTaskEncoder | None,
    arguments: Mapping[str, Any],
    *,
    known: Mapping[str, Any] | None = None,
) -> AnyTaskEncoder:
    """Return the task encoder with the decoder that deprecated arguments describe.

    `image_decode`, `av_decode` and `video_decode_audio` set up a `SampleDecoder`;
    `auto_decode=False` leaves parts as bytes. `handler` and `ignore_decoder_errors` have no
    effect. The task encoder that was passed is not changed.

    Args:
        task_encoder: The encoder; None for `DefaultTaskEncoder`.
        arguments: What was passed.
        known: The arguments that the getter has, for a proposal; None for those of all getters.

    Raises:
        UnknownArgumentError: If there is no such argument.
    """
    encoder: AnyTaskEncoder = DefaultTaskEncoder() if task_encoder is None else task_encoder
    for name in arguments:
        _warn(name, known or inspect.signature(core.get_train_dataset).parameters)
    settings = {name: arguments[name] for name in _OF_DECODER if name in arguments}
    if not settings and "auto_decode" not in arguments:
        return encoder
    encoder = copy.copy(encoder)
    if arguments.get("auto_decode", True):
        encoder.decoder = replace(encoder.decoder or SampleDecoder(), **settings)
    else:
        encoder.decoder = None
    return encoder


def _warn(name: str, known: Mapping[str, Any]) -> None:
    if name not in _INSTEAD:
        near = difflib.get_close_matches(name, (*known, *_INSTEAD), 1)
        hint = f"did you mean {near[0]!r}?" if near else "see the arguments in its docstring"
        raise UnknownArgumentError(f"dataset getters have no argument {name!r}; {hint}")
    warnings.warn(
        f"the argument {name!r} of dataset getters is deprecated; use {_INSTEAD[name]}",
        FutureWarning,
        stacklevel=5,
    )
