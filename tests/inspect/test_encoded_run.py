"""Commands that run the hooks of a saved run, compared with the run itself."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from energon import (
    DefaultTaskEncoder,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from tests.commands import ok, run
from tests.datasets import make_crude

RANKS = 2
STEPS = 6
MORE = 9


class Plain(DefaultTaskEncoder):
    decoder = None


class SkipsSome(Plain):
    def encode_sample(self, sample):
        if sample["__key__"].endswith(("1", "6")):
            raise SkipSample
        return sample


class Packs(Plain):
    def select_samples_to_pack(self, samples):
        sizes = [1, 3, 2, 1]
        groups = []
        while samples:
            size = sizes[len(groups) % len(sizes)]
            groups.append(samples[:size])
            samples = samples[size:]
        return groups

    def pack_selected_samples(self, samples):
        return {
            "__key__": ",".join(each["__key__"] for each in samples),
            "__restore_key__": (),
            "text": [each["txt"] for each in samples],
        }


class Lists(SkipsSome):
    def batch(self, samples):
        return [sample["__key__"] for sample in samples]


SETTINGS = {SkipsSome: {}, Packs: {"packing_buffer_size": 8}, Lists: {}}


def keys_of(batch):
    keys = batch if isinstance(batch, list) else batch["__key__"]
    return [key for each in keys for key in each.split(",")]


def loaders(path, encoder):
    for rank in range(RANKS):
        config = WorkerConfig(rank=rank, world_size=RANKS, num_workers=0, seed_offset=5)
        yield get_savable_loader(
            get_train_dataset(
                path,
                worker_config=config,
                batch_size=3,
                task_encoder=encoder(),
                **SETTINGS[encoder],
            )
        )


def take(loader, steps):
    return [keys_of(batch) for batch in islice(loader, steps)]


def train(path, folder, encoder):
    """Write the states of all ranks after some steps; return the keys of each rank's batches."""
    folder.mkdir()
    batches = []
    for rank, loader in enumerate(loaders(path, encoder)):
        batches.append(take(loader, STEPS))
        (folder / f"rank_{rank}.json").write_text(json.dumps(loader.save_state_rank()))
        batches[-1] += take(loader, MORE)
    return batches


def resume(path, folder, encoder, steps):
    states = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    batches = []
    for loader in loaders(path, encoder):
        loader.restore_state_global(states)
        batches.append(take(loader, steps))
    return batches


@pytest.fixture
def blend(tmp_path):
    make_crude(tmp_path / "a", [30], prefix="a")
    make_crude(tmp_path / "b", [20, 20], prefix="b")
    path = tmp_path / "blend.yaml"
    path.write_text("splits: {train: {blend: [{path: b, weight: 3}, {path: a, weight: 1}]}}\n")
    return path


def named(encoder):
    return ("--task-encoder", f"{__name__}:{encoder.__name__}")


@pytest.mark.parametrize("encoder", [SkipsSome, Packs])
def test_a_plan_lists_the_samples_of_steps_after_the_hooks(blend, tmp_path, encoder):
    batches = train(blend, tmp_path / "state", encoder)
    for step in (0, 1, STEPS - 1, STEPS, STEPS + 1, STEPS + MORE - 1):
        options = ("--step", step, "--json", *named(encoder))
        done = ok("plan", "--state", tmp_path / "state", *options)
        shown = json.loads(done.stdout)
        assert [each["key"] for each in shown] == [k for rank in batches for k in rank[step]]
        assert {each["rank"] for each in shown} == {0, 1}
        assert {each["step"] for each in shown} == {step}


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [SkipsSome, Packs])
def test_a_plan_finds_samples_after_the_hooks(blend, tmp_path, encoder):
    batches = train(blend, tmp_path / "state", encoder)
    seen = [
        (step, rank, batches[rank][step].index(key), key)
        for step in range(STEPS, STEPS + MORE)
        for rank in range(RANKS)
        for key in batches[rank][step]
    ]
    for key in (seen[0][3], seen[len(seen) // 2][3], seen[-1][3]):
        expected = [each[:3] for each in seen if each[3] == key]
        for options, places in (((), expected[:1]), (("--batches", MORE * RANKS), expected)):
            done = ok(
                *("plan", "--state", tmp_path / "state", "--key", key, "--json", *options),
                *named(encoder),
            )
            shown = json.loads(done.stdout)
            assert [(e["step"], e["rank"], e["position"]) for e in shown] == places


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [SkipsSome, Packs, Lists])
def test_skipped_steps_are_those_of_the_hooks(blend, tmp_path, encoder):
    batches = train(blend, tmp_path / "state", encoder)
    edit = ("checkpoint", "edit", "--skip-steps", 4, tmp_path / "state")
    refused = run(*edit, tmp_path / "refused")
    assert refused.exit_code == 1
    assert "pass the --task-encoder of the run" in " ".join(refused.output.split())
    done = ok(*edit, tmp_path / "later", *named(encoder))
    assert f"step {STEPS} becomes step {STEPS + 4}" in done.output
    after = resume(blend, tmp_path / "later", encoder, MORE - 4)
    assert after == [rank[STEPS + 4 :] for rank in batches]


def test_without_the_encoder_commands_ask_for_it(blend, tmp_path):
    train(blend, tmp_path / "packs", Packs)
    train(blend, tmp_path / "skips", SkipsSome)
    done = run("plan", "--state", tmp_path / "packs", "--step", 7)
    assert done.exit_code == 1
    assert "pass the --task-encoder of the run" in done.output
    done = run("plan", "--state", tmp_path / "skips", "--step", 7)
    assert done.exit_code == 0
    assert "Pass the --task-encoder of the run" in done.stderr


def test_batches_without_keys_and_options_without_effect_are_refused(blend, tmp_path):
    train(blend, tmp_path / "state", Lists)
    plan = ("plan", "--state", tmp_path / "state")
    done = run(*plan, "--step", 7, *named(Lists))
    assert done.exit_code == 2
    assert "the batches of Lists carry no __restore_key__" in done.output
    assert "has a sample 'c3'" in run(*plan, "--key", "c3", *named(Lists)).output
    for arguments, said in (
        ((*plan, *named(Lists)), "requires --key or --step"),
        (("plan", blend, "--step", 1, *named(Lists)), "require --state"),
        (
            ("checkpoint", "edit", "--leave-out", "b3", tmp_path / "state", tmp_path / "x"),
            "requires --skip-steps",
        ),
    ):
        more = named(Lists) if arguments[0] == "checkpoint" else ()
        done = run(*arguments, *more)
        assert done.exit_code == 2
        assert said in done.output
