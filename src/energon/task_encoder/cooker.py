"""Cookers: functions that turn crude samples into samples.

Besides the sample, they can receive auxiliary data, their own dataset, and the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import GeneratorType
from typing import Any, Generic, TypeVar, overload

from energon.cache.pool import active_pool
from energon.errors import ConfigError, check_at_least
from energon.samples.provenance import add_source_info, get_source_info
from energon.sources.files.store import (
    DecodeFileStore,
    FileStore,
    FileStoreDecoder,
    PrimaryFileStore,
)
from energon.stages.hooks.failures import ErrorHandler

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(frozen=True)
class Cooker(Generic[T]):
    """A function that converts crude samples, and the datasets it applies to.

    The type argument is the type of the crude sample.

    Args:
        cook: Called with the crude sample; returns a sample or yields some.
        has_subflavors: The subflavors that a dataset must have, with these values; None or
            empty applies to every dataset.

    Example:
        >>> from energon import CaptioningSample, DefaultTaskEncoder, basic_sample_keys
        >>> def cook(sample):
        ...     return CaptioningSample(
        ...         **basic_sample_keys(sample), image=sample["jpg"], caption=sample["txt"]
        ...     )
        >>> class Encoder(DefaultTaskEncoder):
        ...     cookers = (Cooker(cook, has_subflavors={"kind": "photos"}),)
        >>> Encoder.cookers[0].is_match({"kind": "photos", "language": "en"})
        True
    """

    cook: Callable[..., Any]
    has_subflavors: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not callable(self.cook):
            raise ConfigError(f"Cooker: expected a function of the sample, found {self.cook!r}")
        # In the body of a class, a static method is not yet the function that bears the marks.
        object.__setattr__(self, "cook", _marked(self.cook))

    @property
    def need_primary(self) -> bool:
        """Whether the function receives the files of its own dataset by name, see `cooker`."""
        return getattr(self.cook, "__need_primary__", False)

    @property
    def need_cache(self) -> bool:
        """Whether the function receives the cache pool of the loader, see `cooker`."""
        return getattr(self.cook, "__need_cache__", False)

    def is_match(self, subflavors: Mapping[str, Any] | None) -> bool:
        """Return whether this cooker applies to datasets with these `subflavors`."""
        present = subflavors or {}
        required = self.has_subflavors or {}
        return all(key in present and present[key] == value for key, value in required.items())


def find_cooker(
    cookers: Sequence[Cooker[Any]], subflavors: Mapping[str, Any], *, dataset: str
) -> Cooker[Any]:
    """Return the first cooker that applies to `dataset`, which has these `subflavors`.

    Raises:
        ConfigError: If there is none.
    """
    for cooker in cookers:
        if cooker.is_match(subflavors):
            return cooker
    candidates = "; ".join(
        f"{getattr(cooker.cook, '__name__', cooker.cook)} requires "
        f"{dict(cooker.has_subflavors or {})}"
        for cooker in cookers
    )
    raise ConfigError(
        f"no cooker for {dataset}, which has subflavors {dict(subflavors)}: {candidates}. Add a "
        "Cooker to the task encoder, or set the subflavors in the metadataset"
    )


def is_generator_function(function: Any) -> bool:
    """Return whether a function yields, looking through wrappers, methods and callable objects."""
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
    """Mark a function for a `Cooker`, and choose what it receives besides sample and aux data.

    Args:
        fn: The function, when used as `@cooker`.
        need_cache: Whether to pass the cache pool of the loader, as `cache`.
        need_primary: Whether to pass all files of the sample's own dataset by name, as `primary`:
            a `PrimaryFileStore`, in which ".jpg" is that part of the sample.

    Example:
        >>> from energon import TextSample, basic_sample_keys
        >>> @cooker(need_primary=True)
        ... def cook(sample, primary):
        ...     text = primary.get(".txt", sample)
        ...     return TextSample(**basic_sample_keys(sample), text=text)
    """

    def mark(cook: F) -> F:
        marked = _marked(cook)
        marked.__need_cache__ = need_cache
        marked.__need_primary__ = need_primary
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
    """Mark a hook, and set how it runs. Every hook is expected to be a function of its sample.

    Args:
        fn: The hook, when used as `@stateless`.
        restore_seeds: Whether to seed `random`, numpy and torch for each call from the key
            of the sample, so that a single sample can be restored exactly. By default they are
            seeded once per batch.
        failure_tolerance: How many consecutive failures end the run, 0 for never; None for the
            task encoder's.
        failure_rate: The share of samples that may fail, 0 to 1, checked in each worker after
            1,000 samples; None for the task encoder's.
        error_handler: Called as `error_handler(exception, sample, sources)` for each tolerated
            failure; None for that of `WorkerConfig`.

    Raises:
        ConfigError: If a tolerance is negative, or a rate is not between 0 and 1.

    Example:
        >>> import random
        >>> from energon import DefaultTaskEncoder
        >>> class Encoder(DefaultTaskEncoder):
        ...     @stateless(restore_seeds=True, failure_rate=0.01)
        ...     def encode_sample(self, sample):
        ...         sample.caption = random.choice(sample.caption.split())
        ...         return sample
    """
    if failure_tolerance is not None:
        check_at_least(0, "failure_tolerance", failure_tolerance)
    if failure_rate is not None and not 0 <= failure_rate <= 1:
        raise ConfigError(f"failure_rate must be a share from 0 to 1, got {failure_rate}")

    def mark(hook: F) -> F:
        marked = _marked(hook)
        marked.__stateless__ = True
        marked.__restore_seeds__ = restore_seeds
        marked.__failure_tolerance__ = failure_tolerance
        marked.__failure_rate__ = failure_rate
        marked.__error_handler__ = error_handler
        return hook

    return mark(fn) if fn is not None else mark


def _marked(function: Any) -> Any:
    """Return the function that bears the marks: of a static or class method, its function."""
    return function.__func__ if isinstance(function, staticmethod | classmethod) else function


RESERVED_ARGUMENTS = ("primary", "cache")


@dataclass(frozen=True)
class CookerArguments:
    """The keyword arguments of a cooker for the samples of one leaf.

    Args:
        stores: Auxiliary data, by the names in the metadataset.
        primary: All files of the leaf's dataset; None if the cooker does not need them.
        need_cache: Whether the cooker needs the cache pool.
    """

    stores: Mapping[str, FileStore[Any]] = field(default_factory=dict)
    primary: FileStore[Any] | None = None
    need_cache: bool = False

    def __bool__(self) -> bool:
        return bool(self.stores) or self.primary is not None or self.need_cache

    def __call__(self, key: str) -> dict[str, Any]:
        """Return the arguments for the sample of this key."""
        arguments: dict[str, Any] = dict(self.stores)
        if self.primary is not None:
            arguments["primary"] = PrimaryFileStore(self.primary, key)
        if self.need_cache:
            arguments["cache"] = active_pool()
        return arguments


def cooker_arguments(
    cooker: Cooker[Any],
    *,
    aux: Mapping[str, FileStore[Any]],
    primary: Callable[[], FileStore[Any]] | None,
    decoder: FileStoreDecoder | None,
    dataset: str,
) -> CookerArguments:
    """Return the keyword arguments of `cooker` for the samples of a dataset.

    Raises:
        ConfigError: If the cooker does not accept the arguments that the metadataset and its
            marks call for.
    """
    if decoder is not None and getattr(decoder, "is_random", False):
        # Decoded files are cached, and several samples may ask for one.
        decoder = replace(decoder, random_resized_crop=False)  # type: ignore[type-var]
    needed = [name for name in RESERVED_ARGUMENTS if getattr(cooker, f"need_{name}")]
    for name in needed:
        if name in aux:
            raise ConfigError(
                f"{dataset}: aux {name!r} has the name of what @cooker(need_{name}=True) passes; "
                "rename it in the metadataset"
            )
    _check_signature(cooker, [*aux, *needed], dataset)
    if cooker.need_primary and primary is None:
        raise ConfigError(f"{dataset}: its files cannot be found by name, so need_primary fails")

    def decoded(store: FileStore[Any]) -> FileStore[Any]:
        return store if decoder is None else DecodeFileStore(store, decoder=decoder)

    return CookerArguments(
        stores={name: decoded(store) for name, store in aux.items()},
        primary=decoded(primary()) if primary is not None and cooker.need_primary else None,
        need_cache=cooker.need_cache,
    )


def _check_signature(cooker: Cooker[Any], names: list[str], dataset: str) -> None:
    """Raise an error now for a call that would fail for every sample."""
    try:
        signature = inspect.signature(cooker.cook)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, **dict.fromkeys(names))
    except TypeError as error:
        name = getattr(cooker.cook, "__name__", repr(cooker.cook))
        given = ", ".join(names) or "nothing"
        raise ConfigError(
            f"{dataset}: cooker {name}{signature} is called with the sample and {given}: {error}. "
            "It receives an argument for each `aux` of the metadataset, and those requested by "
            "@cooker(need_primary=..., need_cache=...)"
        ) from error


def add_sources(cooked: Any, crude: Any) -> Any:
    """Return a cooked sample, with all files read from stores among its sources.

    Cookers copy the sources of the crude sample before or after reading from stores, depending on
    the order of a constructor's arguments.
    """
    if type(cooked) is GeneratorType:
        return (add_sources(each, crude) for each in cooked)
    own, all_of_them = get_source_info(cooked), get_source_info(crude)
    if own and all_of_them and all_of_them[: len(own)] == tuple(own):
        add_source_info(cooked, *all_of_them[len(own) :])
    return cooked
