"""Send lists of samples by column.

A batch of undecoded samples is a list of dicts with the same names. Pickling it dict by dict would
cost more than reading it did: a call for each dict, and a copy of every part into the pickle. By
column, large parts go straight into shared memory, and one comprehension on the other side makes
the dicts again. Lists of simple objects of one class travel the same way.
"""

from __future__ import annotations

import copyreg
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, repeat
from keyword import iskeyword
from operator import attrgetter
from pickle import PickleBuffer
from typing import Any, NamedTuple

import numpy as np

from energon.loader.transport.pickling import is_copy
from energon.samples.crude import CrudeSample, SampleSource, known_sources

SHARED_COLUMN_BYTES = 4096
"""Parts of at least this size are copied once, into shared memory."""
_TRIED_VALUES = 4
"""Whether a column has such parts is seen from this many of them, or a few more."""


_NOTES = ("__key__", "__shard__", "__restore_key__", "__subflavors__", "__sources__")
_LEAVES = {str, bytes, int, float, bool, type(None), np.ndarray}
"""Types of attributes in objects that are sent by column: nothing that holds other samples."""


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
        sources = None
        if "__sources__" in names:
            at = names.index("__sources__")
            sources = _shared_sources(names, columns, columns[at])
            if sources is not None:
                columns[at] = ()
        lifted = [at for at, column in enumerate(columns) if _has_large(column)]
        for at in lifted:
            columns[at] = [_lift(value) for value in columns[at]]
        # No class of ours and no function is part of it: pickle would look each of them up.
        return None if kind is CrudeSample else kind, names, lifted, sources, columns


def by_column(batch: Any) -> Columns | None:
    """Return a list of samples of the same kind with the same names as columns.

    None for anything else, including lists of plain dicts, since pickle is fast with those.
    """
    if type(batch) is not list or not batch:
        return None
    kind = type(batch[0])
    if not _all_are(kind, batch):
        return None
    if kind is not CrudeSample:
        return _objects_by_column(kind, batch)
    names = _common_names(batch)
    if not names:
        return None
    return Columns(kind, names, list(zip(*map(dict.values, batch), strict=True)))


def _objects_by_column(kind: type, batch: list[Any]) -> Columns | None:
    """Return objects with the same attributes as columns; None if they hold anything more."""
    slots = _slots_of(kind)
    if slots is None:
        return None
    names, columns = slots, [_filled(batch, slot) for slot in slots]
    held: list[Any] = list(map(vars, batch)) if kind.__dictoffset__ else []
    if any(held):
        names += _common_names(held)
        columns += zip(*map(dict.values, held), strict=False)
        if len(names) == len(slots) or _has_setters(kind, names[len(slots) :]):
            return None
    kinds = {each for name, c in zip(names, columns, strict=True) for each in _kinds(name, c)}
    return Columns(kind, names, columns) if kinds and kinds <= _LEAVES else None


