"""The part table of a shard: where each part of each sample is.

A file beside the shard, `x.tar.parts` for `x.tar`, with which readers take content without
parsing a tar header. It is mapped into memory; `part_table_bytes` has its layout. A shard that has
none is scanned.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, mix, mix_one
from energon.errors import DuplicateSampleKeyError, FormatError
from energon.formats.tables.part_table_bytes import (
    FIELDS,
    decode_part_table,
    encode_part_table,
    has_other_version,
    map_part_table,
)
from energon.formats.tar.headers import BLOCK, split_name
from energon.formats.tar.scan import TarScan, iter_members, scan_tar
from energon.messages import warn_once

Column = NDArray[Any]

TABLE_SUFFIX = ".parts"


def _smallest(column: Column) -> Column:
    """Return unsigned numbers in as few bytes as they need, little-endian."""
    dtype = np.min_scalar_type(int(column.max(initial=0)))
    return column.astype(dtype.newbyteorder("<"))


class RepeatedPart(NamedTuple):
    """A part that a sample has twice, as if two adjacent samples had the same key."""

    key: str
    part: str
    offset: int
    """Where its content begins."""
    again: int
    """Where the content begins that claims to be the same part."""

    def error(self, shard: object) -> DuplicateSampleKeyError:
        """Return the error that reports it for a shard."""
        return DuplicateSampleKeyError(
            f"{shard}: sample {self.key!r} has the part {self.part!r} twice, at bytes "
            f"{self.offset} and {self.again}; if these are two samples, rename one; "
            "`energon prepare --fix-duplicates` rewrites the shard so that each has its own"
        )


@dataclass(frozen=True, eq=False)
class PartTable:
    """The positions of the parts in a shard. N samples, P parts."""

    num_samples: int
    num_parts: int
    shard_size: int
    """Bytes of the shard when it was indexed."""
    shard_mtime_ns: int
    """Its modification time then."""
    part_names: tuple[str, ...]
    columns: Mapping[str, Column] = field(repr=False)
    """As they are stored."""
    header: tuple[int, int] | None
    """Blocks before the content of each sample, and where the last ends; None if they differ."""
    schema: tuple[int, ...] | None
    """Indices of the names that every sample has; None if samples differ."""
    key_length: int | None
    """Bytes of every key; None if they differ."""
    unique: bool
    """Whether no two samples have the same key."""
    key_bytes: Any = field(repr=False)
    """All keys in UTF-8, as a buffer."""

    @property
    def sample_offset(self) -> NDArray[np.uint64]:
        """(N + 1,) where each sample begins, headers included, and where the last ends."""
        if self.header is None:
            return self.columns["sample_block"].astype(np.uint64) * BLOCK
        begin, end = self.sample_extents(np.arange(self.num_samples))
        return np.append(begin, end[-1]).astype(np.uint64)

    @property
    def part_offset(self) -> NDArray[np.uint64]:
        """(P,) where the content of each part begins."""
        return self.columns["part_block"].astype(np.uint64) * BLOCK

    @property
    def part_size(self) -> NDArray[np.uint64]:
        """(P,) bytes of content."""
        return self.columns["part_size"].astype(np.uint64)

    @property
    def first_part(self) -> Column:
        """(N + 1,) number of the first part of each sample, and P."""
        if self.schema is None:
            return self.columns["first_part"]
        return np.arange(0, self.num_parts + 1, len(self.schema))

    @property
    def part_name(self) -> Column:
        """(P,) index into `part_names`."""
        if self.schema is None:
            return self.columns["part_name"]
        return np.tile(np.array(self.schema), self.num_samples)

    def extents(self, parts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the offsets and sizes of the contents of some parts.

        Unlike the whole columns, which are made again each time they are asked for, this costs
        what is asked for.
        """
        begin = self.columns["part_block"][parts].astype(np.int64) * BLOCK
        return begin, self.columns["part_size"][parts].astype(np.int64)

    def sample_extent(self, index: int) -> tuple[int, int]:
        """Return where one sample begins, headers included, and where it ends."""
        (begin,), (end,) = self.sample_extents(np.array([index]))
        return int(begin), int(end)

    def sample_extents(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where samples begin, headers included, and where they end."""
        if self.header is None:
            blocks = self.columns["sample_block"]
            begin, end = blocks[indices].astype(np.int64), blocks[indices + 1].astype(np.int64)
            return begin * BLOCK, end * BLOCK
        gap, last = self.header
        following = self._first_parts(np.minimum(indices + 1, self.num_samples - 1))
        begin = self.columns["part_block"][self._first_parts(indices)].astype(np.int64) - gap
        end = self.columns["part_block"][following].astype(np.int64) - gap
        end[indices + 1 == self.num_samples] = last
        return begin * BLOCK, end * BLOCK

    def part_bytes(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the size of the part with a name in each of some samples; 0 where it is missing.

        Parts that a sample has several times are counted together.
        """
        totals = np.zeros(len(indices), np.int64)
        owners, numbers, names = self._parts_of(indices)
        if name in self.part_names:
            is_it = names == self.part_names.index(name)
            np.add.at(totals, owners[is_it], self.extents(numbers[is_it])[1])
        return totals

    def sample_parts(self, index: int) -> list[tuple[str, int, int]]:
        """Return the name, the offset and the size of each part of one sample."""
        numbers = self.part_numbers(index)
        if self.schema is None:
            names = self.columns["part_name"][numbers.start : numbers.stop].tolist()
        else:
            names = self.schema
        offsets, sizes = self.extents(np.array(numbers, np.int64))
        called = [self.part_names[name] for name in names]
        return list(zip(called, offsets.tolist(), sizes.tolist(), strict=True))

    def part_numbers(self, index: int) -> range:
        """Return the numbers of the parts of one sample."""
        if self.schema is None:
            return range(*self.columns["first_part"][index : index + 2].tolist())
        return range(index * len(self.schema), (index + 1) * len(self.schema))

    def repeated_parts(self, indices: NDArray[np.int64] | None = None) -> list[RepeatedPart]:
        """Return the parts that a sample has more than once, each time but the first.

        Nothing is compared where all samples have the same, different parts.

        Args:
            indices: The samples, ascending; None for all.
        """
        if self.schema is not None and len(set(self.schema)) == len(self.schema):
            return []
        indices = np.arange(self.num_samples) if indices is None else indices
        owners, numbers, names = self._parts_of(indices)
        order = np.lexsort((names, owners))
        same = (np.diff(owners[order]) == 0) & (np.diff(names[order]) == 0)
        again = np.flatnonzero(same) + 1
        # The sort is stable: where a run of equal ones begins is the first of them.
        begins = np.flatnonzero(np.append(True, ~same))
        earlier = begins[np.searchsorted(begins, again, side="right") - 1]
        (one, _), (other, _) = (self.extents(numbers[order[at]]) for at in (earlier, again))
        keys = self.keys(indices[owners[order[again]]])
        parts = [self.part_names[name] for name in names[order[again]].tolist()]
        repeated = zip(keys, parts, one.tolist(), other.tolist(), strict=True)
        return [RepeatedPart(*part) for part in repeated]

    @property
    def part_crc32(self) -> Column | None:
        """(P,) CRC-32 of each content; None if unknown."""
        return self.columns.get("part_crc32")

    @cached_property
    def common_parts(self) -> tuple[str, ...] | None:
        """The parts that every sample has, in this order and no others; None if they differ."""
        if self.schema is None:
            return None
        return tuple(self.part_names[name] for name in self.schema)

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """Return the keys of samples, in the order of `indices`."""
        begins, ends = self._key_edges(indices)
        edges = zip(begins.tolist(), ends.tolist(), strict=True)
        return [str(self.key_bytes[a:b], "utf-8", "surrogateescape") for a, b in edges]

    def key_of(self, index: int) -> str:
        """Return the key of one sample."""
        return self.encoded_key(index).decode("utf-8", "surrogateescape")

    def encoded_key(self, index: int) -> bytes:
        """Return the key of one sample in UTF-8: ten times as fast as `keys`, which is for many."""
        if self.key_length is not None:
            return bytes(self.key_bytes[index * self.key_length : (index + 1) * self.key_length])
        start, stop = self.columns["key_start"][index : index + 2].tolist()
        return bytes(self.key_bytes[start:stop])

    def index_of(self, key: str) -> int | None:
        """Return the index of the sample with this key, or None."""
        encoded = key.encode("utf-8", "surrogateescape")
        rank = self.first_from(encoded)
        if rank == self.num_samples or self.key_at(rank) != encoded:
            return None
        return self.index_at(rank)

    def starting_with(self, prefix: bytes) -> Iterator[int]:
        """Yield the samples whose keys begin with `prefix`, in the order of their keys."""
        for rank in range(self.first_from(prefix), self.num_samples):
            if not self.key_at(rank).startswith(prefix):
                return
            yield self.index_at(rank)

    def first_from(self, key: bytes, low: int = 0) -> int:
        """Return the rank, at least `low`, of the first key that does not sort before `key`."""
        return bisect_left(range(self.num_samples), key, low, key=self.key_at)

    def index_at(self, rank: int) -> int:
        """Return the index of the sample whose key has this rank in ascending order."""
        order = self.columns.get("key_order")
        return rank if order is None else int(order[rank])

    def key_at(self, rank: int) -> bytes:
        """Return the key with this rank in ascending order."""
        return self.encoded_key(self.index_at(rank))

    def _parts_of(self, indices: NDArray[np.int64]) -> tuple[Ints, Ints, Ints]:
        """Return the parts of some samples: the place of the sample in `indices`, number, name."""
        first, stop = (self._first_parts(indices + n).astype(np.int64) for n in (0, 1))
        counts = stop - first
        owners = np.repeat(np.arange(len(indices)), counts)
        numbers = np.arange(len(owners)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        if self.schema is None:
            return owners, numbers, self.columns["part_name"][numbers].astype(np.int64)
        return owners, numbers, np.array(self.schema)[numbers % len(self.schema)]

    def _first_parts(self, indices: NDArray[np.int64]) -> Column:
        if self.schema is None:
            return self.columns["first_part"][indices]
        return indices * len(self.schema)

    def _key_edges(self, indices: NDArray[np.int64]) -> tuple[Column, Column]:
        if self.key_length is not None:
            starts = np.asarray(indices) * self.key_length
            return starts, starts + self.key_length
        edges = self.columns["key_start"]
        return edges[indices], edges[np.asarray(indices) + 1]

    @classmethod
    def from_scan(cls, scan: TarScan, *, shard_mtime_ns: int = 0) -> PartTable:
        """Return the table of a shard that was just scanned."""
        schema, key_length = scan.common_schema(), scan.common_key_length()
        header = scan.common_header()
        columns: dict[str, Column] = {
            "part_block": scan.part_offset // BLOCK,
            "part_size": scan.part_size,
        }
        if header is None:
            columns["sample_block"] = scan.sample_offset // BLOCK
        if schema is None:
            columns |= {"first_part": scan.first_part, "part_name": scan.part_name}
        if key_length is None:
            columns["key_start"] = scan.key_start
        order, unique = scan.key_order()
        if order is not None:
            columns["key_order"] = order
        if scan.part_crc32 is not None:
            columns["part_crc32"] = scan.part_crc32
        return cls(
            num_samples=scan.num_samples,
            num_parts=len(scan.part_offset),
            shard_size=scan.size,
            shard_mtime_ns=shard_mtime_ns,
            part_names=scan.part_names,
            columns={name: _smallest(column) for name, column in columns.items()},
            header=header,
            schema=schema,
            key_length=key_length,
            unique=unique,
            key_bytes=scan.key_bytes,
        )

    def to_bytes(self) -> bytes:
        """Return the table as it is stored."""
        fields = {key: getattr(self, name) for key, name in FIELDS.items()}
        names = [name.encode("utf-8", "surrogateescape").hex() for name in self.part_names]
        fields["names"] = names
        return encode_part_table(fields, self.columns, bytes(self.key_bytes))

    @classmethod
    def from_buffer(cls, data: Any, *, origin: str, verify: bool = False) -> PartTable:
        """Return the table in `data`, without copying it.

        Args:
            data: A buffer with the whole file.
            origin: Its name in messages.
            verify: Whether to check the CRC, which reads all of it.

        Raises:
            FormatError: If it is not a part table, or damaged.
        """
        fields, columns, keys = decode_part_table(data, origin=origin, verify=verify)
        for key in ("header", "schema"):
            fields[key] = None if fields[key] is None else tuple(fields[key])
        values = {name: fields[key] for key, name in FIELDS.items()}
        return cls(**values, columns=columns, key_bytes=keys)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = False) -> PartTable:
        """Map the table at `path` into memory.

        Raises:
            FileNotFoundError: If there is none.
            FormatError: If it is not a part table, or damaged.
        """
        return cls.from_buffer(map_part_table(path), origin=str(path), verify=verify)


Hashes = NDArray[np.uint64]
"""128-bit hashes of the keys of samples, in two halves.

Joins take two keys with equal hashes for the same key: among 10^12 keys the probability of any
collision is below 10^-14. Look-ups use the first half, and compare the key. The hash does not
resist an adversary, who could write the same key anyway.
"""

_WORD = 8
_SEEDS = np.array([0x243F6A8885A308D3, 0x13198A2E03707344], np.uint64)


def table_hashes(table: PartTable, indices: Ints) -> Hashes:
    """Return the hashes of the keys of some samples, with shape (samples, 2)."""
    data = np.frombuffer(table.key_bytes, np.uint8)
    if table.key_length is not None:
        return _hash_equal(data, indices * table.key_length, table.key_length)
    edges = table.columns["key_start"]
    starts = edges[indices].astype(np.int64)
    return _hash_all(data, starts, edges[indices + 1].astype(np.int64) - starts)


def key_hashes(keys: Sequence[str]) -> Hashes:
    """Return the hashes of some keys, with shape (keys, 2)."""
    encoded = [key.encode() for key in keys]
    lengths = np.array([len(key) for key in encoded], np.int64)
    data = np.frombuffer(b"".join(encoded), np.uint8)
    return _hash_all(data, np.cumsum(lengths) - lengths, lengths)


def _hash_all(data: NDArray[np.uint8], starts: Ints, lengths: Ints) -> Hashes:
    hashes = np.empty((len(starts), 2), np.uint64)
    for length in np.unique(lengths).tolist():
        chosen = np.flatnonzero(lengths == length)
        hashes[chosen] = _hash_equal(data, starts[chosen], length)
    return hashes


def _hash_equal(data: NDArray[Any], starts: NDArray[np.int64], length: int) -> Hashes:
    """Return the hashes of keys of one length, eight bytes at a time."""
    words = -(-length // _WORD)
    padded = np.zeros((len(starts), words * _WORD), np.uint8)
    if length:
        padded[:, :length] = data[starts[:, None] + np.arange(length)]
    columns = padded.view("<u8").astype(np.uint64)
    hashes = np.tile(mix(_SEEDS ^ np.uint64(length)), (len(starts), 1))
    for word in range(words):
        hashes = mix(hashes ^ mix(columns[:, word : word + 1] + _SEEDS))
    return hashes


def key_hash(key: bytes) -> int:
    """Return the first half of the hash of a key, faster than for many keys at once."""
    seed = int(_SEEDS[0])
    value = mix_one(seed ^ len(key))
    for start in range(0, len(key), _WORD):
        word = int.from_bytes(key[start : start + _WORD], "little")
        value = mix_one(value ^ mix_one(word + seed))
    return value


logger = logging.getLogger("energon")

PROBE_BYTES = 64 << 10
"""What is read for the headers of a sample at a time."""

ReadAt = Callable[[int, int], bytes]
"""`read(offset, size)` returns exactly this many bytes of the shard."""


def find_misplaced(table: PartTable, read: ReadAt, *, count: int) -> int | None:
    """Return a sample whose tar headers contradict the table, or None.

    Args:
        table: Of the shard, maybe of an earlier version of it.
        read: Reads the shard.
        count: How many samples to look at, evenly spread.
    """
    last = table.num_samples - 1
    indices: list[int] = sorted(set(np.linspace(0, last, count).astype(np.int64).tolist()))
    for index in indices:
        if not _is_where_indexed(table, read, index):
            return index
    return None


def _is_where_indexed(table: PartTable, read: ReadAt, index: int) -> bool:
    begin, end = table.sample_extent(index)
    key = table.key_of(index)
    expected = [
        ((key, name), offset - begin, size) for name, offset, size in table.sample_parts(index)
    ]

    def read_sample(offset: int, size: int) -> bytes:
        return read(begin + offset, min(size, PROBE_BYTES, end - begin - offset))

    try:
        members = list(iter_members(read_sample, end - begin, origin="sample", strict=False))
    except FormatError:
        return False
    parts = [(split_name(member.name), member.offset, member.size) for member in members]
    return [part for part in parts if part[0] is not None] == expected


def part_table_path(shard: str | os.PathLike[str]) -> Path:
    """Return the path of the part table of a shard, next to it."""
    return Path(f"{os.fspath(shard)}{TABLE_SUFFIX}")


def open_part_table(
    shard: str | os.PathLike[str], *, verify: bool = True, dataset: object = None
) -> PartTable:
    """Return the table of a shard: the file next to it, or the result of scanning it.

    Datasets that were prepared by other tools have no part tables, and those that were prepared
    by another release may have some of another version; each shard is then scanned when it is
    opened.

    Args:
        shard: Path of the shard.
        verify: Whether to check the CRC of its table, which reads all of it (about a millisecond
            for 50,000 samples).
        dataset: What the shard belongs to, for warnings; None for its folder.

    Raises:
        FormatError: If the shard or its table is damaged.
    """
    path = f"{os.fspath(shard)}{TABLE_SUFFIX}"
    try:
        data = map_part_table(path)
    except FileNotFoundError:
        return PartTable.from_scan(scan_tar(shard, strict=False))
    if has_other_version(data):
        warn_of_other_version(os.path.dirname(path) if dataset is None else dataset)
        return PartTable.from_scan(scan_tar(shard, strict=False))
    return PartTable.from_buffer(data, origin=path, verify=verify)


def warn_of_other_version(dataset: object) -> None:
    """Log once per dataset that its part tables cannot be used."""
    warn_once(
        logger,
        f"part tables of {dataset}",
        "%s: part tables were written by another release of energon, so headers are read each "
        "time that shards are opened; `energon index` on the dataset rewrites the tables",
        dataset,
    )
