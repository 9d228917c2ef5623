"""What is planned is what a loader then delivers."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest

from energon import ConfigError, WorkerConfig, get_savable_loader, get_train_dataset
from energon.inspect.planned_run import describe_run, find_key, list_step, open_run, shared_samples
from energon.loader.state_files import read_states
from energon.prepare.jsonl import prepare_jsonl
from energon.task_encoder.train_plan import TrainSettings
from tests.commands import ok, run
from tests.datasets import make_crude
from tests.encoders import Keys, SkipsSome

DOCUMENT = """
splits:
  train:
    blend:
      - {path: a, weight: {0: 5, 150: 2, 300: ramp to 0}}
      - {path: b, weight: 2, max_epochs: 3}
      - weight: 3
        concat: [{path: c}, {path: a, subset: {range: [10, 25]}}]
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("plan")
    for name, sizes in (("a", [30, 20]), ("b", [17]), ("c", [25, 25])):
        make_crude(root / name, sizes, prefix=name)
    (root / "m.yaml").write_text(DOCUMENT)
    return root / "m.yaml"


def plan(path, **settings):
    """Plan the run whose batches `deliver` gives."""
    workers = WorkerConfig(rank=0, world_size=2, num_workers=2, seed_offset=3)
    return open_run(path, TrainSettings(batch_size=4, **settings), workers)


def deliver(path, rank, steps, **settings):
    config = WorkerConfig(rank=rank, world_size=2, num_workers=2, seed_offset=3)
    dataset = get_train_dataset(
        path, worker_config=config, batch_size=4, task_encoder=Keys(), **settings
    )
    with get_savable_loader(dataset, workers="thread") as loader:
        return list(islice(iter(loader), steps))


@pytest.mark.parametrize("settings", [{}, {"shuffle_buffer_size": 9}, {"blend_unit": "batch"}])
def test_steps_and_sightings_are_those_of_a_loader(path, settings):
    run = plan(path, **settings)
    delivered = [deliver(path, rank, 60, **settings) for rank in range(2)]
    for step in (0, 1, 17, 59):
        found = [[], []]
        for each in list_step(run, step):
            assert each.moment.step == step
            found[each.moment.rank].append(each.key)
        assert found == [batches[step] for batches in delivered]
    for key in ("a12", "b3", "c49"):
        seen = {
            (step, rank, position)
            for rank, batches in enumerate(delivered)
            for step, batch in enumerate(batches)
            for position, each in enumerate(batch)
            if each == key
        }
        found = find_key(run, key, batches=120)
        assert {(m.step, m.rank, m.position) for m in (each.moment for each in found)} == seen
        assert all(each.key == key for each in found)


