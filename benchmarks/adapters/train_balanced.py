"""Train a small transformer on two ranks whose steps take as long as their sequences are.

    python train_balanced.py BATCHES.json

The file has the lengths of the samples of each rank in each step. Prints the seconds of the run,
and the CPU time of the slowest rank of all steps over the mean.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import spawn

WIDTH, HEADS, LAYERS, VOCABULARY = 128, 4, 2, 256
WARM_STEPS = 2


def main() -> None:
    """Train, and print what the first rank has measured."""
    batches = json.loads(Path(sys.argv[1]).read_text())
    ranks = len(batches[0])
    spawn(train, (ranks, batches, f"{sys.argv[1]}.store"), nprocs=ranks)


def train(rank: int, ranks: int, batches: list[list[list[int]]], store: str) -> None:
    """Train on the batches of a rank; gradients are averaged after each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    model = nn.ModuleList(
        [
            nn.Embedding(VOCABULARY, WIDTH),
            nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
            nn.Linear(WIDTH, VOCABULARY),
        ]
    )
    embed, encode, predict = model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times = []
    began = 0.0
    for step, batch in enumerate([*batches[:WARM_STEPS], *batches]):
        if step == WARM_STEPS:
            dist.barrier()
            began = time.perf_counter()
        started = time.thread_time()
        for length in batch[rank]:
            tokens = torch.randint(VOCABULARY, (1, length + 1))
            logits = predict(encode(embed(tokens[:, :-1])))
            nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").backward()
        times.append(time.thread_time() - started)
        gradient = torch.cat([each.grad.flatten() for each in model.parameters()])
        dist.all_reduce(gradient)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - began
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, times[WARM_STEPS:])
    if rank == 0:
        loads = torch.tensor(gathered)
        slowest = float(loads.max(0).values.sum() / loads.mean(0).sum())
        print(json.dumps({"seconds": seconds, "slowest": slowest}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
