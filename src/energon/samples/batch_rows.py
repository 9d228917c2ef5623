"""Write arrays into the rows of a batch, so that stacking them copies nothing.

While a batch is being made, decoders ask here for memory. If what is stacked in the end is exactly
the first rows of one array, in order, that array is the batch. Otherwise, because a hook has
skipped or replaced some of them, they are stacked as usual.

A sample that is kept after its batch is gone keeps the memory of the whole batch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from energon.samples.large_arrays import LARGE_BYTES, large_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of rows."""


class BatchRows:
    """The rows of one batch after the other, which are taken inside `with rows:`.

    Rows exist for arrays of which the previous batch was full. So there are none as long as the
    shapes in a batch differ.

    Args:
        size: Number of items in a batch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._expected: set[Kind] = set()
        self._taken: Counter[Kind] = Counter()
        self._arrays: dict[Kind, NDArray[Any]] = {}
        self._around: BatchRows | None = None

    def __enter__(self) -> None:
        self._around, _active.rows = _active.rows, self

    def __exit__(self, *error: object) -> None:
        _active.rows, self._around = self._around, None
        if self._taken or self._expected:
            self._expected = {kind for kind, taken in self._taken.items() if taken == self.size}
            self._taken.clear()
            self._arrays.clear()

    def take(self, kind: Kind) -> NDArray[Any] | None:
        """Return the next row; None if there is none."""
        place = self._taken[kind]
        self._taken[kind] += 1
        if kind not in self._expected or place >= self.size:
            return None
        if not place:
            shape, dtype = (self.size, *kind[0]), kind[1]
            is_large = prod(shape) * dtype.itemsize >= LARGE_BYTES
            self._arrays[kind] = large_array(shape, dtype) if is_large else np.empty(shape, dtype)
        row: NDArray[Any] = self._arrays[kind][place]
        return row

    def holding(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
        """Return the array of which these are the first rows, once; None if there is none."""
        first = arrays[0]
        kind: Kind = first.shape, first.dtype
        whole = self._arrays.get(kind)
        if whole is None or len(arrays) > self.size:
            return None
        start = _address(whole)
        expected = range(start, start + len(arrays) * first.nbytes, first.nbytes)
        if list(map(_address, arrays)) != list(expected) or not all(
            type(each) is np.ndarray and each.dtype == first.dtype and each.flags.c_contiguous
            for each in arrays
        ):
            return None
        # If a hook has given an image to two fields, these do not become one array.
        del self._arrays[kind]
        return whole[: len(arrays)]


class _ActiveRows(threading.local):
    """The rows of the batch that this thread is making."""

    rows: BatchRows | None = None


_active = _ActiveRows()


def empty_row(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return an array with arbitrary contents: a row of the batch being made, if possible."""
    rows, dtype = _active.rows, np.dtype(dtype)
    row = None if rows is None else rows.take((shape, dtype))
    return np.empty(shape, dtype) if row is None else row


def stacked_rows(arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """Return arrays of one shape, stacked without a copy; None if they are not such rows."""
    rows = _active.rows
    return None if rows is None else rows.holding(arrays)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
