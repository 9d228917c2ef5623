"""The order of a training run, from its leaves and the arguments of the getter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import fsum, lcm
from operator import index
from typing import Any, Literal

from energon.errors import ConfigError, is_whole
from energon.io.address import is_remote
from energon.io.threads import CallsAhead
from energon.metadataset.leaf import BlendMode, LeafList, multiply_shuffle
from energon.plan.balance import Balance, BalancedOrder, Costs
from energon.plan.blends.curve import Clock
from energon.plan.fill import Budget
from energon.plan.leaves.leaf import WITH_REPLACEMENT, PlanLeaf, choose_slice_samples
from energon.plan.packs import PackedOrder, PlannedPacks
from energon.plan.recipe import PlanRecipe
from energon.sources.decoded_blocks import SliceCost, open_slices
from energon.task_encoder.leaves import OpenedLeaf
from energon.worker import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How samples become batches: arguments of the getters, by their names."""

    batch_size: int | None
    batch_drop_last: bool = False
    packing_buffer_size: int | None = None

    @property
    def fills_batches(self) -> bool:
        """Whether a batch has as many samples as fit, which its row does not tell."""
        return bool(self.packing_buffer_size)

    def __post_init__(self) -> None:
        # The stages check the lower limit of batches.
        _check_whole("batch_size", self.batch_size)
        _check_least(1, "packing_buffer_size", self.packing_buffer_size)
        _set_flag(self, "batch_drop_last")
        for name, value in vars(self).items():
            if is_whole(value):  # states are plain data, without numbers of numpy
                object.__setattr__(self, name, index(value))


@dataclass(frozen=True, kw_only=True)
class TrainSettings(BatchSettings):
    """Arguments of `get_train_dataset`, by their names.

    Raises:
        ConfigError: If one of them is invalid on its own.
    """

    shuffle_buffer_size: int | None = None
    max_samples_per_sequence: int | None = None
    virtual_epoch_length: int = 0
    shuffle_over_epochs_multiplier: int | None = 1
    parallel_shard_iters: int | None = None
    blend_unit: Literal["sample", "batch"] | None = None
    repeat: bool = True
    exclude_from: str | os.PathLike[str] | None = None
    balance: Balance | None = None
    pack: PlannedPacks | None = None
    batch_cost: int | None = None

    @property
    def fills_batches(self) -> bool:
        """Whether a batch has as many samples as fit, which its row does not tell."""
        return super().fills_batches or bool(self.pack or self.batch_cost)

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_flag(self, "repeat")
        length = self.virtual_epoch_length
        if not is_whole(length) or length < 0:
            raise ConfigError(
                f"virtual_epoch_length must be a whole number, 0 (no end) or more, got {length!r}"
            )
        _check_least(1, "max_samples_per_sequence", self.max_samples_per_sequence)
        _check_least(1, "parallel_shard_iters", self.parallel_shard_iters)
        _check_least(0, "shuffle_buffer_size", self.shuffle_buffer_size)
        if self.blend_unit not in (None, "sample", "batch"):
            raise ConfigError(
                f"blend_unit must be 'sample', 'batch' or None, got {self.blend_unit!r}"
            )
        self._check_packs()
        self._check_balance()
        multiplier = self.shuffle_over_epochs_multiplier
        if multiplier not in (None, WITH_REPLACEMENT) and not (
            is_whole(multiplier) and multiplier >= 1
        ):
            raise ConfigError(
                "shuffle_over_epochs_multiplier must be a number of epochs, -1 to draw with "
                f"replacement, or None to keep the order, got {multiplier!r}"
            )

    def _check_balance(self) -> None:
        if self.balance is None:
            return
        if not isinstance(self.balance, Balance):
            raise ConfigError(
                f"balance={self.balance!r}: expected Balance(cost=...), which is imported from "
                "energon"
            )
        if self.packing_buffer_size:
            raise ConfigError(
                "balance deals samples to batches of equal size, but packing decides what goes "
                "into a batch; drop packing_buffer_size"
            )
        if self.pack is None and self.batch_size is None and self.batch_cost is None:
            raise ConfigError(
                "balance deals samples to batches of equal size, but there is no batch_size"
            )
        if (self.pack or self.batch_cost) and self.balance.window == "step":
            raise ConfigError(
                "packs, and batches of a batch_cost, are made of the samples of several steps; "
                "pass Balance(window=...) with a number of steps, such as 64"
            )
        if (self.pack or self.batch_cost) and self.balance.skipped == "repeat":
            raise ConfigError(
                "Balance(skipped='repeat') repeats samples up to the batch_size, but packs, and "
                "batches of a batch_cost, have as many as fit; leave it out"
            )

    def _check_packs(self) -> None:
        _check_least(1, "batch_cost", self.batch_cost)
        if self.batch_cost is not None and (self.batch_size is not None or self.pack):
            other = "pack" if self.pack else "batch_size"
            raise ConfigError(f"batch_cost and {other} exclude each other; pass {other}=None")
        if self.batch_cost is not None and self.balance is None:
            raise ConfigError(
                "batch_cost is the largest cost of a batch; pass Balance(cost=..., window=64), "
                "which gives the cost of a sample"
            )
        if self.pack is None:
            return
        if not isinstance(self.pack, PlannedPacks):
            raise ConfigError(
                f"pack={self.pack!r}: expected PlannedPacks(length=..., context=...), which is "
                "imported from energon"
            )
        if self.packing_buffer_size:
            raise ConfigError(
                "pack plans the packs, and packing_buffer_size lets a hook select them; drop one "
                "of the two"
            )


