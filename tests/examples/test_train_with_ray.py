"""The example for Ray Train continues on other numbers of ranks with the same batches."""

import runpy
import shutil

import pytest
import torch

from tests.datasets import make_captions
from tests.examples.test_pretrain_gpt import EXAMPLES

pytest.importorskip("ray")


@pytest.mark.timeout(900)
@pytest.mark.slow  # a cluster, and processes that import torch
@pytest.mark.filterwarnings("ignore")
def test_a_run_continues_on_another_number_of_ranks_with_the_same_loss(ray_cluster, tmp_path):
    main = runpy.run_path(str(EXAMPLES / "train_with_ray.py"))["main"]
    data, first = make_captions(tmp_path / "captions", [40]), tmp_path / "first.pt"
    main([str(data), str(first), "--ranks", "2", "--steps", "2"])

    def loss(ranks, actors):
        checkpoint = tmp_path / f"{ranks}-{actors}.pt"
        shutil.copy(first, checkpoint)
        numbers = ["--ranks", str(ranks), "--actors", str(actors), "--steps", "2"]
        main([str(data), str(checkpoint), *numbers])
        return torch.load(checkpoint)["loss"]

    assert loss(2, 1) == pytest.approx(loss(1, 2), abs=1e-5)
