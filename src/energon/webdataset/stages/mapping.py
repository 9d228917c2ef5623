"""Apply functions to items or their fields, and select items.

Specifications of fields are parsed once.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from energon.errors import ConfigError, FieldAccessError, SampleError
from energon.formats.tar.parser import StreamSample
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.stages.base import (
    Context,
    Positioned,
    Stage,
    StageIterator,
    State,
    load_state,
    state_of,
)
from energon.webdataset.stages.shuffling import Draws
from energon.webdataset.utils import transform_with


class _PerItem(Stage):
    """Yields the result of a function for each item. Subclasses have a handler and `_result`."""

    handler: Handler

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _HandledIterator(self.handler, self._result, source)

    def _result(self, item: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Map(_PerItem):
    """Yields the result of a function for each item; None drops the item.

    If both are dicts, the result keeps the `__key__` of the item.

    Args:
        f: Takes an item.
        handler: Called for errors of the function.
    """

    f: Callable[[Any], Any]
    handler: Handler = reraise_exception

    def _result(self, item: Any) -> Any:
        result = self.f(item)
        if result is None:
            return _DROPPED
        if isinstance(result, dict) and isinstance(item, dict) and "__key__" in item:
            result["__key__"] = item["__key__"]
        return result


@dataclass(frozen=True)
class Apply(Stage):
    """Yields the result of a function for each item, unchanged."""

    f: Callable[[Any], Any]
    handler: Handler = reraise_exception

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _HandledIterator(self.handler, self.f, source)


@dataclass(frozen=True)
class Select(_PerItem):
    """Yields the items for which a function returns True.

    Args:
        predicate: Takes an item.
        handler: Called for errors of the function.
    """

    predicate: Callable[[Any], Any]
    handler: Handler = reraise_exception

    def _result(self, item: Any) -> Any:
        return item if self.predicate(item) else _DROPPED


_DROPPED = object()
"""Returned for an item that a stage does not pass on."""


class _HandledIterator(StageIterator):
    """Holds no items back: its position is that of its source, and whether its handler ended it.

    Args:
        handler: Called for errors of the function.
        function: Returns the result for an item.
        source: The items.
    """

    def __init__(
        self, handler: Handler, function: Callable[[Any], Any], source: Iterator[Any]
    ) -> None:
        self._handler = handler
        self._function = function
        self._has_stopped = False
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        function = self._function
        for item in self._source:
            try:
                result = function(item)
            except BaseException as error:
                if self._goes_on(error, item):
                    continue
                return
            if result is not _DROPPED:
                yield result
            del item, result  # the next ones reuse their memory

    def state_dict(self) -> State:
        state = state_of(self._source)
        return {"stopped": state} if self._has_stopped else state

    def load_state_dict(self, state: State) -> None:
        # If this is the mark of a stage before, which holds nothing back either, no item is left.
        self._has_stopped = isinstance(state, dict) and set(state) == {"stopped"}
        if self._has_stopped:
            state = state["stopped"]
            self._items = iter(())
        load_state(self._source, state)

    def _goes_on(self, error: BaseException, item: Any) -> bool:
        """Ask the handler about an error, after adding the key of the item to it.

        Handlers are not asked about errors that end a program, such as an interrupt.
        """
        if isinstance(item, dict) and "__key__" in item:
            error.add_note(f"sample {item['__key__']!r} of {item.get('__url__', 'unknown origin')}")
        if not isinstance(error, Exception):
            raise error
        self._has_stopped = not self._handler(error)
        return not self._has_stopped


@dataclass(frozen=True)
class RandomSample(Stage):
    """Yields each item with probability `p`; the choices are a function of the seed."""

    is_random = True

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ConfigError(f"rsample(p={self.p!r}): a probability is between 0 and 1")

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return Positioned(partial(self._drawn, Draws(context.seed_of)), source, drawn=0)

    def _drawn(self, draws: Draws, source: Iterator[Any], at: State) -> Iterator[Any]:
        draws.load_state_dict(at)
        for item in source:
            at["drawn"] += 1
            if draws.fraction() < self.p:
                yield item


class Slice(Stage):
    """Yields the items that `itertools.islice` would: `Slice(stop)`, `Slice(start, stop, step)`.

    Raises:
        ConfigError: If the numbers do not form a slice.
    """

    def __init__(self, *args: int | None) -> None:
        try:
            islice((), *args)
        except (TypeError, ValueError) as error:
            given = ", ".join(map(repr, args))
            raise ConfigError(
                f"slice({given}): expected a stop, or a start, a stop and a step; start and stop "
                "must be at least 0 or None, and the step at least 1 or None"
            ) from error
        chosen = slice(*args)
        self.start, self.stop, self.step = chosen.start or 0, chosen.stop, chosen.step or 1

    def describe(self) -> dict[str, Any]:
        return {"stage": "Slice", "slice": [self.start, self.stop, self.step]}

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return Positioned(self._sliced, source, taken=0)

    def _sliced(self, source: Iterator[Any], at: State) -> Iterator[Any]:
        stop = sys.maxsize if self.stop is None else self.stop
        for item in islice(source, max(0, stop - at["taken"])):
            number, at["taken"] = at["taken"], at["taken"] + 1
            if number >= self.start and not (number - self.start) % self.step:
                yield item


def alternatives(spec: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names in "a;b;c", or in a list of names."""
    return tuple(spec.split(";")) if isinstance(spec, str) else tuple(spec)


