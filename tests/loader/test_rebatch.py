"""The states of runs that continue with another batch size, without any data."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import StateError
from energon.loader.relane import rebatch, relane
from energon.loader.state import LanePosition, build_state
from energon.plan.blends.mix import Mix
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe

LEAVES = (
    PlanLeaf("a", 300, weight=3.0, slice_samples=7, parallel_slices=3),
    PlanLeaf("b", 53, weight=1.0, slice_samples=128),
)
KINDS = {
    "blend": {"kind": "blend", "mix": Mix.flat([3.0, 1.0]), "shuffle_window": 10},
    "batches of one leaf": {"kind": "blend", "mix": Mix.flat([3.0, 1.0]), "unit": 12},
    "epochized": {"kind": "epochized"},
    "once": {"kind": "epochized", "repeat": False, "shuffle_window": 7},
    "in order": {"kind": "concat", "repeat": False},
}
SIZE = 12


def recipe_of(kind, streams):
    return PlanRecipe(
        leaves=LEAVES, seed=3, stripe=SIZE, batch_size=SIZE, streams=streams, **KINDS[kind]
    )


def lane_state(row, changes=()):
    return {"inner": {"row": row}, "read": row, "changes": list(changes)}


def saved(recipe, lanes, batches, *, batch_size=SIZE, **about):
    """The state of a run of `lanes` lanes after some batches of all of them together."""
    plan = recipe(lanes)
    positions = {}
    for lane in range(lanes):
        done, end = (batches + lanes - 1 - lane) // lanes, plan.num_rows(lane)
        row = done * batch_size if end is None else min(done * batch_size, end)
        positions[lane] = LanePosition(
            batches=-(-row // batch_size), epoch_batches=0, state=lane_state(row) if row else None
        )
    leaves = {
        leaf.uid: {
            "samples": leaf.num_samples,
            "repetitions": leaf.repetitions,
            "slice": [leaf.slice_samples, leaf.parallel_slices],
            "shuffle_over_epochs": leaf.shuffle_over_epochs,
        }
        for leaf in LEAVES
    }
    fingerprint = {**recipe.to_json(), "lanes": lanes, "batch_size": batch_size, "leaves": leaves}
    return build_state(positions, lanes=lanes, fingerprint={**fingerprint, **about})


def next_samples(state, count):
    """The next samples of a run, in the order of the batches."""
    size, lanes = state["fingerprint"]["batch_size"], state["lanes"]
    plan, samples = PlanRecipe.from_json(state["fingerprint"])(lanes), {}
    for name, position in state["positions"].items():
        lane, row = int(name), position["state"]["read"] if position["state"] else 0
        found = plan.rows(lane, row, -(-count // lanes // size + 1) * size)
        for number, triple in enumerate(zip(*(c.tolist() for c in found), strict=True)):
            samples[position["batches"] + number // size, lane, number] = triple
    return [samples[place] for place in sorted(samples)[:count]]


@pytest.mark.slow
@given(
    kind=st.sampled_from(sorted(KINDS)),
    streams=st.sampled_from([None, 1, 2, 3]),
    per_stream=st.integers(1, 4),
    batches=st.integers(0, 60),
    sizes=st.lists(st.sampled_from([6, 4, 3, 2, 1]), min_size=1, max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_the_samples_come_in_the_same_order_in_smaller_batches(
    kind, streams, per_stream, batches, sizes
):
    state = saved(recipe_of(kind, streams), (streams or 2) * per_stream, batches)
    expected = next_samples(state, 90)
    size = SIZE
    for smaller in sizes:
        if size % smaller == 0:
            size = smaller
            state = json.loads(json.dumps(rebatch(state, size, lane_state)))
            assert next_samples(state, 90) == expected


@given(
    kind=st.sampled_from(sorted(KINDS)),
    streams=st.sampled_from([None, 1, 2]),
    batches=st.integers(0, 40),
    first=st.sampled_from([6, 4, 3, 2, 1]),
    then=st.sampled_from([12, 6, 4, 3, 2, 1]),
    skipped=st.sets(st.integers(0, 90), max_size=4),
)
@settings(max_examples=100, deadline=None)
def test_divided_batches_are_joined_again(kind, streams, batches, first, then, skipped):
    state = saved(recipe_of(kind, streams), 4, batches)
    state["positions"]["1"]["skip_rows"] = sorted(skipped)
    divided = rebatch(state, first, lane_state)
    assert rebatch(divided, then, lane_state) == rebatch(state, then, lane_state)


def test_a_state_stays_the_same_if_its_batches_do():
    state = saved(recipe_of("blend", None), 4, 9)
    assert rebatch(rebatch(state, 3, lane_state), SIZE, lane_state) == state


def test_batches_of_which_a_part_was_delivered_are_not_joined():
    recipe = PlanRecipe.from_json(
        rebatch(saved(recipe_of("blend", 2), 4, 0), 4, lane_state)["fingerprint"]
    )
    state = saved(recipe, 12, 7, batch_size=4)
    with pytest.raises(StateError, match="were delivered already"):
        rebatch(state, 12, lane_state)
    assert next_samples(rebatch(state, 2, lane_state), 99) == next_samples(state, 99)


@pytest.mark.parametrize("size", [5, 24, 8])
def test_batches_that_are_no_parts_are_refused(size):
    with pytest.raises(StateError, match=f"{size} are not equal parts of those of 12"):
        rebatch(saved(recipe_of("blend", 1), 4, 3), size, lane_state)


def test_more_lanes_than_a_run_can_have_are_refused():
    state = saved(recipe_of("blend", None), 4, 0, batch_size=SIZE)
    state["fingerprint"]["batch_size"] = 10**9 * SIZE
    with pytest.raises(StateError, match="too many lanes"):
        rebatch(state, SIZE, lane_state)


@pytest.mark.parametrize("parts", ["2", 0, -1, 5, None, [2]])
def test_parts_that_no_loader_writes_are_refused(parts):
    state = rebatch(saved(recipe_of("blend", 2), 4, 9), 6, lane_state)
    state["fingerprint"]["parts"] = parts
    with pytest.raises(StateError, match="which no loader writes"):
        recipe_of("blend", 2).continuing(state["fingerprint"])


def test_samples_that_wait_keep_their_batches():
    state = saved(recipe_of("blend", 1), 4, 3)
    state["positions"]["0"]["state"]["inner"]["waiting"] = [3]
    with pytest.raises(StateError, match="samples are buffered"):
        rebatch(state, 6, lane_state)


@pytest.mark.parametrize("skips", [[0, 0, 0, 0], [3, 0, 7, 1], [11, 12, 13, 30]])
def test_no_sample_is_lost_or_repeated_if_hooks_have_skipped_some(skips):
    recipe = recipe_of("once", 2)
    state, read = saved(recipe, 4, 9), set()
    for lane, more in enumerate(skips):
        state["positions"][str(lane)]["state"] = lane_state(24 + more)
    for number in (0, 1):
        changed = state if number == 0 else rebatch(state, 4, lane_state)
        plan = PlanRecipe.from_json(changed["fingerprint"])(changed["lanes"])
        done = []
        for lane, position in changed["positions"].items():
            rows = plan.rows(int(lane), 0, (position["state"] or {"read": 0})["read"])
            done += zip(*(column.tolist() for column in rows), strict=True)
        read = read or set(done)
        assert set(done) == read
        assert len(done) == 96 + sum(skips)


def test_parts_of_batches_are_dealt_to_lanes_that_are_a_multiple_of_them():
    state = rebatch(saved(recipe_of("blend", 2), 4, 9), 4, lane_state)
    with pytest.raises(StateError, match="must be a multiple of 3, not 10"):
        relane(state, 10)
    assert relane(state, 15, streams=5).state["fingerprint"]["parts"] == 3
