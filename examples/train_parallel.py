"""Train with tensor and data parallelism: one process of each replica loads.

    torchrun --nproc-per-node 4 examples/train_parallel.py DATASET CHECKPOINT [--tp 2]

Processes form a mesh of data-parallel replicas of --tp processes each, which hold parts of one
model. DATASET has captions. A checkpoint has the state of the data once. A run that finds one
continues, with the same global batches on any mesh: the number of replicas must divide LANES.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from energon import WorkerConfig, get_savable_loader, get_train_dataset

LANES = 4
BATCH_SIZE = 2
WIDTH = 64


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, save, and return the loss of each global batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tp", type=int, default=2, help="processes per replica")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    replicas = dist.get_world_size() // options.tp
    mesh = init_device_mesh("cpu", (replicas, options.tp), mesh_dim_names=("dp_shard", "tp"))
    config = WorkerConfig.from_mesh(mesh, num_workers=1, lanes=LANES)
    dataset = get_train_dataset(options.dataset, worker_config=config, batch_size=BATCH_SIZE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    saved: dict[str, Any] | None = None
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
    step = 0 if saved is None else saved["step"]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = []
    with get_savable_loader(dataset) as loader:
        if saved is not None:
            loader.restore_state_global(saved["data"])
        batches = iter(loader)
        for _ in range(options.steps):
            model.zero_grad()
            total = torch.zeros(())
            for _ in range(LANES // replicas):
                loss = functional.mse_loss(model(inputs_of(next(batches))), torch.ones(()))
                (loss / LANES).backward()
                total += loss.detach() / LANES
            sum_over_replicas(model, total, mesh)
            losses.append(total.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            step += 1
        data = loader.save_state_global()
        weights = {name: full(value) for name, value in model.state_dict().items()}
        if dist.get_rank() == 0:
            new = options.checkpoint.with_suffix(".new")
            content = {"model": weights, "data": data, "step": step}
            torch.save(content, new)
            new.replace(options.checkpoint)
            click.echo(f"step {step}: loss {losses[-1]:.6f}")
    dist.barrier()
    dist.destroy_process_group()
    return losses


def inputs_of(batch: Any) -> torch.Tensor:
    """Return how often each byte occurs in the captions of a batch."""
    counts = torch.zeros(len(batch.caption), 256)
    for row, caption in enumerate(batch.caption):
        for byte in caption.encode():
            counts[row, byte] += 1
    return counts


def sum_over_replicas(model: nn.Module, total: torch.Tensor, mesh: Any) -> None:
    """Sum gradients and losses over the data-parallel ranks."""
    group = mesh.get_group("dp_shard")
    dist.all_reduce(total, group=group)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.to_local(), group=group)


def full(value: Any) -> torch.Tensor:
    """Return a whole weight, of which each process of a replica has a part."""
    tensor: torch.Tensor = value.full_tensor()
    return tensor


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("start this program with torchrun --nproc-per-node 4")
    main()
