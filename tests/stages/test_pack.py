from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, FatalSampleError
from energon.packing.packer import Selection
from energon.stages.hooks.failures import split_reasons
from energon.stages.hooks.hook import Hook
from energon.stages.lane import Lane
from energon.stages.map import MapDataset
from energon.stages.pack import PackDataset
from energon.testing import check_resume
from tests.stages.counts import check_counts
from tests.stages.hooks import drop_threes, fail_fives, ids, repeat_by_rest
from tests.stages.numbers import numbers


def length(sample):
    return 1 + sample["n"] * 7 % 5


def next_fit(samples, *, room=8):
    """Fill one pack after the other."""
    groups = [[]]
    for sample in samples:
        if sum(map(length, groups[-1])) + length(sample) > room:
            groups.append([])
        groups[-1].append(sample)
    return groups


def carry_the_last(samples):
    *groups, last = next_fit(samples)
    return Selection(groups, carry=last) if groups else Selection([last])


def carry_every_third(samples):
    """Samples that are carried need not stand at the end."""
    carried = samples[1:-1:3]
    known = {id(sample) for sample in carried}
    return Selection(next_fit([s for s in samples if id(s) not in known]), carried)


def two_halves(samples):
    yield ids(samples)[::2]
    yield ids(samples)[1::2]


def packed(dataset, *, size=10, select=next_fit, pack=ids, postencode=(), **options):
    return PackDataset(
        dataset,
        size,
        select=Hook(select.__name__, select, **options),
        pack=(Hook(pack.__name__, pack, restore_seeds=True),),
        postencode=tuple(Hook(function.__name__, function) for function in postencode),
    )


def mapped(dataset, function):
    hooks = (Hook(function.__name__, function),)
    return MapDataset(dataset, (hooks,))


def jitter(sample):
    return {**sample, "draw": random.random()}


SELECT = st.sampled_from([next_fit, carry_the_last, carry_every_third])


@settings(deadline=None, max_examples=25)
@given(
    total=st.integers(0, 60),
    size=st.integers(1, 25),
    select=SELECT,
    pack=st.sampled_from([ids, two_halves]),
    below=st.sampled_from([None, drop_threes, repeat_by_rest]),
)
def test_packing_resumes_at_every_pack(total, size, select, pack, below):
    dataset = numbers(total) if below is None else mapped(numbers(total), below)
    check_resume(packed(dataset, size=size, select=select, pack=pack))


@settings(deadline=None, max_examples=25)
@given(total=st.integers(0, 200), size=st.integers(1, 40), select=SELECT)
def test_every_sample_is_in_one_pack(total, size, select):
    packs = list(packed(numbers(total), size=size, select=select).open(Lane(0, 1)))
    assert sorted(n for pack in packs for n in pack) == list(range(total))


def test_windows_are_consecutive_runs_of_the_stream():
    windows = []

    def note(samples):
        windows.append(ids(samples))
        return next_fit(samples)

    list(packed(numbers(25), size=10, select=note).open(Lane(0, 1)))
    assert windows == [list(range(10)), list(range(10, 20)), list(range(20, 25))]


def test_what_is_carried_over_comes_first_in_the_next_window_and_leaves_room_for_fewer():
    windows = []

    def note(samples):
        windows.append(ids(samples))
        return Selection([samples[3:]], carry=samples[:3]) if len(windows) < 3 else [samples]

    list(packed(numbers(20), size=8, select=note).open(Lane(0, 1)))
    assert windows == [
        list(range(8)),
        [0, 1, 2, *range(8, 13)],
        [0, 1, 2, *range(13, 18)],
        [18, 19],
    ]


def test_samples_that_are_not_selected_are_left_out_and_counted():
    lane = Lane(0, 1)
    dataset = packed(numbers(20), size=10, select=lambda samples: [samples[:4], []])
    assert list(dataset.open(lane)) == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert lane.counts == Counter({"samples": 8, "dropped by packing": 12})


def test_counts_are_the_same_with_and_without_a_restore():
    check_counts(packed(mapped(numbers(60), drop_threes), size=10))


def test_the_state_stays_small_and_knows_nothing_of_contents():
    dataset = packed(numbers(None), size=4096, select=carry_every_third)
    iterator = dataset.open(Lane(0, 1))
    for _ in range(50):
        next(iterator)
    assert len(json.dumps(iterator.state_dict())) < 16_384


def test_packs_leave_evenly():
    dataset = packed(numbers(None), size=100)
    iterator = dataset.open(Lane(0, 1))
    next(iterator)
    read = []
    for _ in range(300):
        before = iterator.inner.row
        next(iterator)
        read.append(iterator.inner.row - before)
    assert max(read) <= 6, "a pack has 2.67 samples on average"


def test_a_sample_that_fails_before_packing_is_left_out_of_its_pack(caplog):
    lane = Lane(0, 1)
    dataset = packed(numbers(12), size=4, select=lambda s: [s[:1], s[1:]], postencode=[fail_fives])
    assert list(dataset.open(lane)) == [[1, 2, 3], [4], [6, 7], [8], [9, 11]]
    assert lane.counts["failed"] == 3
    assert "no fives, got 10" in caplog.text


def test_a_hook_that_must_give_one_sample_may_not_yield_several():
    with pytest.raises(FatalSampleError, match="repeat_by_rest yields several samples"):
        next(packed(numbers(12), postencode=[repeat_by_rest]).open(Lane(0, 1)))


