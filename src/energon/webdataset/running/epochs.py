"""What processes of a run tell one another: which epoch it is, and how far workers have come."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import weakref
from ctypes import c_uint64
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from typing import Any
from zlib import crc32

from energon.io.atomic import write_atomic
from energon.webdataset.running.place import Place, torch_worker_info

_EPOCH_BITS = 32
_MASK = (1 << _EPOCH_BITS) - 1


class EpochCounter:
    """How many epochs were begun, by all copies of a pipeline in workers together.

    All workers of a DataLoader begin an epoch, but it counts once. So the shared number is kept
    with a mark of those who began the last epoch: whoever has the same mark joins it, anyone else
    begins the next.

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
        """Set how many epochs were begun."""
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
        """Record where a worker continues."""
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
