"""Deal the samples of steps to micro-batches whose costs are equal.

A *step* is what one optimizer step trains on: N micro-batches, which are N consecutive global
batches. It takes as long as the slowest of them. The lanes of a step are those whose batches it
has; their rows are exchanged among the lanes of a *pool*, in *windows* of K steps:

1. The samples of a window are sorted by cost and cut into K groups of similar samples.
2. Groups come in an order that is permuted by key, the same for all pools: so all micro-batches of
   a step have samples of the same quantile of cost.
3. The samples of each group are dealt to the micro-batches so that all have equally many, and equal
   costs. The largest first, each to the micro-batch with the least cost so far, would move nearly
   all of them. So they stay in their own lanes as far as there is room, and micro-batches whose
   cost exceeds the least possible exchange single samples with others, and only where that does
   not suffice the samples are all dealt.

With K = 1, a step has the samples that it has without balancing. All of this is a bijection of the
rows of a window, so the epochs stay exact, and a lane continues at any row by computing the window
of that row. Where data ends, the last window is not complete: its steps are dealt one by one, and
the remaining rows are not exchanged.

If N is less than the number of lanes, steps take turns in using N lanes each, and those of a window
are K steps of the same lanes.

Where lanes have different *speeds*, costs are divided by them. The samples of a window are then
divided between the speeds first, so that those of the same quantile have costs in proportion to
their speed; each group has its share of each, and each lane samples for its own speed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, inf
from operator import index
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, distinct
from energon.errors import ConfigError, StateError, is_whole
from energon.messages import counted
from energon.plan.deal import deal_to_lanes, samples_by_speed
from energon.plan.dealt import DealtPlan, rows_of_lanes
from energon.plan.randomness import combine, derive_seed, divided, permute
from energon.plan.rows import COUNTED_ROWS, DrawPlan, Rows

Costs = Callable[[Rows], NDArray[np.float64]]
"""Return the cost of each sample; 0 for gaps."""

PLANNED_ROWS = 64, 512
"""Rows of each lane that are planned together: a call for the first number takes as long as for a
single row, and the second is for few lanes."""
CHUNK_ROWS = 1 << 13
"""Rows of all lanes that are planned together, if that is within these limits."""
KEPT_ROWS = 1 << 20
"""Rows of all windows that are kept at a time."""
COST_UNITS = 1 << 40
"""The largest cost of a window in whole units, whose sums fit into 64 bits."""
COST_SLACK = 0.005
"""By which share of the mean of its window a micro-batch may exceed the least cost, so that fewer
samples move."""
KEPT_CHUNKS = 2
"""Chunks that are kept even if they have more rows: the one in use, and the next."""


Measures = Mapping[str, NDArray[np.float64]]
"""The measures of some samples by name, each an array with a number for every sample."""


def cost_name(cost: object) -> str:
    """Return the name of a measure or function; "" if it has none."""
    name = cost if isinstance(cost, str) else getattr(cost, "__name__", "")
    return name if isinstance(name, str) and name != "<lambda>" else ""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How the costs of micro-batches are made equal, for `get_train_dataset`.

    Args:
        cost: The cost of a sample: the name of a measure, or a function from arrays of measures
            to an array of costs. It must be picklable, and return the same on all machines.
        window: "step" deals the samples of each step to its micro-batches; each step has the same
            samples as without balancing. A number K sorts the samples of K steps by cost into
            steps of similar samples, and deals these.
        micro_batches: N, micro-batches of a step: ranks, times the batches that a rank accumulates.
            None for the lanes of the worker config or, without them, the number of ranks when
            the run begins; a restored run keeps it.
        pool: M, lanes that exchange samples, a divisor of N; "all" for those of the step. With
            fewer, ranks read fewer samples of slices that other ranks read too. None for the most
            for which a rank makes about as many requests as without balancing: with a number as
            `window`, 1 if samples are read in slices; else "all". With `speeds`, a pool has lanes
            of all of them, so it is a multiple of their number, instead of 1 that number itself.
        name: What identifies the cost in states; None for the name of the measure or function.
        version: Version of the function: change it with the costs that the function returns.
        padded: With `batch_cost`, whether samples count as much as the largest of their batch.
        skipped: What becomes of a batch from which hooks skip samples: "shorten" makes it smaller,
            "repeat" repeats its other samples, in their order, up to the batch size. Neither
            changes other batches, so a restored run may choose anew.
        speeds: The relative speeds of the data-parallel ranks, in their order, a divisor of N;
            fewer are repeated. A micro-batch costs in proportion to the speed of its rank, as far
            as equally many samples can; with `batch_cost`, its largest cost is. None if all ranks
            are equally fast. They are those of the ranks for which they were given: on other
            ranks, a run keeps its order.

    Raises:
        ConfigError: If a value is invalid.

    Example:
        >>> Balance(cost="bytes", window=16).name
        'bytes'
    """

    cost: str | Callable[[Measures], NDArray[Any]]
    window: Literal["step"] | int = "step"
    micro_batches: int | None = None
    pool: int | Literal["all"] | None = None
    name: str | None = None
    version: int | str = 0
    padded: bool = False
    skipped: Literal["shorten", "repeat"] = "shorten"
    speeds: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cost, str) and not callable(self.cost):
            raise ConfigError(
                f"Balance(cost={self.cost!r}): expected the name of a measure, such as 'bytes', or "
                "a function of measures"
            )
        numbers: dict[str, Any] = {"micro_batches": self.micro_batches}
        if self.pool != "all":
            numbers["pool"] = self.pool
        if self.window != "step":
            numbers["window"] = self.window
        for name, value in numbers.items():
            if value is not None and not (is_whole(value) and value >= 1):
                raise ConfigError(f"Balance({name}={value!r}): expected a whole number from 1")
            if value is not None:  # states are plain data, without numbers of numpy
                object.__setattr__(self, name, index(value))
        if self.skipped not in ("shorten", "repeat"):
            raise ConfigError(f"Balance(skipped={self.skipped!r}): expected 'shorten' or 'repeat'")
        if self.speeds is not None:
            object.__setattr__(self, "speeds", _relative(self.speeds))
        if self.name is None:
            name = cost_name(self.cost)
            if not name:
                raise ConfigError(
                    f"Balance(cost={self.cost!r}): the function has no name by which states could "
                    "identify it; pass Balance(name=...)"
                )
            object.__setattr__(self, "name", name)


