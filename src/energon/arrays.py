"""Types of arrays that are passed around, and functions of numbers that several packages need."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
U64 = NDArray[np.uint64]

# Arrays without dimensions: with numbers of numpy, operations on short arrays take half as long
# again.
_GOLDEN = np.array(0x9E3779B97F4A7C15, np.uint64)
_MIX_1 = np.array(0xBF58476D1CE4E5B9, np.uint64)
_MIX_2 = np.array(0x94D049BB133111EB, np.uint64)
_30, _27, _31 = (np.array(bits, np.uint64) for bits in (30, 27, 31))


T_number = TypeVar("T_number", bound=np.number)


def distinct(values: NDArray[T_number]) -> NDArray[T_number]:
    """Return the different values, sorted.

    `np.unique` does the same, but imports `numpy.ma`, which delays the first batch by 25 ms.

    Example:
        >>> distinct(np.array([3, 1, 3])).tolist(), distinct(np.array([], int)).tolist()
        ([1, 3], [])
    """
    ordered = np.sort(values)
    return ordered[np.diff(ordered, prepend=ordered[:1] - 1) > 0]


def mix(values: U64) -> U64:
    """Return 64 well-mixed bits for each value (the finaliser of SplitMix64)."""
    # In place: to allocate a new array takes longer than to compute one of a few thousand bits.
    mixed = values + _GOLDEN
    shifted = mixed >> _30
    mixed ^= shifted
    mixed *= _MIX_1
    np.right_shift(mixed, _27, out=shifted)
    mixed ^= shifted
    mixed *= _MIX_2
    np.right_shift(mixed, _31, out=shifted)
    mixed ^= shifted
    return mixed


_MASK = (1 << 64) - 1


def mix_one(value: int) -> int:
    """Return the result of `mix` for one number, without the cost of an array."""
    value = (value + int(_GOLDEN)) & _MASK
    value = ((value ^ value >> 30) * int(_MIX_1)) & _MASK
    value = ((value ^ value >> 27) * int(_MIX_2)) & _MASK
    return value ^ value >> 31
