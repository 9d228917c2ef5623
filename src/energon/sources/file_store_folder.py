"""The files of a folder, by their paths below it."""

from __future__ import annotations

import os
from pathlib import Path

from energon.errors import DatasetNotFoundError, NoSuchFileError
from energon.samples.source_info import SourceInfo
from energon.sources.file_store import FileStore


class SystemFileStore(FileStore[bytes]):
    """The files of a folder, by their paths below it.

    Args:
        base_dir: The folder. Names that would leave it are refused. None takes absolute paths
            as names.

    Raises:
        DatasetNotFoundError: If there is no such folder.
    """

    def __init__(self, base_dir: str | os.PathLike[str] | None = None) -> None:
        self.base_dir = None if base_dir is None else Path(base_dir)
        if self.base_dir is not None and not self.base_dir.is_dir():
            raise DatasetNotFoundError(
                f"{self.base_dir}: no such folder; wanted is one with the files that samples name"
            )

    def get_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        path = self._path(name)
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NoSuchFileError(f"{path}: no such file, but a sample names {name!r}") from error
        return data, SourceInfo(self.get_path(), name, None, (name,))

    def get_path(self) -> str:
        return "" if self.base_dir is None else str(self.base_dir)

    def __contains__(self, name: str) -> bool:
        return self._path(name).is_file()

    def _path(self, name: str) -> Path:
        if self.base_dir is None:
            if not os.path.isabs(name):
                raise NoSuchFileError(
                    f"{name!r} is no absolute path, and this store has no folder; give it one with "
                    "SystemFileStore(base_dir)"
                )
            return Path(name)
        # Names come from data, and must not reach what was never meant to be read.
        relative = os.path.normpath(name)
        if os.path.isabs(name) or relative == ".." or relative.startswith(".." + os.sep):
            raise NoSuchFileError(
                f"{name!r} leaves the folder {self.base_dir}; wanted is a path below it"
            )
        return self.base_dir / relative
