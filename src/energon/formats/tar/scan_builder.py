"""Collect the members that a scan of a shard finds, or that its writer writes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from operator import lt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.formats.tar.headers import BLOCK
from energon.formats.tar.names import split_name, split_name_fields
from energon.formats.tar.parser import Member, Run


@dataclass(frozen=True, eq=False)
class TarScan:
    """The content of a shard: samples, parts and their positions. N samples, P parts."""

    size: int
    """Bytes of the shard."""
    part_names: tuple[str, ...]
    """The different names of parts."""
    sample_offset: Ints
    """(N + 1,) where each sample begins, headers included, and where the last one ends."""
    first_part: Ints
    """(N + 1,) number of the first part of each sample, and P."""
    part_name: Ints
    """(P,) index into `part_names`."""
    part_offset: Ints
    """(P,) where the content begins."""
    part_size: Ints
    """(P,) bytes of content."""
    key_start: Ints
    """(N + 1,) where each key begins in `key_bytes`, and their length."""
    key_bytes: bytes
    """All keys in UTF-8."""
    part_crc32: NDArray[np.uint32] | None = None
    """(P,) CRC-32 of each content; None if contents were not read."""

    @property
    def num_samples(self) -> int:
        """How many samples the shard has."""
        return len(self.sample_offset) - 1

    @property
    def keys(self) -> list[str]:
        """The keys of all samples."""
        edges = self.key_start.tolist()
        return [
            self.key_bytes[start:stop].decode("utf-8", "surrogateescape")
            for start, stop in pairwise(edges)
        ]

    def common_header(self) -> tuple[int, int] | None:
        """Return the header that all samples begin with, if it is the same for all.

        Returns:
            Blocks before the content of the first part of each sample, and the block in which the
            last one ends; None if samples differ.
        """
        if not self.num_samples:
            return None
        gaps = self.part_offset[self.first_part[:-1]] - self.sample_offset[:-1]
        if (gaps != gaps[0]).any():
            return None
        return int(gaps[0]) // BLOCK, int(self.sample_offset[-1]) // BLOCK

    def common_schema(self) -> tuple[int, ...] | None:
        """Return the names of the parts that all samples have, in this order; None if they differ.

        They are indices into `part_names`.
        """
        count = len(self.part_name) // max(1, self.num_samples)
        if not count or len(self.part_name) != count * self.num_samples:
            return None
        names = self.part_name.reshape(-1, count)
        regular = self.first_part[:-1] == np.arange(0, len(self.part_name), count)
        if not regular.all() or not (names == names[0]).all():
            return None
        return tuple(names[0].tolist())

    def common_key_length(self) -> int | None:
        """Return the length of all keys in bytes; None if they differ."""
        lengths = np.diff(self.key_start)
        if not len(lengths) or (lengths != lengths[0]).any():
            return None
        return int(lengths[0])

    def key_order(self) -> tuple[Ints | None, bool]:
        """Return the numbers of samples in the order of their keys, and whether keys are unique.

        The order is None if the samples are in it already.
        """
        edges = self.key_start.tolist()
        keys = [self.key_bytes[start:stop] for start, stop in pairwise(edges)]
        if all(map(lt, keys, keys[1:])):
            return None, True
        order = sorted(range(len(keys)), key=keys.__getitem__)
        ascending = [keys[index] for index in order]
        return np.array(order), all(map(lt, ascending, ascending[1:]))


class ScanBuilder:
    """Collects the members of a shard in order, and groups them into samples.

    Consecutive members with the same key are the parts of a sample.
    """

    def __init__(self) -> None:
        self._columns = {
            name: _Column()
            for name in ("sample_offset", "first_part", "key_length", "name", "offset", "size")
        }
        self._keys: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._last_key: bytes | None = None
        self._num_parts = 0
        self._stop = 0

    def add(self, key: bytes, part: bytes, header_offset: int, offset: int, size: int) -> None:
        """Add one part."""
        columns = self._columns
        if key != self._last_key:
            self._keys.append(key)
            columns["sample_offset"].one.append(header_offset)
            columns["first_part"].one.append(self._num_parts)
            columns["key_length"].one.append(len(key))
            self._last_key = key
        columns["name"].one.append(self._numbers.setdefault(part, len(self._numbers)))
        columns["offset"].one.append(offset)
        columns["size"].one.append(size)
        self._num_parts += 1
        self._stop = offset + size + -size % BLOCK

    def add_member(self, member: Member) -> None:
        """Add a member, unless it belongs to no sample."""
        self._stop = member.end
        name = member.name
        base = name.rfind("/") + 1
        dot = name.find(".", base)
        if dot <= base or (name[0] == "_" and split_name(name) is None):
            return
        key = name[:dot].encode("utf-8", "surrogateescape")
        part = name[dot + 1 :].encode("utf-8", "surrogateescape")
        self.add(key, part, member.header_offset, member.offset, member.size)

    def add_run(self, run: Run, start: int) -> None:
        """Add the members of a run that begins at byte `start`, if there are any."""
        if not len(run.size):
            return
        split = split_name_fields(run.names)
        header_offset, offset, size = run.header_offset, run.offset, run.size
        if not split.valid.all():
            header_offset, offset, size = (c[split.valid] for c in (header_offset, offset, size))
            split = split.take(split.valid)
        if len(size):
            begins = np.append(split.key(0) != self._last_key, ~split.same_key_as_before())
            keys, lengths = split.keys(begins)
            self._keys.append(keys)
            self._last_key = split.key(-1)
            self._extend("sample_offset", header_offset[begins] + start)
            self._extend("first_part", np.flatnonzero(begins) + self._num_parts)
            self._extend("key_length", lengths)
            names, which = split.parts()
            numbers = [self._numbers.setdefault(name, len(self._numbers)) for name in names]
            self._extend("name", np.array(numbers)[which])
            self._extend("offset", offset + start)
            self._extend("size", size)
            self._num_parts += len(size)
        self._stop = start + run.stop

    def finish(self, size: int, part_crc32: NDArray[np.uint32] | None = None) -> TarScan:
        """Return the collected members; `size` is the size of the shard."""
        columns = {name: column.whole() for name, column in self._columns.items()}
        return TarScan(
            size=size,
            part_names=tuple(name.decode("utf-8", "surrogateescape") for name in self._numbers),
            sample_offset=np.append(columns["sample_offset"], self._stop),
            first_part=np.append(columns["first_part"], self._num_parts),
            part_name=columns["name"],
            part_offset=columns["offset"],
            part_size=columns["size"],
            key_start=np.concatenate(([0], np.cumsum(columns["key_length"]))),
            key_bytes=b"".join(self._keys),
            part_crc32=part_crc32,
        )

    def _extend(self, name: str, values: Ints) -> None:
        self._columns[name].many(values)


class _Column:
    """Integers, added one by one or in runs."""

    def __init__(self) -> None:
        self.one = array("q")
        self._pieces: list[NDArray[Any]] = []

    def many(self, values: Ints) -> None:
        self._flush()
        self._pieces.append(values)

    def whole(self) -> Ints:
        self._flush()
        return np.concatenate(self._pieces) if self._pieces else np.empty(0, np.int64)

    def _flush(self) -> None:
        if self.one:
            self._pieces.append(np.frombuffer(self.one, np.int64))
            self.one = array("q")
