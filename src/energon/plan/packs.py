"""Fill micro-batches to a budget: packs of a context, decided from the lengths of samples alone.

The unbalanced plan is cut into *windows* of equally many rows of each lane. The samples of a window
are divided into packs, none of which exceeds the context, and these into as many steps as it takes:

1. The samples of each pool of lanes fill packs, the larger ones first, each into the pack that it
   leaves the least room in. Those of about the same size come in an order that is permuted by key:
   a window may have several epochs of a small dataset, whose samples should not meet themselves.
2. The packs are sorted by cost and cut into steps of similar packs, in an order that is permuted by
   key, the same for all pools.
3. The packs of each step are dealt to its micro-batches, as `balance.py` deals samples. Where lanes
   have different speeds, the packs of a window are divided between these first. If packs of slower
   lanes have less room, it is the samples that are divided, before they are packed.

How many samples a pack has is not known in advance, so the rows of a lane have gaps: the bits of a
row are the number of the window, of the pack within the lane, and of the sample within the pack.
A lane continues at any row by computing the window of that row. The last step of a window has what
is left of its samples, so its packs are less full than the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import index
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import ConfigError, EmptyDatasetError, StateError, is_whole
from energon.plan.balance import (
    BalancedOrder,
    BalancedPlan,
    Measures,
    StepCosts,
    cost_name,
    of_windows,
    recalled,
)
from energon.plan.deal import deal, samples_by_speed
from energon.plan.dealt import DealtPlan, rows_of_lanes
from energon.plan.fill import PACK_ROWS, Budget, PackNumbers, add_packs
from energon.plan.randomness import combine, derive_seed, permute
from energon.plan.rows import DrawPlan, Rows

WINDOW_PACKS = 1 << 18
"""Packs of a lane in a window, at most."""
WINDOW_ROWS = WINDOW_PACKS * PACK_ROWS
"""Rows of a window, most of which are gaps."""
EMPTY_WINDOWS = 100
"""Windows without a sample of a lane, after which the run ends."""
Length = str | Callable[[Measures], NDArray[Any]]
"""The name of a measure, or a function of measures."""


@dataclass(frozen=True, kw_only=True)
class PlannedPacks:
    """How samples are packed from their lengths alone, for `get_train_dataset`.

    The packs of a window of steps are decided before any of its samples is read, over all lanes.
    The hooks of the encoder receive the samples of each: `postencode_sample` and
    `pack_selected_samples`.

    Args:
        length: The length of a sample: the name of a measure, or a function of measures; several
            for several dimensions.
        context: The largest sum of lengths of a pack; several for several dimensions.
        too_long: What to do with a sample that is longer than the context: "error" ends the run
            and names it, "leave_out" leaves it out of the order.
        version: Version of the functions: change it with the lengths that they return.
        encoded_length: Returns the length of a sample as `pack_selected_samples` receives it, one
            number for each dimension; None to trust the planned lengths.
        if_longer: What to do with an encoded sample that is longer than planned: "error" ends the
            run and names it, "drop" skips it, and a function of the sample and the planned length
            returns a shorter sample.

    Raises:
        ConfigError: If a value is invalid.

    Example:
        >>> PlannedPacks(length="tokens", context=8192).room
        (8192,)
        >>> PlannedPacks(length=["tokens", "images"], context=[8192, 48]).room
        (8192, 48)
    """

    length: Length | Sequence[Length]
    context: int | Sequence[int]
    too_long: Literal["error", "leave_out"] = "error"
    version: int | str = 0
    encoded_length: Callable[[Any], int | Sequence[int]] | None = None
    if_longer: Literal["error", "drop"] | Callable[[Any, Any], Any] = "error"

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.room):
            raise ConfigError(
                f"PlannedPacks(length={self.length!r}, context={self.context!r}): expected as many "
                "lengths as numbers of the context"
            )
        for room in self.room:
            if not is_whole(room) or room < 1:
                raise ConfigError(
                    f"PlannedPacks(context={self.context!r}): expected whole numbers from 1"
                )
        if not all(self.names):
            raise ConfigError(
                f"PlannedPacks(length={self.length!r}): expected names of measures, such as "
                "'tokens', or named functions of measures"
            )
        if self.too_long not in ("error", "leave_out"):
            raise ConfigError(
                f"PlannedPacks(too_long={self.too_long!r}): expected 'error' or 'leave_out'"
            )
        if self.if_longer not in ("error", "drop") and not callable(self.if_longer):
            raise ConfigError(
                f"PlannedPacks(if_longer={self.if_longer!r}): expected 'error', 'drop', or a "
                "function of a sample and its planned length that returns a shorter one"
            )
        if self.if_longer != "error" and self.encoded_length is None:
            raise ConfigError(
                "PlannedPacks(if_longer=...) needs encoded_length=..., a function that returns the "
                "length of an encoded sample"
            )

    @property
    def lengths(self) -> tuple[Length, ...]:
        """The length in each dimension."""
        single = isinstance(self.length, str) or callable(self.length)
        return (self.length,) if single else tuple(self.length)  # type: ignore[arg-type,return-value]

    @property
    def room(self) -> tuple[int, ...]:
        """The context in each dimension."""
        context = self.context
        return tuple(context) if isinstance(context, Sequence) else (context,)

    @property
    def names(self) -> list[str]:
        """What identifies the lengths in states; "" for a function without a name."""
        return [cost_name(each) for each in self.lengths]

    def to_json(self) -> dict[str, Any]:
        """Return all that determines the packs, as plain data."""
        return {
            "length": self.names,
            "context": [index(each) for each in self.room],
            "too_long": self.too_long,
            "version": self.version,
        }


@dataclass(frozen=True, kw_only=True)
class PackedOrder(BalancedOrder):
    """How samples are divided into packs, and these are dealt to micro-batches.

    The `batch_size` is that in packs.

    Args:
        lengths: Returns the lengths of samples, shape (samples, dimensions).
        budget: What a pack may contain.
        rows: Samples of a window for each micro-batch of a step.
        identity: What identifies the lengths in states.
    """

    lengths: Callable[[Rows], Ints]
    budget: Budget
    rows: int
    identity: Mapping[str, Any]

    def plan(self, plan: DealtPlan | DrawPlan) -> PackedPlan:
        """Return the plan of lanes that exchange the samples of their windows."""
        return PackedPlan(plan, self)

    @property
    def unit_rows(self) -> int:
        """Rows of a micro-batch: a power of 2, so that a window has a whole number of them."""
        return batch_rows(self.batch_size)

    def to_json(self) -> dict[str, Any]:
        """Return all that determines the deal, as plain data, for the fingerprint of states."""
        order = super().to_json()
        order["balance"]["packs"] = dict(self.identity)
        return {**order, "window_rows": self.rows}

    def continuing(self, saved: Mapping[str, Any]) -> PackedOrder:
        """Return the order of a run that was saved with some fingerprint, whose windows it keeps.

        Raises:
            StateError: If the settings have another N, or the numbers of the state are damaged.
        """
        rows = saved.get("window_rows", self.rows)
        if not is_whole(rows) or not 1 <= rows < WINDOW_ROWS:
            raise StateError(
                f"the fingerprint of the state has window_rows={rows!r}, expected a number from 1; "
                "the state is damaged or was edited"
            )
        return replace(super().continuing(saved), rows=rows)  # type: ignore[call-arg,return-value]


def batch_rows(packs: int) -> int:
    """Return the rows of a micro-batch of some packs."""
    return PACK_ROWS << (packs - 1).bit_length()


class _PackedWindow:
    """The samples of a window of the lanes of a step, and the packs that they are in.

    Args:
        plan: The plan.
        group: Which lanes: their number divided by that of the lanes of a step.
        number: The window.
    """

    def __init__(self, plan: PackedPlan, group: int, number: int) -> None:
        order, lanes = plan.order, plan.lanes_of_step
        order.check(plan.lanes)
        first, size = group * lanes, plan.window_rows
        requests = [(lane, number * size, size) for lane in range(first, first + lanes)]
        self.samples, self.edges = rows_of_lanes(plan.plan, requests)
        lengths = order.lengths(self.samples)
        costs = order.costs(self.samples)
        of_lane = order.micro_batches * order.batch_size // lanes
        pools = [slice(*self.edges[[at, at + plan.pool]]) for at in range(0, lanes, plan.pool)]
        seeds = [plan.seed_of(first // plan.pool + each, number) for each in range(len(pools))]
        speeds = order.speeds(plan.pool)
        shares = [
            [
                (each, *each.budget.fill(lengths[members][each.samples], seed))
                for each in order.budget.shares(lengths[members], speeds)
            ]
            for members, seed in zip(pools, seeds, strict=True)
        ]
        self.steps = max(
            -(-count // (of_lane * len(share.lanes))) for own in shares for share, _, count in own
        )
        if self.steps * of_lane > WINDOW_PACKS:
            raise ConfigError(
                f"a window of {size:,} samples of each lane has more than {WINDOW_PACKS:,} packs a "
                "lane; use Balance(window=...) with a smaller number of steps"
            )
        key = derive_seed(order.seed, "packs", group)
        keys = combine(np.array([key], np.uint64), number)
        turns = permute(np.arange(self.steps), np.array([max(1, self.steps)]), keys)
        self.lane = np.full(len(self.samples.leaf), -1, np.int64)
        self.row = np.full(len(self.samples.leaf), -1, np.int64)
        for pool, (members, own_shares) in enumerate(zip(pools, shares, strict=True)):
            own_costs = costs[members]
            bins = np.full(len(own_costs), -1, np.int64)
            packs: list[tuple[Ints, Ints]] = []
            for share, own_bins, count in own_shares:
                first = sum(len(numbers) for _, numbers in packs)
                of_step = of_lane * len(share.lanes)
                more_bins = add_packs(
                    own_bins,
                    count,
                    self.steps * of_step,
                    group=of_step,
                    lengths=lengths[members][share.samples],
                    costs=own_costs[share.samples],
                    budget=share.budget,
                )
                bins[share.samples] = np.where(more_bins < 0, -1, more_bins + first)
                packs.append((share.lanes, first + np.arange(self.steps * of_step)))
            lane, pack = self._dealt(plan, bins, own_costs, turns, seeds[pool], packs)
            chosen = np.flatnonzero(bins >= 0)
            at = chosen + members.start
            self.lane[at] = lane[bins[chosen]] + pool * plan.pool
            self.row[at] = pack[bins[chosen]] * PACK_ROWS + _ranks(bins[chosen])
        by_lane = np.lexsort((self.row, self.lane))
        stops = np.searchsorted(self.lane[by_lane], np.arange(lanes + 1))
        self._of_lane = [by_lane[start:stop] for start, stop in pairwise(stops)]

    def _dealt(
        self,
        plan: PackedPlan,
        bins: PackNumbers,
        costs: NDArray[np.float64],
        turns: Ints,
        seed: int,
        packs_of_lanes: Sequence[tuple[Ints, Ints]],
    ) -> tuple[Ints, Ints]:
        """Return the lane within the pool of each pack, and its number in the lane."""
        order, pool, size = plan.order, plan.pool, plan.order.batch_size
        of_lane = order.micro_batches // plan.lanes_of_step
        chosen = bins >= 0
        total = self.steps * of_lane * pool * size
        loads = np.bincount(bins[chosen], costs[chosen], minlength=total)
        lane, number = np.empty(total, np.int64), np.empty(total, np.int64)
        slots = order.unit_rows // PACK_ROWS
        if not order.budget.by_speed:
            packs_of_lanes = samples_by_speed(loads, pool, order.speeds_of_lanes(pool))
        for lanes, packs in packs_of_lanes:
            hands = of_lane * len(lanes)
            similar = packs[np.argsort(loads[packs], kind="stable")]
            similar = similar.reshape(self.steps, hands * size)
            for step, turn in enumerate(turns.tolist()):
                dealt = similar[turn][deal(loads[similar[turn]], hands)]
                key = combine(np.array([seed], np.uint64), step)
                dealt = dealt[permute(np.arange(hands), np.array([hands]), key)]
                own_turn, own = divmod(np.arange(hands), len(lanes))
                lane[dealt] = lanes[own][:, None]
                number[dealt] = ((step * of_lane + own_turn) * slots)[:, None] + np.arange(size)
        return lane, number

    @property
    def num_rows(self) -> int:
        """Number of samples of the window, in all lanes."""
        return len(self.lane)

    def rows_of(self, lane: int) -> Ints:
        """Return the rows of a lane in the window, ascending."""
        return self.row[self._of_lane[lane]]

    def at(self, lane: int, rows: Ints) -> Rows:
        """Return the samples at rows of a lane in the window."""
        members = self._of_lane[lane]
        at = np.searchsorted(self.row[members], rows)
        present = at < len(members)
        present[present] = self.row[members[at[present]]] == rows[present]
        if not present.all():
            raise StateError(
                f"there is no sample at {int((~present).sum())} of the rows {rows!r:.100} of a "
                "window; the costs or lengths of samples have changed, or the state was edited"
            )
        return self.samples.pick(members[at])


def _ranks(bins: PackNumbers) -> Ints:
    """Return the number of each sample within its pack, in the order of the samples."""
    order = np.argsort(bins, kind="stable")
    ordered = bins[order]
    starts = np.searchsorted(ordered, ordered)
    ranks = np.empty(len(bins), np.int64)
    ranks[order] = np.arange(len(bins)) - starts
    return ranks


@dataclass(frozen=True)
class PackedPlan(BalancedPlan):
    """The plan of lanes whose samples are divided into packs.

    Args:
        plan: The order without packs.
        order: How samples are packed.
    """

    order: PackedOrder

    @cached_property
    def window_rows(self) -> int:
        """Rows of a lane of the unbalanced plan in each window."""
        return self.order.rows * self.order.micro_batches // self.lanes_of_step

    def rows(self, lane: int, start: int, count: int) -> Rows:
        """Return the samples of the next `count` rows that exist; fewer only at the end."""
        return PackedRows(self, lane, start)(0, count)

    def at(self, lane: int, rows: Ints, *, gaps: bool = False) -> Rows:
        """Return the samples at `rows` of a lane, in any order; all rows must exist."""
        own = lane % self.lanes_of_step
        return of_windows(
            rows // WINDOW_ROWS,
            lambda number, at: self.window(lane, number).at(own, rows[at] - number * WINDOW_ROWS),
        )

    def num_rows(self, lane: int) -> int | None:
        """Return how many samples a lane has without packs, about as many as with; None for all."""
        return self.plan.num_rows(lane)

    def seed_of(self, pool: int, window: int) -> int:
        """Return the key that mixes the samples and packs in a window of a pool."""
        key = np.array([derive_seed(self.order.seed, "packs of a pool", pool)], np.uint64)
        return int(combine(key, window)[0])

    def has_window(self, lane: int, number: int) -> bool:
        """Return whether the data of the lanes of a step reach into a window."""
        group = lane // self.lanes_of_step * self.lanes_of_step
        ends = [self.plan.num_rows(each) for each in range(group, group + self.lanes_of_step)]
        return any(end is None or end > number * self.window_rows for end in ends)

    def rows_of_window(self, lane: int, number: int) -> Ints:
        """Return the rows of a lane that a window has, ascending."""
        own = self.window(lane, number).rows_of(lane % self.lanes_of_step)
        return np.asarray(own + number * WINDOW_ROWS)

    def first_unread(self, row: int) -> int:
        """Return the first row of the unbalanced lanes of which nothing comes before `row`."""
        return -(-row // WINDOW_ROWS) * self.window_rows

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        """Return how often each leaf comes in the rows of a lane before `row`."""
        number = row // WINDOW_ROWS
        counts = self.plan.leaf_counts(lane, number * self.window_rows)
        if not row % WINDOW_ROWS or not self.has_window(lane, number):
            return counts
        rows = self.rows_of_window(lane, number)
        leaf = self.leaf_of(lane, rows[rows < row])
        return counts + np.bincount(leaf[leaf >= 0], minlength=len(counts))

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return the lane and row of a sample in an epoch of its leaf."""
        unpacked = self.plan.find(leaf, epoch, ordinal)
        if unpacked is None:
            return None
        group, own = divmod(unpacked[0], self.lanes_of_step)
        number, offset = divmod(unpacked[1], self.window_rows)
        window = self.window(unpacked[0], number)
        at = int(window.edges[own]) + offset
        if window.lane[at] < 0:
            return None
        row = number * WINDOW_ROWS + int(window.row[at])
        return group * self.lanes_of_step + int(window.lane[at]), row

    def costs_of_step(self, lane: int, row: int) -> StepCosts:
        """Return the costs of the micro-batches of a step, one of which has a row of a lane."""
        order, lanes = self.order, self.lanes_of_step
        number, within = divmod(row, WINDOW_ROWS)
        window, of_lane = self.window(lane, number), order.micro_batches // lanes
        turn = within // order.unit_rows
        step = turn // of_lane
        members = np.flatnonzero(window.row // (order.unit_rows * of_lane) == step)
        batch = window.row[members] // order.unit_rows % of_lane * lanes + window.lane[members]
        costs = order.costs(window.samples.pick(members))
        batches = np.bincount(batch, costs, minlength=order.micro_batches).astype(np.float64)
        times = batches / order.speeds(len(batches))
        return StepCosts(batches, times, turn % of_lane * lanes + lane % lanes)

    def window(self, lane: int, number: int) -> _PackedWindow:
        """Return a window of a lane and of those that have batches in the same steps."""
        address = lane // self.lanes_of_step, number
        return recalled(self._windows, address, lambda: _PackedWindow(self, *address))

    @cached_property
    def _windows(self) -> OrderedDict[tuple[int, int], _PackedWindow]:
        return OrderedDict()


class PackedRows:
    """The rows of a lane that exist, from one on, numbered without gaps. Call it for samples.

    Args:
        plan: The plan.
        lane: The lane.
        first: The row, from which on rows are counted.
    """

    def __init__(self, plan: PackedPlan, lane: int, first: int) -> None:
        self._plan, self._lane, self._first = plan, lane, first
        self._start = first // WINDOW_ROWS
        self._edges = [0]
        self._ended = False
        # A window and its rows: every read asks for them.
        self._latest: tuple[int, Ints] = (-1, np.empty(0, np.int64))

    def __call__(self, start: int, count: int) -> Rows:
        """Return the samples of `count` rows; fewer only at the end."""
        return self._plan.at(self._lane, self.numbers(start, count))

    def numbers(self, start: int, count: int) -> Ints:
        """Return `count` rows from that with a number on; fewer only at the end."""
        parts: list[Ints] = []
        at = start
        while at < start + count:
            while self._edges[-1] <= at and not self._ended:
                self._next()
            if self._edges[-1] <= at:
                break
            window = int(np.searchsorted(self._edges, at, side="right")) - 1
            own = self._of_window(window)
            parts.append(own[at - self._edges[window] :][: start + count - at])
            at += len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def count(self, start: int, stop: int) -> int:
        """Return how many rows come before row `stop` of the plan, from that with a number on.

        Both are in one window.
        """
        if not len(self.numbers(start, 1)):
            return 0
        window = int(np.searchsorted(self._edges, start, side="right")) - 1
        before = int(np.searchsorted(self._of_window(window), stop))
        return before + self._edges[window] - start

    def _next(self) -> None:
        """Count the rows of the next window.

        Raises:
            EmptyDatasetError: If many windows had none.
        """
        number = len(self._edges) - 1
        if not self._plan.has_window(self._lane, self._start + number):
            self._ended = True
            return
        self._edges.append(self._edges[-1] + len(self._of_window(number)))
        if len(self._edges) > EMPTY_WINDOWS and self._edges[-EMPTY_WINDOWS - 1] == self._edges[-1]:
            identity = self._plan.order.identity
            raise EmptyDatasetError(
                f"lane {self._lane} has no sample in {EMPTY_WINDOWS} windows of "
                f"{self._plan.window_rows:,} rows: nearly all samples are longer than the "
                f"context {identity['context']} by {identity['length']}, and left out; pass a "
                "larger context"
            )

    def _of_window(self, number: int) -> Ints:
        latest, rows = self._latest
        if number != latest:
            rows = self._plan.rows_of_window(self._lane, self._start + number)
            rows = rows if number else rows[rows >= self._first]
            self._latest = number, rows
        return rows
