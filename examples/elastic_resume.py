"""Save on four ranks, and resume on two, three and one with the same global batches.

    python examples/elastic_resume.py DATA

DATA is a prepared dataset; if it does not exist, a small one is created there. Here, the ranks of a
job are loops in a single process, which is enough to see what each would read. In a real job, each
rank opens its own loader, and `save_state_global` collects the state on one of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from energon import (
    SavableDataLoader,
    ShardWriter,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
)

LANES = 12
"""Every number of ranks that divides it resumes exactly."""
GLOBAL_BATCHES = 24


def main(arguments: Sequence[str] | None = None) -> bool:
    """Save, resume, compare; return whether all runs have read the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    options = parser.parse_args(arguments)
    if not options.data.exists():
        make_data(options.data)
    with ExitStack() as stack:
        job = start(stack, options.data, world_size=4, num_workers=0)
        read(job, GLOBAL_BATCHES)
        states = [loader.save_state_rank() for loader in job]
        expected = read(job, GLOBAL_BATCHES)
    text = json.dumps(states)
    click.echo(f"saved on 4 ranks: {len(text)} bytes of JSON")
    same = True
    for world_size, num_workers in ((4, 0), (2, 0), (3, 0), (1, 2)):
        with ExitStack() as stack:
            job = start(stack, options.data, world_size=world_size, num_workers=num_workers)
            for loader in job:
                loader.load_state_dict(json.loads(text))
            is_same = read(job, GLOBAL_BATCHES) == expected
        click.echo(
            f"ranks: {world_size}, workers of each: {num_workers}: "
            f"{'the same' if is_same else 'other'} batches"
        )
        same = same and is_same
    return same


def start(
    stack: ExitStack, data: Path, *, world_size: int, num_workers: int
) -> list[SavableDataLoader]:
    """Return the loaders of all ranks of a job."""
    loaders = []
    for rank in range(world_size):
        config = WorkerConfig(
            rank=rank, world_size=world_size, num_workers=num_workers, lanes=LANES
        )
        dataset = get_train_dataset(data, worker_config=config, batch_size=4)
        loaders.append(stack.enter_context(get_savable_loader(dataset, workers="thread")))
    return loaders


def read(job: list[SavableDataLoader], number: int) -> list[list[str]]:
    """Return the keys of the next batches of a job, one of each rank in turn."""
    iterators: list[Any] = [iter(loader) for loader in job]
    return [next(iterators[step % len(job)]).__key__ for step in range(number)]


def make_data(folder: Path) -> None:
    """Write a dataset of short texts."""
    with ShardWriter(folder / "%03d.tar", maxcount=100) as writer:
        for number in range(400):
            writer.write({"__key__": f"{number:04}", "txt": f"text {number}"})
    prepare_dataset(
        folder, split_ratio={"train": 1}, sample_type="TextSample", field_map={"text": "txt"}
    )


if __name__ == "__main__":
    main()
