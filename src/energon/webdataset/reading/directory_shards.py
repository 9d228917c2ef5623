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
from energon.webdataset.running.dataset import TorchLookalike
from energon.webdataset.stages.base import Context, Stage, UnsavableIterator
from energon.webdataset.utils import glob_with_braces

_CLAIMED = re.compile(r"^(?P<name>.*)\._(?P<pid>\d+)_$")
_SELECT = ("random", "oldest")
_FATES = ("unlink", "keep", "resample")


class DirectoryShardList(TorchLookalike, Stage):
    """Gives the files of a folder as they come, to one process each.

    A file is claimed by giving it the number of the process as a suffix, and recycled when the
    next one is asked for. Files that dead processes have claimed are recycled as well.

    Args:
        path: The folder.
        pattern: Which files, with braces.
        poll: Seconds between looks into the folder while it has no file; None ends there.
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
        poll: float | None = 1.0,
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

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # Whoever drops this may still have to read the last file.
        return self._claimed_files(random.Random(), puts_back=False)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        files = self._claimed_files(random.Random(context.seed_of()), puts_back=True)
        return UnsavableIterator(files, "DirectoryShardList")

    def recycle(self, activename: str) -> None:
        """Give a claimed file its fate."""
        name = without_last_extension(activename)
        with contextlib.suppress(FileNotFoundError):
            if self.fate is not None:
                self.fate(activename)
            elif self.mode == "unlink":
                os.unlink(activename)
            elif self.mode == "keep":
                os.rename(activename, f"{name}._done_")
            else:
                os.rename(activename, name)

    def cleanup_files_without_processes(self) -> None:
        """Give files their fate that processes have claimed which are no more."""
        for name in os.listdir(self.path):
            pid = get_pid_from_filename(name)
            if pid is not None and not check_pid_is_running(pid):
                self.recycle(os.path.join(self.path, name))

    def _claimed_files(
        self, chooser: random.Random, *, puts_back: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield files; one that was not read to its end when this is closed may be put back."""
        waiting_since = time.monotonic()
        while time.monotonic() - waiting_since < self.timeout:
            claimed = self._claim(chooser)
            if claimed is None:
                if self.poll is None:
                    return
                time.sleep(min(self.poll, self.timeout))
                continue
            try:
                yield {"url": claimed}
            except GeneratorExit:
                if puts_back:
                    _put_back(claimed)
                raise
            self.recycle(claimed)
            waiting_since = time.monotonic()

    def _claim(self, chooser: random.Random) -> str | None:
        """Return the present path of a file that is this process's own now."""
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
                return claimed
        return None

    def _free_orphans(self) -> None:
        """Put files back that processes have claimed which are no more: nobody has used them."""
        for name in os.listdir(self.path):
            pid = get_pid_from_filename(name)
            if pid is not None and not check_pid_is_running(pid):
                _put_back(os.path.join(self.path, name))


def _put_back(claimed: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rename(claimed, without_last_extension(claimed))


def get_pid_from_filename(fname: str) -> int | None:
    """Return the process that has claimed a file, or None."""
    found = _CLAIMED.match(fname)
    return int(found["pid"]) if found else None


def without_last_extension(fname: str) -> str:
    """Return a name without what follows its last dot."""
    return re.sub(r"\.[^.]*$", "", fname)


def check_pid_is_running(pid: int) -> bool:
    """Return whether there is a process of that number."""
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
