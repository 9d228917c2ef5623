"""Edited states continue as they say, compared with the run that was not edited."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import islice

import pytest

from energon import ConfigError, StateError, WorkerConfig, get_savable_loader, get_train_dataset
from energon.errors import EnergonError
from energon.inspect.planned_run import describe_run, find_key, list_step
from energon.inspect.saved_run import num_ranks, open_saved_run
from energon.inspect.saved_state import (
    change_mix,
    compare_states,
    describe_position,
    leave_out,
    skip_steps,
)
from energon.loader.relane import relane
from energon.loader.state import merge_states
from energon.loader.state_files import redistribute
from energon.prepare.dataset import prepare_dataset
from tests.commands import ok, run
from tests.datasets import CRUDE, jpeg, make_crude, write_shard
from tests.effort import some
from tests.encoders import Keys, SkipsSome
from tests.token_files import write_tokens

RANKS = 2


class KeysOfAll(Keys):
    def batch(self, samples):
        return [key_of_sample(sample) for sample in samples]


def key_of_sample(sample):
    return sample["__key__"] if isinstance(sample, dict) else sample.__key__


class Encodes(Keys):
    def encode_sample(self, sample):
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
    return run("checkpoint", "edit", *options, folder, target)


@pytest.mark.parametrize(("steps", "skipped"), [(5, 3), (3, 40), (20, 1)])
def test_skipped_steps_are_those_that_would_have_come(blend, tmp_path, steps, skipped):
    expected = train(blend, tmp_path / "state", steps, more=skipped + 6)
    done = edit(tmp_path / "state", tmp_path / "edited", "--skip-steps", skipped)
    assert done.exit_code == 0, done.output
    assert f"step {steps} becomes step {steps + skipped}" in done.output
    assert f"{RANKS * skipped} batches skipped: b/train" in done.output
    after = resume(blend, tmp_path / "edited", 6)
    assert after == [batches[steps + skipped :] for batches in expected]


def test_what_cannot_be_skipped_exactly_is_refused(blend, tmp_path):
    train(blend, tmp_path / "skips", 30, encoder=SkipsSome(), shuffle_buffer_size=None)
    done = edit(tmp_path / "skips", tmp_path / "edited", "--skip-steps", 1)
    assert done.exit_code == 1
    assert "hooks have skipped samples, or samples are packed" in done.output
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


def ordinals(batches, prefix):
    keys = [key for batch in batches for key in batch if key.startswith(prefix)]
    return [int(key[1:]) for key in keys]


def together(of_ranks):
    """Return the batches of all ranks, in the order of steps."""
    return [batch for step in zip(*of_ranks, strict=True) for batch in step]


def with_weights(path, b, a):
    entries = f"[{{path: b, weight: {b}}}, {{path: a, weight: {a}}}]"
    path.write_text(f"splits: {{train: {{blend: {entries}}}}}\n")


def test_changed_weights_hold_from_the_next_sample_on_with_exact_epochs(blend, tmp_path):
    before = train(blend, tmp_path / "state", 20, shuffle_buffer_size=None)
    done = edit(tmp_path / "state", tmp_path / "edited", "--weight", "a/train=9")
    assert done.exit_code == 0, done.output
    assert "a/train: weight 1 becomes 9" in done.output
    with pytest.raises(StateError, match=r"mix.*saved 9"):
        resume(blend, tmp_path / "edited", 1, shuffle_buffer_size=None)
    with_weights(blend, 3, 9)
    after = resume(blend, tmp_path / "edited", 40, shuffle_buffer_size=None)
    drawn = [len(ordinals(together(after), prefix)) for prefix in "ba"]
    assert drawn[0] / sum(drawn) == pytest.approx(3 / 12, abs=0.03)
    # Every epoch holds each sample once, that in which the weights changed too, as far as all
    # lanes have come.
    whole = ordinals([*together(before), *together(after)], "a")
    counts = Counter(whole)
    assert max(counts.values()) - min(counts.values()) <= 2
    again = resume_and_save(blend, tmp_path / "edited", 10, tmp_path / "later")
    assert again == [batches[:10] for batches in after]
    later = resume(blend, tmp_path / "later", 30, shuffle_buffer_size=None)
    assert later == [batches[10:] for batches in after]
    shown = run("plan", "--state", tmp_path / "later", "--step", 33, "--json")
    expected = [key for batch in together(after)[26:28] for key in batch]
    assert [row["key"] for row in json.loads(shown.stdout)] == expected


def resume_and_save(path, folder, steps, target):
    states = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    target.mkdir()
    found = []
    for rank in range(RANKS):
        with loader(path, rank, shuffle_buffer_size=None) as batches:
            batches.load_state_dict(states)
            given = iter(batches)
            found.append([next(given) for _ in range(steps)])
            (target / f"rank_{rank}.json").write_text(json.dumps(batches.state_dict()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("position", "window"), [(0, None), (7, None), (200, None), (40, 12)])
def test_a_dataset_goes_on_at_the_position_that_was_set(blend, tmp_path, position, window):
    settings = {"shuffle_buffer_size": window, "max_samples_per_sequence": 1}
    train(blend, tmp_path / "state", 20, **settings)
    expected = train(blend, tmp_path / "whole", 0, more=200, **settings)
    done = edit(tmp_path / "state", tmp_path / "edited", "--position", f"b/train={position}")
    assert done.exit_code == 0, done.output
    epoch, rest = divmod(position, 40)
    assert f"becomes epoch {epoch} after {rest} samples" in done.output
    after = ordinals(together(resume(blend, tmp_path / "edited", 60, **settings)), "b")
    # By then, all lanes have drawn all that is left of the epoch and two more.
    if window is None:
        left = Counter(range(40)) - Counter(drawn_before(expected, position))
        early = Counter(after[: 40 - rest + 40])
        assert not left - Counter(after[: 40 - rest + 30])
        assert max(early.values()) <= 3
    counts = Counter(after)
    assert max(counts.values()) - min(counts.values()) <= 3
    # Nothing but this dataset is changed.
    others = ordinals(together(resume(blend, tmp_path / "state", 60, **settings)), "a")
    same = ordinals(together(resume(blend, tmp_path / "edited", 60, **settings)), "a")
    assert same == others


def drawn_before(expected, position):
    """Return the samples of the epoch in progress among the first draws of all lanes."""
    return ordinals(together(expected), "b")[position // 40 * 40 : position]


def keys_of(batches):
    return Counter(key for batch in batches for key in batch)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", some([Keys, Encodes], 2))
def test_left_out_samples_come_in_no_epoch_and_all_others_as_before(blend, tmp_path, encoder):
    settings = {"shuffle_buffer_size": 12, "encoder": encoder()}
    expected = train(blend, tmp_path / "state", 12, more=40, **settings)
    keys = expected[0][14][:2]
    done = edit(tmp_path / "state", tmp_path / "edited", *with_option("--leave-out", keys))
    assert done.exit_code == 0, done.output
    assert f"{keys[0]} of " in done.output
    after = keys_of(together(resume(blend, tmp_path / "edited", 60, **settings)))
    assert not after.keys() & set(keys)
    before = keys_of(together([batches[12:] for batches in expected]))
    for key in keys:
        del before[key]
    assert before <= after
    info = run("checkpoint", "info", tmp_path / "edited").output
    assert "rows skipped after crashing workers or by an edit" in info


def with_option(name, values):
    return [text for value in values for text in (name, value)]


def test_an_edit_may_be_repeated_into_its_folder_and_another_may_not(blend, tmp_path):
    train(blend, tmp_path / "state", 3)
    for _ in range(2):
        done = edit(tmp_path / "state", tmp_path / "edited", "--skip-steps", 1)
        assert done.exit_code == 0, done.output
    before = {path.name: path.read_bytes() for path in (tmp_path / "edited").iterdir()}
    done = edit(tmp_path / "state", tmp_path / "edited", "--skip-steps", 2)
    assert done.exit_code == 1
    assert "is not empty" in done.output
    assert {path.name: path.read_bytes() for path in (tmp_path / "edited").iterdir()} == before


def test_edits_that_cannot_be_exact_or_make_no_sense_are_refused(blend, tmp_path):
    train(blend, tmp_path / "state", 3)
    for options, said in [
        (["--weight", "c/train=1"], "blends no dataset 'c/train', only b/train, a/train"),
        (["--weight", "a=1"], "did you mean"),
        (["--weight", "a/train=-1"], "is not NAME=NUMBER"),
        (["--weight", "a/train=0", "--weight", "b/train=0"], "all weights would be 0"),
        (["--position", "a/train=x"], "is not NAME=NUMBER"),
        (["--leave-out", "nobody"], "has a sample 'nobody'"),
        ([], "pass --skip-steps, --weight"),
    ]:
        done = edit(tmp_path / "state", tmp_path / "edited", *options)
        assert done.exit_code, done.output
        assert said in done.output
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    done = edit(tmp_path / "state", tmp_path / "full", "--skip-steps", 1)
    assert "is not empty" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["a", "b", "blend.yaml", "state", "full"]
    )
    lined = tmp_path / "line.yaml"
    lined.write_text("splits: {train: {blend_epochized: [{path: b}, {path: a}]}}\n")
    train(lined, tmp_path / "line", 3)
    done = edit(tmp_path / "line", tmp_path / "edited", "--position", "a/train=0")
    assert "does not blend its datasets by weight" in done.output


def test_tells_where_in_each_dataset_a_run_is(blend, tmp_path):
    train(blend, tmp_path / "state", 22, shuffle_buffer_size=None)
    output = run("checkpoint", "info", tmp_path / "state").output
    assert "b/train: epoch 3, after 12 of 40 samples; 132 in all" in output
    assert "a/train: epoch 1, after 14 of 30 samples; 44 in all" in output
    assert f"split train of {blend}, read by 2 ranks" in output


def test_tells_what_differs_between_states(blend, tmp_path):
    train(blend, tmp_path / "one", 4)
    train(blend, tmp_path / "two", 8)
    same = run("checkpoint", "diff", tmp_path / "one", tmp_path / "one")
    assert "at the same position of the same run" in same.output
    output = run("checkpoint", "diff", tmp_path / "one", tmp_path / "two").output
    assert "batches: 8 batches more" in output
    assert (
        "b/train: 24 samples further, epoch 0 after 24 samples became epoch 1 after 8 samples"
    ) in output
    train(blend, tmp_path / "three", 4, batch_size=2)
    done = run("checkpoint", "diff", tmp_path / "one", tmp_path / "three", "--json")
    assert "batch_size: 4 became 2" in json.loads(done.stdout)["differences"]


def test_tells_where_an_edited_run_continues(blend, tmp_path):
    train(blend, tmp_path / "state", 20)
    done = edit(tmp_path / "state", tmp_path / "edited", "--position", "b/train=80")
    assert done.exit_code == 0, done.output
    said = "then continues from epoch 2 after 0 samples, as edited"
    info = run("checkpoint", "info", tmp_path / "edited").output
    assert re.search(rf"b/train: epoch 2, after 39 of 40 samples; 119 in all; {said}\n", info)
    assert info.count(said) == 1
    differs = run("checkpoint", "diff", tmp_path / "state", tmp_path / "edited").output
    assert differs.splitlines() == ["changes of the mix: 0 became 1", f"b/train: {said}"]
    # Soon all lanes are there, and nothing is left to be said.
    settings = {"shuffle_buffer_size": None}
    train(blend, tmp_path / "plain", 20, **settings)
    edit(tmp_path / "plain", tmp_path / "there", "--position", "b/train=80")
    resume_and_save(blend, tmp_path / "there", 24, tmp_path / "later")
    assert "as edited" not in run("checkpoint", "info", tmp_path / "later").output


def give_other_lanes(folder, target):
    """Write the states of a run with 10 lanes in place of 24."""
    options = ("--new-world-size", RANKS, "--lanes", 10)
    done = ok("checkpoint", "redist", *options, folder, target)
    assert "24 lanes became 10 lanes" in done.output


@pytest.fixture(params=[0, 7], ids=["at once", "after steps"])
def changed_lanes(request, blend, tmp_path):
    """States of a run whose lanes have changed, some steps after that, and its batches before."""
    before = train(blend, tmp_path / "state", 20, shuffle_buffer_size=None)
    give_other_lanes(tmp_path / "state", tmp_path / "lanes")
    if not request.param:
        return tmp_path / "lanes", together(before)
    more = resume_and_save(blend, tmp_path / "lanes", request.param, tmp_path / "later")
    return tmp_path / "later", together(before) + together(more)


def test_steps_of_a_run_with_changed_lanes_are_skipped_exactly(blend, tmp_path, changed_lanes):
    state, _ = changed_lanes
    whole = resume(blend, state, 30, shuffle_buffer_size=None)
    done = edit(state, tmp_path / "edited", "--skip-steps", 13)
    if state.name == "lanes":
        assert done.exit_code == 1
        assert "was changed, and the run has not taken a step since" in done.output
        return
    assert done.exit_code == 0, done.output
    after = resume(blend, tmp_path / "edited", 17, shuffle_buffer_size=None)
    assert after == [batches[13:] for batches in whole]


@pytest.mark.slow
def test_samples_are_left_out_of_a_run_with_changed_lanes(blend, tmp_path, changed_lanes):
    state, _ = changed_lanes
    whole = resume(blend, state, 50, shuffle_buffer_size=None)
    keys = [whole[0][4][0], whole[1][9][2]]
    done = edit(state, tmp_path / "edited", *with_option("--leave-out", keys))
    assert done.exit_code == 0, done.output
    after = keys_of(together(resume(blend, tmp_path / "edited", 50, shuffle_buffer_size=None)))
    assert not after.keys() & set(keys)
    before = keys_of(together(whole))
    for key in keys:
        del before[key]
    assert before <= after


@pytest.mark.slow
def test_weights_and_positions_of_a_run_with_changed_lanes(blend, tmp_path, changed_lanes):
    state, before = changed_lanes
    whole = resume(blend, state, 60, shuffle_buffer_size=None)
    options = ("--weight", "a/train=9", "--position", "b/train=400")
    done = edit(state, tmp_path / "edited", *options)
    assert done.exit_code == 0, done.output
    with_weights(blend, 3, 9)
    after = resume(blend, tmp_path / "edited", 60, shuffle_buffer_size=None)
    assert len(ordinals(together(after), "a")) / 480 == pytest.approx(9 / 12, abs=0.05)
    # All samples of a dataset that nobody moved come equally often, over both changes.
    counts = Counter(ordinals([*before, *together(after)], "a"))
    assert max(counts.values()) - min(counts.values()) <= 2
    # The dataset that was moved begins an epoch: 10 epochs of 40 samples are behind it.
    first = ordinals(together(after), "b")[:40]
    assert len(set(first)) >= 36
    assert after != whole


def test_positions_behind_a_change_of_lanes_are_refused(blend, tmp_path, changed_lanes):
    state, _ = changed_lanes
    done = edit(state, tmp_path / "edited", "--position", "b/train=3")
    assert done.exit_code == 1
    assert "number of lanes was changed after" in done.output
    assert "cannot be set back before that point exactly" in done.output
    assert not (tmp_path / "edited").exists()


@pytest.fixture
def divided(blend, tmp_path):
    """States of a run that continued with half of its batches for some steps."""
    train(blend, tmp_path / "state", 12)
    states = [json.loads(file.read_text()) for file in sorted((tmp_path / "state").iterdir())]
    (tmp_path / "divided").mkdir()
    for rank in range(RANKS):
        with loader(blend, rank, batch_size=2) as batches:
            batches.load_state_dict(states, strict=["batch_size"])
            list(islice(batches, 7))
            state = json.dumps(batches.save_state_rank())
            (tmp_path / "divided" / f"rank_{rank}.json").write_text(state)
    return tmp_path / "divided"


def test_a_run_with_divided_batches_is_told_and_edited_like_any_other(blend, tmp_path, divided):
    output = run("checkpoint", "info", divided).output
    assert "48 of 48 lanes, 62 batches" in output
    drawn = re.findall(r"; (\d+) in all", output)
    assert sum(map(int, drawn)) == 2 * 12 * 4 + 2 * 7 * 2
    whole = resume(blend, divided, 14, batch_size=2)
    shown = run("plan", "--state", divided, "--step", 12 * 2 + 7 + 3, "--json")
    expected = [key for of_rank in whole for key in of_rank[3]]
    assert [row["key"] for row in json.loads(shown.stdout)] == expected
    done = edit(divided, tmp_path / "later", "--skip-steps", 9)
    assert done.exit_code == 0, done.output
    after = resume(blend, tmp_path / "later", 5, batch_size=2)
    assert after == [batches[9:] for batches in whole]
    keys = [whole[0][4][0], whole[1][9][1]]
    done = edit(divided, tmp_path / "without", *with_option("--leave-out", keys))
    assert done.exit_code == 0, done.output
    found = keys_of(together(resume(blend, tmp_path / "without", 14, batch_size=2)))
    assert not found.keys() & set(keys)


def test_schedules_are_told_in_words(blend, tmp_path):
    with_weights(blend, 3, '{0: 1, 5000: "ramp to 4"}')
    train(blend, tmp_path / "state", 4)
    done = edit(tmp_path / "state", tmp_path / "edited", "--weight", "a/train=0.5")
    schedule = "a/train: weight 1; ramp to 4 at sample 5,000"
    assert f"{schedule} becomes 0.5" in done.output
    differs = run("checkpoint", "diff", tmp_path / "state", tmp_path / "edited").output
    assert differs.splitlines() == [f"{schedule} became 0.5", "changes of the mix: 0 became 1"]


def _edits(value, path=()):
    """Yield the path of each value in a state."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for name, each in entries:
        yield (*path, name)
        if isinstance(each, dict | list):
            yield from _edits(each, (*path, name))


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, 0, 1e308, 10**30, "x", [], {}], ids=repr)
def test_any_damage_of_a_state_is_reported_as_such(blend, value):
    batches = loader(blend, 0)
    list(islice(batches, 3))
    whole = batches.save_state_rank()
    failures = 0
    for *path, last in _edits(whole):
        state = json.loads(json.dumps(whole))
        inside = state
        for step in path:
            inside = inside[step]
        inside[last] = value
        with suppress(StateError, ConfigError):
            merged = merge_states(state)
            list(describe_position(merged))
            list(compare_states(merged, whole))
            continue
        failures += 1
    assert failures > 5


