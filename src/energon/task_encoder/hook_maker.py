"""Turn the methods of a task encoder into hooks, according to their marks; check the encoder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from energon.errors import ConfigError
from energon.messages import nearest, warn_once
from energon.samples.crude import key_of, sample_keys
from energon.samples.provenance import SourceInfo
from energon.sources.reader import LeafReader
from energon.stages.hooks.failures import DEFAULT_TOLERANCE, UNTRIED_TOLERANCE, Tolerance
from energon.stages.hooks.hook import Compiled, ErrorHandler, Hook
from energon.task_encoder.encoder import TaskEncoder

logger = logging.getLogger("energon")

AnyTaskEncoder = TaskEncoder[Any, Any, Any, Any]


@dataclass(frozen=True)
class HookMaker:
    """Turns the methods of a task encoder into hooks.

    Args:
        encoder: The user's hooks.
        reader: Locates the sources of samples.
        names: The names of the leaves in statistics.
        error_handler: Called for each tolerated failure of a sample; None logs it.
        seed_each: Whether every call is seeded separately, marked or not. This is needed where
            samples are recreated apart from their batch, as when resuming between two outputs
            of a generator.
    """

    encoder: AnyTaskEncoder
    reader: LeafReader
    names: tuple[str, ...]
    error_handler: ErrorHandler | None
    seed_each: bool = False

    def make(self, name: str, function: Callable[[Any], Any], settings: Any = None) -> Hook:
        """Return `function` as a hook, run according to its marks or those of `settings`."""
        if isinstance(function, Compiled):
            function.prepare()
        encoder, marked = self.encoder, function if settings is None else settings
        tolerance = _mark(marked, "__failure_tolerance__", encoder.__default_failure_tolerance__)
        return Hook(
            name=name,
            function=function,
            tolerance=Tolerance(
                tolerance,
                untried=UNTRIED_TOLERANCE if tolerance == DEFAULT_TOLERANCE else tolerance,
                rate=_mark(marked, "__failure_rate__", encoder.__default_failure_rate__),
            ),
            restore_seeds=self.seed_each or _mark(marked, "__restore_seeds__", False),
            may_yield=self.seed_each,
            locate=Locate(self.reader),
            dataset=DatasetName(self.names),
            handler=_mark(marked, "__error_handler__", self.error_handler),
            title=_title(encoder, name, function) if name in _RETURNING else None,
        )

    def method(self, name: str) -> Hook:
        """Return the hook of this name."""
        hook = self.encoder._hook_method(name)
        return self.make(name, hook.function, settings=hook.marked)

    def overridden(self, *names: str) -> tuple[Hook, ...]:
        """Return the hooks of these names that the encoder overrides."""
        return tuple(
            self.method(name) for name in names if self.encoder._hook_method(name).overridden
        )


_RETURNING = (
    "cook_crude_sample",
    "encode_sample",
    "preencode_sample",
    "postencode_sample",
    "pack_selected_samples",
    "batch",
    "encode_batch",
)


def _title(encoder: AnyTaskEncoder, name: str, function: Callable[[Any], Any]) -> str:
    """Return class and method of a hook, or the name of a cooker's function."""
    cooker = getattr(function, "cooker", None)
    user = function if cooker is None else cooker.cook
    qualified: str = getattr(user, "__qualname__", f"{type(encoder).__name__}.{name}")
    return qualified.rpartition("<locals>.")[2]


def _mark(marked: Any, name: str, default: Any) -> Any:
    """Return the mark that `stateless` left, or the default of the task encoder."""
    value = getattr(marked, name, None)
    return default if value is None else value


@dataclass(frozen=True)
class DatasetName:
    """Names the dataset of a sample, pack or batch, from its restore key."""

    names: tuple[str, ...]

    def __call__(self, argument: Any) -> str:
        """Return its name, "several datasets" for a mix, or "data" if it is unknown."""
        samples = argument if isinstance(argument, list) else [argument]
        leaves = {key[0] for sample in samples for key in sample_keys(key_of(sample) or ())}
        if len(leaves) > 1:
            return "several datasets"
        leaf = leaves.pop() if leaves else -1
        return self.names[leaf] if 0 <= leaf < len(self.names) else "data"


