"""Where a pipeline runs, and how far the job is: rank, worker, and the epochs of all copies.

A pipeline is also a dataset to torch, which is not imported for it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_uint64
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from typing import Any
from zlib import crc32

from energon.io.atomic import write_atomic


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


class TorchLookalike:
    """Looks like an `torch.utils.data.IterableDataset` where there is torch."""

    # isinstance() believes what an object says of its class.
    @property
    def __class__(self) -> type:
        data = sys.modules.get("torch.utils.data")
        base = getattr(data, "IterableDataset", None)
        own: Any = type(self)
        return own if base is None else _with_base(own, base)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        object.__dict__["__class__"].__set__(self, kind)

    def __reduce__(self) -> Any:
        return _rebuild, (
            _without_length(type(self)),
            isinstance(self, _Sized),
            self.__getstate__(),
        )

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


def add_length_method(obj: Any) -> Any:
    """Let `len` of an object return its `size`, and return the object."""
    if not isinstance(obj, _Sized):
        kind: Any = type(obj)
        obj.__class__ = _with_length(kind)
    return obj


def _rebuild(kind: Any, is_sized: bool, state: Any) -> Any:
    value = kind.__new__(kind)
    value.__setstate__(state)
    return add_length_method(value) if is_sized else value


class _Sized:
    """Adds `__len__`."""

    size: int

    def __len__(self) -> int:
        return self.size


@lru_cache(maxsize=256)
def _with_base(kind: type, base: type) -> type:
    """Return `kind` as a subclass of `base`: only ever looked at, never instantiated."""
    return type(kind.__name__, (kind, base), {"__module__": kind.__module__})


@lru_cache(maxsize=256)
def _with_length(kind: type) -> type:
    return type(kind.__name__, (_Sized, kind), {"__module__": kind.__module__, "_unsized": kind})


def _without_length(kind: type) -> type:
    found: type = getattr(kind, "_unsized", kind)
    return found


_EPOCH_BITS = 32
_MASK = (1 << _EPOCH_BITS) - 1


class EpochCounter:
    """How many epochs were begun, by all copies of a pipeline in workers together.

    Args:
        epochs: How many there were before.
    """

    def __init__(self, epochs: int = 0) -> None:
        self._word: Any = RawValue(c_uint64, epochs)
        self._begun_here = 0
        self.notes = WorkerNotes()

    @property
    def epochs(self) -> int:
        """How many epochs were begun."""
        return int(self._word.value) & _MASK

    def begin(self) -> int:
        """Return the number of the epoch that begins, from 0."""
        mark = self._mark()
        self._begun_here += 1
        word = int(self._word.value)
        if word >> _EPOCH_BITS == mark:
            return (word & _MASK) - 1
        epoch = word & _MASK
        self._word.value = mark << _EPOCH_BITS | (epoch + 1)
        return epoch

    def set(self, epochs: int) -> None:
        """Let the next epoch have the number `epochs`."""
        self._word.value = epochs

    def _mark(self) -> int:
        """Return what the workers of one epoch have in common, not 0."""
        info = torch_worker_info()
        # A DataLoader draws this for each epoch, and its workers add their number.
        run = os.getpid() if info is None else info.seed - info.id
        return crc32(f"{run} {self._begun_here}".encode()) or 1

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            shared = {"word": self._word, "notes": self.notes.folder}
            return {**shared, "begun": self._begun_here}
        return {"epochs": self.epochs, "begun": self._begun_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._word = state["word"] if "word" in state else RawValue(c_uint64, state["epochs"])
        self._begun_here = state["begun"]
        self.notes = WorkerNotes(state.get("notes"))


class WorkerNotes:
    """Notes of workers, which copies of a pipeline in other processes share.

    Args:
        folder: Where they are; None for others than anybody has.
    """

    def __init__(self, folder: str | None = None) -> None:
        if folder is not None:
            self.folder = folder
            return
        name = f"energon-epochs-{secrets.token_hex(12)}"
        self.folder = os.path.join(tempfile.gettempdir(), name)
        weakref.finalize(self, _remove, self.folder, os.getpid())

    def write(self, place: Place, note: dict[str, Any]) -> None:
        """Note where a worker continues."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        write_atomic(self._path(place), json.dumps(note))

    def read(self, place: Place) -> dict[str, Any] | None:
        """Return the last note of a worker."""
        try:
            with open(self._path(place), encoding="utf-8") as file:
                note: dict[str, Any] = json.load(file)
        except FileNotFoundError:
            return None
        return note

    def _path(self, place: Place) -> str:
        numbers = (place.rank, place.world_size, place.worker, place.num_workers)
        return os.path.join(self.folder, "-".join(map(str, numbers)))


def _remove(folder: str, owner: int) -> None:
    # Forks have a copy of what was to be done at the end.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
