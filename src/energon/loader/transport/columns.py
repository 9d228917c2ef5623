"""Send lists of raw samples by column.

A batch of undecoded samples is a list of dicts with the same names. Pickled dict by dict it
costs more than reading it did: a call for each dict, and a copy of every part into the pickle.
By column, large parts go straight into shared memory, and the dicts are made again by one
comprehension on the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pickle import PickleBuffer
from typing import Any, NamedTuple

from energon.samples.crude import CrudeSample
from energon.samples.source_info import SampleSource, known_source

OUT_OF_BAND_BYTES = 4096
"""Parts of this size and more are copied once, into shared memory."""


_OF_SOURCES = ("__key__", "__restore_key__", "__shard__")


class Columns:
    """A list of samples on its way to another process, where it is a list again."""

    __slots__ = ("columns", "names")

    def __init__(self, names: tuple[str, ...], columns: list[Sequence[Any]]) -> None:
        self.names = names
        self.columns = columns

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        lifted = tuple(at for at, column in enumerate(self.columns) if _is_large(column))
        columns = list(self.columns)
        for at in lifted:
            columns[at] = [_lift(value) for value in columns[at]]
        return rebuild, (self.names, lifted, columns)


def by_column(batch: Any) -> Any:
    """Return a list of crude samples with the same names as columns, anything else as it is."""
    if type(batch) is not list or not batch:
        return batch
    # Plain dicts are left alone: pickle itself is fast with those.
    if type(batch[0]) is not CrudeSample or not batch[0]:
        return batch
    names = tuple(batch[0])
    # Names in the same order, as one reader gives them.
    if set(map(type, batch)) != {CrudeSample} or set(map(tuple, batch)) != {names}:
        return batch
    if set(map(type, names)) != {str}:
        return batch
    columns: list[Any] = list(zip(*[sample.values() for sample in batch], strict=True))
    if "__sources__" in names and set(_OF_SOURCES) <= set(names):
        at = names.index("__sources__")
        columns[at] = _shared_source(batch, columns[at]) or columns[at]
    return Columns(names, columns)


class SharedSource(NamedTuple):
    """Stands for a column of sources: all samples are of one dataset and have the same parts."""

    dataset_path: str
    parts: tuple[str, ...]


def _shared_source(batch: list[Any], column: Sequence[Any]) -> SharedSource | None:
    """Return what the sources of samples share, if the rest of each follows from its sample."""
    found = set()
    for sample, sources in zip(batch, column, strict=True):
        if type(sources) is not tuple or len(sources) != 1 or type(sources[0]) is not SampleSource:
            return None
        found.add(sources[0].follows_from(sample))
    (first, *others) = found
    return None if others or first is None else SharedSource(*first)


def rebuild(
    names: tuple[str, ...], lifted: Sequence[int], columns: list[Sequence[Any]]
) -> list[CrudeSample]:
    """Return the list that was sent."""
    for at in lifted:
        # Out of the pickle they are views of shared memory.
        columns[at] = [bytes(v) if type(v) is memoryview else v for v in columns[at]]
    for at, column in enumerate(columns):
        if type(column) is SharedSource:
            path, parts = column
            known = (columns[names.index(name)] for name in _OF_SOURCES)
            columns[at] = [(known_source(path, *row, parts),) for row in zip(*known, strict=True)]
    return _row_builder(names)(*columns)


def _is_large(column: Sequence[Any]) -> bool:
    if type(column) is SharedSource:
        return False
    if type(column[0]) is not bytes:
        return False
    return any(type(value) is bytes and len(value) >= OUT_OF_BAND_BYTES for value in column)


def _lift(value: Any) -> Any:
    large = type(value) is bytes and len(value) >= OUT_OF_BAND_BYTES
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
