"""What every kind of dataset has to do, whatever lies there."""

from __future__ import annotations

import json
import random

import numpy as np

from energon import WorkerConfig, get_savable_loader, get_train_dataset
from energon.samples.crude import key_of

LANES = 8
TOPOLOGIES = [
    ((1, 2), "process"),
    ((1, 3), "thread"),
    ((2, 1), "thread"),
    ((4, 2), "thread"),
]
"""What is opened in a process is so for any number of them: one run proves it."""


def plain(value):
    """Content of samples and batches that can be compared."""
    if hasattr(value, "__dataclass_fields__"):
        return plain({name: getattr(value, name) for name in value.__dataclass_fields__})
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if name != "__sources__"}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


class Run:
    """All ranks of a job."""

    def __init__(self, path, topology, *, encoder, state=None, workers="process", **settings):
        world_size, num_workers = topology
        self.loaders = []
        for rank in range(world_size):
            config = WorkerConfig(
                rank=rank, world_size=world_size, num_workers=num_workers, lanes=LANES
            )
            dataset = get_train_dataset(
                path,
                worker_config=config,
                task_encoder=None if encoder is None else encoder(),
                **{"batch_size": 3, **settings},
            )
            self.loaders.append(get_savable_loader(dataset, workers=workers))
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        self.ranks = [iter(loader) for loader in self.loaders]
        self.at = 0

    def take(self, count):
        """The next global batches."""
        batches = []
        for _ in range(count):
            batches.append(plain(next(self.ranks[self.at % len(self.ranks)])))
            self.at += 1
        return batches

    def save(self):
        return [loader.save_state_rank() for loader in self.loaders]

    def close(self):
        for loader in self.loaders:
            loader.close()


def check_kind(path, *, encoder=None, num_batches=48, resumed=6, turn=None, **settings):
    """Check the order on topologies, that any step can be resumed, and single samples.

    All topologies are tried, or the one whose turn it is.
    """
    first = Run(path, (1, 0), encoder=encoder, **settings)
    states, expected = [], []
    for _ in range(num_batches):
        states.append(first.save())
        expected += first.take(1)
    dataset = first.loaders[0]
    batch = next(first.ranks[0])
    assert plain(dataset.restore_sample(key_of(batch))) == plain(batch)
    first.close()
    for topology, workers in TOPOLOGIES if turn is None else [TOPOLOGIES[turn % len(TOPOLOGIES)]]:
        run = Run(path, topology, encoder=encoder, workers=workers, **settings)
        try:
            assert run.take(num_batches) == expected
        finally:
            run.close()
    for at in random.Random(7).sample(range(num_batches), resumed):
        run = Run(path, (1, 0), encoder=encoder, state=states[at], **settings)
        assert run.take(min(6, num_batches - at)) == expected[at : at + 6]
        run.close()
    # Once with workers, which open everything again: in threads, since that a state comes to
    # processes does not depend on the kind.
    at = num_batches // 2
    run = Run(path, (1, 2), encoder=encoder, state=states[at], workers="thread", **settings)
    try:
        assert run.take(6) == expected[at : at + 6]
    finally:
        run.close()
    return expected
