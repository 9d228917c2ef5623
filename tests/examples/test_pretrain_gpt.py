"""The example that pre-trains on token files, and continues with another number of ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(*arguments, ranks, program="pretrain_gpt.py"):
    """Run a program on some ranks, and return the number at the end of what it prints."""
    return float(printed(*arguments, ranks=ranks, program=program).rpartition(" ")[2])


def printed(*arguments, ranks, program):
    """Run a program on some ranks, and return what the first one prints; the others are silent."""
    running = started(*arguments, ranks=ranks, program=program)
    outputs = [each.communicate(timeout=240)[0] for each in running]
    assert [each.returncode for each in running] == [0] * ranks
    assert not any(outputs[1:])
    return outputs[0]


def started(*arguments, ranks, program):
    """Start a program on some ranks, as torchrun does."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    place |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    return [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / program), *map(str, arguments)],
            env={
                **os.environ,
                **place,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def train_and_kill(data, checkpoint, *arguments, ranks, program="pretrain_gpt.py"):
    """Kill a program on some ranks while it trains, and return how many steps it has saved."""
    endless = "--steps", 10**6, "--save-every", 1
    running = started(data, checkpoint, *endless, *arguments, ranks=ranks, program=program)
    try:
        wait_until(lambda: checkpoint.exists() or any(each.poll() for each in running))
        time.sleep(0.2)  # a step is shorter: some are saved, and one is half done
    finally:
        for each in running:  # all at once: a rank that loses another one ends by itself
            each.kill()
        for each in running:
            each.communicate()
    assert [each.returncode for each in running] == [-signal.SIGKILL] * ranks
    return torch.load(checkpoint)["step"]


@pytest.mark.slow  # two processes that import torch
def test_a_run_that_is_told_to_end_saves_its_last_step_on_all_ranks(tmp_path):
    checkpoint = tmp_path / "run.pt"
    arguments = tmp_path / "corpora", checkpoint, "--steps", 10**6, "--save-every", 1
    running = started(*arguments, ranks=2, program="pretrain_gpt.py")
    wait_until(lambda: checkpoint.exists() or any(each.poll() for each in running))
    running[1].send_signal(signal.SIGTERM)  # the other rank learns of it from this one
    outputs = [each.communicate(timeout=240)[0] for each in running]
    assert [each.returncode for each in running] == [0, 0]
    step = torch.load(checkpoint)["step"]
    assert outputs[0].startswith(f"step {step}: loss")


@pytest.mark.slow  # six processes that import torch
def test_a_killed_run_goes_on_with_other_ranks_as_if_nothing_had_happened(tmp_path):
    # Two ranks begin without data: one of them makes it.
    steps = 3 + train_and_kill(tmp_path / "corpora", tmp_path / "cut.pt", ranks=2)
    found = train(tmp_path / "corpora", tmp_path / "cut.pt", "--steps", steps, ranks=3)
    expected = train(tmp_path / "corpora", tmp_path / "whole.pt", "--steps", steps, ranks=1)
    assert found == pytest.approx(expected, abs=2e-4)
    whole, cut = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "cut"))
    for name, value in whole["model"].items():
        assert torch.allclose(value, cut["model"][name], atol=1e-4), name
