"""A training run over a dataset: which samples its steps consist of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from energon.errors import ConfigError
from energon.inspect.planned_run import (
    PlannedRun,
    Sighting,
    counts_over_time,
    list_step,
    open_run,
    rows_of_batch,
    shares_of,
)
from energon.inspect.saved_run import SavedRun
from energon.inspect.saved_state import describe_position
from energon.plan.balance import Costs
from energon.plan.packs import PackedPlan
from energon.sources.measures import SampleCosts, SourceMeasures
from energon.sources.source import Source
from energon.task_encoder.train_plan import TrainSettings
from energon.worker import WorkerConfig

MAX_STEPS = 20
CHART_POINTS = 24
"""Shares over time are computed for this many stretches of a run."""
MAX_RUN_SAMPLES = 1000
MAX_SAMPLES_OF_STEP = 100_000
MAX_WORKERS = 1_000_000
MAX_COSTED_SAMPLES = 4096
"""The costs of steps with up to this many samples are shown."""


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that has no state yet.

    Args:
        batch_size: Samples per batch.
        world_size: Number of ranks.
        num_workers: Workers per rank.
        seed: `WorkerConfig(seed_offset=…)`.
        packing_buffer_size: As `get_train_dataset` takes it; 0 if the run packs nothing.
    """

    batch_size: int = 8
    world_size: int = 1
    num_workers: int = 0
    seed: int = 0
    packing_buffer_size: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"expected a batch size of 1 or more, not {self.batch_size}")
        if self.batch_size * self.world_size > MAX_SAMPLES_OF_STEP:
            raise ConfigError(
                f"a step of {self.world_size} batches of {self.batch_size} has more than "
                f"{MAX_SAMPLES_OF_STEP} samples, the largest number that is listed"
            )
        if self.world_size * self.num_workers > MAX_WORKERS:
            raise ConfigError(
                f"{self.world_size} ranks with {self.num_workers} workers each are more than "
                f"{MAX_WORKERS} workers, the largest number that is planned"
            )


class RankCosts(NamedTuple):
    """The costs of the batches of a step."""

    name: str
    """The measure, or the function of measures."""
    is_balanced: bool
    """Whether the run balances its batches by it."""
    costs: list[float]
    """The cost of the batch of each rank, over its speed if it has one."""


