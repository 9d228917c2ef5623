"""One global order of a balanced run, whoever loads, and after any restore."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from energon import (
    Balance,
    ConfigError,
    DefaultTaskEncoder,
    FormatError,
    SkipSample,
    StateError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
)
from energon.inspect.planned_run import find_key, list_step
from energon.inspect.saved_run import open_saved_run
from energon.inspect.saved_state import change_mix, skip_steps
from energon.loader.state_files import read_states
from tests.datasets import write_shard
from tests.effort import mixed

LANES = 8
BATCH_SIZE = 3
NUM_BATCHES = 96
TOPOLOGIES = [(1, 0), (1, 2), (1, 3), (2, 1), (4, 2), (8, 0)]
BALANCES = {
    "step": Balance(cost="txt:bytes"),
    "window": Balance(cost="txt:bytes", window=3, pool="all"),
    "pools": Balance(cost="txt:bytes", window=2, pool=2, micro_batches=4),
}


def make_texts(root, shard_counts, prefix, *, parts=("txt",)):
    """A crude dataset of texts, most of which are short."""
    sizes, number = np.random.default_rng(sum(shard_counts)), 0
    for shard, count in enumerate(shard_counts):
        samples = []
        for _ in range(count):
            text = b"x" * int(sizes.lognormal(5, 1))
            samples.append((f"{prefix}{number}", dict.fromkeys(parts, text)))
            number += 1
        write_shard(root / f"{shard:03}.tar", samples)
    prepare_dataset(root, split_parts=["train:.*"], sample_type="CrudeWebdataset")


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    root = tmp_path_factory.mktemp("blend")
    make_texts(root / "large", [40, 25, 60], "l")
    make_texts(root / "small", [20, 17], "m")
    path = root / "blend.yaml"
    write_blend(path, large=3, small=1)
    return path


def write_blend(path, **weights):
    entries = "".join(f"      - {{path: {name}, weight: {w}}}\n" for name, w in weights.items())
    path.write_text(
        "__module__: megatron.energon\n"
        "__class__: MetadatasetV2\n"
        f"splits:\n  train:\n    blend:\n{entries}"
    )


class Encoder(DefaultTaskEncoder):
    def encode_sample(self, sample):
        return {
            "__key__": sample["__key__"],
            "__restore_key__": sample["__restore_key__"],
            "size": len(sample["txt"]),
        }


class Skipping(Encoder):
    def encode_sample(self, sample):
        if sample["__key__"].endswith("7"):
            raise SkipSample
        return super().encode_sample(sample)


class Run:
    """All ranks of a job, from the global batch `start` on."""

    def __init__(self, path, topology, balance, *, start=0, state=None, restore=None, **settings):
        world_size, num_workers = topology
        batch_size = settings.pop("batch_size", BATCH_SIZE)
        encoder, lanes = settings.pop("encoder", Encoder), settings.pop("lanes", LANES)
        self.loaders = []
        for rank in range(world_size):
            config = WorkerConfig(
                rank=rank,
                world_size=world_size,
                num_workers=num_workers,
                lanes=lanes,
                seed_offset=7,
            )
            dataset = get_train_dataset(
                path,
                worker_config=config,
                batch_size=batch_size,
                max_samples_per_sequence=4,
                task_encoder=encoder(),
                balance=balance,
                **settings,
            )
            self.loaders.append(get_savable_loader(dataset))
            if state is not None:
                saved = json.loads(json.dumps(state))
                self.loaders[-1].load_state_dict(saved, **(restore or {}))
        self.ranks = [iter(loader) for loader in self.loaders]
        self.at = start

    def take(self, count):
        """The keys and sizes of the next global batches."""
        batches = []
        for _ in range(count):
            batch = next(self.ranks[self.at % len(self.ranks)])
            batches.append((batch["__key__"], list(batch["size"])))
            self.at += 1
        return batches

    def save(self):
        return [loader.save_state_rank() for loader in self.loaders]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for loader in self.loaders:
            loader.close()


class Expected(dict):
    """The global batches of the run with each balance, made when a test asks for them."""

    def __init__(self, open_run, balances):
        self.open_run, self.balances = open_run, balances

    def __missing__(self, name):
        with self.open_run(self.balances[name]) as run:
            self[name] = run.take(NUM_BATCHES)
        return self[name]


@pytest.fixture(scope="module")
def expected(blend):
    return Expected(partial(Run, blend, (1, 0)), {**BALANCES, "unbalanced": None})


def keys_of(batches):
    return sorted(key for keys, _ in batches for key in keys)


@pytest.mark.slow
def test_each_step_has_the_samples_that_it_has_without_balancing(expected):
    for start in range(0, NUM_BATCHES, LANES):
        step = slice(start, start + LANES)
        assert keys_of(expected["step"][step]) == keys_of(expected["unbalanced"][step])
    window = slice(0, 3 * LANES)
    assert keys_of(expected["window"][window]) == keys_of(expected["unbalanced"][window])


@pytest.mark.parametrize("name", BALANCES)
def test_batches_of_a_step_cost_nearly_the_same(expected, name):
    def time(batches, of_step):
        loads = np.array([sum(sizes) for _, sizes in batches]).reshape(-1, of_step)
        return loads.max(axis=1).sum() / loads.mean(axis=1).sum()

    of_step = 4 if name == "pools" else LANES
    assert time(expected[name], of_step) < time(expected["unbalanced"], of_step) - 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("name", "topology"), mixed([*BALANCES], TOPOLOGIES[1:]))
def test_a_fresh_run_has_the_same_global_batches_on_any_topology(blend, expected, name, topology):
    with Run(blend, topology, BALANCES[name]) as run:
        assert run.take(NUM_BATCHES) == expected[name]


def resume_often(expected, open_run, times=6):
    """Check the batches of a run that is resumed elsewhere again and again; return a state."""
    choose = random.Random(4)
    state, at, topology = None, 0, (1, 0)
    for number in range(times):
        lanes = LANES if state is None else None
        with open_run(topology=topology, start=at, state=state, lanes=lanes) as run:
            step = 1 if number % 5 == 4 else choose.randint(1, len(expected) // times)
            assert run.take(step) == expected[at : at + step], (number, topology, at)
            at += step
            state = run.save()
        topology = choose.choice([other for other in TOPOLOGIES if other != topology])
    return state


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BALANCES)
def test_saving_anywhere_and_resuming_elsewhere_goes_on_exactly(blend, expected, name):
    resume_often(expected[name], partial(Run, blend, balance=BALANCES[name]))


@pytest.mark.slow
def test_a_run_without_given_lanes_keeps_its_micro_batches_on_other_ranks(blend):
    balance = Balance(cost="txt:bytes", pool=2)
    with Run(blend, (2, 1), balance, lanes=None) as run:
        run.take(10)
        state, rest = run.save(), run.take(40)
    assert state[0]["fingerprint"]["micro_batches"] == 2
    for topology in [(4, 2), (1, 0)]:
        with Run(blend, topology, balance, start=10, state=state, lanes=None) as run:
            assert run.take(40) == rest
            assert run.save()[0]["fingerprint"]["micro_batches"] == 2
    with pytest.raises(ConfigError, match="batches of 3 lanes, .* into pools of 2"):
        Run(blend, (3, 0), balance, lanes=None).take(1)


@pytest.mark.slow
def test_other_lanes_keep_epochs_exact_but_for_open_windows(tmp_path):
    make_texts(tmp_path, [50, 40], "s")
    balance = BALANCES["window"]
    with Run(tmp_path, (2, 0), balance) as run:
        drawn = keys_of(run.take(30))
        state = run.save()
    with pytest.raises(ConfigError, match="up to 22 samples may be repeated and up to 22 may be"):
        Run(tmp_path, (3, 0), balance, state=state, lanes=None)
    restore = {"relane": True}
    with Run(tmp_path, (3, 0), balance, state=state, restore=restore, lanes=None) as run:
        drawn += keys_of(run.take(27 * 24))  # nine windows of each lane
        assert run.save()[0]["fingerprint"]["micro_batches"] == 3
    counts = np.array([drawn.count(f"s{number}") for number in range(90)])
    epochs = counts.sum() // 90
    assert (np.clip(epochs - counts, 0, None) + np.clip(counts - epochs - 1, 0, None)).sum() <= 44


def test_samples_that_hooks_skip_make_their_batch_smaller_and_change_no_other(blend, expected):
    with Run(blend, (2, 0), BALANCES["window"], encoder=Skipping) as run:
        batches = run.take(NUM_BATCHES)
    kept = [[key for key in keys if not key.endswith("7")] for keys, _ in expected["window"]]
    assert [keys for keys, _ in batches] == kept


class Failing(Encoder):
    def encode_sample(self, sample):
        if sample["__key__"].endswith("7"):
            raise ValueError(sample["__key__"])
        return super().encode_sample(sample)


@pytest.mark.parametrize(("name", "encoder"), [("step", Skipping), ("pools", Failing)])
def test_samples_may_be_repeated_in_place_of_those_that_hooks_skip(blend, expected, name, encoder):
    balance = replace(BALANCES[name], skipped="repeat")
    open_run = partial(Run, blend, balance=balance, encoder=encoder)
    kept = [
        [sample for sample in zip(*batch, strict=True) if not sample[0].endswith("7")]
        for batch in expected[name]
    ]
    filled = [(samples * BATCH_SIZE)[:BATCH_SIZE] for samples in kept]
    batches = [tuple(map(list, zip(*samples, strict=True))) for samples in filled]
    at, state = 0, None
    for topology, count in {(2, 0): 7, (4, 0): 11, (1, 0): 30}.items():
        with open_run(topology=topology, start=at, state=state) as run:
            assert run.take(count) == batches[at : at + count]
            at, state = at + count, run.save()
    with open_run(topology=(1, 0)) as run:
        for keys, sizes in batches[:10]:
            again = run.loaders[0].restore_sample(next(run.ranks[0])["__restore_key__"])
            assert (again["__key__"], list(again["size"])) == (keys, sizes)
        stats = run.loaders[0].stats(flat=True)
    left = sum(map(len, kept[:10]))
    assert (stats["samples"], stats["repeated"]) == (left, 10 * BATCH_SIZE - left)


def test_a_restored_run_may_repeat_samples_that_it_skipped(blend, expected):
    with Run(blend, (1, 0), BALANCES["step"], encoder=Skipping) as run:
        run.take(10)
        state = run.save()
    repeating = replace(BALANCES["step"], skipped="repeat")
    with Run(blend, (2, 0), repeating, start=10, state=state, encoder=Skipping) as run:
        assert all(len(keys) == BATCH_SIZE for keys, _ in run.take(30))


def test_speeds_of_ranks_divide_the_cost_of_each_step_on_any_topology(blend, expected, tmp_path):
    speeds = np.array([1, 0.5, 0.5, 1])
    balance = Balance(cost="txt:bytes", window=3, pool=4, speeds=speeds)
    at, state, batches = 0, None, []
    for topology, count in {(4, 0): 7, (2, 0): 10, (1, 0): 31}.items():
        with Run(blend, topology, balance, start=at, state=state) as run:
            batches += run.take(count)
            at, state = at + count, run.save()
            stats, files = run.loaders[0].stats()["balance"], save_to(tmp_path / "state.json", run)
    assert keys_of(batches) == keys_of(expected["window"][:48])
    times = np.array([sum(sizes) for _, sizes in batches]) / np.resize(speeds, 48)
    assert stats["slowest_over_mean"] == pytest.approx(times[-8:].max() / times[-8:].mean())
    unequal = [sum(sizes) for _, sizes in expected["window"][:48]] / np.resize(speeds, 48)
    factors = [t.reshape(-1, 8).max(axis=1).sum() / t.sum() for t in (times, unequal)]
    assert factors[0] < factors[1] - 0.02
    with Run(blend, (4, 0), balance) as run:
        assert run.take(48) == batches
    planned = open_saved_run(read_states(files)).run
    assert [each.key for each in list_step(planned, 40)] == batches[40][0]
    with pytest.raises(StateError, match=r"balance.speeds: saved \[1.0, 0.5, 0.5, 1.0\], now noth"):
        Run(blend, (2, 0), replace(balance, speeds=[2, 2]), state=state)


@pytest.mark.slow
def test_every_sample_of_a_pass_comes_once(tmp_path):
    make_texts(tmp_path, [50, 41], "s")
    for balance in BALANCES.values():
        with Run(tmp_path, (2, 0), balance, repeat=False) as run:
            keys = [key for rank in run.ranks for batch in rank for key in batch["__key__"]]
        assert sorted(keys) == sorted(f"s{number}" for number in range(91))


def test_batches_can_be_restored_by_their_keys(blend):
    with Run(blend, (1, 0), BALANCES["pools"]) as run:
        batches = [next(run.ranks[0]) for _ in range(10)]
        for batch in batches:
            again = run.loaders[0].restore_sample(batch["__restore_key__"])
            assert again["__key__"] == batch["__key__"]


@pytest.mark.slow
def test_another_mix_begins_with_a_window_and_is_the_same_on_any_topology(blend, tmp_path):
    path = blend.parent / "changed.yaml"
    write_blend(path, large=1, small=3)
    balance = BALANCES["window"]
    with Run(blend, (2, 0), balance) as run:
        before = run.take(10)
        state, goes_on = run.save(), run.take(14)
    runs, restore = [], {"strict": ["mix"]}
    for topology in [(1, 0), (4, 1)]:
        with Run(path, topology, balance, start=10, state=state, restore=restore) as run:
            runs.append(run.take(62))
            again = run.save()
        with Run(path, (2, 2), balance, start=72, state=again) as run:
            runs[-1] += run.take(24)
    assert runs[0] == runs[1]
    assert runs[0][:14] == goes_on
    shares = [
        np.mean([key.startswith("m") for key in keys_of(batches)])
        for batches in (before + goes_on, runs[0][14:])
    ]
    assert shares[0] < 0.4 < 0.6 < shares[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"balance": Balance(cost="tokens")}, "no measure 'tokens'.*bytes, txt:bytes"),
        ({"balance": Balance(cost="jpg:bytes")}, "are 0, by 'jpg:bytes'"),
        ({"balance": Balance(cost="bytes"), "packing_buffer_size": 4}, "drop packing"),
        ({"balance": Balance(cost="bytes"), "blend_unit": "batch"}, "drop one of the two"),
        ({"balance": "bytes"}, "imported from energon"),
        ({"balance": Balance(cost=lambda m: m["bytes"][:1], name="one")}, "finite number for each"),
        ({"balance": Balance(cost="bytes", micro_batches=5)}, "lanes=5 or 10"),
    ],
)
def test_settings_that_cannot_be_balanced_are_refused(blend, settings, message):
    with pytest.raises(ConfigError, match=message):
        Run(blend, (1, 0), **settings)


def of_other_bytes(path):
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def longer(path):
    path.write_bytes(path.read_bytes() + bytes(1024))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("002.tar.parts", of_other_bytes, "checksum does not match"),
        ("002.tar", longer, "bytes, had .* when it was indexed"),
    ],
)
def test_no_rank_deals_samples_by_the_index_of_a_changed_shard(tmp_path, name, change, message):
    make_texts(tmp_path, [64, 40, 40], "s")
    balance = replace(BALANCES["window"], window=6)  # which has all samples
    with Run(tmp_path, (4, 0), balance) as run:
        change(tmp_path / name)
        for rank in run.ranks:
            with pytest.raises(FormatError, match=message):
                next(rank)


def test_states_of_other_costs_are_refused(blend):
    with Run(blend, (2, 0), BALANCES["step"]) as run:
        run.take(5)
        state = run.save()
    same = {"cost": "txt:bytes"}
    for balance in (None, Balance(**same, version=1), Balance(**same, window=2)):
        with pytest.raises(StateError, match="balance"):
            Run(blend, (2, 0), balance, state=state)
    with pytest.raises(StateError, match="steps of 8 micro-batches, now it is 4"):
        Run(blend, (2, 0), Balance(**same, micro_batches=4), state=state)


def save_to(file, run):
    """Write the state of a run of one rank."""
    file.write_text(json.dumps(run.loaders[0].state_dict()))
    return [file]


@pytest.mark.parametrize("name", BALANCES)
def test_the_steps_of_a_state_are_those_of_the_run(blend, expected, name, tmp_path):
    with Run(blend, (1, 0), BALANCES[name]) as run:
        run.take(10)
        files = save_to(tmp_path / "state.json", run)
    planned = open_saved_run(read_states(files)).run
    for step in (3, 40, NUM_BATCHES - 1):
        samples = list_step(planned, step)
        assert [each.key for each in samples] == expected[name][step][0]
        for found in find_key(planned, samples[0].key, batches=NUM_BATCHES):
            assert expected[name][found.moment.batch][0][found.moment.position] == found.key


def test_the_steps_of_a_run_with_a_cost_function_need_it(blend, tmp_path):
    with Run(blend, (1, 0), Balance(cost=double)) as run:
        run.take(10)
        files, batch = save_to(tmp_path / "state.json", run), run.take(1)[0]
    with pytest.raises(StateError, match=r"by the function 'double'.*--with MODULE:FUNCTION"):
        open_saved_run(read_states(files))
    step = list_step(open_saved_run(read_states(files), cost=double).run, 10)
    assert [each.key for each in step] == batch[0]


def test_new_weights_in_a_state_begin_with_a_window_as_those_of_a_restore(blend, tmp_path):
    balance, path = BALANCES["window"], blend.parent / "edited.yaml"
    with Run(blend, (1, 0), balance) as run:
        run.take(10)
        files = save_to(tmp_path / "state.json", run)
    state = json.loads(files[0].read_text())
    write_blend(path, large=1, small=3)
    weights = {"large/train": 1.0, "small/train": 3.0}
    edited = change_mix(read_states(files), weights=weights, positions={}).state
    with Run(path, (2, 0), balance, start=10, state=edited) as run:
        batches = run.take(60)
    with Run(path, (1, 0), balance, start=10, state=state, restore={"strict": ["mix"]}) as run:
        assert run.take(60) == batches


def test_skipped_steps_are_those_that_the_run_would_have_had(blend, expected, tmp_path):
    with Run(blend, (1, 0), BALANCES["window"]) as run:
        run.take(10)
        files = save_to(tmp_path / "state.json", run)
    edited = skip_steps(read_states(files), 30, world_size=1)
    with Run(blend, (1, 0), BALANCES["window"], start=40, state=edited.state) as run:
        assert run.take(20) == expected["window"][40:60]


def double(measures):
    return measures["bytes"] + 2 * measures["txt:bytes"]


def test_costs_are_a_function_of_measures(blend):
    with Run(blend, (1, 2), Balance(cost=double, version="v2")) as run:
        run.take(8)
        about = run.save()[0]["fingerprint"]["balance"]
    settings = {"version": "v2", "window": "step", "pool": None}
    assert about == {"cost": "double", "function": True, **settings}


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCES)
def test_statistics_have_the_cost_of_the_last_batch_and_of_its_step(blend, expected, name):
    of_step = 4 if name == "pools" else LANES
    with Run(blend, (2, 1), BALANCES[name]) as run:
        run.take(19)
        stats = [loader.stats()["balance"] for loader in run.loaders]
        flat = run.loaders[0].stats(flat=True)
    costs = [sum(sizes) for _, sizes in expected[name]]
    for each, last in zip(stats, (18, 17), strict=True):
        start = last // of_step * of_step
        step = costs[start : start + of_step]
        assert each["batch_cost"] == costs[last]
        assert each["mean_cost"] == pytest.approx(np.mean(step))
        assert each["slowest_over_mean"] == pytest.approx(max(step) / np.mean(step))
    assert flat["balance/batch_cost"] == costs[18]


def test_runs_that_are_not_balanced_have_no_costs(blend):
    with Run(blend, (1, 0), None) as run:
        run.take(2)
        assert "balance" not in run.loaders[0].stats()
