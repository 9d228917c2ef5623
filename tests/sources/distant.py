"""Datasets in stores, and training from them."""

from __future__ import annotations

import json
from pathlib import Path

from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon.io.address import join_address
from energon.io.files import write_bytes


def upload(folder: Path, address: str) -> str:
    """Put a folder into a store, below its own name; return the address of the copy."""
    address = join_address(address, folder.name)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            write_bytes(join_address(address, str(path.relative_to(folder))), path)
    return address


class Plain(DefaultTaskEncoder):
    """Yields samples as they are read."""

    decoder = None

    def batch(self, samples):
        return samples


def open_loader(path, *, num_workers: int = 0, lanes: int | None = 2, **settings):
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, lanes=lanes)
    settings = {"max_samples_per_sequence": 4, "parallel_shard_iters": 3, **settings}
    dataset = get_train_dataset(
        path, worker_config=config, batch_size=3, task_encoder=Plain(), **settings
    )
    return get_savable_loader(dataset)


def start(path, **settings):
    """Yield the batches of a run as (key, content) pairs; it ends with the generator."""
    with open_loader(path, **settings) as loader:
        for batch in loader:
            yield [(sample["__key__"], content(sample)) for sample in batch]


def train(path, *, batches: int, state=None, **settings):
    """Return the first batches of a run as (key, content) pairs, its state and statistics."""
    loader = open_loader(path, **settings)
    try:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        iterator = iter(loader)
        found = []
        for _ in range(batches):
            found.append([(sample["__key__"], content(sample)) for sample in next(iterator)])
        return found, loader.state_dict(), loader.stats()
    finally:
        loader.close()


def content(sample) -> dict[str, bytes]:
    return {name: value for name, value in sample.items() if not name.startswith("__")}