def test_a_window_whose_selection_fails_is_left_out_and_counted(caplog):
    def select(samples):
        if samples[0]["n"] == 10:
            raise ValueError("cannot decide")
        return [samples]

    lane = Lane(0, 1)
    packs = list(packed(numbers(30), select=select).open(lane))
    assert [pack[0] for pack in packs] == [0, 20]
    counts, failures, _ = split_reasons(lane.counts)
    assert counts == {"samples": 20, "failed": 1, "dropped by packing": 10}
    assert failures[0]["samples"][0]["message"] == "cannot decide"
    assert "cannot decide" in caplog.text


def test_selecting_nothing_again_and_again_ends_the_run():
    with pytest.raises(FatalSampleError, match="selected nothing from 100 windows of 10 samples"):
        next(packed(numbers(None), select=lambda samples: []).open(Lane(0, 1)))


def test_carrying_everything_ends_the_run():
    dataset = packed(numbers(None), select=lambda samples: Selection([], carry=samples))
    with pytest.raises(FatalSampleError, match="carries over all 10 samples"):
        next(dataset.open(Lane(0, 1)))


def test_only_samples_of_the_window_can_be_carried():
    dataset = packed(numbers(None), select=lambda samples: Selection([samples], carry=[{"n": 3}]))
    with pytest.raises(FatalSampleError, match="is not one of this window"):
        next(dataset.open(Lane(0, 1)))


def test_equal_samples_are_told_apart_when_carried():
    dataset = packed(
        mapped(numbers(40), lambda sample: sample["n"] // 2),
        select=lambda samples: Selection([samples[:7]], carry=samples[7:]),
        pack=list,
    )
    packs = check_resume(dataset, lanes=1)
    assert sorted(n for pack in packs for n in pack) == sorted(list(range(20)) * 2)


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 1 << 32))
def test_random_numbers_of_hooks_are_the_same_after_resuming(seed):
    random.seed(seed)
    hook = (Hook("jitter", jitter, restore_seeds=True),)
    dataset = PackDataset(
        MapDataset(numbers(60), (hook,)),
        10,
        select=Hook("select", lambda s: random.sample(next_fit(s), 2), restore_seeds=True),
        pack=(Hook("pack", lambda s: (s, random.random()), restore_seeds=True),),
    )
    check_resume(dataset, limit=8)


def test_a_pack_carries_the_keys_of_its_samples_and_is_restored_by_them():
    def pack(samples):
        return {"sum": sum(ids(samples)), "__restore_key__": ()}

    def drawn(sample):
        for _ in range(2):
            yield {**sample, "draw": random.random()}

    hook = (Hook("drawn", drawn),)
    dataset = packed(MapDataset(numbers(40), (hook,)), pack=pack)
    lane = Lane(0, 1)
    for made in dataset.open(lane):
        assert made["__restore_key__"][0] == "pack"
        assert dataset.restore(lane, made["__restore_key__"]) == (made, ())


def test_each_of_several_packs_of_a_group_is_restored_by_its_key():
    def pack(samples):
        for part in (samples[::2], samples[1::2]):
            yield {"ids": ids(part), "draw": random.random(), "__restore_key__": ()}

    dataset = packed(numbers(40), pack=pack)
    lane = Lane(0, 1)
    for made in dataset.open(lane):
        assert dataset.restore(lane, made["__restore_key__"]) == (made, ())


@settings(deadline=None, max_examples=40)
@given(dead=st.sets(st.integers(0, 59), max_size=4), at=st.integers(0, 15))
def test_samples_that_killed_workers_leave_the_others_in_their_packs(dead, at):
    dataset = packed(mapped(numbers(60), dict), size=20)
    iterator = dataset.open(Lane(0, 1))
    before = list(islice(iterator, at))
    state = json.loads(json.dumps(iterator.state_dict()))
    rest = list(dataset.open(Lane(0, 1, skip_rows=frozenset(dead)), state))
    everything = [n for pack in before + rest for n in pack]
    assert len(everything) == len(set(everything))
    assert set(range(60)) - set(everything) <= dead


def test_packing_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        packed(numbers(5), size=0)


def test_a_pack_is_restored_without_the_samples_that_failed():
    def fail_fives(sample):
        if sample["n"] % 5 == 0:
            raise ValueError("no fives")
        return {**sample, "draw": random.random()}

    def pack(samples):
        return {"samples": samples, "draw": random.random(), "__restore_key__": ()}

    seeded = {"restore_seeds": True}
    dataset = PackDataset(
        numbers(40),
        6,
        select=Hook("select", next_fit),
        pack=(Hook("pack", pack, **seeded),),
        postencode=(Hook("fail_fives", fail_fives, **seeded),),
    )
    lane = Lane(0, 1)
    for made in dataset.open(lane):
        assert dataset.restore(lane, made["__restore_key__"]) == (made, ())


def test_samples_made_by_the_selecting_hook_are_packed_under_the_row_of_their_window():
    rows = []
    dataset = packed(
        mapped(numbers(20), dict),
        size=5,
        select=lambda samples: [[dict(sample) for sample in samples]],
        postencode=[dict],
    )
    lane = Lane(0, 1, progress=lambda row, several: rows.append(row))
    assert [len(pack) for pack in dataset.open(lane)] == [5] * 4
    assert min(rows) == 0


@pytest.mark.parametrize("selected", [None, 3, [1, 2]])
def test_a_selection_that_is_none_ends_the_run(selected):
    with pytest.raises(FatalSampleError, match="expected lists of samples"):
        next(packed(numbers(20), select=lambda samples: selected).open(Lane(0, 1)))


def test_groups_may_be_yielded():
    def halves(samples):
        yield samples[:5]
        yield iter(samples[5:])

    assert [len(pack) for pack in packed(numbers(20), select=halves).open(Lane(0, 1))] == [5] * 4
