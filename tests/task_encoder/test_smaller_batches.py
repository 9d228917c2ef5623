"""Runs that continue with smaller batches keep the samples of each global batch together."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest

from energon import StateError, get_savable_loader, get_train_dataset, get_val_dataset
from energon.loader.state import merge_states
from energon.loader.state_files import redistribute
from tests.effort import mixed
from tests.task_encoder.test_lanes import Groups, Job, Keys, Packs, Skips, blend, config, folder

__all__ = ["folder"]
BEFORE, AFTER = [(1, 0), (2, 1), (1, 2)], [(1, 0), (4, 0), (1, 2)]
KINDS = ["buffered", "single", "epochized", "batches of one", "schedule in batches"]
BY_BATCH = ["batch_size"]


def samples(batches):
    return [key for batch in batches for key in batch]


def job(path, topology=(1, 0), **settings):
    return Job(path, world_size=topology[0], num_workers=topology[1], **settings)


def blends(folder):
    """Blends, some of whose orders depend on what a batch is."""
    weights = {0: 9, 30: 1, 50: "ramp to 5"}
    entries = [{"path": str(folder / name), "weight": n} for name, n in (("a", 3), ("b", 1))]
    scheduled = [{**entries[0], "weight": weights}, entries[1]]
    whole = {"blend": entries, "unit": "batch"}
    return {
        "buffered": (blend(folder, "a", "b", "c", a=4, b=2), {"shuffle_buffer_size": 10}),
        "single": (folder / "a", {}),
        "epochized": (
            {
                "splits": {
                    "train": {"blend_epochized": [{"path": entries[0]["path"], "repetitions": 3}]}
                }
            },
            {},
        ),
        "batches of one": ({"splits": {"train": whole}}, {}),
        "schedule in batches": (
            {"splits": {"train": {"blend": scheduled, "schedule_unit": "batches"}}},
            {},
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first", "then"), mixed(KINDS, BEFORE, AFTER))
def test_the_samples_come_in_the_same_order_with_smaller_batches(folder, kind, first, then):
    path, more = blends(folder)[kind]
    run = job(path, first, batch_size=8, **more)
    run.take(24 // first[0])
    state = run.save()
    expected = samples(run.take(48 // first[0]))
    run.close()
    done = 24
    for size in (4, 2, 1):
        smaller = job(path, then, batch_size=size, **more).restored(state, strict=BY_BATCH)
        done *= 2
        assert samples(smaller.take(8 * 8 // size // then[0])) == expected[:64]
        state, expected = smaller.save(), expected[64:]
        smaller.close()


@pytest.mark.parametrize("before", [3, 30])
@pytest.mark.parametrize("together", [False, True])
def test_a_mix_that_has_changed_is_kept(folder, before, together):
    """Of 24 lanes, the first of which has begun and the last not yet."""
    first, second = (blend(folder, "a", "b", a=weight) for weight in (4, 1))
    run = job(first, batch_size=8)
    run.take(before)
    changed = job(second, batch_size=8).restored(run.save(), strict=["mix"])
    if together:
        smaller = job(second, batch_size=2).restored(run.save(), strict=["mix", *BY_BATCH])
    else:
        smaller = job(second, batch_size=2).restored(changed.save(), strict=BY_BATCH)
    assert samples(smaller.take(40 * 4)) == samples(changed.take(40))


def test_larger_batches_are_parts_joined_again(folder):
    run = job(folder / "a", batch_size=8)
    run.take(6)
    state = run.save()
    expected = samples(run.take(10))
    divided = job(folder / "a", (2, 0), batch_size=2).restored(state, strict=BY_BATCH)
    divided.take(4)
    joined = job(folder / "a", batch_size=4).restored(divided.save(), strict=BY_BATCH)
    assert joined.loaders[0].config()["lanes"] == 48
    assert samples(joined.take(12)) == expected[16:64]


@pytest.mark.parametrize("strict", [True, ["mix"]])
def test_another_batch_size_is_refused_with_what_to_do(folder, strict):
    run = job(folder / "a", batch_size=8)
    run.take(1)
    together = r"strict=\['batch_size'\], which can keep the samples of each global batch together"
    with pytest.raises(StateError, match=rf"batch_size: saved 8, now 4(.|\n)*{together}"):
        job(folder / "a", batch_size=4).restored(run.save(), strict=strict)


@pytest.mark.parametrize(
    ("encoder", "settings", "reason"),
    [
        (Packs(), {"packing_buffer_size": 10}, "which samples"),
        (Groups(), {}, "which samples"),
        (Keys(), {"batch_size": 5}, "batches of 5 are not equal parts of those of 8"),
    ],
)
def test_batches_without_a_fixed_number_of_samples_continue_from_their_rows(
    folder, encoder, settings, reason, caplog
):
    settings = {"encoder": encoder, **settings}
    run = job(folder / "a", **{**settings, "batch_size": 8})
    run.take(2)
    smaller = job(folder / "a", **{"batch_size": 4, **settings})
    smaller.restored(run.save(), strict=BY_BATCH)
    assert smaller.take(1)
    assert f"do not stay together: {reason}" in caplog.text


def test_lanes_that_the_program_chose_keep_their_rows(folder):
    run = job(folder / "a", batch_size=8, lanes=4)
    run.take(6)
    smaller = job(folder / "a", batch_size=4, lanes=4).restored(run.save(), strict=BY_BATCH)
    lanes = [samples(run.take(4)), samples(smaller.take(4))]
    assert lanes[1] == samples([lanes[0][8 * lane : 8 * lane + 4] for lane in (0, 1, 2, 3)])


def test_hooks_that_skip_lose_and_repeat_nothing(folder):
    entry = {"path": str(folder / "a"), "repetitions": 7}
    path = {"splits": {"train": {"blend_epochized": [entry]}}}
    run = job(path, encoder=Skips(), repeat=False, batch_size=8)
    seen = run.take(40)
    smaller = job(path, (2, 0), encoder=Skips(), repeat=False, batch_size=4)
    seen += smaller.restored(run.save(), strict=BY_BATCH).take(999)
    assert Counter(samples(seen)) == {f"a{n}": 7 for n in range(130) if n % 5 != 3}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_redistributed_states_are_divided_by_each_rank_alone(folder, ranks):
    run = job(folder / "a", (2, 0), batch_size=8)
    run.take(12)
    states = redistribute(merge_states(run.save()), ranks)
    expected = samples(run.take(8))
    smaller = job(folder / "a", (ranks, 0), batch_size=2)
    for loader, state in zip(smaller.loaders, states, strict=True):
        loader.restore_state_rank(state, strict=BY_BATCH)
    assert samples(smaller.take(64 // ranks)) == expected


def test_the_state_of_one_rank_is_enough_where_that_of_the_others_follows(folder):
    run = job(folder / "a", (4, 0), batch_size=8)
    run.take(3)
    state = run.save()
    expected = samples(run.take(4))
    smaller = job(folder / "a", (2, 0), batch_size=4).restored(state[1], strict=BY_BATCH)
    assert samples(smaller.take(16)) == expected
    assert len(json.dumps(smaller.loaders[0].state_dict())) < 20_000


def test_the_state_of_one_rank_is_refused_where_hooks_have_skipped_samples(folder):
    """Another rank may have skipped none, and would divide its batches."""
    run = job(folder / "a", (2, 0), encoder=Skips(), batch_size=8)
    run.take(9)
    of_rank = run.save()[1]
    smaller = job(folder / "a", (2, 0), encoder=Skips(), batch_size=4)
    with pytest.raises(StateError, match=r"lanes 0, 2.* are missing; pass a global state"):
        smaller.loaders[1].restore_state_rank(of_rank, strict=BY_BATCH)
    smaller.restored(run.save(), strict=BY_BATCH)


@pytest.mark.parametrize("training", [True, False])
def test_passes_over_data_that_ends_are_whole(folder, training):
    """The last batch has 2 samples, which is not enough for all of its parts."""

    def open_loader(size):
        arguments = {"worker_config": config(), "batch_size": size, "task_encoder": Keys()}
        if training:
            return get_savable_loader(get_train_dataset(folder / "a", repeat=False, **arguments))
        return get_savable_loader(get_val_dataset(folder / "a", split_part="train", **arguments))

    run = open_loader(8)
    list(run)
    batches = iter(run)
    list(islice(batches, 9))
    state = run.save_state_rank()
    expected = [samples(batches), sorted(samples(run))]
    smaller = open_loader(2)
    smaller.restore_state_rank(state, strict=BY_BATCH)
    assert [samples(smaller), sorted(samples(smaller))] == expected
    list(run)
    smaller = open_loader(2)
    smaller.restore_state_rank(run.save_state_rank(), strict=BY_BATCH)
    assert sorted(samples(smaller)) == sorted(expected[1])