def _common_names(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the names of dicts that have the same names in the same order; () otherwise."""
    names = tuple(rows[0])
    # The names of all, one after another, can be cut in no other place: a longer row would have a
    # name twice, and if none is longer, none is shorter.
    same = list(chain.from_iterable(rows)) == list(names) * len(rows)
    return names if same and set(map(type, names)) == {str} else ()


@lru_cache(maxsize=256)
def _slots_of(kind: type) -> tuple[str, ...] | None:
    """Return the slots of a class if pickle would copy nothing but its attributes; else None."""
    own: tuple[Any, ...] = (kind.__new__, kind.__reduce_ex__, kind.__reduce__)
    plain: tuple[Any, ...] = (object.__new__, object.__reduce_ex__, object.__reduce__)
    special = ("__setstate__", "__getnewargs__", "__getnewargs_ex__")
    copies_state = getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
    if own != plain or not copies_state or any(hasattr(kind, name) for name in special):
        return None
    if kind in copyreg.dispatch_table or is_copy(kind):
        return None
    return tuple(copyreg._slotnames(kind))  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _has_setters(kind: type, names: tuple[str, ...]) -> bool:
    """Return whether setting one of these attributes does more than store a value."""
    # Not getattr: on the class, a descriptor may give something else than itself.
    held = [vars(each).get(name) for each in kind.__mro__ for name in names]
    return any(hasattr(type(value), "__set__") for value in held)


def _filled(batch: list[Any], slot: str) -> tuple[Any, ...]:
    """Return the values in a slot of objects; a marker that is never sent where it is empty."""
    try:
        return tuple(map(attrgetter(slot), batch))
    except AttributeError:
        return (_EMPTY,)


_EMPTY = object()


def _kinds(name: str, column: Sequence[Any]) -> set[type]:
    """Return the types of values in a column; those of notes are known."""
    if name in _NOTES and column[0] is not _EMPTY:
        return {str}
    kinds: set[type] = set(map(type, column))
    if np.ndarray in kinds and any(type(v) is np.ndarray and v.dtype.hasobject for v in column):
        kinds.add(object)
    return kinds


SharedSources = tuple[int, Sequence[Any]]
"""Stands for a column of sources, each of which belongs to a single sample: for how many samples,
and what is known of them. For each property of a source, in the order of `known_source`, that is
the name of the column with the value, or else its own column, of one value if all samples share it.
"""

_SOURCE_NAMES = (None, "__key__", "__restore_key__", "__shard__", None)


def _shared_sources(
    names: tuple[str, ...], columns: list[Any], column: Sequence[Any]
) -> SharedSources | None:
    """Return what the sources of samples tell that the samples do not."""
    if not _all_are(tuple, column):
        return None
    try:
        sources = [source for (source,) in column]
        if not _all_are(SampleSource, sources):
            return None
        known: list[Any] = list(zip(*[source._known for source in sources], strict=True))
        for at, name in enumerate(_SOURCE_NAMES):
            if name in names and known[at] == columns[names.index(name)]:
                known[at] = name
            elif known[at].count(known[at][0]) == len(column):
                known[at] = known[at][:1]
    except (TypeError, ValueError):  # several or none, or notes that cannot be compared
        return None
    return len(column), known


def _all_are(kind: type, values: Sequence[Any]) -> bool:
    return [*map(type, values)].count(kind) == len(values)


def rebuild(
    kind: Any,
    names: tuple[str, ...],
    lifted: Sequence[int],
    sources: SharedSources | None,
    columns: list[Sequence[Any]],
) -> list[Any]:
    """Return the list that was sent.

    Args:
        kind: The type of the samples; None for `CrudeSample`.
        names: The names of the columns.
        lifted: Where the columns are whose large values were not in the pickle.
        sources: What the sources of the samples are made of, if they were not sent.
        columns: The columns.
    """
    for at in lifted:
        # As unpickled, they are views of shared memory.
        columns[at] = [bytes(v) if type(v) is memoryview else v for v in columns[at]]
    if sources is not None:
        count, known = sources
        known = [columns[names.index(c)] if type(c) is str else c for c in known]
        columns[names.index("__sources__")] = known_sources(known, count)
    if kind is None:
        return _row_builder(names)(*columns)
    if kind.__setattr__ is object.__setattr__ and all(map(_is_attribute, names)):
        return _object_builder(names)(kind, *columns)
    made: list[Any] = list(map(object.__new__, repeat(kind, len(columns[0]))))
    for name, column in zip(names, columns, strict=True):
        deque(map(object.__setattr__, made, repeat(name), column), maxlen=0)
    return made


def _has_large(column: Sequence[Any]) -> bool:
    """Return whether some values of a column are large parts, which stay out of the pickle.

    One that is overlooked among small ones is only copied once more.
    """
    if not column or type(column[0]) is not bytes:
        return False
    some = column[:: max(1, len(column) // _TRIED_VALUES)]
    return any(type(value) is bytes and len(value) >= SHARED_COLUMN_BYTES for value in some)


def _lift(value: Any) -> Any:
    large = type(value) is bytes and len(value) >= SHARED_COLUMN_BYTES
    return PickleBuffer(value) if large else value


@lru_cache(maxsize=1024)
def _row_builder(names: tuple[str, ...]) -> Callable[..., list[CrudeSample]]:
    """Compile a function of columns that returns a dict per row.

    Names come from data, so they appear in the source as string literals only.
    """
    values = ", ".join(f"v{index}" for index in range(len(names)))
    entries = ", ".join(f"{name!r}: v{index}" for index, name in enumerate(names))
    columns = ", ".join(f"c{index}" for index in range(len(names)))
    source = f"lambda {columns}: [CrudeSample({{{entries}}}) for {values}, in zip({columns})]"
    builder: Callable[..., list[CrudeSample]] = eval(source, {"CrudeSample": CrudeSample})
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