@dataclass(frozen=True, kw_only=True)
class ValidationSettings(BatchSettings):
    """Arguments of `get_val_dataset`, by their names.

    Raises:
        ConfigError: If one of them is invalid on its own.
    """

    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_least(0, "limit", self.limit)


def _check_least(least: int, name: str, value: Any) -> None:
    _check_whole(name, value)
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, or None, got {value}")


def _check_whole(name: str, value: Any) -> None:
    if value is not None and not is_whole(value):
        raise ConfigError(f"{name} must be a whole number or None, got {value!r}")


def _set_flag(settings: BatchSettings, name: str) -> None:
    value = getattr(settings, name)
    # Text such as "no" counts as true everywhere else in Python.
    if isinstance(value, str) or value not in (True, False):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    object.__setattr__(settings, name, bool(value))


SQUARED_LENGTH = "squared length"
"""The name of the cost of planned packs that no other was given for."""
PACKED_STEPS = 64
"""Steps of a window of planned packs, whose last one has what is left: half of one on average."""
MIN_BATCHES_OF_LANE = 8
"""Finite data gets more lanes than workers only if each lane has at least this many batches."""


def train_plan(
    resolved: LeafList,
    opened: Sequence[OpenedLeaf],
    settings: TrainSettings,
    workers: WorkerConfig,
) -> PlanRecipe:
    """Return the order of a training run over leaves that are mixed as `resolved` says.

    Raises:
        ConfigError: If the settings and the document do not fit together.
    """
    is_blend = resolved.blend_mode is BlendMode.DATASET_WEIGHT
    endless = resolved.blend_mode is BlendMode.NONE and settings.repeat
    plan = PlanRecipe(
        kind="blend" if is_blend or endless else "epochized",
        leaves=_plan_leaves(opened, settings),
        seed=workers.seed_offset,
        repeat=settings.repeat,
        stripe=settings.batch_size or 1,
        shuffle_window=settings.shuffle_buffer_size or 0,
        sources=resolved.sources,
        mix=resolved.mix,
        batch_size=settings.batch_size or 1,
        streams=streams(workers),
    )
    if is_blend and (settings.blend_unit or resolved.unit) == "batch":
        _check_batches(settings)
        plan = replace(plan, unit=plan.batch_size)
    if is_blend and not settings.repeat and not plan.blend_mix.limits:
        raise ConfigError(
            "repeat=False, but a weighted blend has no end; use blend_epochized, give its "
            "entries max_epochs, or set a virtual_epoch_length"
        )
    plan = replace(plan, leaves=_weighted(plan))
    plan = balanced_plan(plan, opened, settings, workers)
    if plan.unit > 1 and plan.balance is not None:
        raise ConfigError(
            "the blend draws whole batches of one dataset, but balance deals the samples of each "
            "step to its batches; drop one of the two"
        )
    if plan.counts_batches and settings.fills_batches:
        raise ConfigError(
            "weights are scheduled in batches, but with packs or batch_cost, the number of samples "
            "in a batch is not known in advance; schedule them in samples (schedule_unit: samples)"
        )
    return plan


