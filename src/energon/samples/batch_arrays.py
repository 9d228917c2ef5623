"""Memory for batches: arrays into whose rows images are decoded, and large ones that are reused.

While a batch is being made, decoders ask here for memory. If what is stacked in the end is exactly
the first rows of one array, in order, that array is the batch, and stacking copies nothing.
Otherwise, because a hook has skipped or replaced some of them, they are stacked as usual. If
something still views a row when the batch is made, because a hook has kept the sample, the batch
is copied: a change to the sample must not appear in it. From then on there are no rows.

The C library returns memory blocks of 32 MiB and more to the system as soon as they are freed, so
that each batch of full-size float images would be written to new pages, which the system has to
clear first. Measured on batches of 32 images of 500 x 375: a tenth of the CPU time of loading them,
decoding included.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGE_BATCH_BYTES = 32 << 20
"""Smaller blocks are kept by the C library, see `loader/memory.py`."""
KEPT_BLOCKS = 2
"""How many free blocks are kept: while the trainer uses a batch, the next one is made."""

_free: deque[NDArray[np.uint8]] = deque(maxlen=KEPT_BLOCKS)
_leases: dict[int, weakref.ref[Any]] = {}


def large_array(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array of at least `LARGE_BATCH_BYTES` with arbitrary contents.

    Its memory is used again when the array and all views of it are gone.
    """
    size = prod(shape) * dtype.itemsize
    block = _take(size)
    # All views refer to this array and not to the block, of which it knows only the memory.
    lease = np.frombuffer(block.data, np.uint8, size)
    _leases[id(block)] = weakref.ref(lease, partial(_give_back, _free, _leases, block))
    return lease.view(dtype).reshape(shape)


def _take(size: int) -> NDArray[np.uint8]:
    """Return a free block of about this size, or a new one; drop those that do not fit."""
    while _free:
        try:
            block = _free.pop()
        except IndexError:  # another thread has taken it
            break
        if size <= block.nbytes <= 2 * size:
            return block
    return np.empty(size, np.uint8)


def _give_back(
    free: deque[NDArray[np.uint8]], leases: dict[int, Any], block: NDArray[np.uint8], _: object
) -> None:
    """Keep a block without views; called in whichever thread drops the last view.

    That may be when the interpreter exits, which clears the variables of modules.
    """
    del leases[id(block)]
    free.append(block)


_REFERENCES = 2
"""How many there are to memory that only a batch views: its view, and that of the question."""

Kind = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of rows."""


class BatchRows:
    """The rows of one batch after the other, which are taken inside `with rows:`.

    Rows exist for arrays of which the previous batch was full. So there are none as long as the
    shapes in a batch differ.

    Args:
        size: Number of items in a batch; 0 for no rows.
    """

    def __init__(self, size: int) -> None:
        self.size = size if hasattr(sys, "getrefcount") else 0
        self._expected: set[Kind] = set()
        self._taken: Counter[Kind] = Counter()
        self._arrays: dict[Kind, NDArray[Any]] = {}
        self._owners: list[NDArray[Any]] = []
        self._around: BatchRows | None = None

    def __enter__(self) -> None:
        self._around, _active.rows = _active.rows, self

    def __exit__(self, *error: object) -> None:
        _active.rows, self._around = self._around, None
        if self._taken or self._expected:
            self._expected = {kind for kind, taken in self._taken.items() if taken == self.size}
            self._taken.clear()
            self._arrays.clear()
            self._owners.clear()

    def take(self, kind: Kind) -> NDArray[Any] | None:
        """Return the next row; None if there is none."""
        taken = self._taken[kind]
        self._taken[kind] += 1
        if kind not in self._expected or taken >= self.size:
            return None
        if not taken:
            shape, dtype = (self.size, *kind[0]), kind[1]
            is_large = prod(shape) * dtype.itemsize >= LARGE_BATCH_BYTES
            self._arrays[kind] = large_array(shape, dtype) if is_large else np.empty(shape, dtype)
        row: NDArray[Any] = self._arrays[kind][taken]
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
        self._owners.append(whole if whole.base is None else whole.base)  # the base of all views
        return whole[: len(arrays)]

    def released(self, batch: Any) -> Any:
        """Return the batch, or a copy if anything else views its memory.

        Called when nothing but the batch should be left of its items.
        """
        while self._owners:
            if sys.getrefcount(self._owners.pop()) > _REFERENCES:
                self.size = 0
                return deepcopy(batch)
        return batch


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
