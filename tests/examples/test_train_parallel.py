"""The example for tensor parallelism resumes on other meshes with the same batches."""

import shutil

import pytest

from tests.datasets import make_captions
from tests.examples.test_pretrain_gpt import train


@pytest.mark.slow  # six processes that import DTensor
def test_a_run_continues_on_another_mesh_with_the_same_loss(tmp_path):
    data, first = make_captions(tmp_path / "captions", [40]), tmp_path / "first.pt"

    def loss(ranks, tp):
        checkpoint = tmp_path / f"{ranks}-{tp}.pt"
        shutil.copy(first, checkpoint)
        return train(data, checkpoint, "--tp", tp, ranks=ranks, program="train_parallel.py")

    train(data, first, "--tp", 2, ranks=2, program="train_parallel.py")
    assert loss(2, 2) == pytest.approx(loss(2, 1), abs=1e-5)
