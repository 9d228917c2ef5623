"""Edited states continue as they say, compared with the run that was not edited."""

from __future__ import annotations

import json

import pytest

from energon import (
    DefaultTaskEncoder,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from tests.commands import run
from tests.datasets import make_crude

RANKS = 2


class Keys(DefaultTaskEncoder):
    decoder = None

    def batch(self, samples):
        return [sample["__key__"] for sample in samples]


class SkipsSome(Keys):
    def encode_sample(self, sample):
        if sample["__key__"].endswith("1"):
            raise SkipSample
        return sample


class Groups(Keys):
    def batch_group_criterion(self, sample):
        return len(sample["__key__"]), 2


@pytest.fixture
def blend(tmp_path):
    make_crude(tmp_path / "a", [30], prefix="a")
    make_crude(tmp_path / "b", [20, 20], prefix="b")
    path = tmp_path / "blend.yaml"
    path.write_text("splits: {train: {blend: [{path: b, weight: 3}, {path: a, weight: 1}]}}\n")
    return path


def loader(path, rank, *, encoder=None, **settings):
    config = WorkerConfig(rank=rank, world_size=RANKS, num_workers=0, seed_offset=5)
    settings = {"batch_size": 4, "shuffle_buffer_size": 12, **settings}
    encoder = encoder or Keys()
    return get_savable_loader(
        get_train_dataset(path, worker_config=config, task_encoder=encoder, **settings)
    )


def train(path, folder, steps, *, more=0, **settings):
    """Write the states of all ranks after some steps; return the batches of these and more."""
    folder.mkdir(exist_ok=True)
    found = []
    for rank in range(RANKS):
        with loader(path, rank, **settings) as batches:
            given = iter(batches)
            found.append([next(given) for _ in range(steps)])
            (folder / f"rank_{rank}.json").write_text(json.dumps(batches.save_state_rank()))
            found[rank] += [next(given) for _ in range(more)]
    return found


def resume(path, folder, steps, **settings):
    states = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    found = []
    for rank in range(RANKS):
        with loader(path, rank, **settings) as batches:
            batches.load_state_dict(states)
            given = iter(batches)
            found.append([next(given) for _ in range(steps)])
    return found


def edit(folder, target, *options):
    return run("checkpoint", "edit", "--world-size", RANKS, *options, folder, target)


@pytest.mark.parametrize(("steps", "skipped"), [(5, 3), (3, 40), (20, 1)])
def test_skipped_steps_are_those_that_would_have_come(blend, tmp_path, steps, skipped):
    expected = train(blend, tmp_path / "state", steps, more=skipped + 6)
    done = edit(tmp_path / "state", tmp_path / "edited", "--skip-steps", skipped)
    assert done.exit_code == 0, done.output
    assert f"step {steps} becomes step {steps + skipped}" in done.output
    assert f"{RANKS * skipped} batches are left out: b/train" in done.output
    after = resume(blend, tmp_path / "edited", 6)
    assert after == [batches[steps + skipped :] for batches in expected]


def test_what_cannot_be_skipped_exactly_is_refused(blend, tmp_path):
    train(blend, tmp_path / "skips", 30, encoder=SkipsSome(), shuffle_buffer_size=None)
    done = edit(tmp_path / "skips", tmp_path / "edited", "--skip-steps", 1)
    assert done.exit_code == 1
    assert "hooks have skipped samples" in done.output
    settings = {"encoder": Groups(), "batch_size": None, "shuffle_buffer_size": None}
    train(blend, tmp_path / "groups", 9, **settings)
    done = edit(tmp_path / "groups", tmp_path / "edited", "--skip-steps", 1)
    assert done.exit_code == 1
    train(blend, tmp_path / "new", 0)
    done = edit(tmp_path / "new", tmp_path / "edited", "--skip-steps", 1)
    assert "the run has not begun" in done.output
    assert not (tmp_path / "edited").exists()


def test_steps_behind_the_end_of_the_data_are_refused(tmp_path):
    root = make_crude(tmp_path / "a", [400])
    train(root, tmp_path / "state", 3, repeat=False)
    done = edit(tmp_path / "state", tmp_path / "edited", "--skip-steps", 49)
    assert done.exit_code == 1
    assert "the data end" in done.output
    done = edit(tmp_path / "state", tmp_path / "edited", "--skip-steps", 20)
    assert done.exit_code == 0, done.output


def test_tells_where_in_each_dataset_a_run_is(blend, tmp_path):
    train(blend, tmp_path / "state", 22, shuffle_buffer_size=None)
    output = run("checkpoint", "info", tmp_path / "state").output
    assert "b/train: 3 epochs and 12 of 40 samples; 132 in all" in output
    assert "a/train: 1 epoch and 14 of 30 samples; 44 in all" in output


def test_tells_what_differs_between_states(blend, tmp_path):
    train(blend, tmp_path / "one", 4)
    train(blend, tmp_path / "two", 8)
    same = run("checkpoint", "diff", tmp_path / "one", tmp_path / "one")
    assert "the same position of the same run" in same.output
    output = run("checkpoint", "diff", tmp_path / "one", tmp_path / "two").output
    assert "batches: 8 batches more" in output
    assert "b/train: 24 samples further" in output
    train(blend, tmp_path / "three", 4, batch_size=2)
    done = run("checkpoint", "diff", tmp_path / "one", tmp_path / "three", "--json")
    assert "batch_size: 4 became 2" in json.loads(done.stdout)["differences"]
