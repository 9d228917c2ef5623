"""One loop over a pipeline: the items of an epoch, in one place of the job.

A loop iterates over a `Snapshot` of the pipeline, so that what a program changes while it runs is
for the next one. Its items are those of `Passes`, one over the data after the other, up to where
the `Extent` ends it. Its state is the number of the loop, how many items it has given, and the
position within the pass. Which epoch comes next is known to all copies of the pipeline together,
also to those in workers (`EpochCounter`).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from energon.errors import ConfigError, StateError
from energon.webdataset.running.epochs import EpochCounter
from energon.webdataset.running.place import Place, torch_worker_info
from energon.webdataset.stages.base import (
    Context,
    Stage,
    StageIterator,
    State,
    close,
    describe,
    load_state,
    state_of,
    unpack,
)
from energon.webdataset.stages.shuffling import generator_state, set_generator

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

    def share(self, place: Place, epoch: int) -> int | None:
        """Return how many items of an epoch fall to one worker; ranks get the same number."""
        if self.items is None:
            return None
        return self.items_before(place, epoch + 1) - self.items_before(place, epoch)

    def items_before(self, place: Place, epoch: int) -> int:
        """Return how many items of all epochs before one fall to a worker.

        What cannot be dealt evenly goes to another worker each time, so that none gets ahead.
        """
        epochs = epoch - self.first_epoch
        if self.scope == "worker":
            return epochs * (self.items or 0)
        number = place.num_workers
        even, odd = divmod(self.rank_share(place.world_size), number)
        return epochs * even + max(0, (epochs * odd - place.worker + number - 1) // number)

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
        sends: Whether its items are pickled as they are, and nothing else sees them.
    """

    listed: tuple[Any, ...]
    stages: tuple[Stage, ...]
    seed: int
    extent: Extent
    sends: bool = False

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
        """Return what a saved state has to agree with, as JSON."""
        return [describe(stage) for stage in self.stages]

    def open(self, context: Context) -> Iterator[Any]:
        """Return the items of one pass, opened stage after stage."""
        if not self.stages:
            raise ConfigError("a pipeline without stages has nothing to iterate over")
        items: Iterator[Any] = iter(())
        *rest, last = enumerate(self.stages)
        for number, stage in rest:
            items = stage.open(items, context.at(number))
        number, stage = last
        return stage.open(items, replace(context.at(number), sends=self.sends))

    def passes(self, place: Place, *, first: int, count: int | None) -> Passes:
        """Return the items of `count` passes from number `first` on; None means no end."""
        return Passes(
            lambda number: self.open(Context(place, self.seed, number)),
            first=first,
            count=count,
            generators=self.generators,
        )

    def passes_of_loop(self, place: Place, number: int) -> Passes:
        """Return the passes of a loop that does not continue the one before it."""
        count = self.extent.passes
        return self.passes(place, first=number if count is None else number * count, count=count)

    def items_of_loop(self, place: Place, number: int) -> Iterator[Any]:
        """Return the items of such a loop."""
        passes, share = self.passes_of_loop(place, number), self.extent.share(place, number)
        return passes if share is None else Limited(passes, share)


class Passes(StageIterator):
    """Items of one pass over the data after the other.

    Args:
        open_pass: Opens the pipeline for the pass of a number, which seeds shuffles.
        first: The number of the first pass.
        count: How many passes; None means no end.
        generators: What the passes draw from, one after the other.
    """

    def __init__(
        self,
        open_pass: Callable[[int], Iterator[Any]],
        *,
        first: int,
        count: int | None,
        generators: Sequence[random.Random],
    ) -> None:
        self._open_pass = open_pass
        self._number = first
        self._left = count
        self._generators = generators
        self._current: Iterator[Any] | None = None
        super().__init__()

    def _run(self) -> Iterator[Any]:
        while self._left is None or self._left > 0:
            is_whole = self._current is None
            if self._current is None:
                self._current = self._open_pass(self._number)
            items = iter(self._current)
            first = next(items, _END)
            if first is not _END:
                yield first
                del first  # it may be a large batch
                yield from items
            elif self._left is None and is_whole:
                # Whoever waits for items that never come would wait forever.
                return
            close(self._current)
            self._current = None
            self._number += 1
            self._left = None if self._left is None else self._left - 1

    def state_dict(self) -> State:
        current = None if self._current is None else state_of(self._current)
        drawn = list(map(generator_state, self._generators))
        return {"epoch": self._number, "left": self._left, "generators": drawn, "pass": current}

    def load_state_dict(self, state: State) -> None:
        names = ("epoch", "left", "generators", "pass")
        self._number, self._left, drawn, current = unpack(state, *names)
        for generator, saved in zip(self._generators, drawn, strict=True):
            set_generator(generator, saved)
        if current is not None:
            self._current = self._open_pass(self._number)
            load_state(self._current, current)

    def close(self) -> None:
        super().close()
        close(self._current)


