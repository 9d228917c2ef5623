"""Arrays for large batches, in memory that is used again once they are gone.

The C library returns memory blocks of 32 MiB and more to the system as soon as they are freed, so
that each batch of full-size float images would be written to new pages, which the system has to
clear first. Measured on batches of 32 images of 500 x 375: a tenth of the CPU time of loading them,
decoding included.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGE_BYTES = 32 << 20
"""Smaller blocks are kept by the C library, see `loader/memory.py`."""
KEPT_BLOCKS = 2
"""How many free blocks are kept: while the trainer uses a batch, the next one is made."""

_free: deque[NDArray[np.uint8]] = deque(maxlen=KEPT_BLOCKS)
_leases: dict[int, weakref.ref[Any]] = {}


def large_array(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array of at least `LARGE_BYTES` with arbitrary contents.

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
    """Keep a block that nobody views any longer; called in whichever thread drops the last view.

    That may be when the interpreter exits, which clears the variables of modules.
    """
    del leases[id(block)]
    free.append(block)