def _computations(state):
    """Yield all that commands compute with a state."""
    run_of = partial(open_saved_run, state)
    yield lambda: redistribute(state, 2)
    yield lambda: redistribute(relane(state, 48).state, 2)
    yield lambda: skip_steps(state, 2, world_size=num_ranks(state, None))
    yield lambda: change_mix(state, weights={"b/train": 2.0}, positions={})
    yield lambda: change_mix(state, weights={}, positions={"b/train": 50})
    yield lambda: leave_out(state, run_of(), ["b3"], epochs=3)
    yield lambda: list_step(run_of().run, 3)
    yield lambda: find_key(run_of().run, "b3", batches=100)
    yield lambda: describe_run(run_of().run, batches=100)


@pytest.mark.slow
def test_commands_report_damage_of_a_state(blend):
    states = []
    for rank in range(RANKS):
        batches = loader(blend, rank)
        list(islice(batches, 30))
        states.append(batches.save_state_rank())
    whole = merge_states(states)
    values = [None, 0, -1, 1e308, 10**30, 1 << 40, "x", [], {}, [[]], True, float("nan")]
    # All lanes are alike: two of them are enough.
    paths = [path for path in _edits(whole) if path[0] != "positions" or path[1:2] < ("1",)]
    edits = [(path, value) for path in paths for value in values]
    chosen = [(("fingerprint", "batch_size"), value) for value in values]
    reported = 0
    for (*path, last), value in chosen + random.Random(7).sample(edits, 20):
        state = inside = json.loads(json.dumps(whole))
        for step in path:
            inside = inside[step]
        inside[last] = value
        with suppress(StateError, ConfigError):
            merged = merge_states(state)
            for compute in _computations(merged):
                try:
                    compute()
                except EnergonError:
                    reported += 1
    assert reported > 40


