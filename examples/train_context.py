"""Train with context and data parallelism: each process gets its part of every sequence.

    torchrun --nproc-per-node 4 examples/train_context.py DATASET CHECKPOINT [--cp 2]

The --cp processes of a replica share the tokens of each sequence; one of them loads. Queries stay
where they are, keys and values of a layer are gathered. DATASET has captions, whose next byte the
model predicts. CHECKPOINT is a folder of torch.distributed.checkpoint with the model and the state
of the data. A run that finds one continues with the same global batches for any --cp and number
of replicas, which must divide LANES.
"""

from __future__ import annotations

import argparse
import os
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
from torch.nn import functional

from energon import (
    ContextParallel,
    DefaultTaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

LANES = 4
BATCH_SIZE = 2
LENGTH = 32
WIDTH = 32


class Encoder(DefaultTaskEncoder):
    """Makes sequences of bytes of equal length."""

    @stateless
    def batch(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        """Return tokens, labels and positions: (samples, LENGTH) each; labels of padding are -1."""
        texts = [sample.caption.encode()[: LENGTH + 1] for sample in samples]
        rows = torch.tensor([[*text, *[-1] * (LENGTH + 1 - len(text))] for text in texts])
        return {
            "tokens": rows[:, :-1].clamp(min=0),
            "labels": rows[:, 1:].contiguous(),
            "position_ids": torch.arange(LENGTH).repeat(len(rows), 1),
        }


def gathered(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the parts of all processes side by side: (samples, tokens of all, ...)."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=1)


class Gather(torch.autograd.Function):
    """Gathers the parts of all processes, and sums the gradients of each part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        """Return the parts of all processes."""
        ctx.group = group
        return gathered(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the own part."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return gradient.chunk(size, dim=1)[rank], None


class Model(nn.Module):
    """One layer of causal attention over bytes, whose sequences are divided among processes."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte: (samples, tokens of this process, 256)."""
        hidden = self.bytes(tokens) + self.positions(positions)
        queries, keys, values = self.attention(hidden).chunk(3, dim=-1)
        keys, values = (Gather.apply(each, self._group) for each in (keys, values))
        is_seen = gathered(positions, self._group)[:, None, :] <= positions[:, :, None]
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen)
        logits: torch.Tensor = self.head(hidden + mixed)
        return logits


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, save, and return the loss of each global batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--cp", type=int, default=2, help="processes that share a sequence")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    replicas = dist.get_world_size() // options.cp
    mesh = init_device_mesh("cpu", (replicas, options.cp), mesh_dim_names=("dp_shard", "cp"))
    config = WorkerConfig.from_mesh(mesh, num_workers=1, lanes=LANES)
    dataset = get_train_dataset(
        options.dataset, worker_config=config, batch_size=BATCH_SIZE, task_encoder=Encoder()
    )
    cut = ContextParallel(dims={"tokens": 1, "labels": 1, "position_ids": 1}, layout="zigzag")
    torch.manual_seed(0)
    model = Model(mesh.get_group("cp"))
    losses = []
    with get_savable_loader(dataset, context_parallel=cut) as loader:
        if options.checkpoint.exists():
            dcp.load({"model": model, "data": loader}, checkpoint_id=options.checkpoint)
        batches = iter(loader)
        for _ in range(options.steps):
            model.zero_grad()
            total = torch.zeros(2)
            for batch in islice(batches, LANES // replicas):
                logits = model(batch["tokens"], batch["position_ids"]).flatten(0, 1)
                labels = batch["labels"].flatten()
                loss = functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
                loss.backward()
                total += torch.stack([loss.detach(), (labels >= 0).sum()])
            dist.all_reduce(total)
            losses.append((total[0] / total[1]).item())
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter -= 0.5 * parameter.grad / total[1]
        dcp.save({"model": model, "data": loader}, checkpoint_id=options.checkpoint)
    if dist.get_rank() == 0:
        click.echo(f"loss {losses[-1]:.6f}")
    dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("start this program with torchrun --nproc-per-node 4")
    main()
