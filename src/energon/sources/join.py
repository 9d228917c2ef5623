"""Read joined samples by ordinal: those of several datasets that have the same key.

Which samples belong together is in an index, with one row for each joined sample. All numbers are
little-endian.

| bytes | content |
|---|---|
| 8 | magic `ENERGJN1` |
| 8 | bytes of the rest after this header (uint64) |
| 4 | CRC-32 of that rest (uint32) |
| 4 | bytes of the JSON (uint32) |
| … | JSON, spaces at its end up to a multiple of 8 |
| … | columns, each beginning at a multiple of 8 |

The JSON has the number of `rows`, and `columns`, a list of numpy types, one for each dataset: its
column holds the number of the sample for each row, -1 for none. null instead of a type means that
the sample has the number of the row, and there is no column.

Samples are matched by the hashes of their keys, see `key_hash`.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import repeat
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, distinct
from energon.errors import EmptyDatasetError, FormatError, TruncatedError
from energon.formats.tables.part_table import Hashes, key_hashes, table_hashes
from energon.formats.text import parse_json
from energon.io.epath import AnyPath
from energon.limits import check_document
from energon.local_file import map_file
from energon.messages import counted
from energon.plan.leaves.subset import exclude_indices, include_ordinals, resolve_range
from energon.samples.crude import JOINED, CrudeSample, UnreadableSample
from energon.sources.source import (
    Extents,
    Location,
    Source,
    SplitSource,
    content_fingerprint,
    restore_keys_of,
)
from energon.sources.webdataset import WebdatasetSource
from energon.stages.lane import Block, BuiltBlock

JOIN_MAGIC = b"ENERGJN1"
MISSING = -1
_HEADER = struct.Struct("<8sQII")
_TYPES = ("<i4", "<i8")
_CHUNK = 1 << 20
_AGAIN = "delete it, and it is built again"


@dataclass(frozen=True, eq=False)
class JoinIndex:
    """Which samples of several datasets belong together.

    Args:
        num_rows: How many joined samples there are.
        columns: For each dataset the number of its sample in each row, -1 for none; None if
            samples have the numbers of the rows.
        path: The file that it is mapped from; None if it is in memory only.
    """

    num_rows: int
    columns: tuple[NDArray[Any] | None, ...] = field(repr=False)
    path: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:
            # Workers map the file too: a copy would be as large as the file.
            return _open, (self.path,)
        return JoinIndex, (self.num_rows, self.columns)

    def ordinals(self, column: int, rows: Ints) -> Ints:
        """Return the samples of a dataset in some rows; -1 for none."""
        numbers = self.columns[column]
        return rows if numbers is None else numbers[rows].astype(np.int64)

    def rows_with(self, column: int, numbers: Ints) -> Ints:
        """Return the rows with any of these samples of a dataset, ascending.

        Args:
            column: The dataset.
            numbers: The samples, ascending.
        """
        values = self.columns[column]
        if values is None or not len(numbers):
            return numbers
        rows = [
            np.flatnonzero(np.isin(values[start : start + _CHUNK], numbers)) + start
            for start in range(0, self.num_rows, _CHUNK)
        ]
        return np.concatenate([np.empty(0, np.int64), *rows])

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> JoinIndex:
        """Map the index at `path` into memory.

        Raises:
            FileNotFoundError: If there is none.
            FormatError: If it is not a join index, or truncated.
        """
        data = map_file(path)
        if len(data) < _HEADER.size:
            raise TruncatedError(f"{path}: is too short for a join index; {_AGAIN}")
        magic, length, _, text_length = _HEADER.unpack_from(data)
        if magic != JOIN_MAGIC:
            raise FormatError(f"{path}: begins with {magic!r}, expected {JOIN_MAGIC!r}; {_AGAIN}")
        if len(data) != _HEADER.size + length:
            raise TruncatedError(
                f"{path}: has {len(data)} bytes, expected {_HEADER.size + length}; {_AGAIN}"
            )
        check_document(text_length, str(path))
        position = _HEADER.size + text_length
        columns: list[NDArray[Any] | None] = []
        try:
            header = parse_json(bytes(data[_HEADER.size : position]), origin="JSON")
            if type(header["rows"]) is not int or header["rows"] < 0:
                raise ValueError(f"{header['rows']!r} rows")
            for dtype in header["columns"]:
                if dtype is None:
                    columns.append(None)
                    continue
                if dtype not in _TYPES:
                    raise ValueError(f"a column of {dtype!r}")
                columns.append(np.frombuffer(data, dtype, header["rows"], position))
                size = header["rows"] * np.dtype(dtype).itemsize
                position += size + -size % 8
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{path}: is damaged: {error}; {_AGAIN}") from error
        return cls(header["rows"], tuple(columns), os.path.abspath(path))


def _open(path: str) -> JoinIndex:
    # A function of the module: cloudpickle would send a method of a class by value.
    return JoinIndex.open(path)


def write_join_index(
    path: str | os.PathLike[str],
    columns: Sequence[NDArray[np.int64] | None],
    *,
    num_rows: int,
) -> None:
    """Write an index in one pass over columns, which may be larger than memory.

    Args:
        path: Where to; not renamed into place here.
        columns: As in `JoinIndex`.
        num_rows: How many joined samples there are.
    """
    types = [None if column is None else _smallest(column) for column in columns]
    text = json.dumps({"rows": num_rows, "columns": types}).encode()
    text += b" " * (-(_HEADER.size + len(text)) % 8)
    with open(path, "wb") as file:
        file.write(bytes(_HEADER.size))
        checksum = _write(file, text, 0)
        for column, dtype in zip(columns, types, strict=True):
            if column is None or dtype is None:
                continue
            for start in range(0, num_rows, _CHUNK):
                block = column[start : start + _CHUNK].astype(dtype).tobytes()
                checksum = _write(file, block, checksum)
            checksum = _write(file, bytes(-file.tell() % 8), checksum)
        length = file.tell() - _HEADER.size
        file.seek(0)
        file.write(_HEADER.pack(JOIN_MAGIC, length, checksum, len(text)))


def _write(file: BinaryIO, data: bytes, checksum: int) -> int:
    file.write(data)
    return zlib.crc32(data, checksum)


def _smallest(column: NDArray[np.int64]) -> str:
    largest = max(
        (int(column[at : at + _CHUNK].max()) for at in range(0, len(column), _CHUNK)), default=0
    )
    return "<i4" if largest < 1 << 31 else "<i8"


HASHED_KEYS = 1 << 16
"""Keys of a source without shards that are hashed at once."""


def unexcluded(source: Source) -> tuple[Source, Ints]:
    """Return a source with all its samples, and the numbers of the excluded ones in it.

    Joins match all samples, and leave out those of which a part is excluded. So exclusions change
    neither the index of a join nor the bounds of its subset, and do not count as missing.
    """
    if isinstance(source, SplitSource):
        return source.unexcluded
    return source, np.empty(0, np.int64)


def hashed_keys(source: Source) -> list[Callable[[], tuple[Hashes, Ints]]]:
    """Return functions that hash the keys of some samples of a source, and return their numbers."""
    if isinstance(source, WebdatasetSource):  # keys are in its tables, and need not become strings
        return [partial(_hash_shard, source, shard) for shard in range(len(source.shards))]
    return [partial(_hash_range, source, start) for start in range(0, len(source), HASHED_KEYS)]


def _hash_range(source: Source, start: int) -> tuple[Hashes, Ints]:
    ordinals = np.arange(start, min(start + HASHED_KEYS, len(source)))
    return key_hashes(source.keys(ordinals)), ordinals


def _hash_shard(source: WebdatasetSource, shard: int) -> tuple[Hashes, Ints]:
    low, high = source.bounds[shard : shard + 2].tolist()
    raw = np.arange(low, high)
    if len(source.excluded):
        raw = raw[~np.isin(raw, source.excluded)]
    ordinals = exclude_indices(raw, source.excluded) - source.start
    chosen = (ordinals >= 0) & (ordinals < len(source))
    indices = raw[chosen] - low + int(source.firsts[shard])
    return table_hashes(source.open_shard(shard).table, indices), ordinals[chosen]


class JoinedSource:
    """Samples of several sources with equal keys, numbered as in the index.

    A sample is a dict with the key, the shard and the restore key of the first source's sample, and
    the samples of all sources in `__joined__`.

    Args:
        members: The sources; the first has a sample for each row. Samples that one of them
            excludes are excluded from the join.
        index: Which of their samples belong together, excluded or not.
        digest: Identifies the index; equal for equal content.
        subsets: Ranges that narrow the join, see `energon.plan.leaves.subset`.
        subflavors: The `__subflavors__` of each source's samples, besides those of all.

    Raises:
        EmptyDatasetError: If no row is left.
    """

    def __init__(
        self,
        members: Sequence[Source],
        index: JoinIndex,
        *,
        digest: str,
        subsets: Sequence[Any] = (),
        subflavors: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        pairs = list(map(unexcluded, members))
        self.members = tuple(member for member, _ in pairs)
        self.index = index
        self.digest = digest
        self.subflavors = tuple(subflavors or repeat({}, len(members)))
        self.start, self.stop = resolve_range(index.num_rows, subsets)
        rows = [index.rows_with(number, excluded) for number, (_, excluded) in enumerate(pairs)]
        excluded = distinct(np.concatenate(rows))
        # Numbered from the beginning of the subset.
        self.excluded = excluded[(excluded >= self.start) & (excluded < self.stop)] - self.start
        if not len(self):
            also = ""
            if len(self.excluded):
                also = f" and the exclusion of {counted(len(self.excluded), 'sample')}"
            raise EmptyDatasetError(
                f"{self.path}: the join has {index.num_rows} samples, of which the subset "
                f"[{self.start}, {self.stop}){also} leaves none"
            )

    def __len__(self) -> int:
        return self.stop - self.start - len(self.excluded)

    @property
    def path(self) -> AnyPath:
        """Path of the first dataset, which identifies the join."""
        return self.members[0].path

    @property
    def paths(self) -> list[AnyPath]:
        """Paths of all datasets."""
        return [member.path for member in self.members]

    @property
    def is_remote(self) -> bool:
        """Whether any of the datasets is remote."""
        return any(member.is_remote for member in self.members)

    @cached_property
    def mean_sample_bytes(self) -> float:
        """Average size of a joined sample in bytes."""
        return sum(member.mean_sample_bytes for member in self.members)

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of the samples and their order, which a saved state must match."""
        content = [
            [member.fingerprint()["index"] for member in self.members],
            self.digest,
            [self.start, self.stop],
        ]
        if len(self.excluded):
            content.append(self.excluded.tolist())
        return content_fingerprint(len(self), content)

    def read(
        self,
        ordinals: Ints,
        *,
        restore_keys: Sequence[tuple[int, ...]] | None = None,
        subflavors: Mapping[str, Any] | None = None,
    ) -> Block:
        """Return joined samples, in the order of `ordinals`; see `Source.read`."""
        rows = self._rows(ordinals)
        keys = restore_keys_of(ordinals, restore_keys)
        columns = [
            self._read_member(number, rows, keys, subflavors) for number in range(len(self.members))
        ]
        samples: list[CrudeSample] = []
        for key, parts in zip(keys, zip(*columns, strict=True), strict=True):
            entries = {
                "__key__": parts[0]["__key__"],
                "__shard__": parts[0]["__shard__"],
                "__restore_key__": key,
                "__subflavors__": parts[0]["__subflavors__"],
            }
            unreadable = next((part for part in parts if type(part) is UnreadableSample), None)
            if unreadable is not None:
                samples.append(UnreadableSample(entries, unreadable.error))
            else:
                samples.append(CrudeSample({**entries, JOINED: parts}))
        return BuiltBlock(samples)

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the samples are, for each dataset and file."""
        rows = self._rows(ordinals)
        for number, member in enumerate(self.members):
            numbers = self.index.ordinals(number, rows)
            present = np.flatnonzero(numbers != MISSING)
            for file, requested, low, high in member.extents(numbers[present]):
                yield Extents(file, present[requested], low, high)

    def locate(self, ordinal: int) -> Location:
        """Return where the sample of the first dataset is."""
        return self.members[0].locate(self.ordinals(ordinal)[0])

    def origins(self, ordinal: int) -> list[tuple[Source, int]]:
        pairs = zip(self.members, self.ordinals(ordinal), strict=True)
        return [(member, number) for member, number in pairs if number != MISSING]

    def keys(self, ordinals: Ints) -> list[str]:
        return self.members[0].keys(self.index.ordinals(0, self._rows(ordinals)))

    def find(self, key: str) -> list[int]:
        numbers = self.index.ordinals(0, self._rows(np.arange(len(self))))
        matches = self.members[0].find(key)
        return [int(index) for match in matches for index in np.flatnonzero(numbers == match)]

    def ranges(self) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
        return ("rows", self.digest, *map(str, self.paths)), {"": (self.start, self.stop)}

    def ordinals(self, ordinal: int) -> list[int]:
        """Return the numbers of a joined sample in each dataset; -1 where it is missing."""
        return [int(numbers[0]) for numbers in self.member_ordinals(np.array([ordinal]))]

    def member_ordinals(self, ordinals: Ints) -> list[Ints]:
        """Return, for each dataset, the numbers of joined samples there; -1 where it is missing."""
        rows = self._rows(ordinals)
        return [self.index.ordinals(number, rows) for number in range(len(self.members))]

    def _rows(self, ordinals: Ints) -> Ints:
        outside = ordinals[(ordinals < 0) | (ordinals >= len(self))]
        if len(outside):
            raise IndexError(
                f"{self.path}: the join has samples 0 to {len(self) - 1}, not {outside[0]}"
            )
        if len(self.excluded):
            ordinals = include_ordinals(ordinals, self.excluded)
        return ordinals + self.start

    def _read_member(
        self,
        number: int,
        rows: Ints,
        keys: Sequence[tuple[int, ...]],
        subflavors: Mapping[str, Any] | None,
    ) -> list[CrudeSample | None]:
        """Return the samples of one dataset; their restore keys end with their own number."""
        numbers = self.index.ordinals(number, rows)
        present = np.flatnonzero(numbers != MISSING)
        own = numbers[present]
        requested = present.tolist()
        samples = (
            self.members[number]
            .read(
                own,
                restore_keys=[
                    (*keys[index][:-1], ordinal)
                    for index, ordinal in zip(requested, own.tolist(), strict=True)
                ],
                subflavors={**self.subflavors[number], **(subflavors or {})},
            )
            .samples(0, len(own))
        )
        column: list[CrudeSample | None] = [None] * len(rows)
        for index, sample in zip(requested, samples, strict=True):
            column[index] = sample
        return column
