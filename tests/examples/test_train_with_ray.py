"""The example for Ray Train continues on other numbers of ranks with the same batches."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.clusters import RAY_ENVIRONMENT
from tests.datasets import make_captions
from tests.ranks import EXAMPLES

pytest.importorskip("ray")

RUNS = """
import runpy, sys
import ray

# Not the cluster of other tests, which may run at the same time.
ray.init("local", num_cpus=6, include_dashboard=False, object_store_memory=80 << 20)
main = runpy.run_path(sys.argv[1])["main"]
for run in sys.argv[2:]:
    main(run.split("|"))
"""


@pytest.mark.timeout(900)
@pytest.mark.slow  # a cluster of its own, and processes that import torch
def test_a_run_continues_on_another_number_of_ranks_with_the_same_loss(tmp_path):
    data, first = make_captions(tmp_path / "captions", [40]), tmp_path / "first.pt"
    program = str(EXAMPLES / "train_with_ray.py")

    def train(*runs):
        lines = ["|".join(map(str, [data, *run, "--steps", 2])) for run in runs]
        command = [sys.executable, "-c", RUNS, program, *lines]
        subprocess.run(command, check=True, env={**os.environ, **RAY_ENVIRONMENT})

    train([first, "--ranks", 2])
    two, one = tmp_path / "two.pt", tmp_path / "one.pt"
    for checkpoint in (two, one):
        shutil.copy(first, checkpoint)
    train([two, "--ranks", 2, "--actors", 1], [one, "--ranks", 1, "--actors", 2])
    assert torch.load(two)["loss"] == pytest.approx(torch.load(one)["loss"], abs=1e-5)
