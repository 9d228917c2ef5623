"""What processes of a run tell one another: which epoch it is, and how far workers have come."""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_uint64
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from multiprocessing.sharedctypes import RawValue
from typing import Any
from zlib import crc32

from energon.io.file_lock import hold_byte, release_byte
from energon.webdataset.running.place import Place, torch_worker_info

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

    def write(self, place: Place, note: dict[str, Any]) -> None:
        """Record where a worker continues."""
        with self._locked():
            notes = json.dumps({**self._load(), str(place): note}).encode()
            # After a kill between these two, all workers continue with a new pass.
            os.truncate(self.descriptor, 0)
            os.pwrite(self.descriptor, notes, 0)

    def read(self, place: Place) -> dict[str, Any] | None:
        """Return the last note of a worker."""
        with self._locked():
            return self._load().get(str(place))

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
