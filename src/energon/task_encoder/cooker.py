"""Cookers: functions that turn crude samples into samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from energon.errors import ConfigError
from energon.stages.hook import ErrorHandler

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Cooker:
    """A function that makes a sample of a crude one, and the datasets that it is for.

    Args:
        cook: Called with the crude sample; returns a sample or yields some.
        has_subflavors: The subflavors that a dataset must have, with these values; None or
            empty fits every dataset.
    """

    cook: Callable[..., Any]
    has_subflavors: Mapping[str, Any] | None = None

    @property
    def need_primary(self) -> bool:
        """Whether the function gets the files of its own dataset by name, see `cooker`."""
        return getattr(self.cook, "__need_primary__", False)

    @property
    def need_cache(self) -> bool:
        """Whether the function gets the cache pool of the loader, see `cooker`."""
        return getattr(self.cook, "__need_cache__", False)

    def is_match(self, subflavors: Mapping[str, Any] | None) -> bool:
        """Return whether this cooker is for datasets with these `subflavors`."""
        found = subflavors or {}
        wanted = self.has_subflavors or {}
        return all(key in found and found[key] == value for key, value in wanted.items())


def find_cooker(
    cookers: Sequence[Cooker], subflavors: Mapping[str, Any], *, dataset: str
) -> Cooker:
    """Return the first cooker that is for `dataset`, which has these `subflavors`.

    Raises:
        ConfigError: If there is none.
    """
    for cooker in cookers:
        if cooker.is_match(subflavors):
            return cooker
    candidates = "; ".join(
        f"{getattr(cooker.cook, '__name__', cooker.cook)} wants {dict(cooker.has_subflavors or {})}"
        for cooker in cookers
    )
    raise ConfigError(
        f"no cooker for {dataset}, which has subflavors {dict(subflavors)}: {candidates}. Add a "
        "Cooker to the task encoder, or set the subflavors in the metadataset"
    )


def is_generator_function(function: Any) -> bool:
    """Return whether a function yields, also if it is wrapped, bound or an object to call."""
    if not callable(function):
        function = getattr(function, "__func__", None)  # a staticmethod or classmethod
    if function is None:
        return False
    inner = inspect.unwrap(function)
    return inspect.isgeneratorfunction(inner) or inspect.isgeneratorfunction(
        getattr(type(inner), "__call__", None)  # noqa: B004 - what it is, not whether
    )


@overload
def cooker(fn: F) -> F: ...
@overload
def cooker(*, need_cache: bool = False, need_primary: bool = False) -> Callable[[F], F]: ...
def cooker(
    fn: F | None = None, *, need_cache: bool = False, need_primary: bool = False
) -> F | Callable[[F], F]:
    """Mark a function for a `Cooker`: say what it gets beside the sample and auxiliary data.

    Args:
        fn: The function, when used as `@cooker`.
        need_cache: Whether it gets the cache pool of the loader, as argument `cache`.
        need_primary: Whether it gets all files of the sample's own dataset by name, as argument
            `primary`: a `PrimaryFileStore`, to which ".jpg" is that part of the sample.
    """

    def mark(cook: F) -> F:
        cook.__need_cache__ = need_cache  # type: ignore[attr-defined]
        cook.__need_primary__ = need_primary  # type: ignore[attr-defined]
        return cook

    return mark(fn) if fn is not None else mark


@overload
def stateless(fn: F) -> F: ...
@overload
def stateless(
    *,
    restore_seeds: bool = False,
    failure_tolerance: int | None = None,
    failure_rate: float | None = None,
    error_handler: ErrorHandler | None = None,
) -> Callable[[F], F]: ...
def stateless(
    fn: F | None = None,
    *,
    restore_seeds: bool = False,
    failure_tolerance: int | None = None,
    failure_rate: float | None = None,
    error_handler: ErrorHandler | None = None,
) -> F | Callable[[F], F]:
    """Mark a hook: say how it is run. Every hook is expected to be a function of its sample.

    Args:
        fn: The hook, when used as `@stateless`.
        restore_seeds: Whether to seed `random`, numpy and torch for each call from the address
            of the sample, so that even a single sample can be restored exactly. Without it
            they are seeded once a batch.
        failure_tolerance: How many failures in a row end the run, 0 for never; None for that of
            the task encoder.
        failure_rate: Which share of the samples may fail, 0 to 1, judged in each worker from
            1,000 samples on; None for that of the task encoder.
        error_handler: Called as `error_handler(exception, sample, sources)` for each failure
            that is tolerated; None for that of `WorkerConfig`.

    Raises:
        ConfigError: If a tolerance is negative, or a rate is no share.
    """
    if failure_tolerance is not None and failure_tolerance < 0:
        raise ConfigError(f"failure_tolerance must be 0 (never) or more, got {failure_tolerance}")
    if failure_rate is not None and not 0 <= failure_rate <= 1:
        raise ConfigError(f"failure_rate must be a share from 0 to 1, got {failure_rate}")

    def mark(hook: F) -> F:
        hook.__stateless__ = True  # type: ignore[attr-defined]
        hook.__restore_seeds__ = restore_seeds  # type: ignore[attr-defined]
        hook.__failure_tolerance__ = failure_tolerance  # type: ignore[attr-defined]
        hook.__failure_rate__ = failure_rate  # type: ignore[attr-defined]
        hook.__error_handler__ = error_handler  # type: ignore[attr-defined]
        return hook

    return mark(fn) if fn is not None else mark