class Limited(StageIterator):
    """The first items of a source.

    Args:
        source: What to iterate over.
        left: How many items to give.
    """

    def __init__(self, source: Iterator[Any], left: int) -> None:
        self._left = left
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        items = iter(self._source)
        while self._left > 0:
            item = next(items, _END)
            if item is _END:
                return
            self._left -= 1
            yield item

    def state_dict(self) -> State:
        return {"source": state_of(self._source), "left": self._left}

    def load_state_dict(self, state: State) -> None:
        source, self._left = unpack(state, "source", "left")
        load_state(self._source, source)


class Loop(StageIterator):
    """The items of one loop.

    Args:
        snapshot: What is iterated over.
        epochs: Counts the loops.
        place: Where.
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
        place: Place,
        epoch: int,
        before: Loop | None = None,
        state: State | None = None,
    ) -> None:
        self.epoch = epoch
        self.place = place
        self.snapshot = snapshot
        self._epochs = epochs
        self._given = 0
        self.is_over = False
        super().__init__()
        if state is None:
            self._passes = self._first_pass(before)
        else:
            self.load_state_dict(state)

    def _first_pass(self, before: Loop | None) -> Passes:
        """Return where the items come from: again, or where the loop before stopped."""
        snapshot, place, epoch = self.snapshot, self.place, self.epoch
        extent = snapshot.extent
        if not extent.goes_on:
            return snapshot.passes_of_loop(place, epoch)
        if (
            before is not None
            and before.snapshot.extent.goes_on
            and (before.place, before.epoch + 1) == (place, epoch)
        ):
            return before._passes
        if any(getattr(stage, "is_endless", False) for stage in snapshot.stages):
            # Sources that draw shards at random continue as well with other draws.
            return snapshot.passes(place, first=epoch, count=None)
        return self._advanced()

    def _advanced(self) -> Passes:
        """Return the endless items of a place, after those of the loops before this one.

        This is for workers that start over with every epoch. They continue where those before them
        have noted that they stopped; without notes, as of stages that cannot be saved, they begin
        with a new pass.
        """
        extent = self.snapshot.extent
        passes = self.snapshot.passes(self.place, first=self.epoch, count=None)
        noted = self._epochs.notes.read(self.place)
        if noted is not None and self._may_use(noted):
            passes.load_state_dict(noted["items"])
            done = extent.items_before(self.place, noted["epoch"])
            for _ in islice(passes, extent.items_before(self.place, self.epoch) - done):
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
        """Return where the loop is; after its end, where the next one begins."""
        place = _numbers(self.place)
        if not self.is_over:
            items: State | None = self._passes.state_dict()
            return _state(self.snapshot, self.epoch, place=place, given=self._given, items=items)
        items = None
        if self.snapshot.extent.goes_on:
            items = self._passes.state_dict()
        elif self.snapshot.generators:
            items = self.snapshot.passes_of_loop(self.place, self.epoch + 1).state_dict()
        return _state(self.snapshot, self.epoch + 1, place=place, given=0, items=items)

    def load_state_dict(self, state: State) -> None:
        """Go to a saved position.

        Raises:
            StateError: If it was saved by another pipeline, or elsewhere in the job.
        """
        self.check(self.snapshot, state)
        epoch, saved, given, items = (state[name] for name in ("epoch", "place", "given", "items"))
        if saved is not None and saved != _numbers(self.place):
            raise StateError(
                f"the state is that of rank, ranks, worker, workers {saved}, and is loaded at "
                f"{_numbers(self.place)}; load it where it was saved, or use WebLoader, whose "
                "states fit any number of workers"
            )
        self.epoch = epoch
        self._epochs.set(epoch + 1)
        if items is None:
            self._passes = self._first_pass(None)
            return
        count = self.snapshot.extent.passes
        self._passes = self.snapshot.passes(self.place, first=epoch, count=count)
        self._passes.load_state_dict(items)
        self._given = given

    def close(self) -> None:
        super().close()
        self._passes.close()

    def _run(self) -> Iterator[Any]:
        yield from self._limited()
        self.is_over = True
        if self.snapshot.extent.goes_on and torch_worker_info() is not None:
            # This process may end now, and another one continue.
            with contextlib.suppress(StateError):
                items, stages = self._passes.state_dict(), self.snapshot.describe()
                note = {"epoch": self.epoch + 1, "stages": stages, "items": items}
                self._epochs.notes.write(self.place, note)

    def _limited(self) -> Iterator[Any]:
        share = self.snapshot.extent.share(self.place, self.epoch)
        if share is None:
            yield from self._passes
            return
        items = iter(self._passes)
        while self._given < share:
            item = next(items, _END)
            if item is _END:
                return
            self._given += 1
            yield item


def _numbers(place: Place) -> list[int]:
    return [place.rank, place.world_size, place.worker, place.num_workers]


def _state(snapshot: Snapshot, epoch: int, **position: Any) -> State:
    return {
        "format": FORMAT,
        "version": VERSION,
        "seed": snapshot.seed,
        "stages": snapshot.describe(),
        "epoch": epoch,
        **position,
    }
