"""A hosted lane: the state that its stages share, and the blocks of rows that are read for it."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from energon.errors import ConfigError, StateError
from energon.plan.randomness import derive_seed
from energon.plan.rows import Plan, Rows
from energon.samples.crude import RestoreKey, flat
from energon.samples.provenance import record_sources
from energon.stages.hooks.clock import HookClock
from energon.stages.hooks.failures import Tally
from energon.worker import WorkerConfig

MAX_PLANNED_ROWS = 4096
"""Rows planned at once; the cost per row of numpy calls is flat from about here on."""
MIN_PLANNED_ROWS = 64
"""Planning a few takes as long as this, also where a block is a single sample of megabytes."""
MAX_BLOCK_BYTES = 8 << 20
"""Bytes read at once for a lane: enough for full spans, small enough for hundreds of lanes."""
T = TypeVar("T")
PlanRows = Callable[[int, int], Rows]
"""Return the rows of a lane: `rows(start, count)`."""


class Block:
    """Samples that were read together: their bytes are in memory, and each is built when taken.

    Building and releasing samples batch by batch takes two thirds of the time of building
    thousands at once, which would evict one another from the CPU cache. A sample is taken once, so
    that the block can release its bytes.

    Attributes:
        column_names: The parts that `columns` returns; empty if samples are collated one by one.
            Samples of several datasets with the same names are collated together.
    """

    column_names: tuple[str, ...] = ()

    def samples(self, start: int, stop: int) -> list[Any]:
        """Return the samples from `start` to `stop`."""
        raise NotImplementedError

    def columns(self, start: int, stop: int) -> dict[str, Any]:
        """Return the samples from `start` to `stop` as columns, equal to collating them."""
        raise NotImplementedError

    def with_sources(self, dataset_path: str) -> Block:
        """Return the same samples, all of one dataset, with their origin in `__sources__`."""
        raise NotImplementedError


class BuiltBlock(Block):
    """A block of samples that are already built."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def samples(self, start: int, stop: int) -> list[Any]:
        return release(self._samples, start, stop)

    def with_sources(self, dataset_path: str) -> BuiltBlock:
        record_sources(dataset_path, self._samples)
        return self


def release(items: list[T | None], start: int, stop: int) -> list[T]:
    """Return the items from `start` to `stop`, and keep none of them in the list."""
    taken = items[start:stop]
    items[start:stop] = [None] * len(taken)
    return taken  # type: ignore[return-value]


class Reader(Protocol):
    """Reads the samples of rows; shared by all lanes of a worker."""

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a sample in bytes."""

    def read(self, rows: Rows) -> Block:
        """Return the samples of `rows`, in that order."""

    def read_ahead(self, lanes_of_stream: int, mixed_rows: int = 0) -> ReadAhead | None:
        """Return the preparation of samples in this worker; None if they need none.

        Args:
            lanes_of_stream: How many lanes read the same slices, over all workers.
            mixed_rows: Rows of a lane that are balanced together, with those of other lanes.
        """


NO_ROWS = Rows(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


class NextRows(NamedTuple):
    """The rows that a lane reads next."""

    lane: int
    rows: PlanRows
    start: int
    number: int
    """Number of rows."""
    planned: Rows = NO_ROWS
    """Those that are already planned: the first of them, and perhaps more."""


@dataclass(eq=False)
class LaneReading:
    """How far a lane has been read, shared by all stages even if they replace other parts of it.

    Args:
        plan: The order of the lane; None for that of the reading stage.
        row: The row after the last one that was passed on.
        opened_at: Its value when the lane was opened.
        unit_rows: How many consecutive rows later stages need together.
    """

    plan: Plan | None = None
    row: int = 0
    opened_at: int = 0
    unit_rows: int = 1


class ReadAhead(Protocol):
    """Prepares the samples of lanes that are read together."""

    @property
    def planned_blocks(self) -> int:
        """How many blocks of rows should be planned for `move_to`, with the one that is read."""

    def move_to(self, readings: Sequence[NextRows]) -> None:
        """Set what each lane reads next; anything before that is no longer needed."""

    def take_counts(self) -> Mapping[str, int]:
        """Return the statistics since the last call, by name."""


SeedKey = tuple[int | str, ...]
"""Together with the seed of the run and the hook, this seeds the random numbers of a call."""


Find = Callable[[int, int, int], tuple[int, int] | None]


class RowCallback(Protocol):
    """Is called with the row that user code is about to process."""

    def __call__(self, row: int, several: bool) -> object: ...


@dataclass(eq=False)
class Host:
    """State shared by the lanes that one worker hosts.

    Args:
        shared: Objects that their stages share, by private keys. Only the users of an object keep
            it alive.
        has_begun: Whether any of them has yielded a batch.
        tallies: For each hook, by a private key, the tallies of all lanes that have run it.
        clock: Measures calls of hooks in the current batch; None if they are not measured.
        read_seconds: How long reading blocks has taken, since this was last recorded.
        batch_seconds: The same for making batches; 0 where it is the trainer who waits for them.
        transfer_seconds: The same for sending batches to the trainer.
    """

    shared: WeakValueDictionary[Hashable, Any] = field(default_factory=WeakValueDictionary)
    has_begun: bool = False
    tallies: defaultdict[Hashable, list[Tally]] = field(default_factory=lambda: defaultdict(list))
    clock: HookClock | None = None
    read_seconds: float = 0.0
    batch_seconds: float = 0.0
    transfer_seconds: float = 0.0


class HookLoop:
    """A flat loop that passes the samples of some rows of a lane to user code.

    The loop only counts the samples; row and key of the current one follow from that. It runs
    inside `with loop:`.

    Attributes:
        keys: The restore key of each sample; None where it has none.
        rows: The row of each.
        taken: How many samples were passed to user code.
        finished: How many samples are finished.
        name: The hook that runs; "" outside of the loop.
        recorded: What `update` recorded last.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.keys: list[RestoreKey | None] = []
        self.rows: Sequence[int] = ()
        self.taken = self.finished = 0
        self.name = ""
        self.recorded: tuple[Any, ...] = ()
        self._around: HookLoop | None = None
        self._caller: Lane | None = None

    def __enter__(self) -> None:
        current = self.lane.current
        self._around, current.loop = current.loop, self
        self._caller, active.lane = active.lane, self.lane

    def __exit__(self, *error: object) -> None:
        around, self._around = self._around, None
        self.name = ""
        if around is not None and around.name:
            self.lane.current.loop = around
        active.lane, self._caller = self._caller, None

    def update(self, current: CurrentItem) -> None:
        """Record the sample that user code is processing in `current`, unless it is up to date."""
        recorded = self.taken, self.name
        if recorded == self.recorded or not self.taken:
            return
        self.recorded = recorded
        lane, row = self.lane, self.rows[self.taken - 1]
        current.known_row = lane.outer_row(row)
        key = current.known_seed_key = self.keys[self.taken - 1] or ("lane", lane.number, row)
        if self.name:
            current.known_call = self.name, key


