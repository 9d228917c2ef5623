"""Arguments of the getters that older programs pass, and what has taken their place."""

from __future__ import annotations

import copy
import difflib
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import UnknownArgumentError
from energon.task_encoder.encoder import DefaultTaskEncoder
from energon.task_encoder.hook_maker import AnyTaskEncoder
from energon.task_encoder.settings import TrainSettings, ValidationSettings

_OF_DECODER = ("image_decode", "av_decode", "video_decode_audio")
_INSTEAD = dict.fromkeys(_OF_DECODER, "`decoder = SampleDecoder(...)` of the task encoder") | {
    "auto_decode": "`decoder` of the task encoder, which is None for raw bytes",
    "handler": "`global_error_handler` of WorkerConfig",
    "ignore_decoder_errors": "`@stateless(failure_tolerance=...)` on hooks",
}


_KNOWN = (
    *(field.name for kind in (TrainSettings, ValidationSettings) for field in fields(kind)),
    *("worker_config", "task_encoder", "split_part", "dataset_config", "split_config"),
    *("subflavors", "exclude_from", "allow", *_INSTEAD),
)


def with_legacy_arguments(
    task_encoder: AnyTaskEncoder | None, arguments: Mapping[str, Any]
) -> AnyTaskEncoder:
    """Return the task encoder with the decoder that deprecated arguments describe.

    `image_decode`, `av_decode` and `video_decode_audio` set up a `SampleDecoder`;
    `auto_decode=False` leaves parts as bytes. `handler` and `ignore_decoder_errors` have no
    effect. The task encoder that was passed is not changed.

    Raises:
        UnknownArgumentError: If there is no such argument.
    """
    encoder: AnyTaskEncoder = DefaultTaskEncoder() if task_encoder is None else task_encoder
    for name in arguments:
        _warn(name)
    settings = {name: arguments[name] for name in _OF_DECODER if name in arguments}
    if not settings and "auto_decode" not in arguments:
        return encoder
    encoder = copy.copy(encoder)
    if arguments.get("auto_decode", True):
        encoder.decoder = replace(encoder.decoder or SampleDecoder(), **settings)
    else:
        encoder.decoder = None
    return encoder


def _warn(name: str) -> None:
    if name not in _INSTEAD:
        near = difflib.get_close_matches(name, _KNOWN, 1)
        hint = f"did you mean {near[0]!r}?" if near else "see the arguments in its docstring"
        raise UnknownArgumentError(f"dataset getters have no argument {name!r}; {hint}")
    warnings.warn(
        f"the argument {name!r} of dataset getters is deprecated; use {_INSTEAD[name]}",
        FutureWarning,
        stacklevel=4,
    )
