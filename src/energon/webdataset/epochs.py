"""Count the epochs of a pipeline, in the workers that iterate over it, too.

Workers of torch's DataLoader get a copy of the dataset, and without persistent workers a fresh
one for every epoch. So the number of epochs begun lives in memory that the copies share: one
word that holds the number and a mark of whoever began that epoch. Workers that find their own
mark are of the same epoch, others begin the next one; a race between them ends well, because
all would write the same word.
"""

from __future__ import annotations

import os
from ctypes import c_uint64
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from typing import Any
from zlib import crc32

from energon.webdataset.place import torch_worker_info
from energon.webdataset.worker_notes import WorkerNotes

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