@dataclass(eq=False)
class CurrentItem:
    """The current item of a lane, shared by all stages.

    Args:
        batch: Number of the batch within the lane; None if unknown, because a sample is recreated
            outside of its batch.
        loop: The loop that is calling user code, or was the last to do so; None if user code has
            since received something else.
        known_row: The last known value of `row`.
        known_seed_key: The last known value of `seed_key`.
        known_call: The last known value of `call`.
        generator: The last result of `active_generator`, and the call it was made for.
        finders: Functions, one per reading stage, that return the lane and row of a sample by
            leaf, epoch and ordinal, if the stage reads it.
        batch_rows: Number of rows per batch, if that is the same for all batches and no row is
            skipped; tells the batch of a sample that is recreated.
    """

    batch: int | None = 0
    loop: HookLoop | None = None
    known_row: int | None = None
    known_seed_key: RestoreKey = ()
    known_call: tuple[str, RestoreKey] = ("", ())
    generator: tuple[object, np.random.Generator] | None = None
    finders: dict[Hashable, Find] = field(default_factory=dict)
    batch_rows: int | None = None

    @property
    def row(self) -> int | None:
        """Row in the lane of the last sample passed to user code; None before the first."""
        if self.loop is not None:
            self.loop.update(self)
        return self.known_row

    @property
    def seed_key(self) -> RestoreKey:
        """The restore key of that sample, or its lane and row; () for several samples."""
        if self.loop is not None:
            self.loop.update(self)
        return self.known_seed_key

    @property
    def call(self) -> tuple[str, RestoreKey]:
        """The hook that runs, and the seed key of its argument."""
        if self.loop is not None and self.loop.name:
            self.loop.update(self)
        return self.known_call

    def count_batch(self) -> None:
        """Record that the lane has yielded a batch."""
        if self.batch is not None:
            self.batch += 1

    @contextmanager
    def working_for(self, batch: int | None) -> Iterator[None]:
        """Attribute the work inside the block to batch `batch`; None keeps the current one."""
        before = self.batch
        self.batch = before if batch is None else batch
        try:
            yield
        finally:
            self.batch = before


