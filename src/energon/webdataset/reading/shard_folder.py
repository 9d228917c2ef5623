"""A folder that other processes fill, as a source of shards: files are claimed by renaming them."""

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
from energon.webdataset.running.place import TorchLookalike
from energon.webdataset.stages.base import Context, Stage, UnsavableIterator
from energon.webdataset.utils import glob_with_braces

_CLAIMED = re.compile(r"^(?P<name>.*)\._(?P<pid>\d+)_$")
_SELECT = ("random", "oldest")
_FATES = ("unlink", "keep", "resample")


class DirectoryShardList(TorchLookalike, Stage):
    """Yields the files of a folder as they appear, each to one process.

    A file is claimed by appending the process id to its name, and recycled when the next one is
    requested. Files claimed by processes that have died are recycled as well.

    Args:
        path: The folder.
        pattern: A pattern for the names of files, which may contain braces.
        poll: Seconds between scans of the folder while it has no file; None ends the source then.
        timeout: Seconds without a file after which the source ends.
        mode: What happens to a used file: "unlink" deletes it, "keep" appends `._done_` to its
            name, "resample" releases it, to be used again.
        select: Which file to take next: "random" or "oldest".
        fate: Called with the path of a used file, instead of what `mode` says.

    Raises:
        ConfigError: If `mode` or `select` is invalid.
        DatasetNotFoundError: If there is no such folder.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> open(f"{folder}/a.tar", "w").close()
        >>> for shard in DirectoryShardList(folder, poll=None, fate=os.unlink):
        ...     shard["url"].startswith(f"{folder}/a.tar._")
        True
    """

    is_endless = is_random = True

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
        # The caller may still have to read the last file.
        return self._claimed_files(random.Random(), puts_back=False)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        files = self._claimed_files(random.Random(context.seed_of(shared=False)), puts_back=True)
        return UnsavableIterator(files, "DirectoryShardList")

    def recycle(self, activename: str) -> None:
        """Dispose of a claimed file according to the mode."""
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
        """Recycle files claimed by processes that no longer exist."""
        for claimed in self._orphans():
            self.recycle(claimed)

    def _claimed_files(
        self, chooser: random.Random, *, puts_back: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield claimed files; one that has not been read to its end on closing may be released."""
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
        """Claim a file for this process, and return its new path."""
        for orphan in self._orphans():
            _put_back(orphan)
        files = glob_with_braces(os.path.join(self.path, self.pattern))
        if self.select == "oldest":
            files = sorted(files, key=_age)
        else:
            chooser.shuffle(files)
        for file in files:
            claimed = f"{file}._{os.getpid()}_"
            # The first process to rename it wins.
            with contextlib.suppress(FileNotFoundError):
                os.rename(file, claimed)
                return claimed
        return None

    def _orphans(self) -> Iterator[str]:
        """Yield the paths of files claimed by processes that no longer exist."""
        for name in os.listdir(self.path):
            pid = get_pid_from_filename(name)
            if pid is not None and not check_pid_is_running(pid):
                yield os.path.join(self.path, name)


def _put_back(claimed: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rename(claimed, without_last_extension(claimed))


def get_pid_from_filename(fname: str) -> int | None:
    """Return the id of the process that has claimed a file, or None."""
    found = _CLAIMED.match(fname)
    return int(found["pid"]) if found else None


def without_last_extension(fname: str) -> str:
    """Return a name without its last dot and everything after it."""
    return re.sub(r"\.[^.]*$", "", fname)


def check_pid_is_running(pid: int) -> bool:
    """Return whether there is a process with this id."""
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
