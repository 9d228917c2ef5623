"""Where a pipeline runs: which rank of the job, and which loader worker of that rank."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """One of `world_size * num_workers` workers that share the data."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1

    @property
    def index(self) -> int:
        """Number of this worker in the whole job."""
        return self.rank * self.num_workers + self.worker

    @property
    def count(self) -> int:
        """How many workers there are in the whole job."""
        return self.world_size * self.num_workers


_local = threading.local()


def current_place(group: Any = None) -> Place:
    """Return where the calling code runs.

    The environment (RANK and WORLD_SIZE, WORKER and NUM_WORKERS) comes before what
    torch.distributed and the workers of torch's DataLoader say. Neither imports torch: who has
    not imported it uses neither.

    Args:
        group: Process group of torch.distributed; None means the default one.
    """
    place: Place | None = getattr(_local, "place", None)
    if place is not None:
        return place
    return Place(*_rank(group), *_worker())


@contextmanager
def running_at(place: Place) -> Iterator[None]:
    """Let `current_place` say `place` in this thread."""
    before = getattr(_local, "place", None)
    _local.place = place
    try:
        yield
    finally:
        _local.place = before


def torch_worker_info() -> Any:
    """Return what torch's DataLoader says of this worker process, or None outside of one."""
    data = sys.modules.get("torch.utils.data")
    return None if data is None else data.get_worker_info()


def _rank(group: Any) -> tuple[int, int]:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(group), distributed.get_world_size(group)
    return 0, 1


def _worker() -> tuple[int, int]:
    if "WORKER" in os.environ and "NUM_WORKERS" in os.environ:
        return int(os.environ["WORKER"]), int(os.environ["NUM_WORKERS"])
    info = torch_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