def getfirst(
    a: Mapping[str, Any],
    keys: str | Iterable[str],
    default: Any = None,
    missing_is_error: bool = True,
) -> Any:
    """Return the first of some fields that a sample has.

    Args:
        a: The sample.
        keys: A list of names, or names with semicolons between them.
        default: Returned if it has none of them, unless that is an error.
        missing_is_error: Whether that is an error.

    Raises:
        FieldAccessError: If the sample has none of them.

    Example:
        >>> getfirst({"png": 1, "txt": 2}, "jpg;png")
        1
    """
    for name in alternatives(keys):
        if name in a:
            return a[name]
    if missing_is_error:
        raise _missing(a, alternatives(keys))
    return default


@dataclass(frozen=True)
class ToTuple:
    """Makes a tuple of the first field that exists of each group of names."""

    groups: tuple[tuple[str, ...], ...]
    missing_is_error: bool = True
    none_is_error: bool = True

    def __call__(self, sample: StreamSample) -> tuple[Any, ...]:
        values = []
        for names in self.groups:
            for name in names:
                if name in sample:
                    value = sample[name]
                    break
            else:
                if self.missing_is_error:
                    raise _missing(sample, names)
                value = None
            if value is None and self.none_is_error:
                raise FieldAccessError(
                    f"sample {sample.get('__key__')!r}: {';'.join(names)} is None or missing; pass "
                    "none_is_error=False to allow it"
                )
            values.append(value)
        return tuple(values)


@dataclass(frozen=True)
class MapTuple:
    """Applies a function to each item of a tuple; None leaves an item unchanged."""

    functions: tuple[Callable[[Any], Any] | None, ...]

    def __call__(self, sample: Sequence[Any]) -> tuple[Any, ...]:
        if not isinstance(sample, tuple | list):
            raise SampleError(
                f"map_tuple got {type(sample).__name__}, expected a tuple; put to_tuple before it"
            )
        if len(self.functions) > len(sample):
            raise SampleError(
                f"map_tuple has {len(self.functions)} functions for a tuple of {len(sample)}"
            )
        return tuple(transform_with(sample, self.functions))


@dataclass(frozen=True)
class MapDict:
    """Applies functions to fields of a sample."""

    functions: Mapping[str, Callable[[Any], Any]]

    def __call__(self, sample: StreamSample) -> StreamSample:
        changed = dict(sample)
        for name, function in self.functions.items():
            if name not in sample:
                raise _missing(sample, (name,), MissingFieldError)
            changed[name] = function(sample[name])
        return changed


@dataclass(frozen=True)
class Rename:
    """Renames fields: for each new name, the first of its old names that exists."""

    names: Mapping[str, tuple[str, ...]]
    keep: bool = True

    def __call__(self, sample: StreamSample) -> StreamSample:
        renamed = {new: getfirst(sample, old) for new, old in self.names.items()}
        if not self.keep:
            return renamed
        gone = {name for old in self.names.values() for name in old}
        return {**{name: v for name, v in sample.items() if name not in gone}, **renamed}


@dataclass(frozen=True)
class RenameKeys:
    """Renames fields by patterns for the old names; the last matching rule wins."""

    rules: tuple[tuple[str, str], ...]
    keep_unselected: bool = False
    must_match: bool = True
    duplicate_is_error: bool = True

    def __call__(self, sample: StreamSample) -> StreamSample:
        renamed: StreamSample = {}
        for old, new in _renaming(self, tuple(sample)):
            if new in renamed and self.duplicate_is_error:
                raise FieldAccessError(
                    f"sample {sample.get('__key__')!r}: two of its fields would be {new!r}; pass "
                    "duplicate_is_error=False to take the first"
                )
            renamed.setdefault(new, sample[old])
        return renamed


