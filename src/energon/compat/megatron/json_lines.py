"""The index of a JSONL file, read and written line by line by programs."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any, Self

from energon.formats.meta.jsonl import jsonl_index_path
from energon.io.epath import EPath
from energon.io.files import file_info, read_bytes

IJSONL_SUFFIX = ".jsonl.idx"
_ENTRY = struct.Struct("<Q")


class IJsonlIndexReader:
    """Where the lines of an indexed JSONL file begin, and where the last one ends, in bytes.

    Args:
        jsonl_path: The JSONL file.
    """

    def __init__(self, jsonl_path: str | os.PathLike[str]) -> None:
        self._data = read_bytes(jsonl_index_path(os.fspath(jsonl_path)))

    def __len__(self) -> int:
        return len(self._data) // _ENTRY.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"entry {index} of an index that has {len(self)}")
        return int(_ENTRY.unpack_from(self._data, index * _ENTRY.size)[0])

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(len(self)))

    def close(self) -> None:
        """Do nothing: the file was closed after it was read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @staticmethod
    def count_samples(jsonl_path: str | os.PathLike[str]) -> int:
        """Return how many lines an indexed file has."""
        info = file_info(jsonl_index_path(os.fspath(jsonl_path)))
        if info is None:
            raise FileNotFoundError(f"{jsonl_path} is not indexed; run `energon prepare` on it")
        return info.size // _ENTRY.size - 1

    @staticmethod
    def size(jsonl_path: str | os.PathLike[str]) -> int:
        """Return where the last line ends."""
        reader = IJsonlIndexReader(jsonl_path)
        return reader[len(reader) - 1]


class IJsonlIndexWriter:
    """Writes an index: `append` the beginning of each line, and the end of the last one.

    The index is there when the block has ended without an error.

    Args:
        jsonl_path: The JSONL file.
    """

    def __init__(self, jsonl_path: str | os.PathLike[str]) -> None:
        self.jsonl_path = EPath(jsonl_path)
        self.final_name = EPath(jsonl_index_path(os.fspath(jsonl_path)))
        self.tmp_name = EPath(f"{self.final_name}.tmp")
        self.ijsonl: IO[Any] = self.tmp_name.open("wb")

    def append(self, offset: int) -> None:
        """Add where a line begins, or the last one ends."""
        self.ijsonl.write(_ENTRY.pack(offset))

    def close(self, finalize: bool = True) -> None:
        """Close the index, and put it in its place or, unless `finalize`, remove it."""
        self.ijsonl.close()
        if finalize:
            self.tmp_name.move(self.final_name)
        else:
            self.tmp_name.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(finalize=error is None)
