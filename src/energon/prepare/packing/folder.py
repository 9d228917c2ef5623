"""Pack a folder: files whose paths are equal up to the first dot of their names are a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby, islice
from typing import Any

from energon.errors import DatasetNotFoundError
from energon.formats.tar import split_name
from energon.io.epath import AnyPath
from energon.prepare.packing.place import names_below


class FolderSource:
    """The files below a folder, sorted by path. Samples are named by their paths below it.

    Args:
        folder: The folder.

    Raises:
        DatasetNotFoundError: If there is no such folder, or nothing in it is a sample.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.folder = folder
        names = names_below(folder)
        pairs = [(split, name) for name in names if (split := split_name(name)) is not None]
        self._files = sorted(pairs)
        chosen = {name for _, name in pairs}
        self._left_out = [
            f"{name}: no sample, its name has no extension" for name in names if name not in chosen
        ]
        if not self._files:
            raise DatasetNotFoundError(
                f"{folder}: no file with an extension in it or below; wanted are files like "
                "0001.jpg and 0001.txt"
            )

    def split_names(self) -> list[str]:
        return [""]

    def samples(self, split: str, start: int) -> Iterator[Mapping[str, Any]]:
        groups = groupby(self._files, key=lambda pair: pair[0][0])
        for key, files in islice(groups, start, None):
            yield {"__key__": key, **{part: self.folder / name for (_, part), name in files}}

    def skipped(self) -> list[str]:
        return self._left_out
