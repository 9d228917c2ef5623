"""Host some lanes of a pipeline and yield their batches in the order of delivery.

The one implementation behind all workers: the training process calls it directly, a thread
puts what it yields into a queue, a process sends it through shared memory.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from energon.loader.order import DeliveryOrder
from energon.loader.pipeline import Pipeline
from energon.loader.state import LanePosition
from energon.stages.base import DatasetIterator
from energon.stages.lane import Lane, Present


class Event(NamedTuple):
    """What a worker has to say next: a batch, the end of a lane, or a failure.

    Args:
        lane: Which lane it is about.
        batch: What the lane yielded.
        state: State of the lane after the batch, pickled: later batches do not change it.
        counts: Statistics of the lane after the batch.
        ended: The lane has no more batches.
        error: Raised instead of a batch.
    """

    lane: int
    batch: Any = None
    state: bytes | None = None
    counts: Mapping[str, int] | None = None
    ended: bool = False
    error: BaseException | None = None


class Watch(Protocol):
    """Who wants to know where a host is, see `heartbeat`."""

    def enter(self, lane: int) -> None:
        """Note that work on a batch of `lane` begins."""

    def row(self, row: int, several: bool) -> None:
        """Note that user code gets the sample of this row, or several that begin with it."""

    def leave(self) -> None:
        """Note that the batch is done."""


class LaneHost:
    """The batches of some lanes, in the order of delivery.

    Lanes are opened when it is their turn, so the first batch waits for one lane only.

    Args:
        pipeline: What the lanes run.
        positions: Where each hosted lane goes on.
        lanes: How many lanes the run has in all.
        watch: Told about every step; None means nobody.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        positions: Mapping[int, LanePosition],
        *,
        lanes: int,
        watch: Watch | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._positions = positions
        self._lanes = lanes
        self._watch = watch
        self._order = DeliveryOrder({v: p.batches for v, p in positions.items()}, lanes)
        self._open: dict[int, tuple[DatasetIterator[Any], Lane]] = {}

    @property
    def lane(self) -> int | None:
        """The lane that the next event is about; None after all have ended."""
        return self._order.lane

    def __iter__(self) -> LaneHost:
        return self

    def __next__(self) -> Event:
        lane = self._order.lane
        if lane is None:
            raise StopIteration
        if self._watch is not None:
            self._watch.enter(lane)
        iterator, opened = self._open.get(lane) or self._open_lane(lane)
        batch = next(iterator, _END)
        if self._watch is not None:
            self._watch.leave()
        if batch is _END:
            self._order.drop()
            return Event(lane, counts=dict(opened.counts), ended=True)
        opened.present.batch += 1
        self._order.advance()
        return Event(lane, batch, pickle.dumps(iterator.state_dict()), dict(opened.counts))

    def _open_lane(self, number: int) -> tuple[DatasetIterator[Any], Lane]:
        position = self._positions[number]
        lane = Lane(
            number,
            self._lanes,
            seed=self._pipeline.worker_config.seed_offset,
            skip_rows=frozenset(position.skip_rows),
            progress=None if self._watch is None else self._watch.row,
            counts=Counter(position.counts),
            present=Present(batch=position.batches),
        )
        iterator = self._pipeline.open_lane(lane, position.saved_state())
        self._open[number] = iterator, lane
        return self._open[number]


_END = object()