def balanced_plan(
    plan: PlanRecipe,
    opened: Sequence[OpenedLeaf],
    settings: TrainSettings,
    workers: WorkerConfig,
) -> PlanRecipe:
    """Return the order in which samples are packed or dealt to batches, as the settings say.

    Raises:
        ConfigError: If lanes cannot be divided as the settings say, or a measure is missing.
    """
    packs, balance = settings.pack, settings.balance
    if settings.batch_cost is not None and balance is not None:
        packs = PlannedPacks(
            length=balance.cost, context=settings.batch_cost, version=balance.version
        )
    if packs is not None:
        plan = _packed(plan, packs, opened, settings, workers)
    elif balance is not None:
        order = _balanced(balance, plan.leaves, opened, settings, workers)
        plan = replace(plan, balance=order)
    lanes = workers.lanes or (balance and balance.micro_batches)
    if lanes and plan.balance is not None:  # else a state may have other lanes
        plan.balance.check(lanes)
    return plan


def _balanced(
    balance: Balance,
    leaves: Sequence[PlanLeaf],
    opened: Sequence[OpenedLeaf],
    settings: TrainSettings,
    workers: WorkerConfig,
) -> BalancedOrder:
    """Return how the samples of steps are dealt to batches.

    Raises:
        ConfigError: If lanes cannot be divided as the settings say, or a measure is missing.
    """
    from energon.sources.measures import SampleCosts  # most runs are not balanced

    costs = SampleCosts(balance.cost, tuple(leaf.source for leaf in opened))
    costs.check()
    count = balance.micro_batches or workers.lanes or workers.world_size
    if (
        balance.pool is None
        and balance.window != "step"
        and any(each.slice_samples > 1 for each in leaves)
    ):
        # Lanes of several ranks would divide each slice into a request of each of them.
        balance = replace(balance, pool=len(balance.speeds or (1,)))
    return BalancedOrder(
        costs,
        balance,
        settings.batch_size or 1,
        count,
        workers.seed_offset,
        measures=costs.digest(),
    )


def _packed(
    plan: PlanRecipe,
    packs: PlannedPacks,
    opened: Sequence[OpenedLeaf],
    settings: TrainSettings,
    workers: WorkerConfig,
) -> PlanRecipe:
    """Return the order in which samples are packed, and packs dealt to batches.

    Raises:
        ConfigError: If lanes cannot be divided as the settings say, or a measure is missing.
    """
    # Most runs do not plan packs.
    from energon.sources.measures import SampleCosts, SampleLengths, joint_digest

    sources = tuple(leaf.source for leaf in opened)
    lengths = SampleLengths(
        tuple(SampleCosts(each, sources) for each in packs.lengths),
        packs.room,
        leave_out=packs.too_long == "leave_out",
    )
    lengths.check()
    balance = settings.balance or Balance(cost=SQUARED_LENGTH, window=PACKED_STEPS)
    digest = lengths.digest()
    costs: Costs = lengths.squared
    if settings.balance is not None:
        given = SampleCosts(balance.cost, sources)
        given.check()
        costs, digest = given, joint_digest((given, *lengths.dimensions))
    count = balance.micro_batches or workers.lanes or workers.world_size
    shares = [leaf.weight or 0.0 for leaf in plan.leaves]
    if plan.kind != "blend":
        shares = [leaf.num_samples * leaf.repetitions for leaf in plan.leaves]
    fullest = max(mean / room for mean, room in zip(lengths.mean(shares), packs.room, strict=True))
    size = settings.batch_size or 1
    by_costs = settings.batch_cost is not None
    speeds = balance.speeds or (1.0,)
    # Slower ranks have smaller batches, of a budget in proportion to their speed.
    mean_budget = fsum(speeds) / len(speeds) if by_costs else 1.0
    of_batch = max(1.0, size * mean_budget / fullest)
    order = PackedOrder(
        costs,
        balance,
        size,
        count,
        workers.seed_offset,
        measures=digest,
        lengths=lengths,
        budget=Budget(
            packs.room,
            padded=by_costs and balance.padded,
            by_speed=by_costs and len(speeds) > 1,
        ),
        rows=max(1, round(int(balance.window) * of_batch)),
        identity={
            **packs.to_json(),
            **({"padded": True} if balance.padded else {}),
            **({"batch_cost": True} if by_costs else {}),
        },
    )
    # What lanes of a stream share, and schedules count: a micro-batch without packing.
    return replace(plan, balance=order, stripe=round(of_batch), batch_size=round(of_batch))


