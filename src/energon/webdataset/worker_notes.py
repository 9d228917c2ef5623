"""Where the workers of an epoch have stopped, for those of the next one.

torch's DataLoader starts workers anew for every epoch unless they are persistent. Files in a
folder of the system's temporary one tell them where to go on; the process that made it removes
it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import weakref

from energon.io.atomic import write_atomic
from energon.webdataset.place import Place
from energon.webdataset.stage import State


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

    def write(self, place: Place, epoch: int, state: State) -> None:
        """Note where a worker begins with number `epoch`."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        write_atomic(self._path(place), json.dumps({"epoch": epoch, "state": state}))

    def read(self, place: Place) -> tuple[int, State] | None:
        """Return the last epoch that a worker has noted, and where it begins there."""
        try:
            with open(self._path(place), encoding="utf-8") as file:
                noted = json.load(file)
        except FileNotFoundError:
            return None
        return noted["epoch"], noted["state"]

    def _path(self, place: Place) -> str:
        numbers = (place.rank, place.world_size, place.worker, place.num_workers)
        return os.path.join(self.folder, "-".join(map(str, numbers)))


def _remove(folder: str, owner: int) -> None:
    # Forks have a copy of what was to be done at the end.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
