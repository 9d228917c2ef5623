"""Choose, rename and change the fields of samples. Specifications are parsed once."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from energon.errors import ConfigError, FieldAccessError, SampleError
from energon.formats.tar.sample_parser import StreamSample


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

    @classmethod
    def of(
        cls, specs: Sequence[Any], missing_is_error: bool, none_is_error: bool | None
    ) -> ToTuple:
        """Return the stage for `to_tuple(*specs)`."""
        if len(specs) == 1 and isinstance(specs[0], str) and " " in specs[0]:
            specs = specs[0].split()
        if not specs:
            raise ConfigError('to_tuple needs names of fields: to_tuple("jpg;png", "json")')
        strict = missing_is_error if none_is_error is None else none_is_error
        return cls(tuple(map(alternatives, specs)), missing_is_error, strict)

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
        changed = [
            value if function is None else function(value)
            for function, value in zip(self.functions, sample, strict=False)
        ]
        return (*changed, *sample[len(changed) :])


@dataclass(frozen=True)
class MapDict:
    """Applies functions to fields of a sample."""

    functions: Mapping[str, Callable[[Any], Any]]

    def __call__(self, sample: StreamSample) -> StreamSample:
        changed = dict(sample)
        for name, function in self.functions.items():
            if name not in sample:
                raise MissingFieldError(_missing_text(sample, (name,)))
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
        fits = [
            name
            for name in names
            if any(fnmatchcase("." + name, p) or fnmatchcase(name, p) for p in patterns)
        ]
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


def _missing(sample: Mapping[str, Any], names: Sequence[str]) -> FieldAccessError:
    return FieldAccessError(_missing_text(sample, names))


def _missing_text(sample: Mapping[str, Any], names: Sequence[str]) -> str:
    return (
        f"sample {sample.get('__key__')!r} has no {' or '.join(names)}; it has "
        f"{', '.join(map(str, sample))}"
    )


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
        lowered = name.rpartition("/")[2].lower()
        for pattern, function in reversed(self.rules):
            for each in alternatives(pattern):
                if fnmatchcase("." + lowered, each) or fnmatchcase(lowered, each):
                    return function
        if self.must_decode:
            raise FieldAccessError(
                f"sample {sample.get('__key__')!r}: nothing decodes {name!r}; name a function for "
                "its extension, or pass must_decode=False"
            )
        return False