def _relative(speeds: Sequence[float]) -> tuple[float, ...] | None:
    """Return speeds over the largest, without repetition; None if all are equal.

    Raises:
        ConfigError: If they are not positive numbers.
    """
    problem = f"Balance(speeds={speeds!r}): expected positive numbers, one for each rank"
    try:
        values = [float(speed) for speed in speeds]
    except (TypeError, ValueError) as error:
        raise ConfigError(problem) from error
    if not values or not all(0 < value < inf for value in values):
        raise ConfigError(problem)
    relative = tuple(value / max(values) for value in values)
    size = len(relative)
    period = next(n for n in range(1, size + 1) if relative == relative[:n] * (size // n))
    return relative[:period] if period > 1 else None


class StepCosts(NamedTuple):
    """The micro-batches of a step."""

    costs: NDArray[np.float64]
    """The cost of each."""
    times: NDArray[np.float64]
    """These over the relative speed of the rank."""
    own: int
    """The micro-batch in question."""


@dataclass(frozen=True)
class BalancedOrder:
    """How the samples of steps are dealt to micro-batches.

    Args:
        costs: Returns the costs of samples.
        balance: The settings of the user.
        batch_size: Samples of a micro-batch.
        micro_batches: N, micro-batches of a step.
        seed: Seed of the run.
        measures: Changes with the stored measures that costs depend on; None if there are none.
    """

    costs: Costs
    balance: Balance
    batch_size: int
    micro_batches: int
    seed: int = 0
    measures: str | None = None

    @property
    def window(self) -> int:
        """K, steps whose samples are sorted together."""
        return 1 if self.balance.window == "step" else self.balance.window

    @property
    def pool(self) -> int | None:
        """M, lanes of a step that exchange samples; None for all."""
        return None if self.balance.pool == "all" else self.balance.pool

    @property
    def num_speeds(self) -> int:
        """How many consecutive lanes have speeds that the next ones repeat."""
        return len(self.balance.speeds or (1,))

    def speeds(self, lanes: int) -> NDArray[np.float64]:
        """Return the relative speeds of consecutive lanes, from the first of a pool or step."""
        return np.resize(np.array(self.balance.speeds or (1.0,)), lanes)

    def speeds_of_lanes(self, lanes: int) -> NDArray[np.float64] | None:
        """Return the same; None if all are equal."""
        return self.speeds(lanes) if self.num_speeds > 1 else None

    def plan(self, plan: DealtPlan | DrawPlan) -> BalancedPlan:
        """Return the plan of lanes that exchange the samples of their steps."""
        return BalancedPlan(plan, self)

    def to_json(self) -> dict[str, Any]:
        """Return all that determines the deal, as plain data, for the fingerprint of states."""
        settings = self.balance
        return {
            "balance": {
                "cost": settings.name,
                **({"function": True} if callable(settings.cost) else {}),
                "version": settings.version,
                "window": settings.window,
                "pool": self.pool,
                **({"speeds": [*settings.speeds]} if settings.speeds else {}),
                **({} if self.measures is None else {"measures": self.measures}),
            },
            "micro_batches": self.micro_batches,
        }

    def continuing(self, saved: Mapping[str, Any]) -> BalancedOrder:
        """Return the order of a run that was saved with some fingerprint, whose N it keeps.

        Raises:
            StateError: If the settings have another N, or that of the state is damaged.
        """
        count = saved.get("micro_batches")
        if count is None or count == self.micro_batches:
            return self
        if not is_whole(count) or count < 1:
            raise StateError(
                f"the fingerprint of the state has micro_batches={count!r}, expected a number from "
                "1; the state is damaged or was edited"
            )
        if self.balance.micro_batches is not None:
            raise StateError(
                f"the run has steps of {count} micro-batches, now it is {self.micro_batches}; pass "
                f"Balance(micro_batches={count}), or leave it out"
            )
        return replace(self, micro_batches=count)

    def check(self, lanes: int) -> None:
        """Raise ConfigError if a run of `lanes` lanes cannot be divided into these steps."""
        count = self.micro_batches
        if lanes % count and count % lanes:
            lower, upper = lanes // count * count, -(-lanes // count) * count
            near = " or ".join(str(each) for each in (lower, upper) if each)
            raise ConfigError(
                f"a run with {lanes} lanes cannot be divided into steps of {count} micro-batches; "
                f"use lanes={near}, or Balance(micro_batches=...) with a divisor of {lanes}"
            )
        of_step = min(lanes, count)
        if of_step % self.num_speeds:
            raise ConfigError(
                f"a step has batches of {counted(of_step, 'lane')}, which {self.num_speeds} speeds "
                "do not fit; use Balance(speeds=...) with as many as ranks, or a divisor of "
                f"{of_step}"
            )
        fitting = self.fitting_pools(of_step)
        if self.pool is not None and self.pool not in fitting:
            of_all = " with all speeds" if self.num_speeds > 1 else ""
            raise ConfigError(
                f"a step has batches of {counted(of_step, 'lane')}, which cannot be divided into "
                f"pools of {self.pool}{of_all}; use Balance(pool=...) with one of "
                f"{', '.join(map(str, fitting))}"
            )

    def fitting_pools(self, lanes: int) -> list[int]:
        """Return the pools into which the lanes of a step can be divided."""
        sizes = range(self.num_speeds, lanes + 1, self.num_speeds)
        return [size for size in sizes if lanes % size == 0]


class _Window:
    """The samples of a window of a pool, and the deals of its steps.

    Samples are numbered lane by lane, in the order of the unbalanced plan.

    Args:
        firsts: The number of the first sample of each lane, and how many there are.
        costs: The cost of each sample.
        step_rows: Rows of each lane in a step.
        order: The balanced order.
        groups: For each step, which group of samples of similar cost it has.
    """

    def __init__(
        self,
        firsts: Ints,
        costs: NDArray[np.float64],
        step_rows: int,
        order: BalancedOrder,
        groups: Ints,
    ) -> None:
        self._firsts, self._step_rows = firsts, step_rows
        self._batch_size, self._groups = order.batch_size, groups
        # Sums of whole numbers do not depend on their order, nor on the machine.
        self._costs = np.rint(costs * (COST_UNITS / (np.abs(costs).max(initial=0) or 1)))
        self._costs = self._costs.astype(np.int64)
        counts = np.diff(firsts)
        self._speeds = order.speeds_of_lanes(len(counts))
        self._is_complete = bool((counts == order.window * step_rows).all())
        self._steps = int(counts.min()) // step_rows
        self._deals: dict[int, Ints] = {}

    def source(self, lane: int, offsets: Ints) -> Ints:
        """Return the numbers of the samples at some rows of a lane."""
        samples = self._firsts[lane] + offsets
        step, within = divided(offsets, self._step_rows)
        for number in range(int(step.min()), min(int(step.max()) + 1, self._steps)):
            chosen = np.flatnonzero(step == number)
            samples[chosen] = self._dealt(number)[lane, within[chosen]]
        return np.asarray(samples)

    def find(self, sample: int) -> tuple[int, int]:
        """Return the lane, and the row in the window, to which a sample is dealt."""
        for number in range(self._steps):
            lanes, rows = np.nonzero(self._dealt(number) == sample)
            if len(lanes):
                return int(lanes[0]), number * self._step_rows + int(rows[0])
        lane = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        return lane, sample - int(self._firsts[lane])

    def _dealt(self, step: int) -> Ints:
        """Return the samples of each lane in a step, shape (lanes, rows)."""
        if step not in self._deals:
            lanes = len(self._firsts) - 1
            samples = self._samples(step)
            homes = np.searchsorted(self._firsts, samples, side="right") - 1
            hands = len(samples) // self._batch_size
            slack = int(self._costs.sum() * COST_SLACK) // (self._steps * hands)
            dealt = deal_to_lanes(
                self._costs[samples], homes, lanes, hands, slack=slack, speeds=self._speeds
            )
            self._deals[step] = samples[dealt].reshape(lanes, -1)
        return self._deals[step]

    def _samples(self, step: int) -> Ints:
        """Return the samples of a step, ascending."""
        if not self._is_complete or len(self._groups) == 1:
            rows = np.arange(step * self._step_rows, (step + 1) * self._step_rows)
            return np.asarray((self._firsts[:-1, None] + rows).ravel())
        group = int(self._groups[step])
        sizes = [len(samples) // len(self._groups) for samples in self._sorted]
        parts = zip(self._sorted, sizes, strict=True)
        return np.sort(np.concatenate([samples[group * size :][:size] for samples, size in parts]))

    @cached_property
    def _sorted(self) -> list[Ints]:
        """The samples for lanes of each speed, sorted by cost."""
        lanes = len(self._firsts) - 1
        return [
            samples[np.argsort(self._costs[samples], kind="stable")]
            for _, samples in samples_by_speed(self._costs, lanes, self._speeds)
        ]


class _Chunk:
    """Some consecutive windows of a pool, whose rows are planned together."""

    def __init__(self, plan: BalancedPlan, pool: int, number: int) -> None:
        plan.order.check(plan.lanes)
        rows, windows = plan.window_rows, plan.chunk_windows
        start = number * windows * rows
        lanes = plan.lanes_of_pool(pool)
        requests = [(lane, start, windows * rows) for lane in lanes]
        self._rows, self._edges = rows_of_lanes(plan.plan, requests)
        self._plan, self._pool, self._first = plan, pool, number * windows
        self._windows: dict[int, tuple[_Window, Ints]] = {}

    @property
    def num_rows(self) -> int:
        """Rows of all lanes."""
        return len(self._rows.leaf)

    def at(self, number: int, lane: int, offsets: Ints) -> Rows:
        """Return the samples at rows of a window, of the lane with a number within the pool."""
        window, numbers = self.window(number)
        return self._rows.pick(numbers[window.source(lane, offsets)])

    def find(self, number: int, lane: int, offset: int) -> tuple[int, int]:
        """Return the lane within the pool, and the row of a window, to which a sample is dealt.

        Args:
            number: The window.
            lane: The lane that has the sample without balancing, within the pool.
            offset: Its row in the window.
        """
        window, numbers = self.window(number)
        sample = np.searchsorted(numbers, self._edges[lane] + offset + self._begin(number))
        return window.find(int(sample))

    def _begin(self, number: int) -> int:
        """Return the row of a lane at which a window begins, counted from that of the chunk."""
        return (number - self._first) * self._plan.window_rows

    def window(self, number: int) -> tuple[_Window, Ints]:
        """Return a window, and the numbers of its samples in this chunk."""
        if number not in self._windows:
            plan, size = self._plan, self._plan.window_rows
            begins = self._edges[:-1] + self._begin(number)
            stops = np.minimum(begins + size, self._edges[1:])
            counts = np.maximum(0, stops - begins)
            firsts = np.cumsum([0, *counts])
            numbers = np.arange(firsts[-1]) + np.repeat(begins - firsts[:-1], counts)
            window = _Window(
                firsts,
                # Only now: costs may have to be fetched from a store.
                plan.order.costs(self._rows.pick(numbers)),
                plan.step_rows,
                plan.order,
                plan.groups(self._pool, number),
            )
            self._windows[number] = window, numbers
        return self._windows[number]


class _Planned(Protocol):
    @property
    def num_rows(self) -> int: ...


T_planned = TypeVar("T_planned", bound=_Planned)


def recalled(
    planned: OrderedDict[tuple[int, int], T_planned],
    address: tuple[int, int],
    make: Callable[[], T_planned],
) -> T_planned:
    """Return the planned part at an address, made if it is missing; forget the oldest parts."""
    # Several threads may plan: none of these steps fails where another one is ahead.
    part = planned.pop(address, None) or make()
    planned[address] = part
    kept = list(planned.items())
    excess = sum(each.num_rows for _, each in kept) - KEPT_ROWS
    for oldest, each in kept[:-KEPT_CHUNKS]:
        if excess > 0:
            planned.pop(oldest, None)
            excess -= each.num_rows
    return part


def of_windows(windows: Ints, read: Callable[[int, Any], Rows]) -> Rows:
    """Return the samples at rows of several windows.

    Args:
        windows: The window of each row.
        read: Returns the samples of a window at those rows that an index picks.
    """
    numbers = distinct(windows).tolist()
    if len(numbers) == 1:
        return read(numbers[0], slice(None))
    columns: Sequence[Any] = [np.empty(len(windows), kind) for kind in (np.int32, *[np.int64] * 2)]
    for number in numbers:
        chosen = np.flatnonzero(windows == number)
        for column, values in zip(columns, read(number, chosen), strict=True):
            column[chosen] = values
    return Rows(*columns)


@dataclass(frozen=True)
class BalancedPlan:
    """The plan of lanes that exchange the samples of their steps.

    Args:
        plan: The order without balancing.
        order: How samples are exchanged.
    """

    plan: DealtPlan | DrawPlan
    order: BalancedOrder

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.plan.lanes

    @property
    def lanes_of_stream(self) -> int:
        """How many lanes read the same slices without balancing."""
        return self.plan.lanes_of_stream

    @cached_property
    def lanes_of_step(self) -> int:
        """How many lanes have batches in a step."""
        return min(self.lanes, self.order.micro_batches)

    @cached_property
    def pool(self) -> int:
        """M, how many lanes exchange samples."""
        return gcd(self.lanes_of_step, self.order.pool or self.lanes_of_step)

    @cached_property
    def step_rows(self) -> int:
        """Rows of a lane in each step."""
        return self.order.micro_batches // self.lanes_of_step * self.order.batch_size

    @cached_property
    def window_rows(self) -> int:
        """Rows of a lane in each window."""
        return self.order.window * self.step_rows

    @cached_property
    def chunk_windows(self) -> int:
        """How many windows are planned together."""
        least, most = PLANNED_ROWS
        rows = max(least, min(most, CHUNK_ROWS // self.pool))
        return -(-rows // self.window_rows)

    def lanes_of_pool(self, pool: int) -> range:
        """Return the lanes of a pool; pools are numbered through all lanes."""
        return range(pool * self.pool, (pool + 1) * self.pool)

    def stream_of(self, lane: int) -> int:
        """Return the number of the pool of a lane in its step: such lanes are read together."""
        return lane % self.lanes_of_step // self.pool

    def groups(self, pool: int, window: int) -> Ints:
        """Return which group of samples of similar cost each step of a window has."""
        count = self.order.window
        key = derive_seed(self.order.seed, "balance", pool * self.pool // self.lanes_of_step)
        keys = combine(np.array([key], np.uint64), window)
        return permute(np.arange(count), np.array([count]), keys)

    def stream_rows(self, lane: int, rows: Ints) -> Ints:
        """Return the rows of its stream that some rows of a lane are, without balancing."""
        return self.plan.stream_rows(lane, rows)

    def rows_before(self, lane: int, stream_row: int) -> int:
        """Return how many rows of a lane come before a row of its stream, without balancing."""
        return self.plan.rows_before(lane, stream_row)

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None means no end."""
        return self.plan.num_rows(lane)

    def first_unread(self, row: int) -> int:
        """Return the first row of the unbalanced lanes of which nothing comes before `row`."""
        return -(-row // self.window_rows) * self.window_rows

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> BalancedPlan:
        """Return the plan of a run in which all streams changed their mix at `rows`.

        Lanes that exchange samples have to change it together, where a window begins.
        """
        if not rows:
            return self
        if rows not in self._changed:
            plan = self.plan
            for each in range(self.lanes):
                plan = plan.with_changes(each, rows)
            self._changed[rows] = replace(self, plan=plan)
        return self._changed[rows]

    def rows(self, lane: int, start: int, count: int) -> Rows:
        """Return rows `start` to `start + count` of a lane; fewer only at the end."""
        end = self.num_rows(lane)
        stop = start + count if end is None else min(start + count, end)
        return self.at(lane, np.arange(start, max(start, stop), dtype=np.int64), gaps=True)

    def at(self, lane: int, rows: Ints, *, gaps: bool = False) -> Rows:
        """Return the samples at `rows` of a lane, in any order; all rows must exist."""
        pool, own = divmod(lane, self.pool)
        windows, offsets = divided(rows, self.window_rows)
        return of_windows(
            windows, lambda number, at: self._chunk(pool, number).at(number, own, offsets[at])
        )

    def leaf_of(self, lane: int, rows: Ints) -> NDArray[np.int32]:
        """Return the leaf of each of `rows` of a lane; below 0 for a gap."""
        return self.at(lane, rows, gaps=True).leaf

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        """Return how often each leaf comes in the rows of a lane before `row`.

        Those of earlier windows are counted as without balancing: the sum over the lanes of a pool
        is the same, as soon as all of them have read these windows.
        """
        begin = row // self.window_rows * self.window_rows
        if row - begin > COUNTED_ROWS:
            return self.plan.leaf_counts(lane, row)
        leaf = self.leaf_of(lane, np.arange(begin, row, dtype=np.int64))
        counts = self.plan.leaf_counts(lane, begin)
        return counts + np.bincount(leaf[leaf >= 0], minlength=len(counts))

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return the lane and row of a sample in an epoch of its leaf."""
        unbalanced = self.plan.find(leaf, epoch, ordinal)
        if unbalanced is None:
            return None
        pool, own = divmod(unbalanced[0], self.pool)
        number, offset = divmod(unbalanced[1], self.window_rows)
        lane, row = self._chunk(pool, number).find(number, own, offset)
        return pool * self.pool + lane, number * self.window_rows + row

    def costs_of_step(self, lane: int, row: int) -> StepCosts | None:
        """Return the costs of the micro-batches of a step, one of which has a row of a lane.

        None if the data ends within the step.
        """
        size, of_step = self.order.batch_size, self.lanes_of_step
        step, own = divmod(row, self.step_rows)
        rows = np.arange(step * self.step_rows, (step + 1) * self.step_rows, dtype=np.int64)
        first = lane // of_step * of_step
        costs = []
        for each in range(first, first + of_step):
            end = self.num_rows(each)
            if end is not None and end <= rows[-1]:
                return None
            costs.append(self.order.costs(self.at(each, rows, gaps=True)).reshape(-1, size))
        batches = np.array(costs).sum(axis=2).T.ravel()
        times = batches / self.order.speeds(len(batches))
        return StepCosts(batches, times, own // size * of_step + lane - first)

    def _chunk(self, pool: int, window: int) -> _Chunk:
        """Return the chunk that has a window of a pool."""
        address = pool, window // self.chunk_windows
        return recalled(self._chunks, address, lambda: _Chunk(self, *address))

    @cached_property
    def _chunks(self) -> OrderedDict[tuple[int, int], _Chunk]:
        return OrderedDict()

    @cached_property
    def _changed(self) -> dict[tuple[int, ...], BalancedPlan]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
