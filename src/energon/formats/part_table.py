"""The part table of a shard: where each part of each sample lies.

A file beside the shard, `x.tar.parts` for `x.tar`, with which readers take content without
parsing a tar header. All numbers are little-endian; each array begins at a multiple of 8.

| bytes | content |
|---|---|
| 8 | magic `ENERGPT1` |
| 8 | bytes of the rest after this header (uint64) |
| 4 | CRC-32 of that rest (uint32) |
| 4 | bytes of the JSON (uint32) |
| … | JSON: `samples` N, `parts` P, `shard_size`, `shard_mtime_ns`, `names` (of parts) |
| 8·(N+1) | offset of each sample in the shard, headers included, and the end of the last |
| 8·P, 8·P | offset and size of the content of each part |
| 8·N | hashes of the keys, ascending: first 8 bytes of BLAKE2b |
| 4·(N+1) | number of the first part of each sample, and P |
| 4·(N+1) | where each key begins in the keys, and their length |
| 4·N | which sample each hash belongs to |
| 2·P | index of the name of each part |
| … | the keys, UTF-8 |
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import FormatError, TruncatedError
from energon.formats.tar import TarScan, scan_tar

MAGIC = b"ENERGPT1"
_HEADER = struct.Struct("<8sQII")


def part_table_path(shard: str | os.PathLike[str]) -> Path:
    """Return where the part table of a shard is: beside it."""
    path = Path(shard)
    return path.with_name(path.name + ".parts")


@dataclass(frozen=True, eq=False)
class PartTable:
    """Where the parts of a shard lie. N samples, P parts."""

    shard_size: int
    """Bytes of the shard when it was indexed."""
    shard_mtime_ns: int
    """Its modification time then."""
    part_names: tuple[str, ...]
    sample_offset: NDArray[np.uint64]
    """(N + 1,) where each sample begins, headers included, and where the last ends."""
    part_offset: NDArray[np.uint64]
    """(P,) where the content of each part begins."""
    part_size: NDArray[np.uint64]
    """(P,) bytes of content."""
    key_hash: NDArray[np.uint64]
    """(N,) hashes of the keys, ascending."""
    first_part: NDArray[np.uint32]
    """(N + 1,) number of the first part of each sample, and P."""
    key_start: NDArray[np.uint32]
    """(N + 1,) where each key begins in `key_bytes`, and their length."""
    hash_sample: NDArray[np.uint32]
    """(N,) the sample of each hash."""
    part_name: NDArray[np.uint16]
    """(P,) index into `part_names`."""
    key_bytes: Any
    """All keys in UTF-8, as a buffer."""

    @property
    def num_samples(self) -> int:
        """How many samples the shard has."""
        return len(self.key_hash)

    @cached_property
    def common_parts(self) -> tuple[str, ...] | None:
        """The parts that every sample has, in this order and no others; None if they differ."""
        count = len(self.part_name) // max(1, self.num_samples)
        if not count or len(self.part_name) != count * self.num_samples:
            return None
        names = self.part_name.reshape(-1, count)
        regular = self.first_part[:-1] == np.arange(0, len(self.part_name), count)
        if not regular.all() or not (names == names[0]).all():
            return None
        return tuple(self.part_names[name] for name in names[0].tolist())

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """Return the keys of samples, in the order of `indices`."""
        starts = self.key_start[indices].tolist()
        stops = self.key_start[indices + 1].tolist()
        data = self.key_bytes
        if len(starts) > 1 and stops[-1] - starts[0] < 64 * len(starts):
            # Neighbours: decode once and cut the text, if characters are bytes.
            low = min(starts)
            text = bytes(data[low : max(stops)])
            if text.isascii():
                letters = text.decode()
                return [letters[a - low : b - low] for a, b in zip(starts, stops, strict=True)]
        return [
            str(data[a:b], "utf-8", "surrogateescape") for a, b in zip(starts, stops, strict=True)
        ]

    def index_of(self, key: str) -> int | None:
        """Return which sample has this key, or None."""
        wanted = hash_key(key.encode("utf-8", "surrogateescape"))
        at = int(np.searchsorted(self.key_hash, np.uint64(wanted)))
        while at < self.num_samples and int(self.key_hash[at]) == wanted:
            sample = int(self.hash_sample[at])
            if self.keys(np.array([sample])) == [key]:
                return sample
            at += 1
        return None

    @classmethod
    def from_scan(cls, scan: TarScan, *, shard_mtime_ns: int = 0) -> PartTable:
        """Return the table of a shard that was just scanned."""
        encoded = [key.encode("utf-8", "surrogateescape") for key in scan.keys]
        hashes = np.array([hash_key(key) for key in encoded], np.uint64)
        order = np.argsort(hashes, kind="stable")
        lengths = np.array([len(key) for key in encoded], np.uint32)
        return cls(
            shard_size=scan.size,
            shard_mtime_ns=shard_mtime_ns,
            part_names=scan.part_names,
            sample_offset=scan.sample_offset,
            part_offset=scan.part_offset,
            part_size=scan.part_size,
            key_hash=hashes[order],
            first_part=scan.first_part,
            key_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.uint32),
            hash_sample=order.astype(np.uint32),
            part_name=scan.part_name,
            key_bytes=b"".join(encoded),
        )

    def to_bytes(self) -> bytes:
        """Return the table as it is stored."""
        about = json.dumps(
            {
                "samples": self.num_samples,
                "parts": len(self.part_offset),
                "shard_size": self.shard_size,
                "shard_mtime_ns": self.shard_mtime_ns,
                "names": [
                    name.encode("utf-8", "surrogateescape").hex() for name in self.part_names
                ],
            }
        ).encode()
        about += b" " * (-(_HEADER.size + len(about)) % 8)
        columns = [getattr(self, name) for name, *_ in _columns(0, 0)]
        body = about + b"".join(_padded(column.tobytes()) for column in columns)
        body += bytes(self.key_bytes)
        return _HEADER.pack(MAGIC, len(body), zlib.crc32(body), len(about)) + body

    @classmethod
    def from_buffer(cls, data: Any, *, origin: str, verify: bool = False) -> PartTable:
        """Return the table in `data`, without copying it.

        Args:
            data: A buffer with the whole file.
            origin: What messages call it.
            verify: Whether to check the CRC, which reads all of it.

        Raises:
            FormatError: If it is not a part table, or damaged.
        """
        again = "delete it and run `energon prepare` again"
        if len(data) < _HEADER.size:
            raise TruncatedError(f"{origin}: has {len(data)} bytes, no part table; {again}")
        magic, length, checksum, about_length = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise FormatError(f"{origin}: begins with {magic!r}, wanted {MAGIC!r}; {again}")
        if len(data) != _HEADER.size + length:
            raise TruncatedError(
                f"{origin}: has {len(data)} bytes, wanted {_HEADER.size + length}; {again}"
            )
        if verify and zlib.crc32(memoryview(data)[_HEADER.size :]) != checksum:
            raise FormatError(f"{origin}: checksum does not fit; {again}")
        about = json.loads(bytes(data[_HEADER.size : _HEADER.size + about_length]))
        position = _HEADER.size + about_length
        columns: dict[str, Any] = {}
        for name, dtype, count in _columns(about["samples"], about["parts"]):
            columns[name] = np.frombuffer(data, dtype, count, position)
            size = count * np.dtype(dtype).itemsize
            position += size + -size % 8
        names = (bytes.fromhex(name) for name in about["names"])
        return cls(
            shard_size=about["shard_size"],
            shard_mtime_ns=about["shard_mtime_ns"],
            part_names=tuple(name.decode("utf-8", "surrogateescape") for name in names),
            key_bytes=memoryview(data)[position:],
            **columns,
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = False) -> PartTable:
        """Map the table at `path` into memory.

        Raises:
            FileNotFoundError: If there is none.
            FormatError: If it is not a part table, or damaged.
        """
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise TruncatedError(f"{path}: is empty, no part table")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return cls.from_buffer(data, origin=str(path), verify=verify)


def hash_key(key: bytes) -> int:
    """Return the 64-bit hash under which a key is found."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


def _columns(samples: int, parts: int) -> Sequence[tuple[str, str, int]]:
    return (
        ("sample_offset", "<u8", samples + 1),
        ("part_offset", "<u8", parts),
        ("part_size", "<u8", parts),
        ("key_hash", "<u8", samples),
        ("first_part", "<u4", samples + 1),
        ("key_start", "<u4", samples + 1),
        ("hash_sample", "<u4", samples),
        ("part_name", "<u2", parts),
    )


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def open_part_table(shard: str | os.PathLike[str]) -> PartTable:
    """Return the table of a shard: that beside it, or one made by scanning it.

    Datasets that were prepared by other tools have no part tables; each shard is then scanned
    once when it is opened. A table of an earlier version of the shard does not count.

    Raises:
        FormatError: If the shard is damaged.
    """
    path = part_table_path(shard)
    if path.exists():
        return PartTable.open(path)
    return PartTable.from_scan(scan_tar(shard, strict=False))
