"""One loop over a pipeline: the items of an epoch, in one worker of the job.

A loop iterates over a `Snapshot` of the pipeline, so that what a program changes while it runs is
for the next one. Its items are those of `Passes`, one over the data after the other, up to where
the `Extent` ends it. Its state is the number of the loop, how many items it has given, and the
position within the pass. Which epoch comes next is known to all copies of the pipeline together,
also to those in workers (`EpochCounter`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import islice
from typing import Any, Literal

from energon.errors import ConfigError, EmptyDatasetError, StateError
from energon.webdataset.running.worker_info import (
    EpochCounter,
    WorkerInfo,
    running_as,
    torch_worker_info,
)
from energon.webdataset.stages.base import (
    Context,
    Positioned,
    SplitAxis,
    Stage,
    StageIterator,
    State,
    UnsavableSource,
    close,
    contexts,
    describe,
    load_state,
    open_source,
    state_of,
    unpack,
)
from energon.webdataset.stages.shuffling import generator_state, set_generator

logger = logging.getLogger("energon")

Scope = Literal["job", "rank", "worker"]
"""Who counts the items of an epoch together: all ranks, the workers of a rank, or each alone."""

FORMAT = "energon webdataset state"
VERSION = 1

_END = object()


@dataclass(frozen=True)
class Extent:
    """How far a loop goes.

    Args:
        passes: How often it goes over the data; None sets no limit.
        items: Where it ends; None where the data ends.
        scope: Who counts these items together.
        goes_on: Whether a loop starts where the one before stopped, instead of with a new pass.
        first_epoch: The loop with which that began: the first one, unless the pipeline was changed
            after some.
    """

    passes: int | None = 1
    items: int | None = None
    scope: Scope = "job"
    goes_on: bool = False
    first_epoch: int = 0

    def share(self, worker: WorkerInfo, epoch: int) -> int | None:
        """Return how many items of an epoch fall to one worker; ranks get the same number."""
        if self.items is None:
            return None
        return self.items_before(worker, epoch + 1) - self.items_before(worker, epoch)

    def items_before(self, worker: WorkerInfo, epoch: int) -> int:
        """Return how many items of all epochs before one fall to a worker.

        What cannot be dealt evenly goes to another worker each time, so that none gets ahead.
        """
        epochs = epoch - self.first_epoch
        if self.scope == "worker":
            return epochs * (self.items or 0)
        number = worker.num_workers
        even, odd = divmod(self.rank_share(worker.world_size), number)
        return epochs * even + max(0, (epochs * odd - worker.number + number - 1) // number)

    def rank_share(self, world_size: int) -> int:
        """Return how many items fall to each rank; if they cannot be dealt evenly, one more."""
        if self.items is None:
            raise ConfigError("the pipeline has no epoch length; set one with with_epoch(n)")
        return -(-self.items // world_size) if self.scope == "job" else self.items


@dataclass(frozen=True)
class Snapshot:
    """A pipeline as it is when a loop begins.

    Args:
        listed: Its stages as the program has listed them.
        stages: The same as stages of this package.
        seed: See `DataPipeline`.
        extent: How far a loop goes.
        later_splits: The splits of the pipeline of which it is a part, see `Context`.
        divides: See `Context`.
    """

    listed: tuple[Any, ...]
    stages: tuple[Stage, ...]
    seed: int
    extent: Extent
    later_splits: frozenset[SplitAxis] = frozenset()
    divides: bool = True

    @property
    def generators(self) -> list[random.Random]:
        """The generators of the program that its stages draw from."""
        return [each for stage in self.stages for each in stage.generators]

    def has_stages_of(self, other: Snapshot) -> bool:
        """Return whether both have the same stages, not only equal ones."""
        return len(self.listed) == len(other.listed) and all(
            mine is theirs for mine, theirs in zip(self.listed, other.listed, strict=True)
        )

    def describe(self) -> list[Any]:
        """Return the fingerprint that a saved state must match, as JSON."""
        return [describe(stage) for stage in self.stages]

    def open(self, context: Context) -> Iterator[Any]:
        """Return the items of one pass, opened stage after stage."""
        if not self.stages:
            raise ConfigError("a pipeline without stages has nothing to iterate over")
        context = replace(context, later_splits=self.later_splits, divides=self.divides)
        items: Iterator[Any] = iter(())
        for stage, within in zip(self.stages, contexts(self.stages, context), strict=True):
            items = stage.open(items, within)
        return items

    def passes_of_loop(self, worker: WorkerInfo, number: int) -> Passes:
        """Return the passes of a loop that does not continue the one before it."""
        count = self.extent.passes
        return Passes(self, worker, first=number if count is None else number * count, count=count)

    def items_of_loop(self, worker: WorkerInfo, number: int) -> Iterator[Any]:
        """Return the items of such a loop."""
        passes, share = self.passes_of_loop(worker, number), self.extent.share(worker, number)
        return passes if share is None else Positioned(_limited, passes, left=share)


class Passes(StageIterator):
    """Items of one pass over the data after the other.

    A worker may have no items in a pass: no shard, or too few samples for a batch. Passes without
    end then read a wider part of the data, that of more and more workers together, until there is
    an item.

    Args:
        snapshot: The pipeline. The number of a pass seeds shuffles.
        worker: The worker in which it runs.
        first: The number of the first pass.
        count: How many passes; None means no end.
    """

    def __init__(
        self, snapshot: Snapshot, worker: WorkerInfo, *, first: int, count: int | None = None
    ) -> None:
        self._snapshot = snapshot
        # Where passes are random, the next one may have items for a worker that has none in one.
        self._is_random = any(getattr(stage, "is_random", False) for stage in snapshot.stages)
        self._workers = [worker] * self._is_random + [worker, *worker.wider()]
        self._level = 0
        self._number = first
        self._left = count
        self._current: Iterator[Any] | None = None
        super().__init__()

    def _run(self) -> Iterator[Any]:
        while self._left is None or self._left > 0:
            is_whole = self._current is None
            if self._current is None:
                self._current = self._opened()
            worker = self._workers[self._level]
            items = iter(self._current)
            if worker != self._workers[0]:
                items = _items_at(worker, items)
            is_empty = is_whole
            for item in items:
                is_empty = False
                yield item
                del item  # it may be a large batch
                yield from items
            close(self._current)
            self._current = None
            self._number += 1
            self._left = None if self._left is None else self._left - 1
            if self._left is None:
                self._choose_level(is_empty=is_empty)

    def _opened(self) -> Iterator[Any]:
        with self._at_level() as worker:
            return self._snapshot.open(Context(worker, self._snapshot.seed, self._number))

    @contextlib.contextmanager
    def _at_level(self) -> Iterator[WorkerInfo]:
        """Run as the worker whose data is read, which is returned."""
        worker = self._workers[self._level]
        with contextlib.nullcontext() if worker == self._workers[0] else running_as(worker):
            yield worker

    def _choose_level(self, *, is_empty: bool) -> None:
        """Choose the part of the data that the next pass reads.

        Raises:
            EmptyDatasetError: If all of the data was read, and nothing was in it.
        """
        if not is_empty:
            self._level = 0 if self._is_random else self._level
            return
        self._level += 1
        if self._level == len(self._workers):
            raise EmptyDatasetError(
                f"the pipeline yields nothing for {self._workers[0]}, not even from the data of "
                "all workers, but loops of a set length need items: are all samples dropped, are "
                "there fewer than a batch, or does a splitter of the program leave this worker out?"
            )
        if self._workers[self._level] != self._workers[0]:
            _warn_of_empty_part(self._workers[0])

    def state_dict(self) -> State:
        current = None if self._current is None else state_of(self._current)
        drawn = list(map(generator_state, self._snapshot.generators))
        return {
            "epoch": self._number,
            "left": self._left,
            "level": self._level,
            "generators": drawn,
            "pass": current,
        }

    def load_state_dict(self, state: State) -> None:
        names = ("epoch", "left", "level", "generators", "pass")
        self._number, self._left, self._level, drawn, current = unpack(state, *names)
        for generator, saved in zip(self._snapshot.generators, drawn, strict=True):
            set_generator(generator, saved)
        if current is not None:
            self._current = self._opened()
            with self._at_level():  # items are read again
                load_state(self._current, current)

    def close(self) -> None:
        super().close()
        close(self._current)


def runs_within_stage() -> bool:
    """Return whether a stage of a running pipeline has called this, directly or not.

    A pipeline that a stage iterates over reads what belongs to an item, such as the captions of a
    shard. Its shards are not divided once more. The pipelines that make up a source of the
    program's own are divided, since nothing else divides that.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is Passes._run.__code__:
            return True
        if frame.f_code in _SOURCE_CODES:
            return False
        frame = frame.f_back
    return False


