"""Make hooks of the methods of a task encoder: how each is run, as its marks say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from energon.samples.crude import SourceInfo, key_of, sample_keys
from energon.sources.reader import LeafReader
from energon.stages.hook import DEFAULT_TOLERANCE, UNTRIED_TOLERANCE, ErrorHandler, Hook
from energon.task_encoder.encoder import TaskEncoder

AnyTaskEncoder = TaskEncoder[Any, Any, Any, Any]


@dataclass(frozen=True)
class HookMaker:
    """Makes hooks of the methods of a task encoder.

    Args:
        encoder: The user's hooks.
        reader: Knows where samples came from.
        names: What statistics call the leaves.
        error_handler: Called for each sample that fails and is tolerated; None logs it.
        seed_each: Whether every call is seeded on its own, marked or not: needed where samples
            are made again apart from those that they came with, which is what resuming between
            two outputs of a generator means, too.
    """

    encoder: AnyTaskEncoder
    reader: LeafReader
    names: tuple[str, ...]
    error_handler: ErrorHandler | None
    seed_each: bool = False

    def make(self, name: str, function: Callable[[Any], Any], settings: Any = None) -> Hook:
        """Return `function` as a hook, run as its marks (or those of `settings`) say."""
        encoder, marked = self.encoder, function if settings is None else settings
        tolerance = _mark(marked, "__failure_tolerance__", encoder.__default_failure_tolerance__)
        return Hook(
            name=name,
            function=function,
            tolerance=tolerance,
            untried_tolerance=UNTRIED_TOLERANCE if tolerance == DEFAULT_TOLERANCE else tolerance,
            rate=_mark(marked, "__failure_rate__", encoder.__default_failure_rate__),
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
    """Return the class and the method of a hook, or the function that cooks."""
    cooker = getattr(function, "cooker", None)
    user = function if cooker is None else cooker.cook
    qualified: str = getattr(user, "__qualname__", f"{type(encoder).__name__}.{name}")
    return qualified.rpartition("<locals>.")[2]


def _mark(marked: Any, name: str, default: Any) -> Any:
    """Return what `stateless` was given, or the default of the task encoder."""
    value = getattr(marked, name, None)
    return default if value is None else value


@dataclass(frozen=True)
class DatasetName:
    """Names the dataset of a sample, or of what is made of samples, through its restore key."""

    names: tuple[str, ...]

    def __call__(self, argument: Any) -> str:
        """Return its name; "several datasets" if there are, "data" if it is not known."""
        samples = argument if isinstance(argument, list) else [argument]
        leaves = {key[0] for sample in samples for key in sample_keys(key_of(sample) or ())}
        if len(leaves) > 1:
            return "several datasets"
        leaf = leaves.pop() if leaves else -1
        return self.names[leaf] if 0 <= leaf < len(self.names) else "data"


@dataclass(frozen=True)
class Locate:
    """Tells the sources of a sample, a list of them or a batch, through their restore keys."""

    reader: LeafReader

    def __call__(self, argument: Any) -> tuple[SourceInfo, ...]:
        """Return what is known about where `argument` came from.

        That may be nothing: hooks may return anything, and messages are made of this.
        """
        samples = argument if isinstance(argument, list) else [argument]
        keys = (key for sample in samples for key in sample_keys(key_of(sample) or ()))
        return tuple(source for key in keys for source in self._locate(key))

    def _locate(self, key: tuple[int, int, int]) -> tuple[SourceInfo, ...]:
        try:
            return self.reader.locate(key)
        except IndexError:
            return ()
