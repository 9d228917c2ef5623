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
from typing import Any

from energon.samples.crude import CrudeSample

OUT_OF_BAND_BYTES = 4096
"""Parts of this size and more are copied once, into shared memory."""


class Columns:
    """A list of samples on its way to another process, where it is a list again."""

    __slots__ = ("columns", "kind", "names")

    def __init__(self, kind: type, names: tuple[str, ...], columns: list[Sequence[Any]]) -> None:
        self.kind = kind
        self.names = names
        self.columns = columns

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return rebuild, (self.kind is CrudeSample, self.names, *self.columns)


def by_column(batch: Any) -> Any:
    """Return `batch` as columns if it is a list of dicts with the same names, else as it is."""
    if type(batch) is not list or not batch or not batch[0]:
        return batch
    kind = type(batch[0])
    if kind is not CrudeSample and kind is not dict:
        return batch
    names = tuple(batch[0])
    for sample in batch:
        # Names in the same order, as one reader gives them: a comparison of tuples.
        if type(sample) is not kind or tuple(sample) != names:
            return batch
    if not all(type(name) is str for name in names):
        return batch
    columns: list[Sequence[Any]] = list(zip(*[sample.values() for sample in batch], strict=True))
    return Columns(kind, names, [_lifted(column) for column in columns])


def rebuild(crude: bool, names: tuple[str, ...], *columns: Sequence[Any]) -> list[Any]:
    """Return the list that was sent."""
    lowered = [
        [bytes(value) if type(value) is memoryview else value for value in column]
        if any(type(value) is memoryview for value in column)
        else column
        for column in columns
    ]
    return _row_builder(crude, names)(*lowered)


def _lifted(column: Sequence[Any]) -> Sequence[Any]:
    if not any(type(value) is bytes and len(value) >= OUT_OF_BAND_BYTES for value in column):
        return column
    return [
        PickleBuffer(value) if type(value) is bytes and len(value) >= OUT_OF_BAND_BYTES else value
        for value in column
    ]


@lru_cache(maxsize=1024)
def _row_builder(crude: bool, names: tuple[str, ...]) -> Callable[..., list[Any]]:
    """Compile a function of columns that returns a dict per row.

    Names come from data, so they appear in the source as string literals only.
    """
    values = ", ".join(f"v{index}" for index in range(len(names)))
    entries = ", ".join(f"{name!r}: v{index}" for index, name in enumerate(names))
    row = f"CrudeSample({{{entries}}})" if crude else f"{{{entries}}}"
    columns = ", ".join(f"c{index}" for index in range(len(names)))
    source = f"lambda {columns}: [{row} for {values}, in zip({columns})]"
    builder: Callable[..., list[Any]] = eval(source, {"CrudeSample": CrudeSample})
    return builder
