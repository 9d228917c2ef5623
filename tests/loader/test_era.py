"""Runs that continue with other lanes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.loader.relane import end_era
from energon.plan.blends.curve import Curve, Point
from energon.plan.blends.mix import Mix, MixEntry
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import WindowPlan

leaves = st.lists(
    st.builds(
        PlanLeaf,
        uid=st.just("leaf"),
        num_samples=st.integers(1, 120),
        slice_samples=st.sampled_from([1, 5, 30]),
        parallel_slices=st.sampled_from([1, 4]),
        shuffle_over_epochs=st.sampled_from([1, 1, 1, 2, None]),
    ),
    min_size=1,
    max_size=3,
)
curves = st.one_of(
    st.integers(1, 5).map(Curve.constant),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(50, 900), st.booleans()).map(
        lambda each: Curve((Point(0, each[0]), Point(each[2], each[1], each[3])))
    ),
)


@st.composite
def recipes(draw):
    found = [
        PlanLeaf(f"leaf {n}", *(getattr(leaf, name) for name in FIELDS))
        for n, leaf in enumerate(draw(leaves))
    ]
    kind = draw(st.sampled_from(["blend", "blend", "blend", "epochized", "once", "in order"]))
    window = draw(st.sampled_from([0, 0, 6]))
    stripe = draw(st.integers(1, 6))
    if kind == "blend":
        mix = Mix(tuple(MixEntry(n, draw(curves)) for n in range(len(found))))
        unit = draw(st.sampled_from([1, stripe]))
        return PlanRecipe(
            "blend",
            tuple(found),
            seed=2,
            mix=mix,
            unit=unit,
            batch_size=stripe,
            stripe=stripe,
            shuffle_window=window if unit == 1 else 0,
        )
    return PlanRecipe(
        "concat" if kind == "in order" else "epochized",
        tuple(found),
        seed=2,
        repeat=kind == "epochized",
        stripe=stripe,
        shuffle_window=0 if kind == "in order" else window,
    )


FIELDS = (
    "num_samples",
    "weight",
    "repetitions",
    "slice_samples",
    "parallel_slices",
    "shuffle_over_epochs",
)


@st.composite
def lanes_and_streams(draw):
    streams = draw(st.integers(1, 5))
    lanes = draw(st.sampled_from([streams, 2 * streams, lcm(streams, 24)]))
    return lanes, (None if draw(st.booleans()) else streams)


def rows_after(plan, batches, size, ahead):
    """Rows of all lanes after so many batches of all, some lanes being ahead of that."""
    rows = {}
    for lane in range(plan.lanes):
        wanted = max(0, -((lane - batches) // plan.lanes)) * size + ahead[lane % len(ahead)]
        end = plan.num_rows(lane)
        rows[lane] = wanted if end is None else min(wanted, end)
    return rows


def drawn(plan, rows):
    """What comes in the first rows of all lanes, as (leaf, epoch) -> ordinals."""
    found: dict[tuple[int, int], list[int]] = {}
    for lane, count in rows.items():
        columns = (column.tolist() for column in plan.rows(lane, 0, count))
        for leaf, epoch, ordinal in zip(*columns, strict=True):
            found.setdefault((leaf, epoch), []).append(ordinal)
    return found


def run_on(recipe, lanes, epochs):
    """Rows of all lanes, and how many draws of each leaf are then made without a gap.

    Enough for two epochs of each leaf after those in `epochs`, if there are so many.
    """
    plan = recipe(lanes)
    streams = recipe.deal(lanes).streams
    whole = recipe.of_streams(streams)
    if isinstance(whole, WindowPlan):
        whole = whole.plan
    turn = lcm(recipe.stripe, max(1, recipe.shuffle_window))
    rows = turn
    while True:
        if not recipe.repeat:
            return {lane: plan.num_rows(lane) for lane in range(lanes)}, None
        if recipe.kind == "epochized":
            made = [rows * lanes + (recipe.eras[-1]["draws"]["all"] if recipe.eras else 0)]
        else:
            made = [
                min(
                    int(whole._order.numbers(u, np.array([leaf]), np.array([count]))[0])
                    for u in range(streams)
                    for count in [int(whole.drawn(u, rows * lanes // streams)[leaf])]
                )
                for leaf in range(len(recipe.leaves))
            ]
        total = sum(leaf.num_samples for leaf in recipe.leaves)
        if (
            made[0] > (max(epochs) + 3) * total
            if recipe.kind == "epochized"
            else all(
                count // leaf.num_samples > epoch + 3
                for count, leaf, epoch in zip(made, recipe.leaves, epochs, strict=True)
            )
        ):
            return dict.fromkeys(range(lanes), rows), made
        rows *= 2


@given(
    recipe=recipes(),
    before=lanes_and_streams(),
    after=lanes_and_streams(),
    batches=st.integers(0, 90),
    ahead=st.lists(st.integers(0, 9), min_size=1, max_size=7),
)
@settings(max_examples=150, deadline=None)
def test_epochs_are_exact_but_for_what_is_counted(recipe, before, after, batches, ahead):
    recipe = replace(recipe, streams=before[1])
    plan = recipe(before[0])
    rows = rows_after(plan, batches, recipe.stripe, ahead)
    ended = end_era(recipe, rows, streams=after[1], stripe=recipe.stripe)
    first = drawn(plan, rows)
    reached = [
        max((epoch for number, epoch in first if number == leaf), default=0)
        for leaf in range(len(recipe.leaves))
    ]
    if recipe.kind != "blend":
        reached = [max(reached)] * len(reached)
    new = ended.recipe
    until, made = run_on(new, after[0], reached)
    later = drawn(new(after[0]), until)
    # The position: not a sample is lost.
    assert new.eras[-1]["samples"] == sum(rows.values()) == sum(map(len, first.values()))
    again = left_out = 0
    for leaf, about in enumerate(recipe.leaves):
        whole = Counter(range(about.num_samples))
        if made is None:
            epochs = 1
        elif recipe.kind == "epochized":
            epochs = made[0] // sum(each.num_samples for each in recipe.leaves)
        else:
            copies = about.shuffle_over_epochs or 1
            epochs = made[leaf] // (copies * about.num_samples) * copies
        assert made is None or epochs > reached[leaf]
        for epoch in range(epochs):
            seen = Counter(first.get((leaf, epoch), []) + later.get((leaf, epoch), []))
            again += (seen - whole).total()
            left_out += (whole - seen).total()
            if epoch > reached[leaf]:
                assert seen == whole
    assert again == sum(ended.again.values())
    assert left_out == sum(ended.left_out.values())


def test_nothing_is_lost_between_lanes_that_are_equally_far():
    recipe = PlanRecipe(
        "blend",
        (PlanLeaf("a", 500, weight=2.0, slice_samples=10), PlanLeaf("b", 90, slice_samples=10)),
        seed=1,
        stripe=4,
        streams=1,
    )
    for batches in (1, 24, 100, 1234):
        rows = rows_after(recipe(24), batches, 4, [0])
        ended = end_era(recipe, rows, streams=5, stripe=4)
        assert not any(ended.again.values())
        assert ended.recipe.eras[0]["samples"] == 4 * batches


@pytest.mark.parametrize("unit", ["samples", "batches", "rows"])
def test_a_schedule_goes_on_where_it_was(unit):
    """The mix over a whole run is the same, whether its lanes are changed on the way or not."""
    every = {"samples": 1, "batches": 8, "rows": 4}[unit]
    points = (Point(0, 1.0), Point(4000 // every, 4.0), Point(8000 // every, 0.5, True))
    mix = Mix((MixEntry(0, Curve(points, unit)), MixEntry(1, Curve.constant(1.0))))
    leaves = (PlanLeaf("a", 9000), PlanLeaf("b", 9000))
    recipe = PlanRecipe("blend", leaves, 0, mix=mix, batch_size=8, stripe=8, streams=4)

    def shares(plan, start, stop):
        leaf = np.concatenate(
            [plan.rows(v, start // plan.lanes, (stop - start) // plan.lanes).leaf
             for v in range(plan.lanes)]
        )  # fmt: skip
        return float((leaf == 0).mean())

    whole = recipe(4)
    rows = dict.fromkeys(range(4), 3000 // 4)
    ended = end_era(recipe, rows, streams=6, stripe=8)
    other = ended.recipe(6)
    for start, stop in ((3000, 3900), (4200, 5400), (6000, 6600), (7200, 7800), (9000, 12000)):
        expected = shares(whole, start, stop)
        assert abs(shares(other, start - 3000, stop - 3000) - expected) < 0.02, (start, expected)


def test_lanes_may_be_changed_again_and_again_within_an_epoch():
    recipe = PlanRecipe("blend", (PlanLeaf("a", 997, slice_samples=9),), 0, stripe=3, streams=1)
    seen: Counter[int] = Counter()
    for lanes, streams, turns in ((24, 1, 3), (10, 5, 7), (7, None, 5), (24, 2, 2), (1, 1, 1000)):
        recipe = replace(recipe, streams=streams)
        plan = recipe(lanes)
        rows = dict.fromkeys(range(lanes), 3 * turns)
        found = drawn(plan, rows)
        seen.update(found.get((0, 0), []))
        recipe = end_era(recipe, rows, streams=1, stripe=3).recipe
    assert seen == Counter(range(997))
    assert len(recipe.eras) == 5


def test_a_recipe_is_made_again_of_a_fingerprint():
    for recipe, lanes in (
        (PlanRecipe("blend", (PlanLeaf("a + b", 70), PlanLeaf("b", 9)), 3, stripe=2), 4),
        (
            PlanRecipe(
                "blend",
                (PlanLeaf("a", 70, repetitions=1.5), PlanLeaf("b", 9), PlanLeaf("c", 40)),
                3,
                sources=((0, 2), (1,)),
                mix=Mix(
                    (MixEntry(0, Curve((Point(0, 1.0), Point(90, 3.0, True)))), MixEntry(1, None))
                ),
                stripe=2,
                streams=2,
                shuffle_window=7,
            ),
            24,
        ),
        (PlanRecipe("epochized", (PlanLeaf("a", 70),), 3, repeat=False, stripe=2, streams=1), 24),
        (PlanRecipe("concat", (PlanLeaf("a", 70),), 3, repeat=False, stripe=2), 24),
    ):
        saved = {
            **recipe.to_json(),
            "batch_size": 2,
            "leaves": {
                leaf.uid: {
                    "samples": leaf.num_samples,
                    "repetitions": leaf.repetitions,
                    "slice": [leaf.slice_samples, leaf.parallel_slices],
                    "shuffle_over_epochs": leaf.shuffle_over_epochs,
                }
                for leaf in recipe.leaves
            },
        }
        again = PlanRecipe.from_json(saved)
        assert again.to_json() == recipe.to_json()
        for lane in range(lanes):
            rows, expected = (r(lanes).rows(lane, 0, 50) for r in (again, recipe))
            assert all((a == b).all() for a, b in zip(rows, expected, strict=True))
