from __future__ import annotations

import json
import tempfile
from itertools import islice

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from energon import (
    ConfigError,
    StateError,
    get_savable_loader,
    load_rank_files,
    save_rank_file,
)
from energon.cli.main import main
from energon.io.epath import EPath
from energon.loader.state_files import read_states, redistribute
from tests.datasets import make_crude
from tests.encoders import Keys
from tests.task_encoder.runs import config, train


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("crude") / "ds", [5, 8, 7])


def loader(root, rank=0, world_size=1):
    worker_config = config(rank=rank, world_size=world_size, lanes=4)
    return get_savable_loader(train(root, Keys(), worker_config=worker_config))


@pytest.fixture
def states(root):
    """The states of two ranks after six batches each, and what follows in the whole run."""
    with loader(root) as whole:
        batches = list(islice(whole, 24))
    saved = []
    for rank in range(2):
        with loader(root, rank, 2) as half:
            assert list(islice(half, 6)) == batches[rank:12:2]
            saved.append(half.save_state_rank())
    return saved, batches[12:]


def as_json(state, path):
    path.write_text(json.dumps(state))


def as_torch(state, path):
    torch.save(state, path)


def in_megatron(state, path):
    torch.save({"dataloader_state_dict": state, "iteration": 3}, path)


read = {
    as_json: lambda path: json.loads(path.read_text()),
    as_torch: lambda path: torch.load(path, weights_only=True),
    in_megatron: lambda path: torch.load(path, weights_only=True)["dataloader_state_dict"],
}
"""How a program reads what it saved in some way."""


def invoke(*arguments):
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "suffix"), [(as_json, ".json"), (as_torch, ".pt"), (in_megatron, ".pt")]
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_states_go_on_as_those_of_other_ranks(root, states, tmp_path, save, suffix, world_size):
    saved, expected = states
    folder = tmp_path / "saved"
    folder.mkdir()
    for rank, state in enumerate(saved):
        save(state, folder / f"rank{rank}{suffix}")
    result = invoke("redist", "--new-world-size", world_size, folder, tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{world_size} state")
    for rank in range(world_size):
        written = tmp_path / f"new/rank{rank}{suffix}"
        with loader(root, rank, world_size) as again:
            again.restore_state_rank(read[save](written))
            count = 12 // world_size
            assert list(islice(again, count)) == expected[rank::world_size]


def test_other_lanes_alone_keep_the_number_of_ranks(states, tmp_path):
    as_json(states[0], tmp_path / "all.json")
    result = invoke("redist", "--lanes", 12, tmp_path / "all.json", tmp_path / "new")
    assert "4 lanes became 12 lanes" in result.output
    assert "2 states in" in result.output
    assert read_states([tmp_path / "new"])["lanes"] == 12


def test_a_global_state_in_one_file_is_read_too(root, states, tmp_path):
    saved, _ = states
    as_json(saved, tmp_path / "all.json")
    merged = read_states([tmp_path / "all.json"])
    assert read_states([tmp_path]) == merged
    assert sorted(merged["positions"]) == ["0", "1", "2", "3"]


def test_states_in_stores_are_dealt_like_those_on_disk(s3, states, tmp_path):
    saved, _ = states
    for rank, state in enumerate(saved):
        as_torch(state, tmp_path / f"rank{rank}.pt")
        (EPath(s3.address) / f"rank{rank}.pt").write_bytes(
            (tmp_path / f"rank{rank}.pt").read_bytes()
        )
    here = invoke("redist", "--new-world-size", 4, tmp_path, tmp_path / "new")
    there = invoke("redist", "--new-world-size", 4, s3.address, f"{s3.address}/new")
    assert here.exit_code == there.exit_code == 0, there.output
    assert read_states([f"{s3.address}/new"]) == read_states([tmp_path / "new"])
    info = invoke("info", f"{s3.address}/new/rank0.pt")
    assert info.output == invoke("info", tmp_path / "new/rank0.pt").output
    with pytest.raises(StateError, match=f"{s3.address}/x.json: there is no such"):
        read_states([f"{s3.address}/x.json"])


@pytest.mark.parametrize("name", ["all.json", "step_500.json", "step_0.txt.json"])
def test_states_of_a_file_that_is_no_rank_are_called_by_ranks(states, tmp_path, name):
    as_json(states[0], tmp_path / name)
    result = invoke("redist", "--new-world-size", 2, tmp_path / name, tmp_path / "new")
    assert "rank_0.json to rank_1.json" in result.output


def test_states_are_found_in_checkpoints_of_trainers(root, states, tmp_path):
    with loader(root) as whole:
        list(islice(whole, 12))
        flat = whole.state_dict()
        flat["header"][0]["fingerprint"]["run"]["world_size"] = 2  # as the others were saved
    merged = read_states([_saved(states[0], tmp_path / "global.json")])
    lightning = {"epoch": 1, "loops": {"combined_loader": [{}]}, "Data": {"train": merged}}
    assert read_states([_saved(lightning, tmp_path / "lightning.json")]) == merged
    assert read_states([_saved({"model": [1], "data": flat}, tmp_path / "dcp.json")]) == merged


def _saved(content, path):
    as_json(content, path)
    return path


def test_checkpoints_of_dcp_are_told_how_to_become_a_file(tmp_path):
    (tmp_path / "__0_0.distcp").touch()
    result = invoke("info", tmp_path)
    assert result.exit_code == 1
    assert "format_utils dcp_to_torch" in result.output


def test_says_where_a_run_was(states, tmp_path):
    as_json(states[0], tmp_path / "all.json")
    output = invoke("info", tmp_path / "all.json").output
    assert "4 of 4 lanes, 12 batches" in output
    assert "batches per lane: 3\n" in output
    assert "world sizes: 1, 2, 4" in output
    assert "ds/train: epoch 2, after 8 of 20 samples" in output
    assert json.loads(invoke("info", "--json", tmp_path / "all.json").output)["lanes"] == 4


def test_lanes_that_cannot_be_dealt_are_refused(states):
    with pytest.raises(ConfigError, match="4 lanes can't be divided evenly among 3 ranks"):
        redistribute({**states[0][0]}, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": ', "the JSON is damaged"),
        (b'{"a": 1}', r"x\.pt: contains no state of an energon loader"),
        (b"something", "neither JSON nor plain data of torch.save"),
    ],
)
def test_files_without_a_state_are_refused(tmp_path, content, message):
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(StateError, match=message):
        read_states([path])