@dataclass(eq=False)
class Lane:
    """One lane, open in a worker.

    Args:
        number: Which lane, from 0.
        lanes: How many lanes the run has.
        seed: Seed of the run.
        skip_rows: Rows that are skipped because processing them killed a worker.
        progress: Called before user code processes a sample, with its row, or with that of the
            first of several samples, and whether there are several. Tells the loader that the
            worker is alive, and where it was if it dies. None reports nothing.
        next_row: Called instead, with the row of a single sample; faster.
        counts: Statistics of the lane, such as samples, skipped and failed, by name.
        current: What the lane is working on.
        stripe: How many consecutive rows have consecutive numbers: those of a batch, as long as
            hooks skip none.
        pass_number: How many passes over finite data came before, for stages that repeat them.
        stride: Row r is known outside of this branch as r * stride + offset.
        offset: See `stride`.
        reading: The plan of the lane, and how far it has been read.
        worker_config: The rank and worker, for hooks that ask.
        host: State shared with the other lanes of the worker.
    """

    number: int
    lanes: int
    seed: int = 0
    skip_rows: frozenset[int] = frozenset()
    progress: RowCallback | None = None
    next_row: Callable[[int], object] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    current: CurrentItem = field(default_factory=CurrentItem)
    stripe: int = 1
    pass_number: int = 0
    stride: int = 1
    offset: int = 0
    reading: LaneReading = field(default_factory=LaneReading)
    worker_config: WorkerConfig | None = None
    host: Host = field(default_factory=Host)

    def enter(self, row: int, seed_key: RestoreKey = (), *, several: bool = False) -> None:
        """Record that user code is about to receive the sample of a row, or several from there.

        Args:
            row: The row.
            seed_key: The restore key of the sample, or its lane and row; () for several.
            several: Whether there are several samples.
        """
        current, outer = self.current, row * self.stride + self.offset
        current.loop = None
        current.known_row, current.known_seed_key = outer, seed_key
        if self.progress is not None:
            self.progress(outer, several)

    def outer_row(self, row: int) -> int:
        """Return the number of a row outside of this branch."""
        return row * self.stride + self.offset

    def inner_row(self, row: int) -> int:
        """Return the number in this branch of a row that is given by its number outside."""
        return (row - self.offset) // self.stride

    def branch(self, number: int, count: int) -> Lane:
        """Return the lane for one of `count` streams that are merged.

        Each stream has a plan of its own, and its rows are numbered apart from those of the
        others: row r of stream i is known outside as r * count + i.
        """
        return replace(
            self,
            skip_rows=frozenset(row // count for row in self.skip_rows if row % count == number),
            stride=self.stride * count,
            offset=self.offset + self.stride * number,
            reading=LaneReading(),
        )

    @contextmanager
    def recreating(self, number: int | None) -> Iterator[None]:
        """Recreate items of the batch with this global number inside the block.

        Args:
            number: The number; None if it is unknown.

        Raises:
            StateError: If it is not a number.
        """
        if number is None:
            yield
            return
        if not isinstance(number, int) or number < 0:
            raise StateError(f"a restore key has {number!r} where batches have their number")
        batch, self.number = divmod(number, self.lanes)
        with self.current.working_for(batch):
            yield

    def sample_number(self, seed_key: SeedKey) -> int:
        """Return the global number of the sample that a seed key begins with.

        The samples of a batch have consecutive numbers, in the order of the batches.

        Raises:
            ConfigError: If it is unknown.
        """
        lane, row = self._lane_row_of(seed_key)
        turn, within = divmod(row, self.stripe)
        return (turn * self.lanes + lane) * self.stripe + within

    def _lane_row_of(self, seed_key: SeedKey) -> tuple[int, int]:
        """Return the lane and row of the sample that a seed key begins with."""
        current = self.current
        if seed_key[:1] == ("lane",):
            _, lane, row, *_ = seed_key
            return int(lane), int(row) * self.stride + self.offset
        sample = tuple(part for part in seed_key if isinstance(part, int))[:3]
        if len(sample) == 3 and sample != flat(current.seed_key)[:3]:
            for find in current.finders.values():
                lane_and_row = find(*sample)
                if lane_and_row is not None:
                    return lane_and_row
        if current.row is None:
            raise ConfigError(
                f"the number of the sample (leaf, epoch, ordinal) {sample} is not known: the run "
                "does not draw it, or draws with replacement, or has changed its mix since"
            )
        return self.number, current.row

    def batch_number(self, seed_key: SeedKey) -> int:
        """Return the global number of the current batch.

        Args:
            seed_key: The seed key of the argument of user code.

        Raises:
            ConfigError: If it is unknown.
        """
        current = self.current
        if current.batch is not None:
            return current.batch * self.lanes + self.number
        if current.batch_rows is None:
            raise ConfigError(
                "the number of the batch is not known: batches of this pipeline take any number of "
                "samples, and the restore key is not that of a batch"
            )
        lane, row = self._lane_row_of(seed_key)
        return row // current.batch_rows * self.lanes + lane


class _Active(threading.local):
    """The lane for which this thread is running user code."""

    lane: Lane | None = None


active = _Active()


def active_lane() -> Lane:
    """Return the lane for which this thread is running user code.

    Raises:
        ConfigError: If no user code is running.
    """
    if active.lane is None:
        raise ConfigError("no hook is running: ask for the sample or batch in a hook")
    return active.lane


def active_call() -> tuple[Lane, SeedKey]:
    """Return the lane, and the seed key of the (first) sample that was passed to the running hook.

    Raises:
        ConfigError: If no hook is running.
    """
    lane = active_lane()
    return lane, flat(lane.current.call[1])


def active_generator() -> np.random.Generator:
    """Return the generator of the running call of a hook, seeded by its argument.

    Raises:
        ConfigError: If no hook is running.
    """
    lane = active_lane()
    current = lane.current
    if current.generator is None or current.generator[0] is not current.call:
        name, seed_key = current.call
        seed = derive_seed(lane.seed, "generator", name, *flat(seed_key))
        current.generator = current.call, np.random.default_rng(seed)
    return current.generator[1]
