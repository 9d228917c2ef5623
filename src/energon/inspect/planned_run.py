"""A training run that is planned but not run: its order, and where a row is in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from energon.errors import ConfigError
from energon.metadataset.resolve import DatasetPath, resolve
from energon.plan.blends.blend import BlendPlan
from energon.plan.line import LinePlan
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import Plan, Rows, WindowPlan
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
    exists = False
    sightings: list[Sighting] = []
    for leaf, opened in enumerate(run.leaves):
        for ordinal in opened.source.find(key):
            exists = True
            sightings += _sightings(run, leaf, ordinal, batches)
    if not exists:
        raise ConfigError(no_such_key(run, key))
    return sorted(sightings)


def no_such_key(run: PlannedRun, key: str) -> str:
    """Return the message about a key that no dataset of a run has."""
    return (
        f"no dataset of the run ({', '.join(run.names)}) has a sample {key!r}; in a shard, keys "
        "are the paths of files up to the first dot of their names"
    )


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
        left = run.batch_size if most is None else min(run.batch_size, most - len(sightings))
        if left <= 0:
            break
        lane, first, rows = rows_of_batch(run, batch, left)
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
    where = run.leaves[leaf].source.locate(ordinal)
    return Sighting(moment, lane, row, run.names[leaf], epoch, ordinal, where.key, where.shard)


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