def test_pickled_objects_are_not_loaded(tmp_path):
    torch.save({"dataloader_state_dict": object}, tmp_path / "x.pt")
    with pytest.raises(StateError, match="pickled objects, are not read"):
        read_states([tmp_path / "x.pt"])


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(StateError, match=r"no \.json or \.pt files"):
        read_states([tmp_path])
    with pytest.raises(StateError, match="No such file"):
        read_states([tmp_path / "x.json"])


def rank_files(root, folder, world_size, batches):
    """Let each rank save its file after some batches."""
    for rank in range(world_size):
        with loader(root, rank, world_size) as each:
            list(islice(each, batches))
            save_rank_file(each, folder)


@pytest.mark.slow
@given(world_sizes=st.tuples(*[st.sampled_from([1, 2, 4])] * 2), batches=st.integers(0, 5))
@settings(deadline=None, max_examples=12)
def test_files_of_ranks_continue_on_any_number_of_ranks(root, world_sizes, batches):
    before, after = world_sizes
    with tempfile.TemporaryDirectory() as folder:
        rank_files(root, f"{folder}/new", before, batches)
        state = load_rank_files(f"{folder}/new")
    with loader(root) as whole:
        expected = list(islice(whole, batches * before + 8))[batches * before :]
    for rank in range(after):
        with loader(root, rank, after) as again:
            again.restore_state_rank(state)
            of_rank = [g for g in range(8) if (g + batches * before) % after == rank]
            assert list(islice(again, len(of_rank))) == [expected[g] for g in of_rank]


def test_files_of_ranks_are_those_of_trainers(root, tmp_path):
    (tmp_path / "model_optim_rng.pt").write_bytes(b"a model")
    rank_files(root, tmp_path, 2, 3)
    names = sorted(path.name for path in tmp_path.glob("train*"))
    assert names == ["train_dataloader_dprank000.pt", "train_dataloader_dprank001.pt"]
    content = torch.load(tmp_path / names[1], weights_only=True)
    with loader(root, 1, 2) as again:
        again.restore_state_rank(content["dataloader_state_dict"])
        assert again.save_state_rank() == content["dataloader_state_dict"]
    assert invoke("info", tmp_path / names[0], tmp_path / names[1]).exit_code == 0


def test_files_of_ranks_live_in_stores_too(s3, root, tmp_path):
    rank_files(root, f"{s3.address}/step_3", 2, 3)
    rank_files(root, tmp_path, 2, 3)
    assert load_rank_files(f"{s3.address}/step_3") == load_rank_files(tmp_path)


def test_files_of_ranks_that_do_not_belong_together_are_refused(root, tmp_path):
    with pytest.raises(StateError, match=r"no files like train_dataloader_dprank000.pt"):
        load_rank_files(tmp_path)
    rank_files(root, tmp_path, 2, 3)
    rank_files(root, tmp_path, 1, 3)  # rank 1 of the run before is left
    with pytest.raises(StateError, match="not belong together: lane 1 is in states 0 and 1"):
        load_rank_files(tmp_path)
