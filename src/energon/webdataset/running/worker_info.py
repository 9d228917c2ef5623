"""The rank and worker in which a pipeline runs, and how these share the epoch and their progress.

To torch, a pipeline is also a dataset; torch is not imported for that.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_uint64
from dataclasses import astuple, dataclass
from functools import lru_cache
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from multiprocessing.sharedctypes import RawValue
from typing import TYPE_CHECKING, Any
from zlib import crc32

from energon.io.atomic import hold_byte, release_byte

logger = logging.getLogger("energon")


@dataclass(frozen=True)
class WorkerInfo:
    """One of `world_size * num_workers` workers that share the data."""

    rank: int = 0
    world_size: int = 1
    number: int = 0
    """Number of this worker within its rank."""
    num_workers: int = 1

    @property
    def index(self) -> int:
        """Number of this worker within the whole job."""
        return self.rank * self.num_workers + self.number

    @property
    def count(self) -> int:
        """How many workers there are in the whole job."""
        return self.world_size * self.num_workers

    def wider(self) -> Iterator[WorkerInfo]:
        """Yield workers with more and more of the data, up to all: half as many share it each."""
        wider = self
        while wider.count > 1:
            rank, ranks, number, workers = astuple(wider)
            if workers > 1:
                wider = WorkerInfo(rank, ranks, number // 2, -(-workers // 2))
            else:
                wider = WorkerInfo(rank // 2, -(-ranks // 2))
            yield wider

    def __str__(self) -> str:
        rank = f"rank {self.rank} of {self.world_size}"
        return f"worker {self.number} of {self.num_workers} on {rank}"


_local = threading.local()


def current_worker_info(group: Any = None) -> WorkerInfo:
    """Return the rank and worker of the calling code.

    The environment (RANK and WORLD_SIZE, WORKER and NUM_WORKERS) takes precedence over
    torch.distributed and the worker info of torch's DataLoader. torch is not imported: a program
    that has not imported it uses neither.

    Code that reads items for accelerate, or for the Trainer of transformers, is on the only rank:
    they divide the items among the ranks.

    Args:
        group: Process group of torch.distributed; None for the default one.
    """
    worker: WorkerInfo | None = getattr(_local, "worker", None)
    if worker is not None:
        return worker
    rank, world_size = _rank(group)
    if world_size > 1 and is_divided_by_trainer():
        rank, world_size = 0, 1
    return WorkerInfo(rank, world_size, *_worker())


def is_divided_by_trainer() -> bool:
    """Return whether accelerate or transformers divides the items of the calling code by rank.

    They read all items of a dataset, on one rank or on every rank, and have a method on the stack
    meanwhile. A forked worker has the stack of the process that started it.
    """
    frame = inspect.currentframe() if _DIVIDING_MODULES & sys.modules.keys() else None
    while frame is not None:
        if (
            frame.f_globals.get("__name__") in _DIVIDING_MODULES
            and type(frame.f_locals.get("self")).__name__ in _DIVIDING_CLASSES
        ):
            return True
        frame = frame.f_back
    return _is_divided_here


_DIVIDING_MODULES = frozenset(("accelerate.data_loader", "transformers.trainer_pt_utils"))
_DIVIDING_CLASSES = ("DataLoaderDispatcher", "IterableDatasetShard")

_is_divided_here = False
"""Whether a trainer divides the items of this process, a worker that was started without a fork."""


def set_divided_by_trainer() -> None:
    """Make `is_divided_by_trainer` return True in this process."""
    global _is_divided_here
    _is_divided_here = True


def warn_of_trainer() -> None:
    """Log a warning if a trainer divides the items of the calling code."""
    if _rank(None)[1] > 1 and is_divided_by_trainer():
        logger.warning(
            "accelerate divides this stream among the ranks, so the stream does not: it is read "
            "with nodesplitter=None; iterate over its WebLoader without prepare() to let each rank "
            "read its own shards"
        )


class running_as:
    """Makes `current_worker_info` return a worker in this thread, within a `with` block.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: WorkerInfo) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._before = getattr(_local, "worker", None)
        _local.worker = self._worker

    def __exit__(self, *_: object) -> None:
        _local.worker = self._before