def test_keys_of_tar_and_token_files_are_told_apart(tmp_path):
    """`china/00100` of a shard and window 100 of a token file are found and left out as such."""
    (tmp_path / "img").mkdir()
    for shard in range(3):
        numbers = range(70 + 40 * shard, 110 + 40 * shard)
        images = [(f"china/{number:05d}", {"jpg": jpeg(number)}) for number in numbers]
        write_shard(tmp_path / f"img/{shard}.tar", images)
    prepare_dataset(tmp_path / "img", **CRUDE)
    write_tokens(tmp_path / "tok", [[number, number + 1] for number in range(150)])
    blend = tmp_path / "blend.yaml"
    blend.write_text("splits: {train: {blend: [{path: img}, {path: tok.bin}]}}\n")
    settings = {"encoder": KeysOfAll(), "shuffle_buffer_size": None}
    state, window = tmp_path / "state", "100"
    batches = train(blend, state, 3, more=60, **settings)
    for key in ("china/00100", window):
        step, rank = next(
            (step, rank)
            for step in range(63)
            for rank in range(RANKS)
            if key in batches[rank][step]
        )
        done = run("plan", "--state", state, "--key", key, "--json")
        (seen, *_) = json.loads(done.stdout)
        assert (seen["step"], seen["rank"], seen["key"]) == (step, rank, key)
    for key, other in (("china/00100", window), (window, "china/00100")):
        edited = tmp_path / f"without_{other.replace('/', '_')}"
        done = edit(state, edited, "--leave-out", key)
        assert done.exit_code == 0, done.output
        assert done.output.count("is skipped in epochs") == 1
        later = keys_of(together(resume(blend, edited, 60, **settings)))
        assert key not in later
        assert later[other]
    for key in ("nonsense/00100", "tok.bin/100", "00100"):
        for done in (
            edit(state, tmp_path / "none", "--leave-out", key),
            run("plan", "--state", state, "--key", key),
        ):
            assert done.exit_code == 2
            assert f"has a sample '{key}'" in done.output
