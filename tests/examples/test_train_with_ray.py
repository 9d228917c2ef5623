"""The example for Ray Train continues on other numbers of ranks with the same batches."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from energon import WorkerConfig, get_savable_loader, get_train_dataset
from tests.datasets import make_captions
from tests.ranks import EXAMPLES

pytest.importorskip("ray")

RUNS = """
import runpy, sys
import ray

ray.init(sys.argv[1])
main = runpy.run_path(sys.argv[2])["main"]
for topology in (["--ranks", "2", "--actors", "1"], ["--ranks", "1", "--actors", "2"]):
    main([*sys.argv[3:], "--steps", "2", *topology])
"""


def loss_of_one_process(data, steps):
    """Return what the program reports after these steps, from a loop without Ray."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=4)
    dataset = get_train_dataset(data, worker_config=config, batch_size=2)
    batches = iter(get_savable_loader(dataset))
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 1)
    for _ in range(steps):
        captions = [caption.encode() for _ in range(4) for caption in next(batches).caption]
        counts = torch.stack([torch.tensor([*each]).bincount(minlength=256) for each in captions])
        loss = functional.mse_loss(model(counts.float()), torch.ones(8, 1))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return loss.item()


@pytest.mark.timeout(900)
@pytest.mark.slow  # processes that import torch
def test_a_run_continues_on_another_number_of_ranks_with_the_same_batches(ray_head, tmp_path):
    data, checkpoint = make_captions(tmp_path / "captions", [40]), tmp_path / "run.pt"
    program = EXAMPLES / "train_with_ray.py"
    command = [sys.executable, "-c", RUNS, ray_head.address, program, data, checkpoint]
    subprocess.run([*map(str, command)], check=True)
    assert torch.load(checkpoint)["loss"] == pytest.approx(loss_of_one_process(data, 4), rel=1e-4)
