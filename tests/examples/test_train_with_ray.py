"""The example for Ray Train continues on other numbers of ranks with the same batches."""

import subprocess
import sys

import pytest
import torch

from tests.datasets import make_captions
from tests.ranks import EXAMPLES

pytest.importorskip("ray")

RUNS = """
import runpy, shutil, sys
import ray

ray.init(sys.argv[1])
main = runpy.run_path(sys.argv[2])["main"]
data, first, two, one = sys.argv[3:]

def train(checkpoint, *options):
    main([data, checkpoint, *options, "--steps", "2"])

train(first, "--ranks", "2")
for checkpoint in (two, one):
    shutil.copy(first, checkpoint)
train(two, "--ranks", "2", "--actors", "1")
train(one, "--ranks", "1", "--actors", "2")
"""


@pytest.mark.timeout(900)
@pytest.mark.slow  # processes that import torch
def test_a_run_continues_on_another_number_of_ranks_with_the_same_loss(ray_head, tmp_path):
    data = make_captions(tmp_path / "captions", [40])
    first, two, one = (tmp_path / f"{name}.pt" for name in ("first", "two", "one"))
    arguments = [
        ray_head.address,
        *map(str, [EXAMPLES / "train_with_ray.py", data, first, two, one]),
    ]
    command = [sys.executable, "-c", RUNS, *arguments]
    subprocess.run(command, check=True)
    assert torch.load(two)["loss"] == pytest.approx(torch.load(one)["loss"], abs=1e-5)
