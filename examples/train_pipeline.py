"""Train with pipeline and data parallelism: the first and the last stage get the same batches.

    torchrun --nproc-per-node 4 examples/train_pipeline.py DATASET CHECKPOINT [--pp 2]

Each data-parallel replica is a pipeline of --pp stages, each of which has a part of the model. The
first stage loads; stages in the middle get no data. DATASET has captions, whose lengths the model
learns. CHECKPOINT is a folder of torch.distributed.checkpoint with the parts of the model and the
state of the data, once. A run that finds one continues with the same global batches, on any
number of stages and replicas: that of replicas must divide LANES.
"""

from __future__ import annotations

import argparse
import os
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

from energon import WorkerConfig, get_savable_loader, get_train_dataset

LANES = 4
BATCH_SIZE = 2
WIDTH = 64
LAYERS = [(256, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, save, and return the loss of each global batch, in the last stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--pp", type=int, default=2, help="stages: 1, 2 or 4")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    replicas = dist.get_world_size() // options.pp
    mesh = init_device_mesh("cpu", (options.pp, replicas), mesh_dim_names=("pp", "dp_shard"))
    number = mesh.get_local_rank("pp")
    is_first, is_last = number == 0, number == options.pp - 1
    config = WorkerConfig.from_mesh(
        mesh, num_workers=1, lanes=LANES, needs_data=is_first or is_last
    )
    dataset = get_train_dataset(options.dataset, worker_config=config, batch_size=BATCH_SIZE)
    part = part_of_model(number, options.pp)
    stage = PipelineStage(part, number, options.pp, torch.device("cpu"), group=mesh.get_group("pp"))
    micro_batches = LANES // replicas
    schedule = ScheduleGPipe(stage, micro_batches, loss_fn=functional.mse_loss)
    losses = []
    with get_savable_loader(dataset) as loader:
        if options.checkpoint.exists():
            dcp.load({"model": part, "data": loader}, checkpoint_id=options.checkpoint)
        batches = iter(loader)
        for _ in range(options.steps):
            part.zero_grad()
            step = list(islice(batches, micro_batches))
            parts: list[torch.Tensor] = []
            inputs = [torch.cat([counts_of(batch) for batch in step])] if is_first else []
            if is_last:
                schedule.step(
                    *inputs, target=torch.cat([lengths_of(batch) for batch in step]), losses=parts
                )
                losses.append(mean_over_replicas(torch.stack(parts).mean(), mesh).item())
            else:
                schedule.step(*inputs)
            with torch.no_grad():
                for parameter in part.parameters():
                    parameter -= 0.1 * mean_over_replicas(parameter.grad, mesh)
        dcp.save({"model": part, "data": loader}, checkpoint_id=options.checkpoint)
    if is_last and mesh.get_local_rank("dp_shard") == 0:
        click.echo(f"loss {losses[-1]:.6f}")
    dist.barrier()
    dist.destroy_process_group()
    return losses


def part_of_model(number: int, stages: int) -> nn.Module:
    """Return the layers of a stage, named as in the whole model."""
    torch.manual_seed(0)
    layers: list[tuple[str, nn.Module]] = []
    for layer, (inputs, outputs) in enumerate(LAYERS):
        linear = nn.Linear(inputs, outputs)
        is_output = layer == len(LAYERS) - 1
        layers.append((str(layer), linear if is_output else nn.Sequential(linear, nn.ReLU())))
    size = len(LAYERS) // stages
    return nn.Sequential(OrderedDict(layers[number * size : (number + 1) * size]))


def counts_of(batch: Any) -> torch.Tensor:
    """Return how often each byte occurs in the captions of a batch."""
    captions = [torch.tensor(list(caption.encode())) for caption in batch.caption]
    return torch.stack([torch.bincount(each, minlength=256).float() for each in captions])


def lengths_of(batch: Any) -> torch.Tensor:
    """Return the lengths of the captions of a batch, in units of 10 bytes."""
    return torch.tensor([[len(caption.encode()) / 10] for caption in batch.caption])


def mean_over_replicas(value: Any, mesh: Any) -> torch.Tensor:
    """Return the mean of a tensor over the data-parallel replicas."""
    total: torch.Tensor = value.detach().clone()
    dist.all_reduce(total, group=mesh.get_group("dp_shard"))
    return total / mesh["dp_shard"].size()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("start this program with torchrun --nproc-per-node 4")
    main()
