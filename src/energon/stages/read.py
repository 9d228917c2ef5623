"""Read the samples of a lane in the order of its plan.

Rows are planned and samples are read in blocks, which grow from a single batch at the start
(so that the first one comes at once) to what a good read takes. The position is one number,
the row of the next sample, and reading can start at any.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np

from energon.errors import ConfigError, StateError
from energon.plan.rows import Plan, Rows
from energon.samples.restore_key import RestoreKey
from energon.stages.base import Dataset, DatasetIterator, Kind, Place, State, unpack
from energon.stages.lane import Lane

MAX_PLANNED_ROWS = 4096
"""Rows planned at once; the cost per row of numpy calls is flat from about here on."""
MAX_BLOCK_BYTES = 8 << 20
"""Bytes read at once for a lane: enough for full spans, little enough for hundreds of lanes."""


class Reader(Protocol):
    """Gives the samples of rows; shared by all lanes of a worker."""

    @property
    def mean_sample_bytes(self) -> float:
        """How many bytes a sample takes on average."""

    def read(self, rows: Rows) -> list[Any]:
        """Return the samples of `rows`, in that order."""

    def look_ahead(self, rows: Callable[[int, int], Rows]) -> LookAhead | None:
        """Return what fetches samples of a lane before they are read; None if nothing has to be.

        Args:
            rows: Returns rows of the lane, from a start and in a number.
        """


class LookAhead(Protocol):
    """Fetches what a lane will read."""

    def move_to(self, row: int, count: int) -> None:
        """Note that rows `row` to `row + count` are read next."""

    def take_counts(self) -> Mapping[str, int]:
        """Return what happened since this was last called, by name, for statistics."""


@dataclass(frozen=True)
class ReadDataset(Dataset[Any]):
    """Yield what `reader` gives for the rows of a plan.

    Args:
        plan: Returns the plan for a number of lanes; called where a lane has none of its own.
        reader: Reads samples.
        leaf: The only leaf of the plan, if the reader knows others; None for all of the reader.
    """

    plan: Callable[[int], Plan]
    reader: Reader
    leaf: int | None = None

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _ReadIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self.plan(lanes).num_rows(lane)

    def read_again(self, lane: Lane, places: Sequence[Place]) -> list[Any]:
        if not places:
            return []
        if not all(isinstance(place, int) for place in places):
            raise StateError(
                f"saved state has the places {places!r:.100}, which no stage writes; it is "
                "damaged or was edited"
            )
        plan = lane.reading.plan or self.plan(lane.lanes)
        return self.reader.read(plan.at(lane.number, np.array(places, np.int64)))

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        numbers = key[:3]
        if len(numbers) < 3 or not all(isinstance(part, int) and part >= 0 for part in numbers):
            raise StateError(f"{key} is not the restore key of a sample: (leaf, epoch, ordinal, …)")
        if self.leaf not in (None, numbers[0]):
            raise StateError(f"{key} is the key of a sample of another dataset")
        self.tell_numbers(lane)
        leaf, epoch, ordinal = (np.array([number], np.int64) for number in numbers)
        try:
            sample = self.reader.read(Rows(leaf.astype(np.int32), epoch, ordinal))[0]
        except IndexError as error:
            raise StateError(f"there is no sample {numbers} in these datasets") from error
        return sample, tuple(key[3:])

    def tell_numbers(self, lane: Lane) -> None:
        """Let user code of `lane` ask for the numbers of samples that are read here."""
        # The lane that was active last stays known: it must not keep the stage and its files open.
        reference = weakref.ref(self)
        reading, lanes, stride, offset = lane.reading, lane.lanes, lane.stride, lane.offset

        def find(leaf: int, epoch: int, ordinal: int) -> int | None:
            stage = reference()
            if stage is None or stage.leaf not in (None, leaf):
                return None
            plan = reading.plan or stage.plan(lanes)
            try:
                found = plan.find(leaf, epoch, ordinal)
            except ConfigError:  # drawn with replacement
                found = None
            if found is None:
                return None
            number, row = found
            return (row * stride + offset) * lanes + number

        lane.present.finders[self.leaf, lane.stride, lane.offset] = find


class _ReadIterator(DatasetIterator[Any]):
    saves: ClassVar[Mapping[str, Kind]] = {"row": int}

    def __init__(self, stage: ReadDataset, lane: Lane) -> None:
        self.reader = stage.reader
        self.stage = stage
        self.plan: Plan | None = None
        self.lane = lane
        self.reading = lane.reading
        self.max_block = max(
            1,
            min(MAX_PLANNED_ROWS, int(MAX_BLOCK_BYTES / max(1.0, stage.reader.mean_sample_bytes))),
        )
        self._row = 0
        self._planned: Rows | None = None
        self._planned_start = 0
        self._block: list[Any] = []
        self._block_start = 0
        self._ahead: LookAhead | None = None
        self._next_block = 1
        stage.tell_numbers(lane)

    @property
    def row(self) -> int:
        return self._row

    @property
    def place(self) -> Place:
        return self._row - 1

    def __next__(self) -> Any:
        at = self._row - self._block_start
        if at == len(self._block):
            self._read(1)
            at = 0
        self._row += 1
        if self._row > self.reading.row:
            self.reading.row = self._row
        return self._block[at]

    def take(self, count: int) -> list[Any]:
        samples: list[Any] = []
        while len(samples) < count:
            at = self._row - self._block_start
            if at == len(self._block):
                try:
                    self._read(count - len(samples))
                except StopIteration:
                    break
                at = 0
            found = self._block[at : at + count - len(samples)]
            self._row += len(found)
            samples += found
        self.reading.row = max(self.reading.row, self._row)
        return samples

    def state_dict(self) -> State:
        return {"row": self._row}

    def load_state_dict(self, state: State) -> None:
        (self._row,) = unpack(state, self.saves)
        self._block_start = self._row

    def _read(self, wanted: int) -> None:
        count = min(self.max_block, max(wanted, self._next_block))
        self._next_block = min(self.max_block, 2 * count)
        rows = self._plan_rows(count)
        if not len(rows.leaf):
            raise StopIteration
        if self._ahead is not None:
            self._ahead.move_to(self._row, len(rows.leaf))
        # The old block is dropped first: two of them would double the memory of a lane.
        self._block = []
        with _uncollected():
            self._block = self.reader.read(rows)
        if self._ahead is not None:
            self.lane.counts.update(self._ahead.take_counts())
        self._block_start = self._row

    def _plan_rows(self, count: int) -> Rows:
        at = self._row - self._planned_start
        if self._planned is None or at + count > len(self._planned.leaf):
            ahead = min(MAX_PLANNED_ROWS, max(count, 8 * self._next_block))
            if self.plan is None:
                # Not before: restoring the lane may decide it.
                self.plan = self.reading.plan or self.stage.plan(self.lane.lanes)
                self._ahead = self.reader.look_ahead(partial(self.plan.rows, self.lane.number))
            self._planned = self.plan.rows(self.lane.number, self._row, ahead)
            self._planned_start = self._row
            at = 0
        return self._planned.pick(slice(at, at + count))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector away while thousands of dicts are made.

    None of them is garbage, and its passes over them would take a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
