"""A planned training run, before it runs: its order, what it will read, and how well it mixes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import ConfigError
from energon.io.range_file import merge_ranges
from energon.messages import counted
from energon.metadataset.resolve import DatasetPath, resolve
from energon.plan.balance import BalancedOrder
from energon.plan.blends.blend import BlendPlan
from energon.plan.dealt import DealtPlan
from energon.plan.line import LinePlan
from energon.plan.randomness import shuffle_quality
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import Plan, Rows, WindowPlan
from energon.sources.shards import span_edges
from energon.sources.source import Source
from energon.stages.lane import MAX_BLOCK_BYTES, MAX_PLANNED_ROWS
from energon.task_encoder.leaves import OpenedLeaf, open_leaves
from energon.task_encoder.train_plan import TrainSettings, default_lanes, train_plan
from energon.worker import WorkerConfig


class Sighting(NamedTuple):
    """A sample at some moment of a run."""

    moment: Moment
    lane: int
    row: int | None
    """None in a batch that hooks have made, for which they may have skipped rows."""
    leaf: str
    epoch: int
    ordinal: int
    key: str
    shard: str


def find_key(run: PlannedRun, key: str, *, batches: int) -> list[Sighting]:
    """Return when the samples with a key are seen in the first `batches` of a run.

    Costs the same for the first epoch and the millionth: nothing is searched.

    Raises:
        ConfigError: If no dataset of the run has such a key, or one that has it is drawn from with
            replacement.
    """
    samples = run.samples_of(key)
    return sorted(each for sample in samples for each in _sightings(run, *sample, batches))


def list_step(
    run: PlannedRun, step: int, *, rank: int | None = None, most: int | None = None
) -> list[Sighting]:
    """Return the samples of a step: of one batch for each rank.

    Args:
        run: The run.
        step: Number of the step.
        rank: Only the batch of this rank; None for all.
        most: Maximum number of samples; None for all.

    Raises:
        ConfigError: If the run ends before it.
    """
    world_size = run.workers.world_size
    sightings: list[Sighting] = []
    batches = range(step * world_size, (step + 1) * world_size)
    for batch in batches if rank is None else batches[rank : rank + 1]:
        count = run.batch_size if most is None else min(run.batch_size, most - len(sightings))
        if count <= 0:
            break
        lane, first, rows = rows_of_batch(run, batch, count)
        triples = zip(*(column.tolist() for column in rows), strict=True)
        for row, (leaf, epoch, ordinal) in enumerate(triples, first):
            sightings.append(sighting(run, run.moment(lane, row), lane, row, leaf, epoch, ordinal))
    if not sightings:
        raise ConfigError(f"there is no step {step}: the run ends before it")
    return sightings


def rows_of_batch(run: PlannedRun, batch: int, count: int) -> tuple[int, int, Rows]:
    """Return the lane of a batch, its first row there, and up to `count` of its rows.

    Raises:
        ConfigError: If the batch is one of a time when the run had other lanes.
    """
    turn, lane = divmod(batch, run.lanes)
    turn -= run.first_turn
    if turn < 0:
        raise ConfigError(
            "the run had a different number of lanes before step "
            f"{run.first_turn * run.lanes // run.workers.world_size}; "
            "pass a state that was saved before that change"
        )
    first = turn * run.batch_size
    return lane, first, run.plan.rows(lane, first, count)


def _sightings(run: PlannedRun, leaf: int, ordinal: int, batches: int) -> Iterator[Sighting]:
    misses = epoch = 0
    # Lanes are not in lockstep, so an epoch may end slightly after the next one begins.
    while misses < 2:
        row = run.plan.find(leaf, epoch, ordinal)
        if row is None or run.moment(*row).batch >= batches:
            misses += 1
        else:
            misses = 0
            yield sighting(run, run.moment(*row), *row, leaf, epoch, ordinal)
        epoch += 1


def sighting(
    run: PlannedRun,
    moment: Moment,
    lane: int,
    row: int | None,
    leaf: int,
    epoch: int,
    ordinal: int,
) -> Sighting:
    """Return a sample of a run at some moment.

    Raises:
        ConfigError: If the run no longer reads its dataset.
    """
    if leaf >= len(run.leaves):
        raise ConfigError(
            f"at that step the run was reading {run.recipe.leaves[leaf].uid}, which it no longer "
            "reads; pass a state that was saved before that change"
        )
    location = run.leaves[leaf].source.locate(ordinal)
    name = run.names[leaf]
    return Sighting(moment, lane, row, name, epoch, ordinal, location.key, location.shard)


class Moment(NamedTuple):
    """When a row of a lane is delivered."""

    step: int
    """How many batches its rank has delivered before it."""
    rank: int
    batch: int
    """Number of the batch among those of all ranks."""
    position: int
    """Place in the batch."""


@dataclass(frozen=True)
class PlannedRun:
    """What a training run would read, and in which order, if no hook skipped or packed samples.

    Args:
        recipe: The order.
        leaves: The datasets, opened.
        lanes: Fixed streams of batches.
        batch_size: Samples of a batch.
        workers: Ranks and workers; the order depends on neither.
        first_turn: How many batches each lane had delivered before its first row, in a run that
            continues with another number of lanes.
        changes: For each stream of a saved run, the rows at which its mix was changed.
    """

    recipe: PlanRecipe
    leaves: tuple[OpenedLeaf, ...]
    lanes: int
    batch_size: int
    workers: WorkerConfig
    first_turn: int = 0
    changes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def plan(self) -> Plan:
        """The order of all lanes."""
        plan, deal = self.recipe(self.lanes), self.recipe.deal(self.lanes)
        for stream, rows in self.changes.items():
            plan = plan.with_changes(deal.lanes_of(stream)[0], rows)
        return plan

    @cached_property
    def streams(self) -> BlendPlan | LinePlan | WindowPlan:
        """The order of the streams that the lanes share."""
        plan = self.recipe.of_streams(self.recipe.deal(self.lanes).streams)
        for stream, rows in self.changes.items():
            plan = plan.with_changes(stream, rows)
        return plan

    @property
    def names(self) -> list[str]:
        """The names of the leaves."""
        return [leaf.plan_leaf.uid for leaf in self.leaves]

    def samples_of(self, key: str) -> list[tuple[int, int]]:
        """Return leaf and number of the samples that have a key.

        Raises:
            ConfigError: If no dataset has it.
        """
        samples = [(n, o) for n, leaf in enumerate(self.leaves) for o in leaf.source.find(key)]
        if not samples:
            raise ConfigError(
                f"no dataset of the run ({', '.join(self.names)}) has a sample {key!r}; in a "
                "shard, keys are the paths of files up to the first dot of their names"
            )
        return samples

    def moment(self, lane: int, row: int) -> Moment:
        """Return when a row of a lane is delivered."""
        turn, position = divmod(row, self.batch_size)
        batch = (turn + self.first_turn) * self.lanes + lane
        step, rank = divmod(batch, self.workers.world_size)
        return Moment(step, rank, batch, position)

    def rows_until(self, lane: int, batches: int) -> int:
        """Return how many rows of a lane are in the first batches of all ranks."""
        turns = -((lane - batches) // self.lanes) - self.first_turn
        rows = max(0, turns) * self.batch_size
        end = self.plan.num_rows(lane)
        return rows if end is None else min(rows, end)

    @cached_property
    def num_batches(self) -> int | None:
        """How many batches there are; None if there is no end."""
        ends = [self.plan.num_rows(lane) for lane in range(self.lanes)]
        counts = [-(-end // self.batch_size) for end in ends if end is not None]
        return sum(counts) if len(counts) == len(ends) else None


def open_run(
    path: DatasetPath,
    settings: TrainSettings,
    workers: WorkerConfig,
    *,
    split_part: str = "train",
) -> PlannedRun:
    """Return the run that `get_train_dataset` would create from the same arguments.

    Indexes are opened, samples are not. Joiners and hooks need not be importable.

    Raises:
        ConfigError: If an argument or a document is invalid.
        DatasetNotFoundError: If there is no such dataset.
        EmptyDatasetError: If a leaf has no samples in this split.
    """
    resolved = resolve(path, split_part=split_part, training=True)
    leaves = open_leaves(resolved.leaves, None)
    recipe = train_plan(resolved, leaves, settings, workers)
    batch_size = settings.batch_size or 1
    lanes = default_lanes(recipe, workers, batch_size=batch_size)
    return PlannedRun(recipe, tuple(leaves), lanes, batch_size, workers)


MEASURED_ROWS = 4096
MEASURED_STREAMS = 4


class LeafReads(NamedTuple):
    """What reading a sample of a leaf takes, on average."""

    requests: float
    bytes_read: float
    """Including the gaps that are read along."""


def measure_reads(run: PlannedRun, *, batches: int) -> dict[int, LeafReads]:
    """Measure the reads of the samples of each leaf in some blocks of rows."""
    sums: dict[int, list[Ints]] = {}
    number = run.streams.lanes
    streams = np.unique(np.linspace(0, number - 1, MEASURED_STREAMS).astype(int)).tolist()
    for stream in streams:
        available = sum(run.rows_until(lane, batches) for lane in range(stream, run.lanes, number))
        count = min(_block_rows(run), MEASURED_ROWS // len(streams), available)
        rows = run.streams.rows(stream, (available - count) // 2, count)
        for leaf in np.unique(rows.leaf).tolist():
            sums.setdefault(leaf, []).append(_read(run, leaf, rows.ordinal[rows.leaf == leaf]))
    reads = {}
    for leaf, parts in sums.items():
        samples, requests, read = np.sum(parts, axis=0).tolist()
        # Kinds that read sample by sample report no requests: each sample is one.
        if requests:
            reads[leaf] = LeafReads(requests / samples, read / samples)
    return reads


def _block_rows(run: PlannedRun) -> int:
    """Return how many rows of a stream are read at once."""
    sizes = [leaf.source.mean_sample_bytes for leaf in run.leaves]
    return max(1, min(MAX_PLANNED_ROWS, int(MAX_BLOCK_BYTES / max(1.0, sum(sizes) / len(sizes)))))


def _read(run: PlannedRun, leaf: int, ordinals: Ints) -> Ints:
    """Return how many samples, requests and bytes a block of a leaf takes."""
    requests = read = 0
    for file, _, low, high in run.leaves[leaf].source.extents(ordinals):
        order = np.argsort(low, kind="stable")
        low, high = low[order], high[order]
        if file.is_remote:
            start, stop = merge_ranges(low, high)[:2]
        else:
            edges = span_edges(low, high)
            start, stop = low[edges], np.maximum.reduceat(high, edges)
        requests += len(start)
        read += int((stop - start).sum())
    return np.array([len(ordinals), requests, read])


BALANCED_STEPS = 64
"""Steps that are compared, and at least a window."""
COMPARED_POOLS = 6


def describe_balance(run: PlannedRun, *, batches: int | None = None) -> dict[str, Any]:
    """Return the costs and reads of the first steps, without balancing and for each pool.

    Args:
        run: A run with balanced batches.
        batches: Number of batches of all ranks; None for a window, and at least 64 steps.

    Raises:
        ConfigError: If the data ends within the first step.
    """
    order = run.recipe.balance
    if order is None:
        raise ConfigError("the run is not balanced; pass Balance(cost=...)")
    count, of_step = order.micro_batches, min(order.micro_batches, run.lanes)
    ends = [run.plan.num_rows(lane) for lane in range(run.lanes)]
    turns = min((end // run.batch_size for end in ends if end is not None), default=None)
    steps = max(BALANCED_STEPS, order.window) if batches is None else batches // count
    steps = steps if turns is None else min(steps, turns * run.lanes // count)
    if not steps:
        raise ConfigError(
            f"a step has {counted(count, 'micro-batch', 'micro-batches')}, but there are fewer "
            "batches; pass a larger --batches or fewer --lanes"
        )
    divisors = order.fitting_pools(of_step)
    chosen = np.unique(np.linspace(0, len(divisors) - 1, COMPARED_POOLS).astype(int)).tolist()
    pools = sorted({*(divisors[at] for at in chosen), order.pool or of_step})
    dealt = {pool: replace(order, balance=replace(order.balance, pool=pool)) for pool in pools}
    return {
        "cost": order.balance.name,
        "window": order.balance.window,
        "micro_batches": count,
        "batch_size": run.batch_size,
        "steps": steps,
        "pool": order.pool or of_step,
        "speeds": order.balance.speeds,
        "unbalanced": _describe_deal(run, order, None, steps),
        "pools": {str(pool): _describe_deal(run, order, dealt[pool], steps) for pool in pools},
    }


def _describe_deal(
    run: PlannedRun, order: BalancedOrder, dealt: BalancedOrder | None, steps: int
) -> dict[str, Any]:
    """Return the costs of some steps, and the reads of a sample, in an order of the run."""
    plan = replace(run.recipe, balance=dealt)(run.lanes)
    size, number = run.batch_size, steps * order.micro_batches
    rows = -(-number // run.lanes) * size
    costs = np.array([order.costs(plan.rows(lane, 0, rows)) for lane in range(run.lanes)])
    batches = costs.reshape(run.lanes, -1, size).swapaxes(0, 1).reshape(-1, size)[:number]
    times = batches.sum(axis=1).reshape(steps, -1) / order.speeds(order.micro_batches)
    padded = batches.max(axis=1).sum() * size
    requests, read = _reads_of_ranks(run, plan, order)
    return {
        "slowest_over_mean": round(float(times.max(axis=1).sum() / times.mean(axis=1).sum()), 4),
        "steps": (times.max(axis=1) / times.mean(axis=1)).round(4).tolist(),
        "padding": round(1 - float(batches.sum() / padded), 4) if padded else 0.0,
        "bytes_per_sample": round(read),
        "requests_per_sample": round(requests, 4),
    }


def _reads_of_ranks(run: PlannedRun, plan: Plan, order: BalancedOrder) -> tuple[float, float]:
    """Return the requests and bytes of a sample, measured in what workers of some ranks read."""
    world_size, sums = run.workers.world_size, np.zeros(3, np.int64)
    is_remote = any(leaf.source.is_remote for leaf in run.leaves)
    for rank in np.unique(np.linspace(0, world_size - 1, MEASURED_STREAMS).astype(int)).tolist():
        lanes = range(rank, run.lanes, world_size * max(1, run.workers.num_workers))
        block = _block_rows(run)
        if is_remote:  # what is fetched ahead is planned as one
            window = order.window * order.micro_batches * run.batch_size
            block = max(block, window * len(lanes) // min(run.lanes, order.micro_batches))
        each = max(1, min(block, MEASURED_ROWS) // len(lanes))
        rows = [plan.rows(lane, 0, each) for lane in lanes]
        leaf, _, ordinal = map(np.concatenate, zip(*rows, strict=True))
        for number in np.unique(leaf).tolist():
            sums += _read(run, number, ordinal[leaf == number])
    samples, requests, read = sums.tolist()
    # Kinds that read sample by sample report no requests: each sample is one.
    mean = sum(leaf.source.mean_sample_bytes for leaf in run.leaves) / len(run.leaves)
    return (requests / samples, read / samples) if requests else (1.0, mean)


MAX_COUNTED_STREAMS = 32
"""If there are more streams than this, some of them represent all."""
QUALITY_ROWS = 1 << 18
"""Rows checked for how well they are mixed."""
MAX_QUALITY_LANES = 1024
"""Lanes that these rows belong to, neighbors in the order of batches."""
MIN_QUALITY_SAMPLES = 30

Floats = NDArray[np.float64]


def describe_run(run: PlannedRun, *, batches: int, points: int = 24) -> dict[str, Any]:
    """Return the reads of the first `batches` of a run, as plain data.

    Args:
        run: The run.
        batches: Number of batches of all ranks together.
        points: Number of sections of the run for which shares are computed.
    """
    end = run.num_batches
    batches = batches if end is None else min(batches, end)
    marks, counts = counts_over_time(run, batches=batches, points=points)
    shares = shares_of(counts)
    reads = measure_reads(run, batches=batches) if batches else {}
    qualities = _qualities(run, batches=batches)
    leaves = {
        name: _describe_leaf(run, leaf, float(counts[-1][leaf]), reads.get(leaf), qualities[leaf])
        for leaf, name in enumerate(run.names)
    }
    world_size = run.workers.world_size
    return {
        "topology": {
            "world_size": world_size,
            "num_workers": run.workers.num_workers,
            "lanes": run.lanes,
        },
        "batch_size": run.batch_size,
        "batches": batches,
        "steps": -(-batches // world_size),
        "samples": round(float(counts[-1].sum())),
        "ends_after_batches": end,
        "rank": {
            "samples": round(float(counts[-1].sum()) / world_size),
            "bytes": round(sum(leaf["bytes"] for leaf in leaves.values()) / world_size),
            "requests": round(sum(leaf["requests"] for leaf in leaves.values()) / world_size),
        },
        "leaves": leaves,
        "shares": {
            "batches": marks,
            **{name: shares[:, leaf].round(6).tolist() for leaf, name in enumerate(run.names)},
        },
        "shared_samples": shared_samples(run),
    }


def counts_over_time(run: PlannedRun, *, batches: int, points: int) -> tuple[list[int], Floats]:
    """Return marks in batches of all ranks, and how many samples of each leaf precede each mark."""
    marks = np.unique(np.linspace(0, batches, points + 1).astype(int)).tolist()
    return marks, np.array([_counts(run, mark) for mark in marks])


def shares_of(counts: Floats) -> Floats:
    """Return the share of each leaf between marks."""
    # Counts of part of a window may contradict the estimates of those before.
    steps = np.maximum(np.diff(counts, axis=0), 0)
    shares: Floats = steps / np.maximum(steps.sum(axis=1, keepdims=True), 1)
    return shares


def shared_samples(run: PlannedRun) -> list[dict[str, Any]]:
    """Return which leaves have samples in common, which are therefore seen more often."""
    shared = []
    for (one, first), (other, second) in combinations(enumerate(run.leaves), 2):
        count = _overlap(first.source, second.source)
        if count:
            shared.append({"leaves": [run.names[one], run.names[other]], "samples": count})
    return shared


def _overlap(first: Source, second: Source) -> int:
    (paths, ranges), (other_paths, others) = first.ranges(), second.ranges()
    if paths != other_paths:
        return 0
    return sum(
        max(0, min(stop, others[name][1]) - max(start, others[name][0]))
        for name, (start, stop) in ranges.items()
        if name in others
    )


def _counts(run: PlannedRun, batches: int) -> Floats:
    """Return how many samples of each leaf are in the first batches of all ranks."""
    if len(run.leaves) == 1:  # nothing to distinguish
        rows = sum(run.rows_until(lane, batches) for lane in range(run.lanes))
        return np.array([rows], np.float64)
    # Batches are dealt in turn, so those of all lanes of a stream are how it begins: one count of
    # its rows instead of one for each lane.
    number = run.streams.lanes
    streams: Sequence[int] = range(number)
    if number > MAX_COUNTED_STREAMS:
        streams = np.linspace(0, number - 1, MAX_COUNTED_STREAMS).astype(int).tolist()
    counts = []
    for stream in streams:
        rows = sum(run.rows_until(lane, batches) for lane in range(stream, run.lanes, number))
        counts.append(run.streams.leaf_counts(stream, rows))
    total: Floats = np.sum(counts, axis=0) * (number / len(streams))
    return total


def _describe_leaf(
    run: PlannedRun,
    leaf: int,
    drawn: float,
    reads: LeafReads | None,
    quality: dict[str, float] | None,
) -> dict[str, Any]:
    opened = run.leaves[leaf]
    size = opened.source.mean_sample_bytes
    described: dict[str, Any] = {
        "path": str(opened.source.path),
        "samples": len(opened.source),
        "drawn": round(drawn),
        "epochs": round(drawn / len(opened.source), 4),
        "bytes": round(drawn * (reads.bytes_read if reads else size)),
        "requests": round(drawn * (reads.requests if reads else 1)),
        "bytes_per_request": round(reads.bytes_read / reads.requests) if reads else None,
        "slice_samples": run.recipe.leaves[leaf].slice_samples,
        "parallel_slices": run.recipe.leaves[leaf].parallel_slices,
        "shuffle": quality,
    }
    last = _last_batch(run, leaf)
    return described if last is None else {**described, "used_up_with_batch": last}


def _last_batch(run: PlannedRun, leaf: int) -> int | None:
    """Return the batch with the last sample of a leaf that has a limit."""
    plan = run.streams.plan if isinstance(run.streams, WindowPlan) else run.streams
    if not isinstance(plan, BlendPlan):
        return None
    source = next(n for n, leaves in enumerate(plan.sources) if leaf in leaves)
    row = plan.last_row(source)
    if row is not None and isinstance(run.plan, DealtPlan):
        row = run.plan.deal.lane_of(*row)
    return None if row is None else run.moment(*row).batch


def _qualities(run: PlannedRun, *, batches: int) -> list[dict[str, float] | None]:
    """Return how well each leaf is shuffled, in the order of the first batches."""
    lanes = min(run.lanes, MAX_QUALITY_LANES)
    per_lane = max(run.batch_size, QUALITY_ROWS // lanes)
    parts = []
    for lane in range(lanes):
        rows = run.plan.rows(lane, 0, min(per_lane, run.rows_until(lane, batches)))
        turn, position = np.divmod(np.arange(len(rows.leaf)), run.batch_size)
        order = (turn * run.lanes + lane) * run.batch_size + position
        parts.append(np.stack((order, rows.leaf, rows.epoch, rows.ordinal)))
    order, leaf, epoch, ordinal = np.concatenate(parts, axis=1)
    in_order = np.argsort(order, kind="stable")
    qualities: list[dict[str, float] | None] = []
    for number, opened in enumerate(run.leaves):
        mine = in_order[(leaf[in_order] == number) & (epoch[in_order] == 0)]
        if len(mine) < MIN_QUALITY_SAMPLES:
            qualities.append(None)
            continue
        quality = shuffle_quality(ordinal[mine], len(opened.source))
        qualities.append({name: round(value, 4) for name, value in quality._asdict().items()})
    return qualities
