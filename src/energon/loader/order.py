"""Which lane delivers next: arithmetic that parent and workers do alike.

Batch b of lane v has the global number g = b·V + v, and batches are delivered in ascending
order of g. Whoever hosts some of the lanes yields their batches in that order, so what a
worker sends next is what the parent asks of it next, and nothing has to be negotiated.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heapreplace


class DeliveryOrder:
    """The order of some lanes of a run, as a position in it.

    Args:
        batches: For each lane, how many of its batches are done.
        lanes: How many lanes the run has in all.

    Example:
        >>> order = DeliveryOrder({0: 1, 2: 0}, lanes=4)
        >>> order.lane
        2
        >>> order.advance()
        >>> order.lane
        0
    """

    def __init__(self, batches: Mapping[int, int], lanes: int) -> None:
        self._lanes = lanes
        self._numbers = [done * lanes + lane for lane, done in batches.items()]
        heapify(self._numbers)

    @property
    def lane(self) -> int | None:
        """The lane whose batch is next; None when all lanes have ended."""
        return self._numbers[0] % self._lanes if self._numbers else None

    def advance(self) -> None:
        """Count the batch that was next as done."""
        heapreplace(self._numbers, self._numbers[0] + self._lanes)

    def drop(self) -> None:
        """Leave out the lane that was next: it has no more batches."""
        heappop(self._numbers)
