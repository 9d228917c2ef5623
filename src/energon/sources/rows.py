"""Build sample dicts from bytes that were read together.

The dicts of a block are made by one list comprehension that is generated for the names of
their parts: an interpreted loop over parts costs about four times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from energon.samples.crude import CrudeSample

RowBuilder = Callable[..., list[CrudeSample]]

META = ("__key__", "__shard__", "__restore_key__", "__subflavors__")


def slice_rows(
    parts: tuple[str, ...],
    meta: Sequence[Sequence[Any]],
    buffers: Sequence[bytes],
    bounds: Sequence[Sequence[int]],
) -> list[CrudeSample]:
    """Return samples whose parts are slices of buffers.

    Args:
        parts: The names of the parts that each sample has.
        meta: A column for each name in `META`.
        buffers: The buffer of each sample; samples may share one.
        bounds: Two columns for each part: where it starts and where it stops in the buffer.
    """
    values = tuple(f"buffer[a{index}:b{index}]" for index in range(len(parts)))
    columns = ("buffer", *(f"{edge}{index}" for index in range(len(parts)) for edge in "ab"))
    return _row_builder(parts, values, columns)(*meta, buffers, *bounds)


def join_rows(
    parts: tuple[str, ...], meta: Sequence[Sequence[Any]], contents: Sequence[Sequence[bytes]]
) -> list[CrudeSample]:
    """Return samples of parts that are there already, a column in `contents` for each name."""
    columns = tuple(f"c{index}" for index in range(len(parts)))
    return _row_builder(parts, columns, columns)(*meta, *contents)


@lru_cache(maxsize=1024)
def _row_builder(
    parts: tuple[str, ...], values: tuple[str, ...], columns: tuple[str, ...]
) -> RowBuilder:
    """Compile a function of columns that returns a dict per row.

    Names of parts come from data, so they appear in the source as string literals only.
    """
    meta = tuple(f"m{index}" for index in range(len(META)))
    entries = zip((*META, *parts), (*meta, *values), strict=True)
    fields = ", ".join(f"{name!r}: {value}" for name, value in entries)
    rows = ", ".join((*meta, *columns))
    arguments = ", ".join(f"_{name}" for name in (*meta, *columns))
    source = f"lambda {arguments}: [CrudeSample({{{fields}}}) for {rows} in zip({arguments})]"
    builder: RowBuilder = eval(source, {"CrudeSample": CrudeSample})
    return builder