_SOURCE_CODES = (open_source.__code__, UnsavableSource._run.__code__)


def _items_at(worker: WorkerInfo, items: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of a pipeline that runs as a different worker than its process."""
    while True:
        with running_as(worker):
            item = next(items, _END)
        if item is _END:
            return
        yield item


@cache
def _warn_of_empty_part(worker: WorkerInfo) -> None:
    logger.warning(
        "%s has no items in its part of the data, and reads that of other workers as well, so that "
        "its loops have the length that is set: some samples are seen more often than others; use "
        "fewer workers, or more and equal shards",
        worker,
    )


def _limited(source: Iterator[Any], at: State) -> Iterator[Any]:
    """Yield as many items of a source as are left."""
    for item in islice(source, at["left"]):
        at["left"] -= 1
        yield item


class Loop(StageIterator):
    """The items of one loop.

    Args:
        snapshot: What is iterated over.
        epochs: Counts the loops.
        worker: The worker in which it runs.
        epoch: Number of the loop, from 0. A loop over the data once is pass number `epoch`.
        before: The loop before this one; None if it is not known here.
        state: Where to begin; None is at its beginning.

    Raises:
        StateError: If the state was saved by another pipeline, or elsewhere in the job.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        epochs: EpochCounter,
        worker: WorkerInfo,
        epoch: int,
        before: Loop | None = None,
        state: State | None = None,
    ) -> None:
        self.epoch = epoch
        self.worker = worker
        self.snapshot = snapshot
        self._epochs = epochs
        self._given = 0
        self.is_over = self._is_restored = self._has_failed = False
        super().__init__()
        if state is None:
            self._passes = self._first_pass(before)
        else:
            self.load_state_dict(state)

    def _first_pass(self, before: Loop | None) -> Passes:
        """Return where the items come from: again, or where the loop before stopped."""
        snapshot, worker, epoch = self.snapshot, self.worker, self.epoch
        extent = snapshot.extent
        if not extent.goes_on:
            return snapshot.passes_of_loop(worker, epoch)
        if (
            before is not None
            and before.snapshot.extent.goes_on
            and not before._has_failed
            and (before.worker, before.epoch + 1) == (worker, epoch)
        ):
            return before._passes
        if any(getattr(stage, "is_endless", False) for stage in snapshot.stages):
            # Sources that draw shards at random continue as well with other draws.
            return Passes(snapshot, worker, first=epoch)
        return self._advanced()

    def _advanced(self) -> Passes:
        """Return the endless items of a worker, after those of the loops before this one.

        This is for workers that start over with every epoch. They continue where those before them
        have noted that they stopped; without notes, as of stages that cannot be saved, they begin
        with a new pass.
        """
        extent = self.snapshot.extent
        passes = Passes(self.snapshot, self.worker, first=self.epoch)
        notes = self._epochs.notes
        noted = None if notes is None else notes.read(self.worker)
        if noted is not None and self._may_use(noted):
            passes.load_state_dict(noted["items"])
            done = extent.items_before(self.worker, noted["epoch"])
            for _ in islice(passes, extent.items_before(self.worker, self.epoch) - done):
                pass
        return passes

    def _may_use(self, noted: State) -> bool:
        """Return whether a note is of the loops since the pipeline was changed."""
        if not self.snapshot.extent.first_epoch <= noted["epoch"] <= self.epoch:
            return False
        return bool(noted["stages"] == self.snapshot.describe())

    @staticmethod
    def check(snapshot: Snapshot, state: State) -> None:
        """Raise StateError unless `state` was saved by a pipeline like this one."""
        if isinstance(state, dict) and "unsavable" in state:
            raise StateError(str(state["unsavable"]))
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise StateError(
                f"this is not a state of a webdataset pipeline: {str(state)[:80]}; states of "
                "loaders are loaded by loaders"
            )
        names = ("format", "version", "seed", "stages", "epoch", "place", "given", "items")
        _, version, seed, stages, *_ = unpack(state, *names)
        if version != VERSION:
            raise StateError(f"the state has version {version}, expected {VERSION}")
        if seed != snapshot.seed:
            raise StateError(f"the state was saved with seed {seed}, this one is {snapshot.seed}")
        present = snapshot.describe()
        for number in range(max(len(stages), len(present))):
            was, now = (each[number] if number < len(each) else None for each in (stages, present))
            if was != now:
                raise StateError(
                    f"the state was saved by another pipeline; stage {number} was "
                    f"{str(was)[:300]}, now it is {str(now)[:300]}"
                )

    @staticmethod
    def state_before(snapshot: Snapshot, epoch: int) -> State:
        """Return the state before the first item of loop number `epoch`, anywhere."""
        return _state(snapshot, epoch, place=None, given=0, items=None)

    def state_dict(self) -> State:
        """Return where the loop is; after its end, where the next one begins.

        Raises:
            StateError: If a stage cannot be saved; in a worker of a DataLoader, only when the state
                is loaded. StatefulDataLoader asks workers for it whether or not it is saved.
        """
        try:
            return self._position()
        except StateError as error:
            if torch_worker_info() is None:
                raise
            return {"unsavable": str(error)}

    def _position(self) -> State:
        worker_numbers = list(astuple(self.worker))
        if not self.is_over:
            items: State | None = self._passes.state_dict()
            return _state(
                self.snapshot, self.epoch, place=worker_numbers, given=self._given, items=items
            )
        items = None
        if self.snapshot.extent.goes_on:
            items = self._passes.state_dict()
        elif self.snapshot.generators:
            items = self.snapshot.passes_of_loop(self.worker, self.epoch + 1).state_dict()
        return _state(self.snapshot, self.epoch + 1, place=worker_numbers, given=0, items=items)

    def load_state_dict(self, state: State) -> None:
        """Go to a saved position.

        Raises:
            StateError: If it was saved by another pipeline, or elsewhere in the job.
        """
        self.check(self.snapshot, state)
        epoch, saved, given, items = (state[name] for name in ("epoch", "place", "given", "items"))
        if saved is not None and saved != list(astuple(self.worker)):
            raise StateError(
                f"the state is that of rank, ranks, worker, workers {saved}, and is loaded at "
                f"{list(astuple(self.worker))}; load it where it was saved, or use WebLoader, "
                "whose states fit any number of workers"
            )
        self.epoch = epoch
        self._epochs.set(epoch + 1)
        if items is None:
            self._passes = self._first_pass(None)
            return
        count = self.snapshot.extent.passes
        self._passes = Passes(self.snapshot, self.worker, first=epoch, count=count)
        self._passes.load_state_dict(items)
        self._given = given
        self._is_restored = True

    def close(self) -> None:
        super().close()
        self._passes.close()

    def _run(self) -> Iterator[Any]:
        try:
            items = self._limited()
            is_over = self._is_restored and self.worker.num_workers == 1
            for item in items:
                is_over = False
                yield item
                del item  # it may be a large batch
                yield from items
            if is_over:
                # The state is that of the last item. Other workers may have items of it left.
                self._begin_next_epoch()
                yield from self._limited()
        except Exception:
            # Generators that have raised an error have ended.
            self._has_failed = True
            raise
        self.is_over = True
        notes = self._epochs.notes
        if notes and self.snapshot.extent.goes_on and torch_worker_info() is not None:
            # This process may end now, and another one continue.
            with contextlib.suppress(StateError):
                position, stages = self._passes.state_dict(), self.snapshot.describe()
                note = {"epoch": self.epoch + 1, "stages": stages, "items": position}
                notes.write(self.worker, note)

    def _begin_next_epoch(self) -> None:
        self.epoch += 1
        self._epochs.set(self.epoch + 1)
        self._given = 0
        if not self.snapshot.extent.goes_on:
            self._passes = self.snapshot.passes_of_loop(self.worker, self.epoch)

    def _limited(self) -> Iterator[Any]:
        share = self.snapshot.extent.share(self.worker, self.epoch)
        if share is None:
            yield from self._passes
            return
        for item in islice(self._passes, max(0, share - self._given)):
            self._given += 1
            yield item


def _state(snapshot: Snapshot, epoch: int, **position: Any) -> State:
    return {
        "format": FORMAT,
        "version": VERSION,
        "seed": snapshot.seed,
        "stages": snapshot.describe(),
        "epoch": epoch,
        **position,
    }
