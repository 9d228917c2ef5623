"""Number samples with some left out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def include_ordinals(ordinals: Ints, excluded: Ints) -> Ints:
    """Return the raw indices of samples that are numbered with `excluded` left out.

    Args:
        ordinals: Numbers among the samples that are left.
        excluded: Raw indices that are left out, ascending, each once.

    Example:
        >>> include_ordinals(np.arange(5), np.array([0, 3])).tolist()
        [1, 2, 4, 5, 6]
    """
    before = excluded - np.arange(len(excluded))
    return ordinals + np.searchsorted(before, ordinals, side="right")


def exclude_indices(indices: Ints, excluded: Ints) -> Ints:
    """Return the ordinals of raw `indices`, none of which is in `excluded`."""
    return indices - np.searchsorted(excluded, indices)
