"""Host a pipeline in the workers of energon's loader.

Each worker of a DataLoader is a lane: it has its part of the shards and its own place in the
job, that stays the same wherever the lane is hosted. So the order of the batches is a function
of the number of lanes alone, and a state fits any number of ranks and workers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from energon.errors import StateError
from energon.formats.json_text import parse_json
from energon.stages.base import DatasetIterator
from energon.stages.lane import Lane
from energon.webdataset.running.place import Place, running_at
from energon.webdataset.running.worker_process import WorkerProcess
from energon.webdataset.stages.base import Context, State, load_state, state_of
from energon.webdataset.stages.batching import Batched
from energon.worker import WorkerConfig

NOTE_SECONDS = 0.05
"""How old a noted position may be: restoring repeats what was done since."""


@dataclass(frozen=True)
class LanePipeline:
    """A pipeline as the loader sees it.

    Args:
        dataset: The pipeline.
        worker_config: Where this process stands, and how many workers it has.
        batch: Makes batches of its items; None leaves them as they are.
        process: Told of the worker process; None in the training process.
        finish: Changes what is sent; None sends it as it is.
    """

    dataset: Any
    worker_config: WorkerConfig
    batch: Batched | None = None
    process: WorkerProcess | None = None
    finish: Callable[[Any], Any] | None = None

    restart = False

    @property
    def default_lanes(self) -> int:
        """The number of lanes of a new run: each has its part of the shards, as workers have."""
        return self.worker_config.total_workers

    @property
    def virtual_epoch_length(self) -> int:
        """Batches of a rank after which a loop ends; 0 means where the data ends."""
        if not self.dataset.extent.goes_on:
            return 0
        items: int = self.dataset.extent.rank_share(self.worker_config.world_size)
        return items if self.batch is None else -(-items // self.batch.batchsize)

    def first_state(self, epoch: int) -> State:
        """Return the state of a lane before the first batch of an epoch."""
        return {
            "epoch": epoch,
            "world_size": self.worker_config.world_size,
            "noted": None,
            "since": 0,
            "unsavable": None,
        }

    def open_lane(self, lane: Lane, state: State | None) -> DatasetIterator[Any]:
        """Return the batches of a lane from where `state` was saved; None is the beginning."""
        return LaneItems(self, lane, self.first_state(0) if state is None else state)

    def num_batches(self, lane: int, lanes: int) -> int | None:
        """Return None: nobody knows how many samples there are."""
        return None

    def fingerprint(self, lanes: int) -> dict[str, Any]:
        """Return what a saved state has to agree with, as JSON."""
        return {
            "stages": self.dataset.describe(),
            "seed": self.dataset.seed,
            "batch_size": None if self.batch is None else self.batch.batchsize,
        }


class LaneItems(DatasetIterator[Any]):
    """The batches of one lane, from a saved position."""

    def __init__(self, pipeline: LanePipeline, lane: Lane, state: State) -> None:
        if state["unsavable"] is not None:
            raise StateError(state["unsavable"])
        self._state = state
        self._process = pipeline.process
        self._finish = pipeline.finish
        ranks = state["world_size"]
        self._place = Place(lane.number % ranks, ranks, lane.number // ranks, lane.lanes // ranks)
        self._noted: str | None = state["noted"]
        self._since: int = state["since"]
        self._unsavable: str | None = None
        self._is_new = True
        with running_at(self._place):
            self._source = _open(pipeline, self._place, state["epoch"])
            if self._noted is not None:
                load_state(self._source, parse_json(self._noted, origin="the noted state"))
            self._items = iter(self._source)
            self._skip(self._since)
        self._noted_at = 0.0

    def __next__(self) -> Any:
        with running_at(self._place):
            if self._process is not None:
                self._process.enter(self._place)
            self._note()
            item = next(self._items)
            self._since += 1
            if self._is_new:
                self._check_savable()
            return item if self._finish is None else self._finish(item)

    @property
    def row(self) -> int:
        """Number of the batch within the lane; rows of samples are not counted here."""
        return self._since

    def state_dict(self) -> State:
        """Return a position noted lately, and how many batches came since."""
        return {
            **self._state,
            "noted": self._noted,
            "since": self._since,
            "unsavable": self._unsavable,
        }

    def _note(self) -> None:
        """Note the position before the next batch, now and then."""
        now = time.monotonic()
        if now - self._noted_at < NOTE_SECONDS or self._unsavable is not None:
            return
        try:
            self._noted = json.dumps(state_of(self._source))
            self._since = 0
        except StateError as error:
            self._unsavable = str(error)
        # Writing it down may take long, too.
        self._noted_at = time.monotonic()

    def _check_savable(self) -> None:
        """Find out whether positions can be noted, as soon as all stages are open."""
        self._is_new = False
        try:
            state_of(self._source)
        except StateError as error:
            self._unsavable = str(error)

    def _skip(self, count: int) -> None:
        passed = sum(1 for _ in islice(self._items, count))
        if passed < count:
            raise StateError(
                f"the data has ended {count - passed} batches before the saved position; has it "
                "changed since?"
            )


def _open(pipeline: LanePipeline, place: Place, epoch: int) -> Iterator[Any]:
    snapshot = pipeline.dataset.snapshot()
    extent = snapshot.extent
    if extent.goes_on:
        items: Iterator[Any] = snapshot.passes(place, epoch=epoch, count=None)
    else:
        items = snapshot.items_of_epoch(place, epoch)
    if pipeline.batch is None:
        return items
    return pipeline.batch.open(items, Context(place, snapshot.seed, epoch, ("loader",)))
