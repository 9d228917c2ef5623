"""The order of a training run, from what is known about its leaves and what the call says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from energon.errors import ConfigError
from energon.metadataset.inherit import multiply_shuffle
from energon.metadataset.leaf import BlendMode, LeafList
from energon.plan.build import choose_slice_samples
from energon.plan.curve import Clock
from energon.plan.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe
from energon.task_encoder.leaves import OpenedLeaf
from energon.task_encoder.settings import TrainSettings
from energon.worker import WorkerConfig

PARALLEL_SLICES = 16
MIN_BATCHES_OF_LANE = 8
"""Batches that a lane of finite data has at least, for there to be more lanes than workers."""


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
        leaves=tuple(_plan_leaf(leaf, settings) for leaf in opened),
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
            "repeat=False, but a blend by weights has no end; use blend_epochized, give its "
            "entries max_epochs, or set a virtual_epoch_length"
        )
    plan = replace(plan, leaves=_weighted(plan))
    if plan.counts_batches and settings.packing_buffer_size:
        raise ConfigError(
            "weights are scheduled in batches, but with packing nobody knows beforehand how many "
            "samples a batch takes; schedule them in samples (schedule_unit: samples)"
        )
    return plan


def streams(workers: WorkerConfig) -> int | None:
    """Return how many groups of lanes read the same slices: one for each worker of the run.

    None, if the user chose the lanes: then the order must not depend on workers.
    """
    return workers.total_workers if workers.lanes is None else None


def default_lanes(plan: PlanRecipe, workers: WorkerConfig, *, batch_size: int) -> int:
    """Return the number of lanes of a new run whose stages hold no samples back.

    Where data end, the last batch of a lane is smaller by what hooks skip. With few batches
    that would be felt, so there are no more lanes than workers then.
    """
    lanes = workers.default_lanes
    rows = plan(workers.lanes or workers.total_workers).num_rows(0)
    if rows is None or rows * workers.total_workers >= MIN_BATCHES_OF_LANE * batch_size * lanes:
        return lanes
    return workers.lanes or workers.total_workers


def _plan_leaf(leaf: OpenedLeaf, settings: TrainSettings) -> PlanLeaf:
    config, source = leaf.config, leaf.source
    # Kinds that read no single samples say how many they read together.
    rows, slices = getattr(source, "preferred_slices", (None, PARALLEL_SLICES))
    return replace(
        leaf.plan_leaf,
        slice_samples=config.max_samples_per_sequence
        or settings.max_samples_per_sequence
        or rows
        or choose_slice_samples(source.mean_sample_bytes),
        parallel_slices=config.parallel_shard_iters or settings.parallel_shard_iters or slices,
        shuffle_over_epochs=multiply_shuffle(
            leaf.plan_leaf.shuffle_over_epochs, settings.shuffle_over_epochs_multiplier
        ),
    )


def _weighted(plan: PlanRecipe) -> tuple[PlanLeaf, ...]:
    """Return the leaves with their shares at the beginning, by which reading ahead is planned."""
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
