"""One loop over a pipeline: the items of an epoch, in one place of the job."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from ctypes import c_uint64
from dataclasses import dataclass
from itertools import islice
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from typing import Any, Literal
from zlib import crc32

from energon.errors import ConfigError, StateError
from energon.io.atomic import write_atomic
from energon.webdataset.running.place import Place, torch_worker_info
from energon.webdataset.stages.base import StageIterator, State, close, load_state, state_of, unpack

Scope = Literal["job", "rank", "worker"]
"""Who counts the items of an epoch together: all ranks, the workers of a rank, or each alone."""


@dataclass(frozen=True)
class Extent:
    """How far a loop goes.

    Args:
        passes: How often it goes over the data; None for ever.
        items: Where it ends; None where the data ends.
        scope: Who counts these items together.
        goes_on: Whether a loop starts where the one before stopped, instead of with a new pass.
    """

    passes: int | None = 1
    items: int | None = None
    scope: Scope = "job"
    goes_on: bool = False

    def share(self, place: Place, epoch: int) -> int | None:
        """Return how many items of an epoch fall to one worker; ranks get the same number."""
        if self.items is None:
            return None
        return self.items_before(place, epoch + 1) - self.items_before(place, epoch)

    def items_before(self, place: Place, epoch: int) -> int:
        """Return how many items of all epochs before one fall to a worker.

        What cannot be dealt evenly goes to another worker each time, so that none gets ahead.
        """
        if self.scope == "worker":
            return epoch * (self.items or 0)
        number = place.num_workers
        even, odd = divmod(self.rank_share(place.world_size), number)
        return epoch * even + max(0, (epoch * odd - place.worker + number - 1) // number)

    def rank_share(self, world_size: int) -> int:
        """Return how many items fall to each rank; if they cannot be dealt evenly, one more."""
        if self.items is None:
            raise ConfigError("the pipeline has no epoch length; set one with with_epoch(n)")
        return -(-self.items // world_size) if self.scope == "job" else self.items


_END = object()


class Passes(StageIterator):
    """Items of one pass over the data after the other.

    Args:
        open_pass: Opens the pipeline for an epoch.
        epoch: The first one.
        count: How many passes; None means no end.
    """

    def __init__(
        self, open_pass: Callable[[int], Iterator[Any]], *, epoch: int, count: int | None
    ) -> None:
        self._open_pass = open_pass
        self._epoch = epoch
        self._left = count
        self._current: Iterator[Any] | None = None
        super().__init__()

    def _run(self) -> Iterator[Any]:
        while self._left is None or self._left > 0:
            is_whole = self._current is None
            if self._current is None:
                self._current = self._open_pass(self._epoch)
            items = iter(self._current)
            first = next(items, _END)
            if first is not _END:
                yield first
                yield from items
            elif self._left is None and is_whole:
                # Whoever waits for items that never come would wait for ever.
                return
            close(self._current)
            self._current = None
            self._epoch += 1
            self._left = None if self._left is None else self._left - 1

    def state_dict(self) -> State:
        current = None if self._current is None else state_of(self._current)
        return {"epoch": self._epoch, "left": self._left, "pass": current}

    def load_state_dict(self, state: State) -> None:
        self._epoch, self._left, current = unpack(state, "epoch", "left", "pass")
        if current is not None:
            self._current = self._open_pass(self._epoch)
            load_state(self._current, current)

    def close(self) -> None:
        super().close()
        close(self._current)


_EPOCH_BITS = 32
_MASK = (1 << _EPOCH_BITS) - 1


class EpochCounter:
    """How many epochs were begun, by all copies of a pipeline in workers together.

    Args:
        epochs: How many there were before.
    """

    def __init__(self, epochs: int = 0) -> None:
        self._word: Any = RawValue(c_uint64, epochs)
        self._begun_here = 0
        self.notes = WorkerNotes()

    @property
    def epochs(self) -> int:
        """How many epochs were begun."""
        return int(self._word.value) & _MASK

    def begin(self) -> int:
        """Return the number of the epoch that begins, from 0."""
        mark = self._mark()
        self._begun_here += 1
        word = int(self._word.value)
        if word >> _EPOCH_BITS == mark:
            return (word & _MASK) - 1
        epoch = word & _MASK
        self._word.value = mark << _EPOCH_BITS | (epoch + 1)
        return epoch

    def set(self, epochs: int) -> None:
        """Let the next epoch have the number `epochs`."""
        self._word.value = epochs

    def _mark(self) -> int:
        """Return what the workers of one epoch have in common, not 0."""
        info = torch_worker_info()
        # A DataLoader draws this for each epoch, and its workers add their number.
        run = os.getpid() if info is None else info.seed - info.id
        return crc32(f"{run} {self._begun_here}".encode()) or 1

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            shared = {"word": self._word, "notes": self.notes.folder}
            return {**shared, "begun": self._begun_here}
        return {"epochs": self.epochs, "begun": self._begun_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._word = state["word"] if "word" in state else RawValue(c_uint64, state["epochs"])
        self._begun_here = state["begun"]
        self.notes = WorkerNotes(state.get("notes"))


class WorkerNotes:
    """Notes of workers, which copies of a pipeline in other processes share.

    Args:
        folder: Where they are; None for others than anybody has.
    """

    def __init__(self, folder: str | None = None) -> None:
        if folder is not None:
            self.folder = folder
            return
        name = f"energon-epochs-{secrets.token_hex(12)}"
        self.folder = os.path.join(tempfile.gettempdir(), name)
        weakref.finalize(self, _remove, self.folder, os.getpid())

    def write(self, place: Place, epoch: int, state: State) -> None:
        """Note where a worker begins with number `epoch`."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        write_atomic(self._path(place), json.dumps({"epoch": epoch, "state": state}))

    def read(self, place: Place) -> tuple[int, State] | None:
        """Return the last epoch that a worker has noted, and where it begins there."""
        try:
            with open(self._path(place), encoding="utf-8") as file:
                noted = json.load(file)
        except FileNotFoundError:
            return None
        return noted["epoch"], noted["state"]

    def _path(self, place: Place) -> str:
        numbers = (place.rank, place.world_size, place.worker, place.num_workers)
        return os.path.join(self.folder, "-".join(map(str, numbers)))


