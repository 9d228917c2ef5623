"""How good a shuffle is, measured against a uniform permutation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ShuffleQuality(NamedTuple):
    """Two views of an order; a uniform permutation has about 0 and 1."""

    serial_correlation: float
    """Correlation of each ordinal with the one before it: 1 for reading in order."""
    neighbour_distance: float
    """Mean distance of consecutive ordinals, as a multiple of the n/3 of a uniform order."""


def shuffle_quality(ordinals: NDArray[np.int64], num_samples: int) -> ShuffleQuality:
    """Return the quality of an order.

    Args:
        ordinals: Samples in the order in which training sees them, at least 3.
        num_samples: How many samples they are drawn from.
    """
    first, second = ordinals[:-1].astype(np.float64), ordinals[1:].astype(np.float64)
    spread = float(first.std() * second.std())
    covariance = float(((first - first.mean()) * (second - second.mean())).mean())
    distance = float(np.abs(second - first).mean())
    return ShuffleQuality(
        covariance / spread if spread else 1.0, distance / (num_samples / 3) if num_samples else 0.0
    )
