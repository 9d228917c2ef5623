"""Change the mix of datasets during a run: a schedule of weights, then another blend.

    python examples/curriculum.py DATA

DATA is a folder with the prepared datasets web, books and code; if it does not exist, small ones
are created there. The share of code grows along a schedule. Halfway through, books are added: the
run continues from its state with another document, and every dataset keeps its position in its
epoch.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click

from energon import (
    SavableDataLoader,
    ShardWriter,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
)

BATCH_SIZE = 100
SCHEDULE = {0: 0, 1000: "ramp to 1", 2000: 1}
"""The weight of code by the number of samples that the run has read: it reaches 1 at 1,000."""


def main(arguments: Sequence[str] | None = None) -> list[Counter[str]]:
    """Print and return how many samples of each dataset some batches have."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    options = parser.parse_args(arguments)
    if not options.data.exists():
        make_data(options.data)
    web = {"path": str(options.data / "web"), "weight": 1}
    code = {"path": str(options.data / "code"), "weight": SCHEDULE}
    books = {"path": str(options.data / "books"), "weight": 2}
    with open_loader([web, code]) as loader:
        shares = show(loader, batches=10)
        state = loader.state_dict()
    with open_loader([web, code, books]) as loader:
        # The state knows another blend than this: say which difference is meant.
        loader.load_state_dict(state, strict=["mix", "leaves"])
        shares += show(loader, batches=4)
    return shares


def open_loader(entries: list[dict[str, Any]]) -> SavableDataLoader:
    """Return a loader of a blend."""
    dataset = get_train_dataset(
        {"splits": {"train": {"blend": entries}}},
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=BATCH_SIZE,
    )
    return get_savable_loader(dataset)


def show(loader: SavableDataLoader, *, batches: int) -> list[Counter[str]]:
    """Print how many samples of each dataset the next batches have."""
    shares = []
    for number, batch in enumerate(islice(loader, batches)):
        shares.append(origins(batch))
        if number % 3 == 0:
            click.echo(f"batch {number}: {dict(sorted(shares[-1].items()))}")
    return shares


def origins(batch: TextSample) -> Counter[str]:
    """Return how many samples of a batch come from each dataset: here, keys tell."""
    return Counter(key.partition("_")[0] for key in batch.__key__)


def make_data(folder: Path) -> None:
    """Write three datasets of short texts."""
    for name in ("web", "code", "books"):
        with ShardWriter(folder / name / "%03d.tar", maxcount=500) as writer:
            for number in range(1000):
                writer.write({"__key__": f"{name}_{number:04}", "txt": f"text {number}"})
        prepare_dataset(
            folder / name,
            split_ratio={"train": 1},
            sample_type="TextSample",
            field_map={"text": "txt"},
        )


if __name__ == "__main__":
    main()
