"""One global order of a run with planned packs, whoever loads, and after any restore."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from energon import (
    Balance,
    ConfigError,
    EmptyDatasetError,
    PlannedPacks,
    SampleError,
    StateError,
)
from energon.sources.reader import LeafReader
from tests.effort import mixed
from tests.test_balanced_order import (
    LANES,
    TOPOLOGIES,
    Encoder,
    Expected,
    Run,
    Skipping,
    make_texts,
    resume_often,
    write_blend,
)

CONTEXT = 2000
NUM_BATCHES = 96
PACKS = PlannedPacks(length="txt:bytes", context=CONTEXT)
BALANCES = {
    "default": None,
    "window": Balance(cost="txt:bytes", window=4),
    "pools": Balance(cost="txt:bytes", window=4, pool=2, micro_batches=4),
}


class Packing(Encoder):
    def pack_selected_samples(self, samples):
        return {
            "__key__": [sample["__key__"] for sample in samples],
            "__restore_key__": (),
            "size": sum(sample["size"] for sample in samples),
        }

    def batch(self, packs):
        return {
            "__key__": [pack["__key__"] for pack in packs],
            "__restore_key__": (),
            "size": [pack["size"] for pack in packs],
        }


class SkippingPacks(Packing, Skipping):
    pass


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    root = tmp_path_factory.mktemp("blend")
    make_texts(root / "large", [40, 25, 60], "l")
    make_texts(root / "small", [20, 17], "m")
    write_blend(root / "blend.yaml", large=3, small=1)
    return root / "blend.yaml"


def run_of(path, topology, balance, **settings):
    settings = {"encoder": Packing, "pack": PACKS, **settings}
    return Run(path, topology, balance, **settings)


@pytest.fixture(scope="module")
def expected(blend):
    return Expected(partial(run_of, blend, (1, 0)), BALANCES)


def sizes_of(path):
    """The size of each sample."""
    with Run(path, (1, 0), None, batch_size=1) as run:
        return {key: size for (key,), (size,) in run.take(600)}


def keys_of(batches):
    return [key for packs, _ in batches for keys in packs for key in keys]


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCES)
def test_batches_have_as_many_packs_as_asked_for_within_the_context(expected, name):
    sizes = np.array([sizes for _, sizes in expected[name]])
    assert sizes.shape == (NUM_BATCHES, 3)
    assert sizes.max() <= CONTEXT
    assert sizes.mean() > 0.8 * CONTEXT


@pytest.mark.slow
@pytest.mark.parametrize(("name", "topology"), mixed([*BALANCES], TOPOLOGIES[1:]))
def test_a_fresh_run_has_the_same_global_batches_on_any_topology(blend, expected, name, topology):
    with run_of(blend, topology, BALANCES[name]) as run:
        assert run.take(NUM_BATCHES) == expected[name]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BALANCES)
def test_saving_anywhere_and_resuming_elsewhere_goes_on_exactly(blend, expected, name):
    state = resume_often(expected[name], partial(run_of, blend, balance=BALANCES[name]))
    assert len(json.dumps(state)) < 8000


@pytest.mark.parametrize(
    "settings",
    [
        {"balance": BALANCES["window"]},
        {"balance": BALANCES["window"], "encoder": Packing, "pack": PACKS},
        {"balance": None, "blend_unit": "batch"},
    ],
    ids=["balanced", "packed", "batches of one dataset"],
)
def test_the_samples_of_the_first_batch_are_read_together(blend, settings, monkeypatch):
    """Reading them one after another would make a distant store answer as often."""
    reads, read = [], LeafReader.read
    monkeypatch.setattr(LeafReader, "read", lambda *args: reads.append(args) or read(*args))
    make = partial(Run, blend, **settings)
    with make((1, 0)) as run:
        run.take(13)
        state = run.save()
    reads.clear()
    with make((8, 0), state=state, start=13) as run:
        run.take(1)
    assert len(reads) == 1


def test_samples_that_hooks_skip_make_their_pack_smaller_and_change_no_other(blend, expected):
    with run_of(blend, (2, 0), BALANCES["window"], encoder=SkippingPacks) as run:
        batches = run.take(NUM_BATCHES)
    kept = [
        [[key for key in keys if not key.endswith("7")] for keys in packs]
        for packs, _ in expected["window"]
    ]
    assert [packs for packs, _ in batches] == [[keys for keys in packs if keys] for packs in kept]


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCES)
def test_statistics_have_the_cost_of_the_last_batch_and_of_its_step(blend, expected, name):
    of_step, power = (4, 1) if name == "pools" else (LANES, 1 if name == "window" else 2)
    with run_of(blend, (2, 1), BALANCES[name]) as run:
        run.take(19)
        stats = [loader.stats()["balance"] for loader in run.loaders]
    sizes = sizes_of(blend)
    costs = [
        sum(sizes[key] ** power for keys in packs for key in keys) for packs, _ in expected[name]
    ]
    for each, last in zip(stats, (18, 17), strict=True):
        start = last // of_step * of_step
        step = costs[start : start + of_step]
        assert each["batch_cost"] == costs[last]
        assert each["slowest_over_mean"] == pytest.approx(max(step) / np.mean(step))


class Lengthening(Packing):
    """Some samples become longer than they were measured."""

    def postencode_sample(self, sample):
        return {**sample, "size": sample["size"] + sample["__key__"].endswith("7")}


def length(sample):
    return sample["size"]


def cut(sample, room):
    return {**sample, "size": room}


def lengthening(**settings):
    packs = replace(PACKS, encoded_length=length, **settings)
    return {"balance": None, "encoder": Lengthening, "pack": packs}


def test_a_sample_that_is_longer_than_planned_is_an_error_that_names_it(blend):
    message = r"planned length failed on sample '.*7'.*its length is \[\d+\].*were planned by"
    with run_of(blend, (1, 0), **lengthening()) as run, pytest.raises(SampleError, match=message):
        run.take(NUM_BATCHES)


@pytest.mark.slow
def test_samples_that_are_longer_than_planned_are_cut_or_dropped(blend, expected):
    with run_of(blend, (2, 1), **lengthening(if_longer=cut)) as run:
        assert run.take(NUM_BATCHES) == expected["default"]
    kept = [
        [[key for key in keys if not key.endswith("7")] for keys in packs]
        for packs, _ in expected["default"]
    ]
    with run_of(blend, (2, 0), **lengthening(if_longer="drop")) as run:
        batches = [packs for packs, _ in run.take(NUM_BATCHES)]
        batch = next(run.ranks[0])
        again = run.loaders[0].restore_sample(batch["__restore_key__"])
        assert again["__key__"] == batch["__key__"]
    assert batches == [[keys for keys in packs if keys] for packs in kept]


def test_a_cut_sample_that_is_still_longer_is_an_error(blend):
    settings = lengthening(if_longer=lambda sample, room: sample)
    with run_of(blend, (1, 0), **settings) as run, pytest.raises(SampleError, match="if_longer"):
        run.take(NUM_BATCHES)


@pytest.mark.slow
def test_every_sample_of_a_pass_comes_once(tmp_path):
    make_texts(tmp_path, [50, 41], "s")
    for balance in BALANCES.values():
        with run_of(tmp_path, (2, 0), balance, repeat=False) as run:
            batches = [(batch["__key__"], ()) for rank in run.ranks for batch in rank]
        assert sorted(keys_of(batches)) == sorted(f"s{number}" for number in range(91))


def test_batches_and_samples_can_be_restored_by_their_keys(blend):
    with run_of(blend, (1, 0), BALANCES["pools"]) as run:
        for _ in range(10):
            batch = next(run.ranks[0])
            key = batch["__restore_key__"]
            assert run.loaders[0].restore_sample(key)["__key__"] == batch["__key__"]
            first = key[1][0][1][0]
            sample = run.loaders[0].restore_sample(first)
            assert sample["__key__"] == batch["__key__"][0][0]


@pytest.mark.slow
def test_another_mix_begins_with_a_window_and_is_the_same_on_any_topology(blend):
    path = blend.parent / "changed.yaml"
    write_blend(path, large=1, small=3)
    with run_of(blend, (2, 0), BALANCES["window"]) as run:
        run.take(10)
        state, goes_on = run.save(), run.take(14)
    runs, restore = [], {"strict": ["mix"]}
    for topology in [(1, 0), (4, 1)]:
        with run_of(
            path, topology, BALANCES["window"], start=10, state=state, restore=restore
        ) as run:
            runs.append(run.take(90))
    assert runs[0] == runs[1]
    assert runs[0][:14] == goes_on
    shares = [
        np.mean([key.startswith("m") for key in keys_of(batches)])
        for batches in (goes_on, runs[0][40:])
    ]
    assert shares[0] < 0.4 < 0.6 < shares[1]


def test_a_sample_longer_than_the_context_is_named_or_left_out(blend):
    with pytest.raises(ConfigError, match=r"sample '[lm]\d+' of .*has the length .*leave_out"):
        run_of(blend, (1, 0), None, pack=PlannedPacks(length="txt:bytes", context=400)).take(9)
    short = PlannedPacks(length="txt:bytes", context=400, too_long="leave_out")
    with run_of(blend, (2, 0), None, pack=short) as run:
        assert max(max(sizes) for _, sizes in run.take(50)) <= 400


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pack": "tokens"}, "imported from energon"),
        ({"pack": PlannedPacks(length="tokens", context=9)}, "no measure 'tokens'"),
        ({"packing_buffer_size": 8}, "drop one of the two"),
        ({"balance": Balance(cost="bytes")}, "number of steps, such as 64"),
        ({"balance": Balance(cost="bytes", window=4, skipped="repeat")}, "as many as fit"),
        ({"pack": None, "batch_cost": 9, "balance": BALANCES["window"]}, "exclude each other"),
        ({"pack": None, "batch_cost": 9, "batch_size": None}, "which gives the cost of a sample"),
        ({"encoder": Encoder}, "does not override pack_selected_samples"),
    ],
)
def test_settings_that_cannot_be_packed_are_refused(blend, settings, message):
    with pytest.raises(ConfigError, match=message):
        run_of(blend, (1, 0), settings.pop("balance", None), **settings)


def test_states_of_other_packs_are_refused(blend):
    with run_of(blend, (2, 0), None) as run:
        run.take(5)
        state = run.save()
    for pack in (None, PlannedPacks(length="txt:bytes", context=CONTEXT + 1)):
        with pytest.raises(StateError, match="balance"):
            run_of(blend, (2, 0), None, state=state, pack=pack, encoder=Packing)


@pytest.mark.slow
def test_other_lanes_keep_epochs_exact_but_for_open_windows(tmp_path):
    make_texts(tmp_path, [50, 40], "s")
    pack = PlannedPacks(length="txt:bytes", context=4000)
    with run_of(tmp_path, (2, 0), BALANCES["window"], pack=pack) as run:
        drawn = keys_of(run.take(30))
        state = run.save()
    with pytest.raises(ConfigError, match="samples may be repeated and up to"):
        run_of(tmp_path, (3, 0), BALANCES["window"], pack=pack, state=state, lanes=None)
    restore = {"relane": True}
    with run_of(
        tmp_path, (3, 0), BALANCES["window"], pack=pack, state=state, restore=restore, lanes=None
    ) as run:
        drawn += keys_of(run.take(150))
        assert run.save()[0]["fingerprint"]["micro_batches"] == 3
    counts = np.array([drawn.count(f"s{number}") for number in range(90)])
    of_window = state[0]["fingerprint"]["window_rows"] * LANES
    assert counts.max() - counts.min() <= 2 + 2 * of_window // 90


@pytest.mark.slow
@pytest.mark.parametrize(("padded", "speeds"), [(False, [1]), (True, [1]), (False, [1, 0.5])])
def test_batches_have_as_many_samples_as_their_cost_admits(blend, padded, speeds):
    balance = Balance(cost="txt:bytes", window=4, padded=padded, speeds=speeds)
    settings = {"encoder": Encoder, "pack": None, "batch_size": None, "batch_cost": CONTEXT}
    with run_of(blend, (1, 0), balance, **settings) as run:
        expected = run.take(NUM_BATCHES)
    costs = [max(sizes) * len(sizes) if padded else sum(sizes) for _, sizes in expected]
    times = np.array(costs) / np.resize(speeds, NUM_BATCHES)
    assert max(times) <= CONTEXT
    assert np.mean(times) > 0.7 * CONTEXT
    assert len({len(sizes) for _, sizes in expected}) > 3
    with run_of(blend, (2, 1), balance, **settings) as run:
        assert run.take(30) == expected[:30]
        state = run.save()
    # On one rank again: each rank and each worker computes all windows.
    with run_of(blend, (1, 0), balance, start=30, state=state, lanes=None, **settings) as run:
        assert run.take(40) == expected[30:70]


def test_data_of_which_no_sample_fits_ends_the_run(blend):
    packs = PlannedPacks(length="txt:bytes", context=1, too_long="leave_out")
    with (
        run_of(blend, (1, 0), None, pack=packs) as run,
        pytest.raises(EmptyDatasetError, match="longer than the context"),
    ):
        run.take(1)
