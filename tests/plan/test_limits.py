"""Blends with limits, units, lines and mixes that change: every draw once, none too many."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, StateError
from energon.plan.blends.blend import BlendPlan
from energon.plan.blends.curve import Curve, Point
from energon.plan.blends.mix import Mix, MixEntry
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import WindowPlan


def entry(node, weight=1.0, limit=None):
    return MixEntry(node, Curve.constant(weight), limit)


def make(
    sizes, mixes, *, lanes=1, sources=None, repetitions=(), shuffle_window=0, gone=(), **settings
):
    repeated = dict(enumerate(repetitions))
    leaves = tuple(
        PlanLeaf(f"leaf {i}", n, slice_samples=4, repetitions=repeated.get(i, 1.0))
        for i, n in enumerate(sizes)
    )
    groups = tuple(map(tuple, sources or zip(range(len(sizes)))))
    plan = BlendPlan(leaves, groups, tuple(mixes), lanes, 5, gone=tuple(gone), **settings)
    return WindowPlan(plan, shuffle_window, 5) if shuffle_window else plan


def everything(plan):
    rows = [plan.rows(lane, 0, 10**5) for lane in range(plan.lanes)]
    assert [len(each.leaf) for each in rows] == [plan.num_rows(v) for v in range(plan.lanes)]
    return Counter(
        triple for each in rows for triple in zip(*(c.tolist() for c in each), strict=True)
    )


LIMITS = st.lists(
    st.tuples(st.integers(1, 40), st.floats(0.05, 9), st.sampled_from([0.5, 1, 2, 2.25])),
    min_size=1,
    max_size=5,
)


@given(shapes=LIMITS, lanes=st.sampled_from([1, 2, 7, 64]), unit=st.sampled_from([1, 3, 8]))
@settings(max_examples=60, deadline=None)
def test_a_blend_of_limits_gives_every_epoch_once_and_ends(shapes, lanes, unit):
    mix = Mix(tuple(entry(i, w, limit) for i, (_, w, limit) in enumerate(shapes)))
    found = everything(make([n for n, _, _ in shapes], [mix], lanes=lanes, unit=unit))
    assert set(found.values()) == {1}
    for number, (n, _, limit) in enumerate(shapes):
        epochs = Counter(epoch for leaf, epoch, _ in found if leaf == number)
        whole, rest = divmod(max(1, round(n * limit)), n)
        assert epochs == Counter(
            {**dict.fromkeys(range(whole), n), **({whole: rest} if rest else {})}
        )


@given(shapes=LIMITS, lanes=st.sampled_from([1, 4, 32]), unit=st.sampled_from([1, 4]))
@settings(max_examples=40, deadline=None)
def test_a_source_retires_exactly_and_the_others_share_what_it_had(shapes, lanes, unit):
    shapes = [*shapes, (1000, 1.0, None)]
    mix = Mix(tuple(entry(i, w, limit) for i, (_, w, limit) in enumerate(shapes)))
    plan = make([n for n, _, _ in shapes], [mix], lanes=lanes, unit=unit)
    assert plan.num_rows(0) is None
    drawn = sum(plan.drawn(lane, 10**6) for lane in range(lanes))
    for number, (n, _, limit) in enumerate(shapes[:-1]):
        assert drawn[number] == max(1, round(n * limit))
    assert drawn.sum() == lanes * 10**6
    assert (plan.rows(0, 10**6, 100).leaf == len(shapes) - 1).all()


@given(shapes=LIMITS, lanes=st.sampled_from([1, 4]), rows=st.lists(st.integers(0, 500), max_size=5))
@settings(max_examples=40, deadline=None)
def test_counts_are_those_of_the_rows(shapes, lanes, rows):
    ramp = Curve((Point(0, 1.0), Point(100 * lanes, 4.0, True), Point(300 * lanes, 0.5)))
    entries = [entry(i, w, limit) for i, (_, w, limit) in enumerate(shapes)]
    mix = Mix((*entries, MixEntry(len(shapes), ramp)))
    plan = make([*(n for n, _, _ in shapes), 50], [mix], lanes=lanes, unit=3)
    for row in rows:
        leaf, draws = plan.draws(lanes - 1, np.arange(row))
        counts = np.bincount(leaf, minlength=len(shapes) + 1)
        assert plan.drawn(lanes - 1, row).tolist() == counts.tolist()
        for number, count in enumerate(counts.tolist()):
            assert draws[leaf == number].tolist() == list(range(count))


def test_the_first_source_that_is_used_up_may_end_the_run():
    mix = Mix((entry(0, 1, 2), entry(1, 3)), stop_at_first=True)
    found = everything(make([10, 10**6], [mix], lanes=4))
    counts = Counter(leaf for leaf, _, _ in found)
    assert counts[0] == 20
    assert 50 <= counts[1] <= 76


def test_lanes_without_a_share_are_empty():
    plan = make([3], [Mix((entry(0, 1, 1),))], lanes=8)
    assert [plan.num_rows(lane) for lane in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert len(plan.rows(5, 0, 10).leaf) == 0
    assert plan.drawn(5, 10).tolist() == [0]


@pytest.mark.parametrize("unit", [1, 4, 16])
def test_units_come_from_one_source_and_begin_where_batches_do(unit):
    plan = make([70, 1000], [Mix((entry(0), entry(1, 2)))], unit=unit)
    leaf = plan.rows(0, 0, 300 * unit).leaf.reshape(-1, unit)
    assert (leaf == leaf[:, :1]).all()
    assert 98 <= (leaf[:, 0] == 0).sum() <= 102


@pytest.mark.parametrize("unit", ["batches", "rows", "samples"])
def test_schedules_never_cut_a_unit(unit):
    ramp = Curve((Point(0, 1.0), Point(101, 9.0, True)), unit)
    plan = make([70, 1000], [Mix((MixEntry(0, ramp), entry(1, 2)))], lanes=2, unit=8, batch_size=8)
    leaf = plan.rows(1, 0, 1600).leaf.reshape(-1, 8)
    assert (leaf == leaf[:, :1]).all()


@given(
    lanes=st.sampled_from([1, 3, 16]),
    repetitions=st.sampled_from([(1, 1), (2, 0.5), (1.5, 3)]),
    limit=st.sampled_from([1, 2]),
)
@settings(max_examples=30, deadline=None)
def test_a_line_of_leaves_is_one_source(lanes, repetitions, limit):
    mix = Mix((entry(0, 1, limit), entry(1, 1)))
    plan = make(
        [20, 30, 500], [mix], lanes=lanes, sources=[(0, 1), (2,)], repetitions=(*repetitions, 1)
    )
    rows = [plan.rows(lane, 0, 500) for lane in range(lanes)]
    found = Counter(
        triple for each in rows for triple in zip(*(c.tolist() for c in each), strict=True)
    )
    assert set(found.values()) == {1}
    for leaf, n in ((0, 20), (1, 30)):
        assert sum(1 for key in found if key[0] == leaf) == limit * round(n * repetitions[leaf])


@given(
    rows=st.lists(st.integers(0, 400), min_size=2, max_size=2).map(sorted),
    lanes=st.sampled_from([1, 4]),
    unit=st.sampled_from([1, 4]),
)
@settings(max_examples=40, deadline=None)
def test_epochs_go_on_when_a_run_is_restored_with_another_mix(rows, lanes, unit):
    mixes = [
        Mix((entry(0, 1), entry(1, 1))),
        Mix((entry(1, 5), entry(0, 1), entry(2, 3, 1))),
        Mix((entry(2, 3, 2), entry(0, 4))),
    ]
    plan = make([10, 17, 30], mixes, lanes=lanes, unit=unit)
    seen = Counter()
    for lane in range(lanes):
        changed = plan.with_changes(lane, tuple(rows))
        changed = pickle.loads(pickle.dumps(changed))
        leaf, draws = changed.draws(lane, np.arange(3000))
        for number in range(3):
            mine = draws[leaf == number]
            assert mine.tolist() == list(range(len(mine)))
        # No unit is cut by a change.
        first, second = (-(-row // unit) * unit for row in rows)
        assert 2 not in leaf[:first]
        assert 1 not in leaf[second:]
        before = plan.rows(lane, 0, first)
        assert np.array_equal(changed.rows(lane, 0, first).ordinal, before.ordinal)
        seen.update((leaf == 2).nonzero()[0].tolist())
    assert sum(seen.values()) == 60


CURVES = st.tuples(
    st.lists(
        st.tuples(st.integers(1, 200), st.integers(0, 6), st.booleans()),
        max_size=2,
        unique_by=lambda point: point[0],
    ).map(lambda points: tuple(Point(at, float(w), ramp) for at, w, ramp in sorted(points))),
    st.integers(0, 6),
    st.sampled_from(["rows", "samples"]),
).map(lambda drawn: Curve((Point(0, float(drawn[1])), *drawn[0]), drawn[2]))
ENDS = st.sampled_from([None, None, 1, 2.5])
# The first weight never is 0, so that there is something to draw.
MIXES = st.tuples(CURVES, CURVES, ENDS, ENDS, ENDS).map(
    lambda drawn: Mix(
        (entry(0, 2.0, drawn[2]), MixEntry(1, drawn[0], drawn[3]), MixEntry(2, drawn[1], drawn[4]))
    )
)


@pytest.mark.slow
@given(
    mixes=st.lists(MIXES, min_size=1, max_size=4),
    steps=st.lists(st.integers(0, 90), min_size=4, max_size=4),
    lanes=st.sampled_from([1, 3]),
    form=st.sampled_from([{}, {"unit": 4}, {"shuffle_window": 2}, {"shuffle_window": 50}]),
)
@settings(max_examples=80, deadline=None)
def test_no_draw_is_lost_or_doubled_wherever_the_mix_changes(mixes, steps, lanes, form):
    """What a lane gives of a source are its first draws of it, each once."""
    plan = make((10, 17, 30), mixes, lanes=lanes, **form)
    order = getattr(plan, "plan", plan)._order
    for lane in range(lanes):
        changes, given_ = (), []
        for number, step in enumerate(steps[: len(mixes)]):
            changes = (*changes, len(given_)) if number else ()
            changed = pickle.loads(pickle.dumps(plan.with_changes(lane, changes)))
            assert triples(changed.rows(lane, 0, len(given_))) == given_
            given_ += triples(changed.rows(lane, len(given_), step))
            counts = Counter(leaf for leaf, *_ in given_)
            assert Counter(dict(enumerate(changed.leaf_counts(lane, len(given_))))) == counts
        # An open window holds later draws before earlier ones, so it is given to its end.
        for _ in range(form.get("shuffle_window", 1)):
            if is_whole(given_, lane, order):
                break
            given_ += triples(changed.rows(lane, len(given_), 1))
        assert is_whole(given_, lane, order)


def triples(rows):
    return [*zip(*(column.tolist() for column in rows), strict=True)]


def is_whole(given_, lane, order):
    """Whether of each source the first draws of a lane were given, in any order."""
    for source in range(3):
        found = sorted((epoch, ordinal) for leaf, epoch, ordinal in given_ if leaf == source)
        leaf, draws = np.full(len(found), source, np.int32), np.arange(len(found))
        epoch, ordinal = order.at(leaf, order.numbers(lane, leaf, draws))
        if found != sorted(zip(epoch.tolist(), ordinal.tolist(), strict=True)):
            return False
    return True


def test_what_is_gone_is_counted_no_longer_and_cannot_be_read():
    gone = Mix((entry(-1, 1), entry(0, 1), entry(-2, 1)))
    mixes = [gone, Mix((entry(0),))]
    plan = make([10], mixes, gone=["left", "lost"]).with_changes(0, (30,))
    leaf, draws = plan.draws(0, np.arange(30, 100))
    assert set(leaf.tolist()) == {0}
    assert draws[0] == 10
    with pytest.raises(StateError, match=r"samples of (left|lost) wait.*weight 0"):
        plan.at(0, np.arange(30))
    # Those that no lane has read yet are left out.
    leaf, _, ordinal = plan.rows(0, 0, 30)
    assert sorted(leaf.tolist()) == [-1] * 20 + [0] * 10
    assert sorted(ordinal[leaf == 0].tolist()) == list(range(10))


def test_far_rows_cost_no_more_than_near_ones():
    ramp = Curve((Point(0, 1.0), Point(10**9, 4.0, True), Point(10**9 + 9, 0.5)))
    plan = make([10**6, 10**5, 7], [Mix((entry(0), MixEntry(1, ramp), entry(2, 1, 3)))], lanes=64)
    rows = plan.rows(63, 10**12, 5)
    assert set(rows.leaf.tolist()) <= {0, 1}
    assert plan.drawn(63, 10**12).sum() == 10**12


@pytest.mark.parametrize("row", [0, 7, 60])
def test_leaves_are_counted_by_their_parts_of_lines(row):
    mix = Mix((entry(0, 3), entry(1, 1)))
    plan = make([30, 10, 500], [mix], lanes=2, sources=[(0, 1), (2,)], repetitions=(1, 3, 1))
    counts = plan.leaf_counts(1, row)
    lines = plan.drawn(1, row)
    assert counts.tolist() == pytest.approx([lines[0] / 2, lines[0] / 2, lines[1]])
    assert counts.sum() == row


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    lanes=st.integers(1, 5),
    stripe=st.integers(1, 6),
)
@settings(max_examples=30, deadline=None)
def test_leaves_in_order_are_counted_as_they_come(sizes, lanes, stripe):
    leaves = [PlanLeaf(str(n), size) for n, size in enumerate(sizes)]
    plan = PlanRecipe("concat", tuple(leaves), 0, stripe=stripe)(lanes)
    for row in (0, 1, plan.num_rows(0) // 2, plan.num_rows(0)):
        counts = sum(plan.leaf_counts(lane, min(row, plan.num_rows(lane))) for lane in range(lanes))
        rows = [plan.rows(lane, 0, row).leaf for lane in range(lanes)]
        expected = sum(np.bincount(each, minlength=len(sizes)) for each in rows)
        assert counts.sum() == pytest.approx(expected.sum())
        assert np.abs(counts - expected).max() <= stripe * lanes


def test_the_last_draw_of_a_source_is_known():
    plan = make([10, 30], [Mix((entry(0, 1, 2), entry(1, 1)))], lanes=4)
    lane, row = plan.last_row(0)
    assert plan.rows(lane, row, 1).leaf.tolist() == [0]
    assert all(0 not in plan.rows(v, row + 3, 50).leaf for v in range(4))
    assert plan.last_row(1) is None


def test_more_epochs_than_can_be_counted_are_refused():
    leaf, mix = PlanLeaf("a/train", 20), Mix((entry(0, limit=1e15),))
    with pytest.raises(ConfigError, match="a/train: max_epochs of 1e\\+15 with 20 samples each"):
        PlanRecipe("blend", (leaf,), 0, mix=mix)(4)
