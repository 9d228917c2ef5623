"""A training run that is planned and not run: its order, and where in it a row is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from energon.metadataset.resolve import DatasetPath, resolve
from energon.plan.blend import BlendPlan
from energon.plan.line import LinePlan
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import Plan
from energon.plan.window import WindowPlan
from energon.task_encoder.leaves import OpenedLeaf, open_leaves
from energon.task_encoder.settings import TrainSettings
from energon.task_encoder.train_plan import default_lanes, train_plan
from energon.worker import WorkerConfig


class Moment(NamedTuple):
    """When a row of a lane is delivered."""

    step: int
    """How many batches its rank has delivered before."""
    rank: int
    batch: int
    """Number of the batch among those of all ranks."""
    position: int
    """Place in the batch."""


@dataclass(frozen=True)
class PlannedRun:
    """What a training run would read, in which order, if no hook skipped or packed samples.

    Args:
        recipe: The order.
        leaves: The datasets, opened.
        lanes: Fixed streams of batches.
        batch_size: Samples of a batch.
        workers: Ranks and workers; the order depends on neither.
    """

    recipe: PlanRecipe
    leaves: tuple[OpenedLeaf, ...]
    lanes: int
    batch_size: int
    workers: WorkerConfig

    @cached_property
    def plan(self) -> Plan:
        """The order of all lanes."""
        return self.recipe(self.lanes)

    @cached_property
    def streams(self) -> BlendPlan | LinePlan | WindowPlan:
        """The order of the streams that the lanes share."""
        return self.recipe.of_streams(self.recipe.num_streams(self.lanes))

    @property
    def names(self) -> list[str]:
        """The names of the leaves."""
        return [leaf.plan_leaf.uid for leaf in self.leaves]

    def moment(self, lane: int, row: int) -> Moment:
        """Return when a row of a lane is delivered."""
        turn, position = divmod(row, self.batch_size)
        batch = turn * self.lanes + lane
        step, rank = divmod(batch, self.workers.world_size)
        return Moment(step, rank, batch, position)

    def rows_until(self, lane: int, batches: int) -> int:
        """Return how many rows of a lane are in the first batches of all ranks."""
        rows = max(0, -((lane - batches) // self.lanes)) * self.batch_size
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
    """Return the run that `get_train_dataset` would make of the same arguments.

    Indexes are opened, samples are not. The code of joiners and hooks is not needed.

    Raises:
        ConfigError: If an argument or a document makes no sense.
        DatasetNotFoundError: If there is no such dataset.
        EmptyDatasetError: If a leaf has no samples in this split.
    """
    resolved = resolve(path, split_part=split_part, training=True)
    leaves = open_leaves(resolved.leaves, None)
    recipe = train_plan(resolved, leaves, settings, workers)
    batch_size = settings.batch_size or 1
    lanes = default_lanes(recipe, workers, batch_size=batch_size)
    return PlannedRun(recipe, tuple(leaves), lanes, batch_size, workers)
