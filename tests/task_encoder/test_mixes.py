"""Mixes of datasets end to end: schedules, limits, and runs restored with other weights."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest

from energon import (
    ConfigError,
    SkipSample,
    StateError,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from tests.datasets import make_crude
from tests.effort import mixed
from tests.encoders import Keys, Packs

SIZES = {"a": 30, "b": 17, "c": 50}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixes")
    for name, size in SIZES.items():
        make_crude(root / name, [size // 2, size - size // 2], prefix=name)
    return root


def document(folder, *entries, **settings):
    """A blend of `(name, what its entry says besides)`, or of single names."""
    listed = [({} if isinstance(e, str) else e[1]) | {"path": str(folder / e[0])} for e in entries]
    return {"splits": {"train": {"blend": listed, **settings}}}


def train(path, *, lanes=4, rank=0, world_size=1, encoder=None, batch_size=5, **settings):
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0, lanes=lanes)
    return get_train_dataset(
        path,
        worker_config=config,
        batch_size=batch_size,
        task_encoder=encoder or Keys(),
        **settings,
    )


def keys(batches):
    return [part for batch in batches for key in batch for part in key.split("+")]


def kinds(batches):
    return Counter(key[0] for key in keys(batches))


def test_a_schedule_changes_the_mix_while_the_run_goes_on(folder):
    weights = {0: 1, 400: 3, 800: "ramp to 0"}
    loader = iter(get_loader(train(document(folder, ("a", {"weight": weights}), "b"))))
    assert abs(kinds(islice(loader, 80))["a"] - 200) <= 4
    # The mean of the ramp from 3 to 0 is 0.537 of the samples.
    assert abs(kinds(islice(loader, 80))["a"] - 215) <= 8
    assert kinds(islice(loader, 80)) == {"b": 400}


def test_a_schedule_may_count_batches(folder):
    mix = document(folder, ("a", {"weight": {0: 1, 8: 0}}), "b", schedule_unit="batches")
    loader = iter(get_loader(train(mix)))
    assert kinds(islice(loader, 8))["a"] > 10
    assert kinds(islice(loader, 8)) == {"b": 40}


@pytest.mark.parametrize("settings", [{}, {"shuffle_buffer_size": 20}, {"repeat": False}])
def test_a_run_of_limited_datasets_ends_when_their_epochs_are_used_up(folder, settings):
    mix = document(folder, ("a", {"max_epochs": 2}), ("b", {"max_epochs": 1, "weight": 3}))
    found = Counter(keys(get_loader(train(mix, **settings))))
    assert found == {**{f"a{n}": 2 for n in range(30)}, **{f"b{n}": 1 for n in range(17)}}


def test_a_limited_dataset_leaves_its_share_to_the_others(folder):
    mix = document(folder, ("a", {"max_epochs": 2}), "b", "c")
    found = kinds(islice(iter(get_loader(train(mix))), 100))
    assert found["a"] == 60
    assert abs(found["b"] - 220) <= 4


def test_weights_from_sizes_follow_the_data(folder):
    mix = document(folder, *[(name, {"weight": "auto"}) for name in SIZES])
    found = kinds(islice(iter(get_loader(train(mix))), 97 * 4))
    assert all(abs(found[name] - 20 * size) <= 8 for name, size in SIZES.items())


def save_after(loader, count):
    batches = list(islice(iter(loader), count))
    return batches, json.loads(json.dumps(loader.save_state_rank()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "world_size"), [(Keys(), 2), *mixed([Keys(), Packs()], [1, 2])]
)
def test_another_mix_begins_where_the_run_was_restored(folder, encoder, world_size):
    packing = {"packing_buffer_size": 7} if isinstance(encoder, Packs) else {}
    settings = {"encoder": encoder, "world_size": world_size, **packing}
    first = document(folder, "a", "b")
    # What is taken out cannot be read again, which packing does.
    idle = [("b", {"weight": 0})] if packing else []
    second = document(folder, ("c", {"weight": 2}), ("a", {"weight": 1}), *idle)
    third = document(folder, ("c", {"weight": 1}), ("a", {"weight": 1}), "b")
    seen, states = [], [None] * world_size
    for mix, steps in ((first, 7), (second, 11), (second, 5), (third, 40)):
        for rank in range(world_size):
            loader = get_savable_loader(train(mix, rank=rank, **settings))
            if states[rank] is not None:
                if mix is not previous:  # noqa: F821
                    with pytest.raises(StateError, match="mix"):
                        loader.restore_state_rank(states[rank])
                loader.restore_state_rank(states[rank], strict=False)
            batches, states[rank] = save_after(loader, steps)
            seen += keys(batches)
        previous = mix  # noqa: F841
    found = Counter(seen)
    counts = Counter(key[0] for key in seen)
    assert sum(counts.values()) == sum(found.values())
    for name, size in SIZES.items():
        # Epochs are exact, but for what lanes have drawn more than others, or hold in windows.
        often = [found[f"{name}{n}"] for n in range(size)]
        assert max(often) - min(often) <= 1 + (7 * 4 + size) // size, (name, often)
    assert [*states[0]["fingerprint"]["mix"]["blend"]] == ["c/train", "a/train", "b/train"]
    assert len(states[0]["fingerprint"]["mix_before"]) == 2


class Groups(Keys):
    def batch_group_criterion(self, sample):
        return len(sample["__key__"]), None


SHAPES = {
    "plain": {},
    "windows": {"shuffle_buffer_size": 50},
    "small windows": {"shuffle_buffer_size": 7},
    "packs": {"packing_buffer_size": 7},
    "packs of windows": {"packing_buffer_size": 7, "shuffle_buffer_size": 20},
    "groups of windows": {"shuffle_buffer_size": 20},
}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "lanes"), mixed([*SHAPES], [1, 4, 12]))
def test_epochs_are_exact_through_changes_of_the_mix(folder, shape, lanes):
    """Two epochs of everything, whatever the weights were on the way."""
    encoder = {"packs": Packs, "groups": Groups}.get(shape.partition(" ")[0], Keys)()
    limit = {"max_epochs": 2}
    mixes = [
        document(folder, ("a", limit), ("b", limit)),
        document(folder, ("b", limit | {"weight": 9}), ("a", limit)),
        document(folder, ("a", limit), ("c", limit | {"weight": 3}), ("b", limit)),
    ]
    seen, state = [], None
    for mix, steps in zip(mixes, (6, 5, None), strict=True):
        loader = get_savable_loader(
            train(mix, lanes=lanes, encoder=encoder, batch_size=3, **SHAPES[shape])
        )
        if state is not None:
            loader.restore_state_rank(state, strict=["mix", "leaves"])
        batches, state = save_after(loader, steps)
        seen += keys(batches)
        if encoder.__class__ is Keys:
            report = {
                name[0]: each["samples"] for name, each in loader.report()["datasets"].items()
            }
            assert {name: count for name, count in report.items() if count} == Counter(
                key[0] for key in seen
            )
    assert Counter(seen) == {f"{name}{n}": 2 for name, size in SIZES.items() for n in range(size)}


@pytest.mark.parametrize("shape", ["plain", "windows", "packs"])
def test_a_run_that_has_ended_goes_on_with_the_epochs_that_another_mix_adds(folder, shape):
    seen, state = [], None
    for epochs in (1, 1, 3):
        limit = {"max_epochs": epochs}
        mix = document(folder, ("a", limit), ("b", limit | {"weight": 3}))
        encoder = Packs() if shape == "packs" else Keys()
        loader = get_savable_loader(train(mix, encoder=encoder, **SHAPES[shape]))
        if state is not None:
            loader.restore_state_rank(state, strict=["mix"])
        found = keys(loader)
        state = loader.save_state_rank()
        seen.append(Counter(found))
    every = [f"{name}{n}" for name in "ab" for n in range(SIZES[name])]
    # The same mix begins the next pass, more epochs continue with the third.
    assert seen[0] == seen[1] == dict.fromkeys(every, 1)
    assert seen[2] == dict.fromkeys(every, 2)


def test_refuses_a_change_after_which_nobody_knows_what_was_drawn(folder):
    half = [("a", {"weight": 2, "max_epochs": 1}), "b"]
    loader = get_savable_loader(train(document(folder, *half)))
    _, state = save_after(loader, 3)
    refused = {
        "b, c": (document(folder, "b", "c"), "cannot remove a/train.*weight 0", {}),
        "unit": (
            document(folder, *half, unit="batch"),
            "drawn 1 samples in a row.*now it is 5",
            {},
        ),
    }
    for mix, message, settings in refused.values():
        again = get_savable_loader(train(mix, **settings))
        with pytest.raises(StateError, match=message):
            again.restore_state_rank(state, strict=False)
    schedule = document(folder, ("a", {"weight": {0: 1, 9: 3}}), "b", schedule_unit="batches")
    loader = get_savable_loader(train(schedule))
    _, state = save_after(loader, 3)
    for mix in (schedule, document(folder, "a", "b")):
        again = get_savable_loader(train(mix, batch_size=4))
        with pytest.raises(StateError, match="batches, of which the run had 5 samples"):
            again.restore_state_rank(state, strict=False)


def test_says_when_an_epoch_cannot_stay_exact(folder, caplog):
    mix = document(folder, "a", "b")
    _, state = save_after(get_savable_loader(train(mix, shuffle_buffer_size=20)), 3)
    again = get_savable_loader(train(mix, batch_size=4))
    again.restore_state_rank(state, strict=["shuffle_window", "batch_size"])
    assert "may be repeated or missed, because shuffle_window differ" in caplog.text
    caplog.clear()
    again = get_savable_loader(train(document(folder, "b", "c"), shuffle_buffer_size=20))
    again.restore_state_rank(state, strict=["mix", "leaves"])
    assert "may be repeated or missed" not in caplog.text


def test_a_dataset_that_was_taken_out_goes_on_when_it_comes_back(folder):
    both, alone = document(folder, "a", "b"), document(folder, "a")
    seen, state = [], None
    for mix, steps in ((both, 10), (alone, 10), (both, 20)):
        loader = get_savable_loader(train(mix, lanes=1))
        if state is not None:
            loader.restore_state_rank(state, strict=False)
        batches, state = save_after(loader, steps)
        seen += keys(batches)
    drawn = [key for key in seen if key[0] == "a"]
    for start in range(0, len(drawn) - 30, 30):
        assert len(set(drawn[start : start + 30])) == 30


def test_a_restored_mix_is_the_same_on_every_topology(folder):
    first, second = document(folder, "a", "b"), document(folder, ("a", {"weight": 5}), "c")
    loader = get_savable_loader(train(first))
    _, state = save_after(loader, 9)

    def resumed(world_size):
        batches = {}
        for rank in range(world_size):
            loader = get_savable_loader(train(second, rank=rank, world_size=world_size))
            loader.restore_state_global(state, strict=False)
            # Rank r continues with the first batch of its own that was not delivered.
            start = next(g for g in range(9, 13) if g % world_size == rank)
            numbers = range(start, 60, world_size)
            batches |= dict(zip(numbers, iter(loader), strict=False))
        return [batches[number] for number in range(9, 60)]

    assert resumed(1) == resumed(2) == resumed(4)


def test_a_mix_of_another_order_is_the_same_mix(folder):
    one = get_savable_loader(train(document(folder, "a", ("b", {"weight": 2}))))
    _, state = save_after(one, 9)
    other = get_savable_loader(train(document(folder, ("b", {"weight": 2}), "a")))
    other.restore_state_rank(state)
    assert [*islice(iter(other), 20)] == [*islice(iter(one), 20)]


class SkipSome(Keys):
    @stateless
    def encode_sample(self, sample):
        if sample["__key__"].endswith("7"):
            raise SkipSample
        return sample


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeat": False}, "a weighted blend has no end"),
        ({"blend_unit": "batch", "batch_size": None}, "there is no batch_size"),
        ({"blend_unit": "batch", "shuffle_buffer_size": 5}, "drop shuffle_buffer_size"),
        ({"blend_unit": "batch", "packing_buffer_size": 5, "encoder": Packs()}, "packing decides"),
    ],
)
def test_refuses_settings_that_exclude_one_another(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        train(document(folder, "a", "b"), **settings)


def test_batches_cannot_be_counted_where_samples_are_packed(folder):
    mix = document(folder, ("a", {"weight": {0: 1, 5: 2}}), "b", schedule_unit="batches")
    with pytest.raises(ConfigError, match="schedule them in samples"):
        train(mix, encoder=Packs(), packing_buffer_size=5)


@pytest.mark.parametrize("by", ["argument", "document"])
def test_whole_batches_may_be_drawn_from_one_dataset(folder, by):
    settings = {"blend_unit": "batch"} if by == "argument" else {}
    unit = {"unit": "batch"} if by == "document" else {}
    mix = document(folder, ("a", {"weight": 3}), "b", **unit)
    batches = list(islice(iter(get_loader(train(mix, **settings))), 200))
    assert all(len(batch) == 5 and len(kinds([batch])) == 1 for batch in batches)
    assert abs(kinds(batches)["a"] - 750) <= 20
    drawn = [key for key in keys(batches) if key[0] == "a"]
    assert Counter(drawn).most_common()[0][1] - Counter(drawn).most_common()[-1][1] <= 2


def test_an_argument_goes_over_the_document(folder):
    mix = document(folder, "a", "b", unit="batch")
    batches = list(islice(iter(get_loader(train(mix, blend_unit="sample"))), 20))
    assert any(len(kinds([batch])) > 1 for batch in batches)


@pytest.mark.parametrize("stop", [1, 5, 17, 30])
def test_batches_stay_pure_when_samples_are_skipped_and_the_run_is_resumed(folder, stop):
    mix = document(folder, ("a", {"weight": 3}), "b", unit="batch")

    def open_loader():
        return get_savable_loader(train(mix, encoder=SkipSome(), batch_size=2))

    whole = list(islice(iter(open_loader()), 60))
    assert all(len(kinds([batch])) == 1 for batch in whole)
    assert {len(batch) for batch in whole} == {1, 2}
    loader = open_loader()
    first, state = save_after(loader, stop)
    again = open_loader()
    again.restore_state_rank(state)
    assert first + list(islice(iter(again), 60 - stop)) == whole


def test_batches_of_one_dataset_use_up_its_epochs_exactly(folder):
    mix = document(folder, ("a", {"max_epochs": 2}), ("b", {"max_epochs": 1}), unit="batch")
    batches = list(get_loader(train(mix, batch_size=4)))
    found = Counter(keys(batches))
    assert found == {**{f"a{n}": 2 for n in range(30)}, **{f"b{n}": 1 for n in range(17)}}
    # Of each lane, the batch in which a dataset retires continues with another.
    assert sum(len(kinds([batch])) > 1 for batch in batches) <= 4


def test_another_mix_of_whole_batches_begins_with_a_batch(folder):
    first = document(folder, "a", "b", unit="batch")
    second = document(folder, "a", "c", unit="batch")
    loader = get_savable_loader(train(first, encoder=SkipSome()))
    _, state = save_after(loader, 9)
    again = get_savable_loader(train(second, encoder=SkipSome()))
    again.restore_state_rank(state, strict=False)
    assert all(len(kinds([batch])) == 1 for batch in islice(iter(again), 40))


def test_groups_and_whole_batches_exclude_one_another(folder):
    mix = document(folder, "a", "b", unit="batch")
    with pytest.raises(ConfigError, match="batch_group_criterion decides"):
        train(mix, encoder=Groups())


def test_a_row_is_described_by_the_mix_of_its_time(folder):
    first, second = document(folder, "a", "b"), document(folder, "a", "c", "b")
    loader = get_savable_loader(train(first, lanes=1))
    _, state = save_after(loader, 6)
    again = get_savable_loader(train(second, lanes=1))
    again.restore_state_rank(state, strict=False)
    batches, later = save_after(again, 6)
    lane_state = later["positions"]["0"]["state"]
    for row, key in zip(range(30, 60), keys(batches), strict=True):
        assert f"sample {key!r} of " in again.dataset.describe_row(0, 1, row, lane_state)
        assert f"sample {key!r} of " in again.dataset.describe_row(
            0, 1, row, state["positions"]["0"]["state"]
        )


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_report_is_what_was_delivered(folder, world_size):
    mix = document(
        folder,
        ("a", {"weight": "auto", "tokens": 3000}),
        ("b", {"weight": "auto", "tokens": 1000}),
    )
    loader = get_savable_loader(train(mix, world_size=world_size, encoder=SkipSome()))
    assert loader.report()["samples"] == 0
    batches = [next(iter(loader)) for _ in range(40)]
    report = json.loads(json.dumps(loader.report()))
    skipped = sum(each["skipped"]["encode_sample"] for each in report["datasets"].values())
    assert report["samples"] == 200 + skipped
    for name, count in kinds(batches).items():
        about = report["datasets"][f"{name}/train"]
        assert about["samples"] == count + about["skipped"]["encode_sample"]
        assert about["epochs"] == pytest.approx(
            about["samples"] * world_size / SIZES[name], abs=1e-4
        )
        assert about["failed"] == {}
        assert about["bytes"] >= about["samples"] * 512
    assert report["datasets"]["a/train"]["share"] == pytest.approx(0.75, abs=0.02)
    assert report["datasets"]["a/train"]["tokens"] == 100 * report["datasets"]["a/train"]["samples"]


@pytest.mark.parametrize("kind", ["concat", "blend_epochized"])
def test_lines_are_reported_by_their_parts(folder, kind):
    entries = [{"path": str(folder / name)} for name in "ab"]
    loader = get_savable_loader(train({"splits": {"train": {kind: entries}}}))
    assert len(keys([next(iter(loader)) for _ in range(9)])) == 45
    report = loader.report()
    assert report["samples"] == 45
    assert abs(report["datasets"]["a/train"]["samples"] - 45 * 30 / 47) <= 1


def test_a_report_goes_on_after_a_restore_with_another_mix(folder):
    loader = get_savable_loader(train(document(folder, "a", "b")))
    _, state = save_after(loader, 10)
    before = loader.report()["datasets"]
    again = get_savable_loader(train(document(folder, "c", ("a", {"weight": 0}))))
    again.restore_state_rank(state, strict=False)
    assert again.report()["datasets"]["a/train"]["samples"] == before["a/train"]["samples"]
    batches, _ = save_after(again, 10)
    assert kinds(batches) == {"c": 50}
    report = again.report()["datasets"]
    assert report["c/train"]["samples"] == 50
    assert report["a/train"]["samples"] == before["a/train"]["samples"]


def test_validation_is_reported_too(folder):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_val_dataset(
        {"splits": {"val": document(folder, "a", "b")["splits"]["train"]}},
        worker_config=config,
        batch_size=10,
        task_encoder=Keys(),
    )
    loader = get_savable_loader(dataset)
    assert len(keys(islice(iter(loader), 4))) == 40
    report = loader.report()["datasets"]
    assert report["a/val"]["samples"] == 30