@lru_cache(maxsize=4096)
def _renaming(stage: RenameKeys, names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return pairs of old and new names, for samples with these fields."""
    pairs: list[tuple[str, str]] = []
    used: set[str] = set()
    for old in names:
        base = old.rpartition("/")[2].lower()
        fits = [rule for rule in stage.rules if fnmatchcase(base, rule[1])]
        used.update(pattern for _, pattern in fits[-1:])
        if fits:
            pairs.append((old, fits[-1][0]))
        elif stage.keep_unselected:
            pairs.append((old, old))
    unused = [rule for rule in stage.rules if rule[1] not in used]
    if unused and stage.must_match:
        raise FieldAccessError(
            f"no field matches the pattern {unused[0][1]!r} for {unused[0][0]!r}; the sample has "
            f"{', '.join(names)}. Pass must_match=False if that is expected"
        )
    return pairs


@dataclass(frozen=True)
class ExtractKeys:
    """Makes a tuple of the fields that match patterns, such as `*.png;*.jpg`."""

    patterns: tuple[tuple[str, ...], ...]
    duplicate_is_error: bool = True
    ignore_missing: bool = False

    def __call__(self, sample: StreamSample) -> tuple[Any, ...]:
        return tuple(sample[name] for name in _extraction(self, tuple(sample)))


@lru_cache(maxsize=4096)
def _extraction(stage: ExtractKeys, names: tuple[str, ...]) -> list[str]:
    """Return the names of the selected fields, for samples with these fields."""
    chosen = []
    for patterns in stage.patterns:
        fits = [name for name in names if _fits(name, patterns)]
        if len(fits) > 1 and stage.duplicate_is_error:
            raise FieldAccessError(
                f"the pattern {';'.join(patterns)!r} matches {', '.join(fits)}; pass "
                "duplicate_is_error=False to take the first"
            )
        if not fits and not stage.ignore_missing:
            raise FieldAccessError(
                f"no field matches the pattern {';'.join(patterns)!r}; the sample has "
                f"{', '.join(names)}"
            )
        chosen += fits[:1]
    return chosen


@dataclass(frozen=True)
class Associate:
    """Adds to each sample the fields associated with its key.

    Args:
        associator: A dict of dicts by key, or a function of the key that returns dicts. Samples
            whose key is not in the dict are unchanged.
    """

    associator: Any

    def __call__(self, sample: StreamSample) -> StreamSample:
        key = sample["__key__"]
        extra = self.associator(key) if callable(self.associator) else self.associator.get(key, {})
        return {**sample, **extra}


class MissingFieldError(FieldAccessError, KeyError):
    """A sample lacks a field that is looked up by name."""

    # KeyError would show its message in quotes.
    __str__ = FieldAccessError.__str__


def _missing(sample: Mapping[str, Any], names: Sequence[str], kind: Any = FieldAccessError) -> Any:
    return kind(
        f"sample {sample.get('__key__')!r} has no {' or '.join(names)}; it has "
        f"{', '.join(map(str, sample))}"
    )


def last_match(rules: Iterable[tuple[str, Any]], name: str) -> tuple[str, Any] | None:
    """Return the last of some rules whose pattern fits a field; in lower case, without folders."""
    fits = [rule for rule in rules if _fits(name.rpartition("/")[2].lower(), alternatives(rule[0]))]
    return fits[-1] if fits else None


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase("." + name, each) or fnmatchcase(name, each) for each in patterns)


class XDecode:
    """Decodes fields by patterns for their names; the functions receive a file to read from.

    Args:
        rules: Pairs of a pattern and a function, or False to leave the field unchanged. The last
            match wins.
        must_decode: Whether a field that matches no pattern is an error.
    """

    def __init__(self, rules: Sequence[tuple[str, Any]], must_decode: bool = True) -> None:
        self.rules = tuple(rules)
        self.must_decode = must_decode
        self._plan: dict[str, Any] = {}

    def __call__(self, sample: StreamSample) -> StreamSample:
        decoded = {}
        for name, data in sample.items():
            if name not in self._plan:
                self._plan[name] = self._function_for(name, sample)
            function = self._plan[name]
            if function and isinstance(data, bytes):
                data = io.BytesIO(data)
            decoded[name] = function(data) if function else data
        return decoded

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": {}}

    def _function_for(self, name: str, sample: StreamSample) -> Any:
        if name.startswith("__"):
            return False
        rule = last_match(self.rules, name)
        if rule is not None:
            return rule[1]
        if self.must_decode:
            raise FieldAccessError(
                f"sample {sample.get('__key__')!r}: nothing decodes {name!r}; name a function for "
                "its extension, or pass must_decode=False"
            )
        return False
