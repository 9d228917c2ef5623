"""A few samples of shards that are not indexed yet, to look at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import EnergonError
from energon.formats.tar.names import split_name
from energon.formats.tar.scan import iter_members
from energon.io.epath import AnyPath
from energon.prepare.files import reporting

MAX_READ_BYTES = 64 << 20
"""Larger parts are not read, only mentioned."""
SPREAD_SHARDS = 4


@dataclass(frozen=True)
class SeenSample:
    """A sample that was read to be looked at.

    Args:
        shard: Path of the shard below the dataset.
        key: Its key.
        sizes: Bytes of its parts.
        raw: Contents of parts that are not too large.
    """

    shard: str
    key: str
    sizes: Mapping[str, int]
    raw: Mapping[str, bytes]

    @cached_property
    def parts(self) -> dict[str, Any]:
        """The parts that could be decoded."""
        return {
            part: value
            for part, value in self.decoded.items()
            if not isinstance(value, EnergonError)
        }

    @cached_property
    def decoded(self) -> dict[str, Any]:
        """The parts, decoded; an error stands for what could not be."""
        decoder = SampleDecoder(image_decode="rgb8")
        found: dict[str, Any] = {}
        for part, data in self.raw.items():
            try:
                found[part] = decoder.decode(f"{self.key}.{part}", data)
            except EnergonError as error:
                found[part] = error
        return found


def first_samples(dataset: AnyPath, shards: Sequence[str], count: int) -> list[SeenSample]:
    """Return the first samples of the first shard that has any, and one each of a few others.

    Raises:
        FormatError: If a shard is damaged.
    """
    found: list[SeenSample] = []
    rest = list(shards)
    while rest and not found:
        found = list(islice(_samples(dataset, rest.pop(0)), count))
    chosen = np.unique(np.linspace(0, len(rest) - 1, min(SPREAD_SHARDS, len(rest))).astype(int))
    for number in chosen.tolist():
        found += islice(_samples(dataset, rest[number]), 1)
    return found


def part_names(samples: Sequence[SeenSample]) -> list[str]:
    """Return the names of all parts, in the order in which they come first."""
    parts: dict[str, str] = {}
    for sample in samples:
        for part in sample.sizes:
            parts.setdefault(part.lower(), part)
    return list(parts.values())


def _samples(dataset: AnyPath, shard: str) -> Iterator[SeenSample]:
    """Yield the samples of a shard; no more of it is read than what is asked for."""
    with reporting(str(dataset / shard)), (dataset / shard).open("rb") as file:

        def read(offset: int, size: int) -> bytes:
            file.seek(offset)
            return bytes(file.read(size))

        size = file.seek(0, os.SEEK_END)
        key: str | None = None
        sizes: dict[str, int] = {}
        raw: dict[str, bytes] = {}
        for member in iter_members(read, size, origin=str(dataset / shard), strict=False):
            name = split_name(member.name)
            if name is None:
                continue
            if name[0] != key:
                if key is not None:
                    yield SeenSample(shard, key, sizes, raw)
                key, sizes, raw = name[0], {}, {}
            sizes[name[1]] = member.size
            if member.size <= MAX_READ_BYTES:
                raw[name[1]] = read(member.offset, member.size)
        if key is not None:
            yield SeenSample(shard, key, sizes, raw)