@dataclass(frozen=True)
class Locate:
    """Finds the sources of a sample, a list of samples or a batch, from their restore keys."""

    reader: LeafReader

    def __call__(self, argument: Any) -> tuple[SourceInfo, ...]:
        """Return the known sources of `argument`.

        There may be none: hooks may return anything, and messages about failures need an answer.
        """
        samples = argument if isinstance(argument, list) else [argument]
        keys = (key for sample in samples for key in sample_keys(key_of(sample) or ()))
        return tuple(source for key in keys for source in self._locate(key))

    def _locate(self, key: tuple[int, int, int]) -> tuple[SourceInfo, ...]:
        try:
            return self.reader.locate(key)
        except IndexError:
            return ()


_PACKING = ("select_samples_to_pack", "pack_selected_samples")


def check_encoder(
    encoder: AnyTaskEncoder, *, selecting: bool = False, packing: bool = False
) -> None:
    """Raise ConfigError if `encoder` is not a task encoder, or its hooks exclude each other.

    Args:
        encoder: The user's hooks.
        selecting: Whether a hook selects the samples of each pack.
        packing: Whether the plan does.
    """
    if isinstance(encoder, type):
        raise ConfigError(
            f"task_encoder: {encoder.__name__} is a class; pass an instance, such as "
            f"{encoder.__name__}()"
        )
    name = type(encoder).__name__
    if not isinstance(encoder, TaskEncoder):
        raise ConfigError(f"task_encoder: expected a TaskEncoder, found {encoder!r} of type {name}")
    decoder: Any = encoder.decoder
    if decoder is not None and not callable(decoder):
        raise ConfigError(
            f"{name}.decoder: expected a SampleDecoder, or None to leave parts as bytes, found "
            f"{decoder!r}"
        )
    _warn_of_misspelled_hooks(encoder)
    if _overrides(encoder, "encode_sample") and _overrides(encoder, "preencode_sample"):
        raise ConfigError(
            f"{name} overrides encode_sample and preencode_sample; preencode_sample replaces "
            "encode_sample where samples are packed, so override one of them"
        )
    missing = [hook for hook in _PACKING if not _overrides(encoder, hook)]
    if packing and _PACKING[1] in missing:
        raise ConfigError(
            f"pack is set, but {name} does not override {_PACKING[1]}; define there how the "
            "samples of a pack are combined; energon.packing helps with it"
        )
    if packing and encoder._hook_method(_PACKING[1]).may_yield:
        raise ConfigError(
            f"{name}.{_PACKING[1]} is a generator, but a planned pack is one item; return it"
        )
    if selecting and missing:
        raise ConfigError(
            f"packing_buffer_size is set, but {name} does not override {' and '.join(missing)}; "
            "define there which samples form a pack and how they are combined; energon.packing "
            "helps with both"
        )


def _warn_of_misspelled_hooks(encoder: AnyTaskEncoder) -> None:
    """Warn of methods whose names are nearly those of a hook that is not overridden."""
    known = vars(TaskEncoder).keys()
    hooks = [name for name in HOOKS if not _overrides(encoder, name)]
    classes = type(encoder).__mro__[:-1]
    own = {name for kind in classes for name, value in vars(kind).items() if callable(value)}
    for name in sorted(own - known):
        close = None if name.startswith("_") else nearest(name, hooks, cutoff=0.9)
        if close is None or name == f"{close}s":
            continue
        place = f"{type(encoder).__name__}.{name}"
        warn_once(logger, place, "%s is not a hook, did you mean %s?", place, close)


HOOKS = (
    *("encode_sample", "preencode_sample", "postencode_sample", "batch", "encode_batch"),
    *("select_samples_to_pack", "pack_selected_samples", "batch_group_criterion"),
)
"""The hooks that any dataset may have; crude ones also have `cook_crude_sample`."""


def _overrides(encoder: AnyTaskEncoder, hook: str) -> bool:
    return encoder._hook_method(hook).overridden
