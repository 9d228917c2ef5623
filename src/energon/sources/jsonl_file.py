"""Read the lines of an indexed JSONL file by number."""

from __future__ import annotations

import os
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from energon.errors import (
    DatasetNotFoundError,
    ShardChangedError,
)
from energon.formats.jsonl import (
    jsonl_index_path,
    load_jsonl_index,
)
from energon.io.disk_cache import map_file
from energon.io.epath import AnyPath, EPath, any_path
from energon.io.local import OpenFile
from energon.io.range_file import RangeFile, RemoteFile
from energon.sources.file_store_locate import local_copy
from energon.sources.spans import read_spans

Ints = NDArray[np.int64]


class JsonlFile:
    """The lines of an indexed JSONL file, opened with the first read. Copies open it anew.

    Args:
        path: The file, here or in an object store.

    Raises:
        DatasetNotFoundError: If it is missing, or not indexed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = any_path(path)
        index = any_path(jsonl_index_path(os.fspath(self.path)))
        for file, found in ((self.path, "does not exist"), (index, "is missing")):
            if not file.is_file():
                raise DatasetNotFoundError(f"{file} {found}; run `energon prepare {self.path}`")
        self._index = index

    def __reduce__(self) -> tuple[type[JsonlFile], tuple[AnyPath]]:
        return JsonlFile, (self.path,)

    @cached_property
    def file(self) -> RangeFile:
        """The file, open."""
        address = os.fspath(self.path)
        return RemoteFile(address) if isinstance(self.path, EPath) else OpenFile(address)

    @cached_property
    def offsets(self) -> NDArray[np.uint64]:
        """Where each sample begins, and the size of the file."""
        size = self.path.stat().size if isinstance(self.path, EPath) else self.path.stat().st_size
        copy = local_copy(self._index)
        data = copy if isinstance(copy, bytes) else map_file(copy)
        return load_jsonl_index(data, size=size, origin=str(self.path))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, numbers: Ints) -> list[bytes]:
        """Return lines by number, without the space around them; numbers ascend.

        Raises:
            ShardChangedError: If there is something else where a line was indexed.
        """
        if not len(numbers):
            return []
        low, high = self.extents(numbers)
        buffers, begin = read_spans(self.file, low, high)
        bounds = zip(buffers, (low - begin).tolist(), (high - begin).tolist(), strict=True)
        lines = [buffer[start:stop].strip() for buffer, start, stop in bounds]
        for number, line in zip(numbers.tolist(), lines, strict=True):
            if line[:1] != b"{":
                raise ShardChangedError(
                    f"{self.path}: sample {number} begins with {line[:20]!r}, not with an object; "
                    f"the file was changed since it was indexed, run `energon prepare {self.path}` "
                    "again"
                )
        return lines

    def extents(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return where lines begin and end."""
        return self.offsets[numbers].astype(np.int64), self.offsets[numbers + 1].astype(np.int64)
