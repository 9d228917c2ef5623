"""The batches of a rank, taken from its workers in the order of delivery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from energon.errors import WorkerError
from energon.loader.hosting import Event
from energon.loader.order import DeliveryOrder
from energon.loader.state import LanePosition


class LaneWorker(Protocol):
    """Whoever hosts some lanes of a rank."""

    def open(self, positions: Mapping[int, LanePosition], *, lanes: int) -> None:
        """Begin to host these lanes, of `lanes` in all, and forget all others.

        `positions` stays the property of the caller, who moves it on with every batch taken.
        """

    def take(self) -> Event:
        """Return the next event of the hosted lanes; raise only if there can be none."""

    def stats(self) -> dict[str, int]:
        """Return counts of what happened so far, by name."""

    def stop(self) -> None:
        """Begin to stop, without waiting."""

    def close(self) -> None:
        """Stop, and give back all that is held. May be called twice."""


def deal_lanes(lanes: Sequence[int], workers: int) -> list[Sequence[int]]:
    """Deal the lanes of a rank to at most `workers` workers, none without a lane.

    Example:
        >>> deal_lanes([1, 3, 5, 7, 9], 2)
        [[1, 5, 9], [3, 7]]
    """
    return [lanes[i::workers] for i in range(min(workers, len(lanes)))]


class RankStream:
    """The batches of a rank from given positions, which are moved on with every batch.

    Args:
        workers: Who hosts the lanes, dealt by `deal_lanes`.
        positions: Of all lanes of the rank, in order.
        lanes: How many lanes the run has in all.
    """

    def __init__(
        self,
        workers: Sequence[LaneWorker],
        positions: Mapping[int, LanePosition],
        *,
        lanes: int,
    ) -> None:
        self.positions = positions
        self.delivered = False
        self._order = DeliveryOrder({v: p.batches for v, p in positions.items()}, lanes)
        self._hosts: dict[int, LaneWorker] = {}
        for worker, dealt in zip(workers, deal_lanes(list(positions), len(workers)), strict=True):
            self._hosts |= dict.fromkeys(dealt, worker)
            worker.open({lane: positions[lane] for lane in dealt}, lanes=lanes)

    def next_batch(self) -> Any:
        """Return the next batch of the rank and count it as delivered.

        Raises:
            StopIteration: If all lanes have ended.
        """
        while (lane := self._order.lane) is not None:
            event = self._hosts[lane].take()
            if event.error is not None:
                raise event.error
            if event.lane != lane:
                raise WorkerError(
                    f"a worker sent a batch of lane {event.lane}, wanted is lane {lane}; this is a "
                    "defect of energon, please report it"
                )
            position = self.positions[lane]
            if event.counts is not None:
                position.counts = event.counts
            if not event.ended:
                position.batches += 1
                position.epoch_batches += 1
                position.state = event.state
                position.ended = False
                self._order.advance()
                self.delivered = True
                return event.batch
            position.ended = True
            self._order.drop()
        raise StopIteration
