"""The example that pre-trains on token files, and continues with another number of ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(*arguments, ranks, program="pretrain_gpt.py"):
    """Run a program on some ranks, and return the number at the end of what it prints."""
    return float(printed(*arguments, ranks=ranks, program=program).rpartition(" ")[2])


def printed(*arguments, ranks, program):
    """Run a program on some ranks, and return what the first one prints; the others are silent."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    running = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / program), *map(str, arguments)],
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [each.communicate(timeout=120)[0] for each in running]
    assert [each.returncode for each in running] == [0] * ranks
    assert not any(outputs[1:])
    return outputs[0]


@pytest.mark.slow  # six processes that import torch
def test_a_run_goes_on_with_other_ranks_as_if_nothing_had_happened(tmp_path):
    # Two ranks begin without data: one of them makes it.
    train(tmp_path / "corpora", tmp_path / "cut.pt", "--steps", 3, ranks=2)
    found = train(tmp_path / "corpora", tmp_path / "cut.pt", "--steps", 8, ranks=3)
    expected = train(tmp_path / "corpora", tmp_path / "whole.pt", "--steps", 8, ranks=1)
    assert found == pytest.approx(expected, abs=2e-4)
    whole, cut = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "cut"))
    for name, value in whole["model"].items():
        assert torch.allclose(value, cut["model"][name], atol=1e-4), name
