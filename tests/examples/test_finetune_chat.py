"""The example that fine-tunes on conversations with images."""

from __future__ import annotations

import gzip
import json
import runpy

import pytest
import torch

from energon import WorkerConfig, get_train_dataset
from tests.examples.test_pretrain_gpt import EXAMPLES, train, train_and_kill

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(EXAMPLES / "finetune_chat.py"))


@pytest.fixture(scope="module")
def data(program, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "data"
    program["make_data"](folder)
    return folder


def test_only_answers_are_learned_and_every_image_has_its_place(program, data):
    lines = gzip.decompress((data / "chats.jsonl.gz").read_bytes()).splitlines()
    chats = [json.loads(line) for line in lines]
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(
        program["chats"](data),
        worker_config=config,
        batch_size=2,
        packing_buffer_size=64,
        repeat=False,
        task_encoder=program["ChatEncoder"](),
    )
    seen = []
    for batch in dataset:
        seen += batch.__key__
        assert (batch.tokens == program["PATCH"]).sum() == program["PATCHES"] * len(batch.images)
        own = [chats[int(key)] for key in batch.__key__]
        assert len(batch.images) == sum(len(chat.get("images", ())) for chat in own)
        learned = batch.labels != program["IGNORED"]
        answers = [
            bytes(token for token in row[mask].tolist() if token < 256)
            for row, mask in zip(batch.labels, learned, strict=True)
        ]
        said = [m["content"] for c in own for m in c["messages"] if m["role"] == "assistant"]
        assert b"".join(answers) == "".join(said).encode()
        # What is learned is the token that comes next, in the same conversation.
        assert torch.equal(
            batch.labels[:, :-1][learned[:, :-1]], batch.tokens[:, 1:][learned[:, :-1]]
        )
        same = batch.conversation[:, :-1] == batch.conversation[:, 1:]
        assert same[learned[:, :-1]].all()
    assert sorted(map(int, seen)) == list(range(len(chats)))


@pytest.mark.slow  # the first optimizer of a process takes seconds
def test_a_run_goes_on_where_it_was_saved(program, data, tmp_path):
    main = program["main"]
    expected = main([str(data), str(tmp_path / "whole.pt"), "--steps", "4"])
    main([str(data), str(tmp_path / "cut.pt"), "--steps", "2"])
    assert main([str(data), str(tmp_path / "cut.pt"), "--steps", "4"]) == expected


@pytest.mark.slow  # processes that import torch
def test_a_killed_run_goes_on_with_other_workers_and_ranks_and_learns(data, tmp_path):
    settings = {"program": "finetune_chat.py"}
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    steps = 2 + train_and_kill(data, cut, "--workers", 2, ranks=1, **settings)
    expected = train(data, whole, "--steps", steps, ranks=1, **settings)
    found = train(data, cut, "--steps", steps, "--workers", 1, ranks=3, **settings)
    assert found == pytest.approx(expected, abs=1e-3)
    untrained = train(data, tmp_path / "new.pt", "--steps", 1, ranks=1, **settings)
    assert train(data, cut, "--steps", steps + 21, ranks=2, **settings) < untrained / 3
