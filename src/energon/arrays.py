"""Types of arrays that are passed around."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


def distinct(values: Ints) -> Ints:
    """Return the different values, sorted.

    `np.unique` does the same, but imports `numpy.ma`, which delays the first batch by 25 ms.

    Example:
        >>> distinct(np.array([3, 1, 3])).tolist(), distinct(np.array([], int)).tolist()
        ([1, 3], [])
    """
    ordered = np.sort(values)
    return ordered[np.diff(ordered, prepend=ordered[:1] - 1) > 0]