@dataclass(frozen=True, eq=False)
class ShownRun:
    """A run, planned or saved.

    Args:
        run: Its order.
        split: The number of the split that it reads.
        order: The number of each of its datasets in the split.
        settings: The arguments that decide which samples are batches.
        saved: The run as described by its state; None if there is no state.
        position: In words, where the run was in each dataset when it was saved.
        all_samples: If the run excludes samples: its datasets with all samples, as they are
            shown; otherwise empty.
    """

    run: PlannedRun
    split: int
    order: Sequence[int]
    settings: TrainSettings
    saved: SavedRun | None = None
    position: Sequence[str] = ()
    all_samples: Mapping[str, Source] = field(default_factory=dict)

    def samples(
        self, first: int, count: int, *, rank: int | None = None, most: int | None = None
    ) -> list[tuple[int, list[tuple[Sighting, int]]]]:
        """Return the samples of some steps, with the numbers of their datasets in the split.

        Args:
            first: The first step.
            count: How many steps.
            rank: Only the batches of this rank; None for all.
            most: Maximum number of samples of a step; None for all.

        Raises:
            ConfigError: If the run ends before.
        """
        steps = range(first, first + count)
        if self.settings.fills_batches:  # only its batches have samples
            return [(step, []) for step in steps]
        return [
            (step, self.shown(list_step(self.run, step, rank=rank, most=most))) for step in steps
        ]

    def shown(self, seen: Iterable[Sighting]) -> list[tuple[Sighting, int]]:
        """Return samples as they are numbered on pages, with the numbers of their datasets."""
        numbers = {name: self.order[n] for n, name in enumerate(self.run.names)}
        return [(self._among_all(each), numbers[each.leaf]) for each in seen]

    def rank_costs(
        self, step: int, *, rank: int = 0, samples: Sequence[Sighting] = ()
    ) -> RankCosts | None:
        """Return the costs of the batches of a step, without reading a sample.

        None if hooks select packs, a step has too many samples, or datasets have no common measure.

        Args:
            step: The step.
            rank: The rank that `samples` are of.
            samples: Samples of its batch, by which a step of planned packs is found.

        Raises:
            ConfigError: If the run ends before.
        """
        run = self.run
        world_size = run.workers.world_size
        if isinstance(run.plan, PackedPlan):
            of_ranks = self._packed_costs(run.plan, rank, samples)
            return RankCosts(self._cost[0], True, of_ranks) if of_ranks else None
        if self.settings.fills_batches or run.batch_size * world_size > MAX_COSTED_SAMPLES:
            return None
        name, costs = self._cost
        if costs is None:
            return None
        rows = (
            rows_of_batch(run, step * world_size + rank, run.batch_size)[2]
            for rank in range(world_size)
        )
        times = np.array([costs(each).sum() for each in rows])
        order = run.recipe.balance
        if order is not None and order.num_speeds > 1:
            batches = np.arange(step * world_size, (step + 1) * world_size)
            times = times / order.speeds(order.num_speeds)[batches % order.num_speeds]
        return RankCosts(name, order is not None, times.tolist())

    def _packed_costs(
        self, plan: PackedPlan, rank: int, samples: Sequence[Sighting]
    ) -> list[float] | None:
        """Return the costs of the batches of a step; None if no sample tells which step it is."""
        world_size = self.run.workers.world_size
        for each in samples:
            with suppress(ConfigError):  # samples drawn with replacement have no row
                row = plan.find(self.run.names.index(each.leaf), each.epoch, each.ordinal)
                if row is not None:
                    costs = plan.costs_of_step(*row)
                    first = costs.own - rank
                    return costs.times[first : first + world_size].tolist() if first >= 0 else None
        return None

    @cached_property
    def _cost(self) -> tuple[str, Costs | None]:
        """What the run balances; else a measure that all datasets have, tokens before bytes."""
        balance = self.run.recipe.balance
        if balance is not None:
            by = " / speed" if balance.num_speeds > 1 else ""
            return f"{balance.balance.name or ''}{by}", balance.costs
        sources = [leaf.source for leaf in self.run.leaves]
        measures = [list(SourceMeasures(each, np.zeros(1, np.int64))) for each in sources]
        common = [name for name in measures[0] if all(name in names for names in measures)]
        common.sort(key=lambda name: (name != "tokens", name != "bytes"))
        return (common[0], SampleCosts(common[0], sources)) if common else ("", None)

    def _among_all(self, seen: Sighting) -> Sighting:
        """Return a sample with its number among all samples, where the run excludes some."""
        source = self.all_samples.get(seen.leaf)
        if source is None:
            return seen
        ordinals = (n for n in source.find(seen.key) if source.locate(n).shard == seen.shard)
        return seen._replace(ordinal=next(ordinals, seen.ordinal))

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the run reads, as `energon plan` counts it.

        That is in one pass, until it was saved, or until its weights no longer change: whichever
        is longest.
        """
        run = self.run
        sizes = [len(leaf.source) for leaf in run.leaves]
        end = run.num_batches
        done = 0 if self.saved is None else self.saved.step * run.workers.world_size
        if end is None:
            end = max(-(-sum(sizes) // run.batch_size), done, _scheduled_batches(run))
        marks, counts = counts_over_time(run, batches=end, points=CHART_POINTS)
        shares = shares_of(counts)
        drawn = counts[-1].tolist()
        return {
            "batches": end,
            "marks": marks,
            "leaves": [
                {
                    "name": name,
                    "samples": size,
                    "drawn": round(drawn[leaf]),
                    "epochs": drawn[leaf] / max(1, size),
                    "shares": shares[:, leaf].tolist(),
                }
                for leaf, (name, size) in enumerate(zip(run.names, sizes, strict=True))
            ],
        }


def _scheduled_batches(run: PlannedRun) -> int:
    """Return how many batches show all changes of weights, and a while after the last one."""
    of_unit = {"samples": 1, "batches": run.batch_size, "rows": run.lanes}
    curves = [] if run.recipe.mix is None else run.recipe.mix.curves()
    ends = [curve.points[-1].position * of_unit[curve.unit] for curve in curves]
    return max(ends, default=0) * 5 // (4 * run.batch_size)


def plan_run(path: str, split_part: str, split: int, settings: RunSettings) -> ShownRun:
    """Return a run that has not begun.

    Raises:
        ConfigError: If a setting is invalid.
    """
    workers = WorkerConfig(
        rank=0,
        world_size=settings.world_size,
        num_workers=settings.num_workers,
        seed_offset=settings.seed,
    )
    packing = settings.packing_buffer_size or None
    batches = TrainSettings(batch_size=settings.batch_size, packing_buffer_size=packing)
    run = open_run(path, batches, workers, split_part=split_part)
    return ShownRun(run, split, range(len(run.leaves)), batches)


def show_saved_run(split: int, saved: SavedRun) -> ShownRun:
    """Return a saved run, which reads the split of this number."""
    leaves = saved.read_from._replace(exclude_from=None).open_leaves()
    numbers = {leaf.plan_leaf.uid: number for number, leaf in enumerate(leaves)}
    excludes = saved.read_from.exclude_from is not None
    return ShownRun(
        saved.run,
        split,
        [numbers[name] for name in saved.run.names],
        saved.settings,
        saved,
        list(describe_position(saved.state)),
        {leaf.plan_leaf.uid: leaf.source for leaf in leaves} if excludes else {},
    )
