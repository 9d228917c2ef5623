"""The example that pre-trains on token files, and continues with another number of ranks."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.ranks import finished, started, train, train_and_kill
from tests.waiting import wait_until

PROGRAM = "pretrain_gpt.py"


@pytest.mark.slow  # processes that train
def test_a_run_that_is_told_to_end_saves_its_last_step_on_all_ranks(tmp_path):
    checkpoint = tmp_path / "run.pt"
    arguments = tmp_path / "corpora", checkpoint, "--steps", 10**6, "--save-every", 1
    running = started(*arguments, ranks=2, program=PROGRAM)
    wait_until(lambda: checkpoint.exists() or any(each.has_ended() for each in running))
    running[1].send_signal(signal.SIGTERM)  # the other rank learns of it from this one
    said, _ = finished(running)
    step = torch.load(checkpoint)["step"]
    assert said.startswith(f"step {step}: loss")


@pytest.mark.slow  # processes that train
def test_a_killed_run_goes_on_with_other_ranks_as_if_nothing_had_happened(tmp_path):
    data = tmp_path / "corpora"  # two ranks begin without it: one of them makes it
    steps = 3 + train_and_kill(data, tmp_path / "cut.pt", ranks=2, program=PROGRAM)
    found = train(data, tmp_path / "cut.pt", "--steps", steps, ranks=3, program=PROGRAM)
    expected = train(data, tmp_path / "whole.pt", "--steps", steps, ranks=1, program=PROGRAM)
    assert found == pytest.approx(expected, abs=2e-4)
    whole, cut = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "cut"))
    for name, value in whole["model"].items():
        assert torch.allclose(value, cut["model"][name], atol=1e-4), name
