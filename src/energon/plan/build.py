"""Make the plan of a run: the only entry to this package that decides on order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from energon.errors import ConfigError, EmptyDatasetError
from energon.plan.blends.blend import BlendPlan
from energon.plan.blends.curve import Clock, Curve, Point
from energon.plan.blends.mix import Mix, MixEntry
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.leaves.leaf_order import Era
from energon.plan.line import LinePlan
from energon.plan.rows import WindowPlan


def blend_plan(
    leaves: Sequence[PlanLeaf],
    *,
    lanes: int,
    seed: int,
    schedule: Sequence[tuple[int, Sequence[float]]] | None = None,
    shuffle_window: int = 0,
) -> BlendPlan | LinePlan | WindowPlan:
    """Return an endless plan that draws from `leaves` by weight.

    Args:
        leaves: At least one.
        lanes: V.
        seed: Seed of the run.
        schedule: Rows of a lane in ascending order, the first 0, each with the weights of all
            leaves from there on; None for the weights of the leaves.
        shuffle_window: Rows of a lane that are permuted together after blending; 0 for none.

    Raises:
        ConfigError: If weights or rows are invalid.
    """
    leaves = _checked(leaves, lanes)
    stages = schedule if schedule is not None else [(0, [leaf.weight for leaf in leaves])]
    plan = BlendPlan(
        tuple(replace(leaf, repetitions=1) for leaf in leaves),
        tuple((number,) for number in range(len(leaves))),
        (_scheduled(len(leaves), stages),),
        lanes,
        seed,
    )
    return _windowed(plan, shuffle_window, seed)


def mix_plan(
    leaves: Sequence[PlanLeaf],
    sources: Sequence[Sequence[int]],
    mixes: Sequence[Mix],
    *,
    lanes: int,
    seed: int,
    unit: int = 1,
    batch_size: int = 1,
    gone: Sequence[str] = (),
    shuffle_window: int = 0,
    eras: Sequence[Era] = (),
    clock: Clock | None = None,
    moves: Sequence[Mapping[int, int]] = (),
    pass_number: int = 0,
) -> BlendPlan | LinePlan | WindowPlan:
    """Return a plan that draws from sources by mixes, endless unless they have limits.

    Args:
        leaves: At least one.
        sources: For each source its leaves, which it repeats as they say.
        mixes: Shares over the sources, each since the run was restored with it.
        lanes: V.
        seed: Seed of the run.
        unit: Consecutive rows of a lane that come from one source.
        batch_size: Rows of a batch, for schedules that count batches.
        gone: Names of the sources -1, -2, … of earlier mixes, which are no longer there.
        shuffle_window: Rows of a lane that are permuted together; 0 for none.
        eras: What went before with other lanes, in draws from each source.
        clock: Tells the rows of positions; None for a run that began with these lanes.
        moves: For each mix but the last, with which draws sources continue after it.
        pass_number: How many passes there were before, if all sources have limits.
    """
    plan = BlendPlan(
        _checked(leaves, lanes),
        tuple(map(tuple, sources)),
        tuple(mixes),
        lanes,
        seed,
        unit,
        batch_size,
        tuple(gone),
        eras=tuple(eras),
        clock=clock,
        moves=tuple(moves),
        pass_number=pass_number,
    )
    return _windowed(plan, shuffle_window, seed)


def _scheduled(num_leaves: int, stages: Sequence[tuple[int, Sequence[float]]]) -> Mix:
    for row, weights in stages:
        if len(weights) != num_leaves:
            raise ConfigError(f"row {row} has {len(weights)} weights for {num_leaves} leaves")
        if not any(weights):
            raise ConfigError(
                f"weights {list(weights)} at row {row}: expected numbers from 0, not all 0"
            )
    curves = (
        Curve(tuple(Point(row, weights[number]) for row, weights in stages), "rows")
        for number in range(num_leaves)
    )
    return Mix(tuple(MixEntry(number, curve) for number, curve in enumerate(curves)))


def epochized_plan(
    leaves: Sequence[PlanLeaf],
    *,
    lanes: int,
    seed: int,
    repeat: bool,
    stripe: int = 1,
    shuffle_window: int = 0,
    eras: Sequence[Era] = (),
    pass_number: int = 0,
) -> BlendPlan | LinePlan | WindowPlan:
    """Return a plan of all samples of `leaves`, each `repetitions` times, as one mixed line.

    Args:
        leaves: At least one. If all keep their order, so does the line.
        lanes: V.
        seed: Seed of the run.
        repeat: Whether the line starts again, mixed again, at its end.
        stripe: Consecutive samples that go to the same lane where the order is kept.
        shuffle_window: Rows of a lane that are permuted together; 0 for none.
        eras: What went before with other lanes, in draws from the line.
        pass_number: How many passes there were before, if the line does not start again.
    """
    leaves = _checked(leaves, lanes)
    shuffle = any(leaf.shuffle_over_epochs is not None for leaf in leaves)
    plan = LinePlan(
        leaves,
        lanes,
        seed,
        repeat=repeat,
        shuffle=shuffle,
        stripe=stripe,
        eras=tuple(eras),
        pass_number=pass_number,
    )
    return _windowed(plan, shuffle_window, seed)


def concat_plan(
    leaves: Sequence[PlanLeaf], *, lanes: int, stripe: int = 1, eras: Sequence[Era] = ()
) -> BlendPlan | LinePlan | WindowPlan:
    """Return the finite plan that yields each sample once, leaf after leaf, in order.

    Args:
        leaves: At least one; weights and repetitions do not count.
        lanes: V.
        stripe: Consecutive samples that go to the same lane. With the batch size, global batch
            g is made of samples g·stripe to (g + 1)·stripe.
        eras: What went before with other lanes, in samples.
    """
    once = [PlanLeaf(leaf.uid, leaf.num_samples) for leaf in _checked(leaves, lanes)]
    return LinePlan(tuple(once), lanes, stripe=stripe, eras=tuple(eras))


def _checked(leaves: Sequence[PlanLeaf], lanes: int) -> tuple[PlanLeaf, ...]:
    if not leaves:
        raise EmptyDatasetError("a plan needs at least one leaf, got none")
    if lanes < 1:
        raise ConfigError(f"a plan needs at least one lane, got {lanes}")
    uids = [leaf.uid for leaf in leaves]
    twice = (
        sorted({uid for uid in uids if uids.count(uid) > 1}) if len(set(uids)) < len(uids) else []
    )
    if twice:
        raise ConfigError(f"leaves share the uid {twice[0]!r}; their draws would be the same")
    return tuple(leaves)


def _windowed(
    plan: BlendPlan | LinePlan, size: int, seed: int
) -> BlendPlan | LinePlan | WindowPlan:
    return WindowPlan(plan, size, seed) if size > 1 else plan