def _remove(folder: str, owner: int) -> None:
    # Forks have a copy of what was to be done at the end.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


FORMAT = "energon webdataset state"
VERSION = 1


class Loop(StageIterator):
    """The items of one loop.

    Args:
        pipeline: What is iterated over.
        place: Where.
        epoch: Number of the loop, from 0.
        passes: Where its items come from.
        given: How many of them were given out before.
    """

    def __init__(
        self, pipeline: Any, place: Place, epoch: int, passes: Passes, *, given: int = 0
    ) -> None:
        self.epoch = epoch
        self.place = place
        self._pipeline = pipeline
        self._passes = passes
        self._given = given
        self._is_over = False
        super().__init__()

    @classmethod
    def begin(cls, pipeline: Any, place: Place, epoch: int, *, before: Loop | None) -> Loop:
        """Return loop number `epoch`; one that goes on starts where the one before stopped."""
        extent = pipeline.extent
        if not extent.goes_on:
            count = extent.passes
            first = epoch if count is None else epoch * count
            passes = pipeline.open_passes(place, epoch=first, count=count)
            return cls(pipeline, place, epoch, passes)
        if before is not None and (before.place, before.epoch + 1) == (place, epoch):
            return cls(pipeline, place, epoch, before._passes)
        return cls(pipeline, place, epoch, _advanced(pipeline, place, epoch))

    @classmethod
    def restore(cls, pipeline: Any, place: Place, state: State) -> Loop:
        """Return the loop that was saved, where it was.

        Raises:
            StateError: If it was saved elsewhere in the job.
        """
        epoch, saved, given, items = (state[name] for name in ("epoch", "place", "given", "items"))
        if saved is not None and saved != _place(place):
            raise StateError(
                f"the state is that of rank, ranks, worker, workers {saved}, and is loaded at "
                f"{_place(place)}; load it where it was saved, or use WebLoader, whose states fit "
                "any number of workers"
            )
        if items is None:
            return cls.begin(pipeline, place, epoch, before=None)
        passes = pipeline.open_passes(place, epoch=epoch, count=pipeline.extent.passes)
        passes.load_state_dict(items)
        return cls(pipeline, place, epoch, passes, given=given)

    @staticmethod
    def check(pipeline: Any, state: State) -> None:
        """Raise StateError unless `state` was saved by a pipeline like this one."""
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise StateError(
                f"this is no state of a webdataset pipeline: {str(state)[:80]}; states of loaders "
                "are loaded by loaders"
            )
        names = ("format", "version", "seed", "stages", "epoch", "place", "given", "items")
        _, version, seed, stages, *_ = unpack(state, *names)
        if version != VERSION:
            raise StateError(f"the state has version {version}, expected {VERSION}")
        if seed != pipeline.seed:
            raise StateError(f"the state was saved with seed {seed}, this one is {pipeline.seed}")
        present = pipeline.describe()
        for number in range(max(len(stages), len(present))):
            was, now = (each[number] if number < len(each) else None for each in (stages, present))
            if was != now:
                raise StateError(
                    f"the state was saved by another pipeline; stage {number} was "
                    f"{str(was)[:300]}, now it is {str(now)[:300]}"
                )

    @staticmethod
    def state_before(pipeline: Any, epoch: int) -> State:
        """Return the state before the first item of loop number `epoch`, anywhere."""
        return _state(pipeline, epoch, place=None, given=0, items=None)

    def state_dict(self) -> State:
        """Return where the loop is; after its end, where the next one begins."""
        if self._is_over:
            goes_on = self._pipeline.extent.goes_on
            return _state(
                self._pipeline,
                self.epoch + 1,
                place=_place(self.place),
                given=0,
                items=self._passes.state_dict() if goes_on else None,
            )
        return _state(
            self._pipeline,
            self.epoch,
            place=_place(self.place),
            given=self._given,
            items=self._passes.state_dict(),
        )

    def load_state_dict(self, state: State) -> None:
        self._pipeline.load_state_dict(state)

    def close(self) -> None:
        super().close()
        self._passes.close()

    def _run(self) -> Iterator[Any]:
        yield from self._limited()
        self._is_over = True
        if self._pipeline.extent.goes_on and torch_worker_info() is not None:
            # This process may end now, and another one go on.
            with contextlib.suppress(StateError):
                notes = self._pipeline.worker_notes
                notes.write(self.place, self.epoch + 1, self._passes.state_dict())

    def _limited(self) -> Iterator[Any]:
        share = self._pipeline.extent.share(self.place, self.epoch)
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


def _advanced(pipeline: Any, place: Place, epoch: int) -> Passes:
    """Return the endless items of a place, after those of the loops before number `epoch`.

    This is for workers that start anew with every epoch. They go on where those before them have
    noted that they stopped; without notes, as of stages that cannot be saved, they go through
    all again. Sources that draw shards at random go on as well with other draws.
    """
    if any(getattr(stage, "is_endless", False) for stage in pipeline.stages):
        passes: Passes = pipeline.open_passes(place, epoch=epoch, count=None)
        return passes
    passes = pipeline.open_passes(place, epoch=0, count=None)
    noted = pipeline.worker_notes.read(place)
    done = 0
    if noted is not None and noted[0] <= epoch:
        done = pipeline.extent.items_before(place, noted[0])
        passes.load_state_dict(noted[1])
    for _ in islice(passes, pipeline.extent.items_before(place, epoch) - done):
        pass
    return passes


def _place(place: Place) -> list[int]:
    return [place.rank, place.world_size, place.worker, place.num_workers]


def _state(pipeline: Any, epoch: int, **position: Any) -> State:
    return {
        "format": FORMAT,
        "version": VERSION,
        "seed": pipeline.seed,
        "stages": pipeline.describe(),
        "epoch": epoch,
        **position,
    }