def test_counts_are_those_of_a_loader(path):
    run = plan(path)
    about = describe_run(run, batches=120)
    assert json.loads(json.dumps(about)) == about
    delivered = Counter(
        key[0] for rank in range(2) for batch in deliver(path, rank, 60) for key in batch
    )
    leaves = about["leaves"]
    assert about["samples"] == 480
    assert about["steps"] == 60
    assert leaves["b/train"]["drawn"] == delivered["b"] == 51
    assert leaves["b/train"]["epochs"] == 3
    both = sum(leaves[name]["drawn"] for name in ("a/train", "a/train#2"))
    assert abs(both - delivered["a"]) <= 12
    assert abs(leaves["c/train"]["drawn"] - delivered["c"]) <= 12
    assert about["rank"]["samples"] == 240
    shares = about["shares"]
    assert shares["a/train"][0] == pytest.approx(0.5, abs=0.1)
    assert shares["a/train"][-1] == 0
    last = leaves["b/train"]["used_up_with_batch"]
    assert any(each.leaf == "b/train" for each in list_step(run, last // 2))
    assert not any(each.leaf == "b/train" for each in list_step(run, last // 2 + 1))


def test_no_share_is_more_than_a_batch_or_negative(tmp_path):
    for name, size in (("a", 8), ("b", 8)):
        make_crude(tmp_path / name, [size], prefix=name)
    (tmp_path / "m.yaml").write_text(
        "splits: {train: {blend_epochized: [{path: a, repetitions: 2}, {path: b}]}}"
    )
    run = open_run(
        tmp_path / "m.yaml",
        TrainSettings(batch_size=1, shuffle_buffer_size=4),
        WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    shares = describe_run(run, batches=24)["shares"]
    assert all(0 <= share <= 1 for name in run.names for share in shares[name])
    assert all(
        sum(pair) == pytest.approx(1) for pair in zip(*map(shares.get, run.names), strict=True)
    )


def test_knows_what_is_read_together_and_how_well_it_mixes(path):
    coarse = describe_run(plan(path), batches=100)
    fine = describe_run(plan(path, max_samples_per_sequence=1), batches=100)
    for name, leaf in coarse["leaves"].items():
        assert leaf["bytes"] >= leaf["drawn"] * 512
        assert leaf["requests"] <= leaf["drawn"]
        assert fine["leaves"][name]["slice_samples"] == 1
        assert leaf["shuffle"] is None or 0.5 < leaf["shuffle"]["neighbor_distance"] < 1.5


def test_names_leaves_that_have_samples_in_common(path):
    run = plan(path)
    assert shared_samples(run) == [{"leaves": ["a/train", "a/train#2"], "samples": 15}]


def test_lines_of_jsonl_files_are_counted_that_datasets_have_in_common(tmp_path):
    lines = tmp_path / "x.jsonl"
    lines.write_text("".join(f'{{"n": {n}}}\n' for n in range(40)))
    prepare_jsonl(lines, split_ratio={"train": 3, "val": 1})
    (tmp_path / "y.jsonl").write_bytes(lines.read_bytes())
    prepare_jsonl(tmp_path / "y.jsonl", split_ratio={"train": 1})
    parts = [
        {"path": str(lines)},
        {"path": str(lines), "subset": {"range": [10, 25]}},
        {"path": str(lines), "split_part": "val"},
        {"path": str(tmp_path / "y.jsonl")},
    ]
    run = plan({"splits": {"train": {"blend": parts}}})
    assert shared_samples(run) == [{"leaves": run.names[:2], "samples": 15}]


def test_rows_of_joins_are_counted_that_datasets_have_in_common(path):
    sides = [{"path": str(path.parent / "a")}, {"path": str(path.parent / "a")}]
    joiner = {"__module__": "energon", "__class__": "Sample"}
    parts = [
        {"join": sides, "joiner": joiner},
        {"join": sides, "joiner": joiner, "subset": {"range": [10, 25]}},
    ]
    run = plan({"splits": {"train": {"blend": parts}}})
    assert shared_samples(run) == [{"leaves": run.names, "samples": 15}]


def test_a_run_that_ends_is_not_planned_beyond_its_end(path):
    document = {"splits": {"train": {"blend": [{"path": str(path.parent / "a"), "max_epochs": 1}]}}}
    run = plan(document)
    about = describe_run(run, batches=10**6)
    assert (about["samples"], about["batches"]) == (50, run.num_batches)
    assert about["ends_after_batches"] == run.num_batches == 14
    with pytest.raises(ConfigError, match="there is no step 7: the run ends before it"):
        list_step(run, 7)
    assert len(find_key(run, "a3", batches=10**6)) == 1


def test_far_moments_are_found_at_once(path):
    run = plan(path)
    for each in list_step(run, 10**12):
        leaf = run.names.index(each.leaf)
        assert run.plan.find(leaf, each.epoch, each.ordinal) == (each.lane, each.row)
        assert each.moment.step == 10**12


def test_an_unknown_key_is_an_error(path):
    with pytest.raises(ConfigError, match="a/train, b/train.* has a sample 'x1'"):
        find_key(plan(path), "x1", batches=9)


def test_excluded_samples_and_those_outside_of_a_subset_are_never_seen(tmp_path):
    root = make_crude(tmp_path / "d", [6])
    split = root / ".nv-meta/split.yaml"
    split.write_text("split_parts: {train: [000.tar]}\nexclude: [000.tar/s2]\n")
    document = {"splits": {"train": {"path": str(root), "subset": {"range": [0, 4]}}}}
    run = open_run(
        document, TrainSettings(batch_size=1), WorkerConfig(rank=0, world_size=1, num_workers=0)
    )
    assert [len(find_key(run, f"s{n}", batches=30)) for n in (0, 1, 3)] == [10, 10, 10]
    for key in ("s2", "s4"):
        with pytest.raises(ConfigError, match="has a sample"):
            find_key(run, key, batches=30)


@pytest.fixture(scope="module")
def saved(path, tmp_path_factory):
    """The states of both ranks after 7 steps, and the keys of the steps before and after."""
    folder = tmp_path_factory.mktemp("states")
    steps = [[], []]
    for rank in (0, 1):
        config = WorkerConfig(rank=rank, world_size=2, num_workers=2, seed_offset=3)
        dataset = get_train_dataset(
            path, worker_config=config, batch_size=4, task_encoder=Keys(), shuffle_buffer_size=8
        )
        with get_savable_loader(dataset) as loader:
            batches = iter(loader)
            steps[rank] = [next(batches) for _ in range(7)]
            (folder / f"rank_{rank}.json").write_text(json.dumps(loader.state_dict()))
            steps[rank] += [next(batches) for _ in range(5)]
    return folder, [one + other for one, other in zip(*steps, strict=True)]


def test_a_state_knows_all_of_its_run(path, saved, tmp_path, monkeypatch):
    folder, steps = saved
    monkeypatch.chdir(tmp_path)
    for step in (0, 6, 7, 11):
        done = ok("plan", "--state", folder, "--step", step, "--json")
        assert [row["key"] for row in json.loads(done.stdout)] == steps[step]
    assert "saved before step 7" in done.stderr


def test_a_state_that_says_less_needs_the_path_and_the_number_of_ranks(path, saved, tmp_path):
    folder, steps = saved
    state = read_states([folder])
    del state["fingerprint"]["run"]
    older = tmp_path / "older.json"
    older.write_text(json.dumps(state))
    assert "pass the PATH" in run("plan", "--state", older, "--step", 3).output
    assert "--world-size" in run("plan", path, "--state", older, "--step", 3).output
    done = run("plan", path, "--state", older, "--step", 3, "--world-size", 2, "--json")
    assert [row["key"] for row in json.loads(done.stdout)] == steps[3]
    done = run("plan", path, "--state", older, "--world-size", 3, "--step", 3)
    assert "14 batches" in done.output
    done = run("plan", path, "--state", older, "--world-size", 5, "--step", 3)
    assert "can't be divided evenly" in done.output


def test_a_state_says_what_the_run_left_out(tmp_path):
    root = make_crude(tmp_path / "a", [30, 20])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"shard": "000.tar", "key": "s3"}\n')
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(
        root, worker_config=config, batch_size=4, task_encoder=Keys(), exclude_from=bad
    )
    with get_savable_loader(dataset) as loader:
        batches = iter(loader)
        given = [next(batches) for _ in range(9)]
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    steps = [
        [row["key"] for row in json.loads(run(*arguments).stdout)]
        for arguments in (
            ("plan", "--state", tmp_path / "state.json", "--step", n, "--json") for n in range(9)
        )
    ]
    assert steps == given
    assert {key for batch in given for key in batch} & {"s2", "s3"} == {"s2"}
    shown = run("preview", "--state", tmp_path / "state.json", "--step", 5, "--json")
    assert [sample["key"] for sample in json.loads(shown.stdout)] == given[5]


def test_one_state_of_a_rank_says_how_many_ranks_there_were(path, saved):
    folder, steps = saved
    one = folder / "rank_1.json"
    done = run("plan", path, "--state", one, "--step", "3", "--json")
    assert [row["key"] for row in json.loads(done.stdout)] == steps[3]
    assert "2 ranks" in run("plan", path, "--state", one, "--world-size", 3, "--step", 1).output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--world-size", "3"], "says that the run had 2 ranks, not 3"),
        (["--world-size", "2", "--batch-size", "8"], "--batch-size"),
        (["--world-size", "2", "--seed", "3"], "--seed"),
        (["--world-size", "2", "--lanes", "24"], "--lanes"),
    ],
)
def test_no_wrong_setting_goes_with_a_state(path, saved, options, said):
    done = run("plan", path, "--state", saved[0], "--step", 1, *options)
    assert done.exit_code == 2
    assert said in done.output


def test_other_data_than_those_of_the_state_are_refused(path, saved, tmp_path):
    folder, _ = saved
    make_crude(tmp_path / "a", [50], prefix="a")
    done = run("plan", tmp_path / "a", "--state", folder, "--world-size", 2, "--step", 1)
    assert "which is not in split 'train'" in done.output
    for name, sizes in (("a", [30, 20]), ("b", [18]), ("c", [25, 25])):
        make_crude(tmp_path / name, sizes, prefix=name)
    (tmp_path / "m.yaml").write_text(DOCUMENT)
    done = run("plan", tmp_path / "m.yaml", "--state", folder, "--world-size", 2, "--step", 1)
    assert done.exit_code == 1
    assert "b/train has changed since the run read it: samples was 17, now 18" in done.output


def test_says_that_hooks_have_skipped_samples(path, tmp_path):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=3)
    dataset = get_train_dataset(path, worker_config=config, batch_size=4, task_encoder=SkipsSome())
    with get_savable_loader(dataset) as loader:
        for _ in zip(range(72), loader, strict=False):
            pass
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    done = ok("plan", path, "--state", tmp_path / "state.json", "--world-size", 1, "--step", 70)
    assert "hooks had skipped" in done.stderr


def test_steps_go_on_with_other_lanes(path, saved, tmp_path):
    folder, _ = saved
    done = ok(
        *("checkpoint", "redist", "--new-world-size", 5, "--lanes", 10, folder, tmp_path / "five")
    )
    states = [json.loads(file.read_text()) for file in sorted((tmp_path / "five").iterdir())]
    step = sum(lane["batches"] for each in states for lane in each["positions"].values()) // 5
    expected = []
    for rank in range(5):
        config = WorkerConfig(rank=rank, world_size=5, num_workers=0, seed_offset=3)
        dataset = get_train_dataset(
            path, worker_config=config, batch_size=4, task_encoder=Keys(), shuffle_buffer_size=8
        )
        with get_savable_loader(dataset) as loader:
            loader.load_state_dict(states)
            expected += next(iter(loader))
    arguments = ("plan", path, "--state", tmp_path / "five", "--world-size", 5, "--json")
    done = run(*arguments, "--step", step)
    assert [row["key"] for row in json.loads(done.stdout)] == expected
    assert (
        "the run had a different number of lanes before"
        in run(*arguments, "--step", step - 1).output
    )
