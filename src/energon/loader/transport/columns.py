"""Send lists of samples by column.

A batch of undecoded samples is a list of dicts with the same names. Pickling it dict by dict would
cost more than reading it did: a call for each dict, and a copy of every part into the pickle. By
column, large parts go straight into shared memory, and one comprehension on the other side makes
the dicts again. Lists of objects of one class travel the same way, and so do plain dicts where that
is faster. One that holds other samples of its batch does not: columns would make copies of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, repeat
from keyword import iskeyword
from operator import attrgetter
from pickle import PickleBuffer
from typing import Any, NamedTuple

import numpy as np

from energon.loader.transport.arrays import is_array_type, pack_arrays, unpack_arrays
from energon.loader.transport.pickling import plain_slots
from energon.loader.transport.sources import all_are, pack_sources, unpack_sources
from energon.samples.crude import CrudeSample

SHARED_COLUMN_BYTES = 4096
"""Parts of at least this size are copied once, into shared memory."""
_TRIED_VALUES = 4
"""Whether a column has such parts is seen from this many of them, or a few more."""

LIFTED, FLATTENED, BY_PROPERTY = "lifted", "flattened", "by property"
"""Forms of columns that are not sent as they are: with large bytes as buffers outside the pickle,
as `transport/arrays.py` packs small arrays, and as `transport/sources.py` packs sources."""

_NOTES = ("__key__", "__shard__", "__restore_key__", "__subflavors__", "__sources__")
_NEVER_PACKED = {str, int, float, bool, type(None), tuple, dict, list}
_LEAVES = {str, bytes, int, float, bool, type(None), np.ndarray}
"""Types of values in dicts that are sent by column: nothing that holds other samples. Those of
objects may be of any type, since pickle tells when it meets another sample."""


class Columns(NamedTuple):
    """A list of samples on its way to another process, where it becomes a list again.

    Args:
        kind: The type of the samples.
        names: The names of the columns.
        columns: For each name, the values of all samples.
    """

    kind: type
    names: tuple[str, ...]
    columns: list[Any]

    def to_send(self) -> tuple[Any, ...]:
        """Return the arguments of `rebuild`, with large bytes as buffers outside the pickle."""
        kind, names, columns = self
        packed: list[tuple[int, str, Any]] = []
        arrays: list[int] = []
        for at, column in enumerate(columns):
            first = type(column[0]) if column else type(None)
            if first is bytes:
                packed.append((at, LIFTED, _lifted(column)))
            elif first is tuple and names[at] == "__sources__":
                samples = dict(zip(names, columns, strict=True))
                packed.append((at, BY_PROPERTY, pack_sources(column, samples)))
            elif first not in _NEVER_PACKED and is_array_type(first):
                arrays.append(at)
        if arrays:
            several = pack_arrays([columns[at] for at in arrays])
            packed += zip(arrays, repeat(FLATTENED), several)
        forms = []
        for at, form, values in packed:
            if values is not None:
                columns[at] = values
                forms.append((at, form))
        # No class of ours and no function is part of it: pickle would look each of them up.
        return None if kind is CrudeSample else kind, names, forms, columns


def by_column(batch: Any) -> Columns | None:
    """Return a list of samples of the same kind with the same names as columns.

    None for anything else, including lists of plain dicts without arrays: pickle is fast with them.
    """
    if type(batch) is not list or not batch:
        return None
    kind = type(batch[0])
    if not all_are(kind, batch):
        return None
    if kind is not CrudeSample and kind is not dict:
        return _objects_by_column(kind, batch)
    if kind is dict and not any(map(is_array_type, map(type, batch[0].values()))):
        return None
    names = _common_names(batch)
    if not names:
        return None
    columns = Columns(kind, names, list(zip(*map(dict.values, batch), strict=True)))
    return columns if kind is CrudeSample or _are_leaves(columns) else None


def _are_leaves(columns: Columns) -> bool:
    """Return whether no value holds other samples."""
    _, names, values = columns
    kinds = {each for name, c in zip(names, values, strict=True) for each in _kinds(name, c)}
    return all(each in _LEAVES or is_array_type(each) for each in kinds)


def _kinds(name: str, column: Sequence[Any]) -> set[type]:
    """Return the types of values in a column; those of notes are known."""
    if name in _NOTES:
        return {str}
    kinds: set[type] = set(map(type, column))
    for kind in filter(is_array_type, list(kinds)):
        arrays: list[Any] = [value for value in column if type(value) is kind]
        # Elements that are objects, or attributes that a program has set, may hold anything.
        held = [v.dtype.hasobject if kind is np.ndarray else v.__dict__ for v in arrays]
        if any(held):
            kinds.add(object)
    return kinds


def _objects_by_column(kind: type, batch: list[Any]) -> Columns | None:
    """Return objects with the same attributes as columns; None if they are more than these."""
    slots = plain_slots(kind)
    if slots is None:
        return None
    names = slots
    try:
        columns = [tuple(map(attrgetter(slot), batch)) for slot in slots]
    except AttributeError:  # one that is not filled
        return None
    held: list[Any] = list(map(vars, batch)) if kind.__dictoffset__ else []
    if any(held):
        names += _common_names(held)
        columns += zip(*map(dict.values, held), strict=False)
        if len(names) == len(slots) or _has_setters(kind, names[len(slots) :]):
            return None
    return Columns(kind, names, columns) if names else None


def _common_names(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the names of dicts that have the same names in the same order; () otherwise."""
    names = tuple(rows[0])
    # The names of all, one after another, can be cut in no other place: a longer row would have a
    # name twice, and if none is longer, none is shorter.
    same = list(chain.from_iterable(rows)) == list(names) * len(rows)
    return names if same and set(map(type, names)) == {str} else ()


