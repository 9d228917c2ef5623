"""Train with Ray Train, with batches from actors on any machines of the cluster.

    python examples/train_with_ray.py DATASET CHECKPOINT [--ranks 2] [--actors 1] [--steps N]

DATASET has captions; all machines must have it, and CHECKPOINT, at the same path. Each rank has its
own actors, which load and encode. A checkpoint has the state of the data once. A run that finds one
continues, with the same global batches on any number of ranks that divides LANES.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.nn import functional

from energon import RayWorkers, WorkerConfig, get_savable_loader, get_train_dataset

LANES = 4
BATCH_SIZE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on a Ray cluster: that of RAY_ADDRESS, one started here, or a new one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--actors", type=int, default=1, help="per rank")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)
    TorchTrainer(
        train_rank,
        train_loop_config={
            "dataset": str(options.dataset.resolve()),
            "checkpoint": str(options.checkpoint.resolve()),
            "actors": options.actors,
            "steps": options.steps,
        },
        scaling_config=train.ScalingConfig(num_workers=options.ranks),
    ).fit()
    saved = torch.load(options.checkpoint)
    click.echo(f"step {saved['step']}: loss {saved['loss']:.6f}")


def train_rank(settings: dict[str, Any]) -> None:
    """Train in one of the ranks, and save."""
    context = train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=1, lanes=LANES)
    dataset = get_train_dataset(settings["dataset"], worker_config=config, batch_size=BATCH_SIZE)
    checkpoint = Path(settings["checkpoint"])
    torch.manual_seed(0)
    model = nn.Linear(256, 1)
    step, loss = 0, torch.zeros(())
    with get_savable_loader(dataset, workers=RayWorkers(num_actors=settings["actors"])) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            loader.restore_state_global(saved["data"], src_rank=None)
            step = saved["step"]
        parallel = prepare_model(model)
        batches = iter(loader)
        for _ in range(settings["steps"]):
            parallel.zero_grad()
            loss = torch.zeros(())
            for _ in range(LANES // world_size):
                outputs = parallel(inputs_of(next(batches)))
                part = functional.mse_loss(outputs, torch.ones_like(outputs))
                (part * world_size / LANES).backward()
                loss += part.detach() / LANES
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            step += 1
        if world_size > 1:
            dist.all_reduce(loss)
        data = loader.save_state_global(global_dst_rank=0)
        if rank == 0:
            content = {"model": model.state_dict(), "data": data, "step": step, "loss": loss.item()}
            new = checkpoint.with_suffix(".new")
            torch.save(content, new)
            new.replace(checkpoint)


def inputs_of(batch: Any) -> torch.Tensor:
    """Return how often each byte occurs in the captions of a batch."""
    counts = torch.zeros(len(batch.caption), 256)
    for row, caption in enumerate(batch.caption):
        for byte in caption.encode():
            counts[row, byte] += 1
    return counts


if __name__ == "__main__":
    main()
