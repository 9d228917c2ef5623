"""Pre-train a GPT on token files: packed sequences, a curriculum, checkpoints for any world size.

    python examples/pretrain_gpt.py CORPORA CHECKPOINT [--steps N]
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py CORPORA CHECKPOINT [--steps N]

CORPORA is a folder with the token files web.bin, web.idx, code.bin and code.idx, as `energon pack
--to tokens` writes them; if it does not exist, small ones are created there. Documents are
concatenated and cut into sequences, and each attends only to itself. The share of code grows during
the run. CHECKPOINT is written every 10 steps, and a run that finds one continues there, also after
it was killed: a step has the same sequences on any number of ranks that divides MICRO_BATCHES.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from energon import TokensSample, WorkerConfig, get_savable_loader, get_train_dataset
from energon.formats.tokens import token_index_bytes

VOCABULARY = 256
CONTEXT = 64
MICRO_BATCHES = 6
"""Batches of a step, over all ranks: 1, 2, 3 or 6 of them."""
BATCH_SIZE = 2


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, save, and return the loss of the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpora", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    options = parser.parse_args(arguments)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 and not options.corpora.exists():
        make_corpora(options.corpora)
    if world_size > 1:
        torch.distributed.barrier()
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0, lanes=MICRO_BATCHES)
    dataset = get_train_dataset(blend(options.corpora), worker_config=config, batch_size=BATCH_SIZE)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, loss = 0, 0.0
    with get_savable_loader(dataset) as loader:
        if options.checkpoint.exists():
            saved = torch.load(options.checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.restore_state_global(saved["data"])
            step = saved["step"]
        batches = iter(loader)
        while step < options.steps:
            loss = 0.0
            for _ in range(MICRO_BATCHES // world_size):
                part = loss_of(model, next(batches)) / MICRO_BATCHES
                part.backward()
                loss += part.item()
            loss = average_gradients(model, loss, world_size)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % options.save_every == 0 or step == options.steps:
                data = loader.save_state_global(global_dst_rank=0)
                if rank == 0:
                    save(
                        options.checkpoint,
                        model=model.state_dict(),
                        optimizer=optimizer.state_dict(),
                        data=data,
                        step=step,
                    )
    if rank == 0:
        click.echo(f"step {step}: loss {loss:.4f}")
    if world_size > 1:
        torch.distributed.destroy_process_group()
    return loss


def save(path: Path, **content: object) -> None:
    """Write a checkpoint: whenever the process is killed, there is a complete one."""
    new = path.with_name(f"{path.name}.new")
    torch.save(content, new)
    new.replace(path)


def blend(corpora: Path) -> dict[str, object]:
    """Return the training mix: less and less of the web, more and more code."""
    read = {"unit": "sequence", "length": CONTEXT + 1, "overlap": 1}
    return {
        "splits": {
            "train": {
                "blend": [
                    {"path": str(corpora / "web.idx"), "read": read, "weight": 1},
                    {
                        "path": str(corpora / "code.idx"),
                        "read": read,
                        "weight": {0: 0.1, 40: 0.1, 120: "ramp to 1"},
                    },
                ]
            }
        }
    }


class Model(nn.Module):
    """A transformer of one layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(CONTEXT, width)
        # Keys have no bias: attention ignores it, so that rounding alone would move it.
        self.heads = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, places: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return predictions of the next token, of shape (batch, length, vocabulary)."""
        hidden = self.tokens(tokens) + self.places(places)
        query, key, value = self.heads(hidden).chunk(3, dim=-1)
        hidden = hidden + functional.scaled_dot_product_attention(query, key, value, mask)
        return self.out(hidden)


def loss_of(model: Model, batch: TokensSample) -> torch.Tensor:
    """Return the loss of a batch; the first token of a document is not predicted by another one."""
    tokens = torch.as_tensor(batch.tokens)
    places = torch.as_tensor(batch.positions)
    begins = places == 0
    document = begins.cumsum(1)[:, :-1]
    order = torch.arange(CONTEXT)
    mask = (document[:, :, None] == document[:, None, :]) & (order[:, None] >= order)
    scores = model(tokens[:, :-1], places[:, :-1], mask)
    labels = tokens[:, 1:].masked_fill(begins[:, 1:], -100)
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


def average_gradients(model: Model, loss: float, world_size: int) -> float:
    """Sum gradients and loss over all ranks, which have a share of the step each."""
    if world_size == 1:
        return loss
    total = torch.tensor(loss)
    for each in (total, *(parameter.grad for parameter in model.parameters())):
        if each is not None:
            torch.distributed.all_reduce(each)
    return float(total)


def make_corpora(folder: Path) -> None:
    """Write token files of documents that count upwards, by one or by two."""
    folder.mkdir(parents=True)
    for name, by in (("web", 1), ("code", 2)):
        generator = np.random.default_rng(by)
        lengths = generator.integers(8, 120, 200).tolist()
        documents = [
            (generator.integers(VOCABULARY) + by * np.arange(length)) % VOCABULARY
            for length in lengths
        ]
        np.concatenate(documents).astype(np.uint16).tofile(folder / f"{name}.bin")
        with open(folder / f"{name}.idx", "wb") as file:
            file.writelines(token_index_bytes(np.dtype(np.uint16), lengths))


if __name__ == "__main__":
    main()
