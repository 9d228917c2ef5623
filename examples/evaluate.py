"""Evaluate a model on several validation sets and ranks: each sample counts exactly once.

    python examples/evaluate.py DATA
    torchrun --nproc-per-node 2 examples/evaluate.py DATA

DATA is a folder with the prepared datasets easy and hard; if it does not exist, small ones are
created there. Ranks may differ by one batch, so the loop contains no collective operation: sums are
reduced at the end. The results are the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch

from energon import (
    Cooker,
    DefaultTaskEncoder,
    ShardWriter,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_val_datasets,
    prepare_dataset,
)

BATCH_SIZE = 8


def cook(sample: dict) -> dict:
    """Return a sample of the part json."""
    about = sample["json"]
    return {**basic_sample_keys(sample), "x": torch.tensor(about["x"]), "label": about["label"]}


class Encoder(DefaultTaskEncoder):
    """Makes numbers of samples."""

    cookers = (Cooker(cook),)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Print and return the accuracy on each validation set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    options = parser.parse_args(arguments)
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    if rank == 0 and not options.data.exists():
        make_data(options.data)
    if world_size > 1:
        torch.distributed.barrier()
    names = sorted(path.name for path in options.data.iterdir())
    sets = [{"path": str(options.data / name), "weight": 1} for name in names]
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0)
    found = {}
    for dataset, leaf in get_val_datasets(
        {"splits": {"val": {"blend": sets}}},
        worker_config=config,
        batch_size=BATCH_SIZE,
        task_encoder=Encoder(),
    ):
        sums = torch.zeros(2)
        with get_loader(dataset) as loader:
            for batch in loader:
                sums += score(batch)
        if world_size > 1:
            torch.distributed.all_reduce(sums)
        right, number = sums.tolist()
        found[leaf.name] = right / number
        if rank == 0:
            click.echo(f"{leaf.name}: {right:.0f} of {number:.0f} are right")
    if world_size > 1:
        torch.distributed.destroy_process_group()
    return found


def score(batch: dict) -> torch.Tensor:
    """Return how many samples of a batch are right, and how many there are."""
    predicted = (batch["x"].sum(1) > 0).long()
    labels = torch.as_tensor(batch["label"])
    return torch.tensor([(predicted == labels).sum(), len(labels)])


def make_data(folder: Path) -> None:
    """Write two validation sets, in one of which some labels are wrong."""
    generator = np.random.default_rng(0)
    for name, wrong in (("easy", 0.0), ("hard", 0.3)):
        with ShardWriter(folder / name / "%03d.tar", maxcount=50) as writer:
            for number in range(150):
                x = generator.normal(size=4)
                label = int((x.sum() > 0) != (generator.random() < wrong))
                about = {"x": x.tolist(), "label": label}
                writer.write({"__key__": f"{number:04}", "json": about})
        prepare_dataset(folder / name, split_ratio={"val": 1}, sample_type="CrudeWebdataset")


if __name__ == "__main__":
    main()