def torch_worker_info() -> Any:
    """Return the worker info of torch's DataLoader, or None outside of its workers."""
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


if TYPE_CHECKING:
    from torch.utils.data import IterableDataset

    _Base = IterableDataset[Any]
else:
    _Base = object


class TorchLookalike(_Base):
    """Looks like a `torch.utils.data.IterableDataset` if torch is imported."""

    def __init_subclass__(cls) -> None:
        # For issubclass(). Subclasses are defined on first use, mostly after torch was imported.
        base = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
        if base is not None:
            base.register(cls)

    # isinstance() uses the `__class__` of an object, also if torch is imported later.
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
        unsized = getattr(type(self), "_unsized", type(self))
        return _rebuild, (unsized, isinstance(self, _Sized), self.__getstate__())

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


def add_length_method(obj: Any) -> Any:
    """Make `len` of an object return its `size`, and return the object."""
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
    """Return `kind` as a subclass of `base`, for type checks only; it is never instantiated."""
    return type(kind.__name__, (kind, base), {"__module__": kind.__module__})


@lru_cache(maxsize=256)
def _with_length(kind: type) -> type:
    return type(kind.__name__, (_Sized, kind), {"__module__": kind.__module__, "_unsized": kind})


_EPOCH_BITS = 32
_MASK = (1 << _EPOCH_BITS) - 1


class EpochCounter:
    """How many epochs were begun, by all copies of a pipeline in workers together.

    All workers of a DataLoader begin an epoch, but it counts once. So the shared number is kept
    with the mark of the loops that began the last epoch: a loop with the same mark joins it, any
    other one begins the next.

    Args:
        epochs: How many there were before.
    """

    def __init__(self, epochs: int = 0) -> None:
        self._word: Any = RawValue(c_uint64, epochs)
        self._begun_here = 0
        self.notes: WorkerNotes | None = None

    def keep_notes(self) -> None:
        """Let workers note where they stop, for those of the next epoch."""
        self.notes = self.notes or WorkerNotes()

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
        """Set how many epochs were begun."""
        self._word.value = epochs

    def _mark(self) -> int:
        """Return the number that the workers of one epoch share, not 0."""
        info = torch_worker_info()
        # A DataLoader draws this for each epoch, and its workers add their number.
        run = os.getpid() if info is None else info.seed - info.id
        return crc32(f"{run} {self._begun_here}".encode()) or 1

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            file = None if self.notes is None else DupFd(self.notes.descriptor)
            return {"begun": self._begun_here, "word": self._word, "file": file}
        has_notes = self.notes is not None
        return {"begun": self._begun_here, "epochs": self.epochs, "has_notes": has_notes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "word" in state:
            file = state["file"]
            self._word = state["word"]
            self.notes = None if file is None else WorkerNotes(file.detach())
        else:
            self._word = RawValue(c_uint64, state["epochs"])
            self.notes = WorkerNotes() if state["has_notes"] else None
        self._begun_here = state["begun"]


class WorkerNotes:
    """Notes of workers, which copies of a pipeline in other processes share.

    They are in a file without a name, which disappears with the last process that has it open.

    Args:
        descriptor: The file; None for a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def write(self, worker: WorkerInfo, note: dict[str, Any]) -> None:
        """Record where a worker continues."""
        with self._locked():
            notes = json.dumps({**self._load(), str(worker): note}).encode()
            # After a kill between these two, all workers continue with a new pass.
            os.truncate(self.descriptor, 0)
            os.pwrite(self.descriptor, notes, 0)

    def read(self, worker: WorkerInfo) -> dict[str, Any] | None:
        """Return the last note of a worker."""
        with self._locked():
            return self._load().get(str(worker))

    def _load(self) -> dict[str, dict[str, Any]]:
        text = os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)
        notes: dict[str, dict[str, Any]] = json.loads(text or b"{}")
        return notes

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Forks share a lock of the open file, but not of its bytes.
        hold_byte(self.descriptor, 0, wait=True)
        try:
            yield
        finally:
            release_byte(self.descriptor, 0)