def streams(workers: WorkerConfig) -> int | None:
    """Return the number of groups of lanes that read the same slices: one for each worker.

    None, if the user chose the lanes: then the order must not depend on workers.
    """
    return workers.total_workers if workers.lanes is None else None


def default_lanes(plan: PlanRecipe, workers: WorkerConfig, *, batch_size: int) -> int:
    """Return the number of lanes of a new run whose stages hold no samples back.

    At the end of finite data, the last batch of each lane is smaller by the samples that hooks
    skipped. With few batches that would be noticeable, so then there are no more lanes than
    workers.
    """
    of_step = 1
    if plan.balance is not None and workers.lanes is None:
        of_step = plan.balance.micro_batches
    fewest = lcm(workers.lanes or workers.total_workers, plan.parts, of_step)
    lanes = lcm(workers.default_lanes, plan.parts, of_step)
    rows = plan(fewest).num_rows(0)
    if rows is None or rows * fewest >= MIN_BATCHES_OF_LANE * batch_size * lanes:
        return lanes
    return fewest


def _plan_leaves(opened: Sequence[OpenedLeaf], settings: TrainSettings) -> tuple[PlanLeaf, ...]:
    # Kinds that decode samples in blocks state the cost of an open slice.
    costs: list[SliceCost | None] = [getattr(leaf.source, "slice_cost", None) for leaf in opened]
    arguments = list(zip(opened, repeat(settings), costs, open_slices(costs)))
    with CallsAhead() as calls:
        for number, leaf in enumerate(opened):
            if is_remote(leaf.source.path):
                calls.begin(number, _plan_leaf, *arguments[number])
        return tuple(calls.result(number, _plan_leaf, *own) for number, own in enumerate(arguments))


def _plan_leaf(
    leaf: OpenedLeaf, settings: TrainSettings, cost: SliceCost | None, slices: int
) -> PlanLeaf:
    config, source = leaf.config, leaf.source
    length = config.max_samples_per_sequence or settings.max_samples_per_sequence
    blocks = None
    if length is None and cost is not None:
        length, blocks = cost.samples, cost.blocks
    return replace(
        leaf.plan_leaf,
        slice_samples=length or choose_slice_samples(source.mean_sample_bytes),
        parallel_slices=config.parallel_shard_iters or settings.parallel_shard_iters or slices,
        shuffle_over_epochs=multiply_shuffle(
            leaf.plan_leaf.shuffle_over_epochs, settings.shuffle_over_epochs_multiplier
        ),
        blocks=blocks,
    )


def _weighted(plan: PlanRecipe) -> tuple[PlanLeaf, ...]:
    """Return the leaves with their initial shares, by which reading ahead is planned."""
    shares = plan.blend_mix.shares(0, 1, Clock(1, 1), ()) if plan.kind == "blend" else None
    if shares is None:
        return plan.leaves
    weights = {
        leaf: share
        * plan.leaves[leaf].num_samples
        / sum(plan.leaves[n].num_samples for n in source)
        for source, share in zip(plan.blend_sources, shares, strict=True)
        for leaf in source
    }
    return tuple(replace(leaf, weight=weights[n]) for n, leaf in enumerate(plan.leaves))


def _check_batches(settings: TrainSettings) -> None:
    """Raise ConfigError where batches of one dataset cannot be drawn."""
    problem = None
    if settings.batch_size is None:
        problem = "there is no batch_size"
    elif settings.packing_buffer_size:
        problem = "packing decides what goes into a batch; drop packing_buffer_size"
    elif settings.shuffle_buffer_size:
        problem = (
            "a shuffle buffer would mix the batches; drop shuffle_buffer_size, the samples of "
            "each dataset are shuffled anyway"
        )
    if problem:
        raise ConfigError(f"the blend draws whole batches of one dataset, but {problem}")