@lru_cache(maxsize=256)
def _has_setters(kind: type, names: tuple[str, ...]) -> bool:
    """Return whether setting one of these attributes does more than store a value."""
    # Not getattr: on the class, a descriptor may give something else than itself.
    held = [vars(each).get(name) for each in kind.__mro__ for name in names]
    return any(hasattr(type(value), "__set__") for value in held)


def rebuild(
    kind: Any,
    names: tuple[str, ...],
    forms: Sequence[tuple[int, str]],
    columns: list[Any],
) -> list[Any]:
    """Return the list that was sent.

    Args:
        kind: The type of the samples; None for `CrudeSample`.
        names: The names of the columns.
        forms: Which columns were not sent as they are, and in which form.
        columns: The columns.
    """
    for at, form in forms:
        packed = columns[at]
        if form == LIFTED:
            # As unpickled, they are views of shared memory.
            columns[at] = [bytes(v) if type(v) is memoryview else v for v in packed]
        elif form == FLATTENED:
            columns[at] = unpack_arrays(*packed)
        else:
            columns[at] = unpack_sources(packed, dict(zip(names, columns, strict=True)))
    if kind is None or kind is dict:
        return _row_builder(names, kind is None)(*columns)
    if kind.__setattr__ is object.__setattr__ and all(map(_is_attribute, names)):
        return _object_builder(names)(kind, *columns)
    made: list[Any] = list(map(object.__new__, repeat(kind, len(columns[0]))))
    for name, column in zip(names, columns, strict=True):
        deque(map(object.__setattr__, made, repeat(name), column), maxlen=0)
    return made


def _lifted(column: Sequence[Any]) -> list[Any] | None:
    """Return a column with its large parts as buffers; None if none seems to be large.

    One that is overlooked among small ones is only copied once more.
    """
    some = column[:: max(1, len(column) // _TRIED_VALUES)]
    return [_lift(value) for value in column] if any(map(_is_large, some)) else None


def _is_large(value: Any) -> bool:
    return type(value) is bytes and len(value) >= SHARED_COLUMN_BYTES


def _lift(value: Any) -> Any:
    return PickleBuffer(value) if _is_large(value) else value


@lru_cache(maxsize=1024)
def _row_builder(names: tuple[str, ...], are_crude: bool) -> Callable[..., list[Any]]:
    """Compile a function of columns that returns a dict per row, or a crude sample.

    Names come from data, so they appear in the source as string literals only.
    """
    values = ", ".join(f"v{index}" for index in range(len(names)))
    entries = ", ".join(f"{name!r}: v{index}" for index, name in enumerate(names))
    columns = ", ".join(f"c{index}" for index in range(len(names)))
    row = f"CrudeSample({{{entries}}})" if are_crude else f"{{{entries}}}"
    source = f"lambda {columns}: [{row} for {values}, in zip({columns})]"
    builder: Callable[..., list[Any]] = eval(source, {"CrudeSample": CrudeSample})
    return builder


def _is_attribute(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name)


@lru_cache(maxsize=1024)
def _object_builder(names: tuple[str, ...]) -> Callable[..., list[Any]]:
    """Compile a function of a class and columns that returns an object per row.

    It takes a quarter of the time of `setattr`.
    """
    values = ", ".join(f"v{index}" for index in range(len(names)))
    columns = ", ".join(f"c{index}" for index in range(len(names)))
    stores = "; ".join(f"each.{name} = v{index}" for index, name in enumerate(names))
    source = (
        f"def build(kind, {columns}):\n"
        "    made = []\n"
        f"    for {values}, in zip({columns}):\n"
        f"        each = new(kind); {stores}; made.append(each)\n"
        "    return made\n"
    )
    scope: dict[str, Any] = {"new": object.__new__}
    exec(source, scope)
    builder: Callable[..., list[Any]] = scope["build"]
    return builder
