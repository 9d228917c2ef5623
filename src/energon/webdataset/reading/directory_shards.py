"""Shards of a folder that others fill: each file is claimed by renaming it, then used."""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from collections.abc import Iterator
from typing import Any

from energon.errors import ConfigError, DatasetNotFoundError
from energon.webdataset.reading.urls import local_path
from energon.webdataset.stages.base import Context, Stage, UnsavableIterator
from energon.webdataset.utils import glob_with_braces

_CLAIMED = re.compile(r"^(?P<name>.*)\._(?P<pid>\d+)_$")
_SELECT = ("random", "oldest")
_FATES = ("unlink", "keep", "resample")


class DirectoryShardList(Stage):
    """Gives the files of a folder as they come, to one process each.

    A file is claimed by giving it the number of the process as a suffix, and gets its fate when
    the next one is asked for. Files that dead processes have claimed are claimed again.

    Args:
        path: The folder.
        pattern: Which files, with braces.
        poll: Seconds between looks into the folder while it has no file.
        timeout: Seconds without a file after which the source ends.
        mode: What happens to a file that was used: "unlink" deletes it, "keep" gives it the
            suffix `._done_`, "resample" puts it back, to be used again.
        select: Which file comes next: "random" or "oldest".
        fate: Called with the path of a file that was used, in place of what the mode says.

    Raises:
        ConfigError: If mode or select is none of these.
        DatasetNotFoundError: If there is no such folder.
    """

    is_endless = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        pattern: str = "*.{tar,tgz,tar.gz,tar.bz2,tar.xz,tar.zst}",
        poll: float = 1.0,
        timeout: float = 1e12,
        mode: str = "resample",
        select: str = "random",
        fate: Any = None,
    ) -> None:
        self.path = local_path(os.fspath(path)) or ""
        if not os.path.isdir(self.path):
            raise DatasetNotFoundError(f"{path}: no such folder on this machine")
        if mode not in _FATES or select not in _SELECT:
            raise ConfigError(
                f"{mode=}, {select=}: expected a mode of {', '.join(_FATES)}, and a selection of "
                f"{', '.join(_SELECT)}"
            )
        self.pattern, self.poll, self.timeout = pattern, poll, timeout
        self.mode, self.select, self.fate = mode, select, fate

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        chooser = random.Random(context.seed_of())
        return UnsavableIterator(self._claimed_files(chooser), "DirectoryShardList")

    def _claimed_files(self, chooser: random.Random) -> Iterator[dict[str, Any]]:
        waiting_since = time.monotonic()
        while time.monotonic() - waiting_since < self.timeout:
            claimed = self._claim(chooser)
            if claimed is None:
                time.sleep(min(self.poll, self.timeout))
                continue
            try:
                yield {"url": claimed[0], "local_path": claimed[1]}
            finally:
                self._release(*claimed)
            waiting_since = time.monotonic()

    def _claim(self, chooser: random.Random) -> tuple[str, str] | None:
        """Return the name and the present path of a file that is this process's own now."""
        self._free_orphans()
        files = glob_with_braces(os.path.join(self.path, self.pattern))
        if self.select == "oldest":
            files = sorted(files, key=_age)
        else:
            chooser.shuffle(files)
        for file in files:
            claimed = f"{file}._{os.getpid()}_"
            # Whoever renames it first has it.
            with contextlib.suppress(FileNotFoundError):
                os.rename(file, claimed)
                return file, claimed
        return None

    def _release(self, name: str, claimed: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.fate is not None:
                self.fate(claimed)
            elif self.mode == "unlink":
                os.unlink(claimed)
            elif self.mode == "keep":
                os.rename(claimed, f"{name}._done_")
            else:
                os.rename(claimed, name)

    def _free_orphans(self) -> None:
        for name in os.listdir(self.path):
            found = _CLAIMED.match(name)
            if found and not _is_alive(int(found["pid"])):
                with contextlib.suppress(FileNotFoundError):
                    path = os.path.join(self.path, found["name"])
                    os.rename(os.path.join(self.path, name), path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _age(path: str) -> float:
    try:
        return os.path.getmtime(path)
    except FileNotFoundError:
        return 0.0
