"""Inspect tar files: list, count and check their content, and index them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from energon.errors import ConfigError, DatasetNotFoundError, EnergonError
from energon.formats.compressed import HEAD_BYTES, compression_of
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.part_table_file import part_table_path
from energon.formats.tar.names import split_name
from energon.formats.tar.sample_parser import SampleParser, StreamSample
from energon.formats.tar.scan import encode_tar_index
from energon.formats.tar.stream import StreamReader
from energon.io.address import address_name, is_remote, local_path, redact, scheme_of
from energon.io.atomic import temporary_folder
from energon.io.files import is_file, read_bytes, write_bytes
from energon.io.range_file import RemoteFile
from energon.messages import shell_word
from energon.prepare.index.index import IndexOptions, index_remote, index_shard
from energon.webdataset.autodecode import Decoder
from energon.webdataset.gopen import open_url
from energon.webdataset.reading.opening import ShardOpening
from energon.webdataset.tools.streams import read_samples

MAX_EXAMPLES = 20
"""Maximum number of problems of one kind reported for a shard."""


@dataclass
class FieldStatistics:
    """The contents of one field."""

    count: int = 0
    total: int = 0
    smallest: int | None = None
    largest: int = 0

    def add(self, size: int) -> None:
        """Count one content."""
        self.count += 1
        self.total += size
        self.smallest = size if self.smallest is None else min(self.smallest, size)
        self.largest = max(self.largest, size)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers."""
        return {
            "count": self.count,
            "bytes": self.total,
            "smallest": self.smallest or 0,
            "mean": self.total / self.count if self.count else 0,
            "largest": self.largest,
        }


@dataclass
class Statistics:
    """The content of some shards."""

    shards: int = 0
    samples: int = 0
    fields: dict[str, FieldStatistics] = field(default_factory=dict)
    layouts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """Number of samples, by their fields."""

    def add(self, sample: StreamSample) -> None:
        """Count a sample, given the sizes of its fields."""
        self.samples += 1
        names = tuple(name for name in sample if not name.startswith("__"))
        self.layouts[names] += 1
        for name in names:
            self.fields.setdefault(name, FieldStatistics()).add(sample[name])

    def to_json(self) -> dict[str, Any]:
        """Return the numbers."""
        return {
            "shards": self.shards,
            "samples": self.samples,
            "bytes": sum(each.total for each in self.fields.values()),
            "fields": {name: each.to_json() for name, each in sorted(self.fields.items())},
            "layouts": [
                {"fields": list(names), "samples": count}
                for names, count in self.layouts.most_common(MAX_EXAMPLES)
            ],
        }


def iter_members(
    url: str, allowed: Collection[str] = (), *, sizes: bool = False, reads_all: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield name and content of every regular file in an archive, samples or not.

    Args:
        url: The archive.
        allowed: "shell" permits a command.
        sizes: Whether to yield sizes instead of contents.
        reads_all: Whether to read contents even then.
    """
    opened = ShardOpening(frozenset(allowed)).open(url)
    parser = SampleParser(opened.url, split=lambda name: (name, "content"), sizes=sizes)
    reader = StreamReader(opened.stream, parser, head=opened.head, reads_all=reads_all)
    try:
        while (members := reader.next_block()) is not None:
            for member in members:
                yield member["__key__"], member["content"]
    finally:
        reader.close()


def count(urls: Collection[str], allow: Collection[str] = ()) -> Iterator[Statistics]:
    """Yield the content of shards so far, after each one."""
    found = Statistics()
    for url in urls:
        for sample in read_samples([url], allow=allow, sizes=True):
            found.add(sample)
        found.shards += 1
        yield found


class Verifier:
    """Finds problems in shards, including those that concern several of them.

    Args:
        decode: Whether to decode all fields as well.
        allow: "shell" permits addresses that are commands, "pickle" permits decoding pickles.
    """

    def __init__(self, *, decode: bool = False, allow: Collection[str] = ()) -> None:
        self.samples = 0
        self.not_there = 0
        self._decoder = Decoder("pil", allow=allow) if decode else None
        self._allow = allow
        self._seen: dict[str, str] = {}
        self._key: str | None = None
        self._fields: set[str] = set()

    def check(self, url: str) -> list[str]:
        """Check one more shard, and describe its problems."""
        problems: list[str] = []
        known = Counter[str]()
        self._key, self._fields = None, set()
        try:
            members = iter_members(url, self._allow, sizes=self._decoder is None, reads_all=True)
            for name, content in members:
                for kind, problem in self._problems(url, name, content):
                    known[kind] += 1
                    if known[kind] <= MAX_EXAMPLES:
                        problems.append(f"{redact(url)}: {problem}")
        except EnergonError as error:
            problems.append(str(error))
            self.not_there += isinstance(error, OSError)
        for kind, number in known.items():
            if number > MAX_EXAMPLES:
                problems.append(f"{redact(url)}: {number - MAX_EXAMPLES} more of this kind: {kind}")
        return problems

    def _problems(self, url: str, name: str, content: Any) -> Iterator[tuple[str, str]]:
        if name.startswith("/") or ".." in name.split("/"):
            yield "unsafe name", f"{name!r} is outside the folder it is unpacked to"
        parts = split_name(name)
        if parts is None:
            if not name.startswith("__"):
                yield "no sample", f"{name!r} belongs to no sample: it has no extension, or no key"
            return
        key, part = parts[0], parts[1].lower()
        if key != self._key:
            self._key, self._fields = key, set()
            self.samples += 1
            if key in self._seen:
                yield "key twice", f"sample {key!r} is also in {self._seen[key]}"
            self._seen.setdefault(key, url)
        if part in self._fields:
            yield "field twice", f"sample {key!r} has {part!r} twice"
        self._fields.add(part)
        if part.startswith("__"):
            yield "reserved name", f"{name!r} has a name that readers reserve"
        if self._decoder is not None:
            try:
                self._decoder.decode({"__key__": key, part: content})
            except EnergonError as error:
                yield "damaged content", str(error)


def can_have_index(url: str) -> bool:
    """Return whether an index can be written next to a shard: web servers are read-only."""
    return scheme_of(url) not in ("http", "https")


def index_anywhere(url: str) -> int:
    """Write the index of a shard next to it, if missing; return its number of samples.

    Shards in a store are read by ranges: their headers, and content where skipping it would take
    longer.

    Raises:
        ConfigError: If the shard is compressed, or not a file.
        FormatError: If it is damaged, truncated or has no samples.
    """
    check_plain(url)
    if not is_remote(url):
        return index_shard(local_path(url)).num_samples
    return _index_remote(url).num_samples


def check_plain(url: str) -> None:
    """Raise ConfigError if the samples of a shard have no positions to index."""
    if url == "-" or url.startswith("pipe:"):
        raise ConfigError(
            f"{redact(url)}: a stream has no place for an index; write it to a file first"
        )
    stream = open_url(url)
    try:
        is_packed = compression_of(stream.read(HEAD_BYTES) or b"") is not None
    finally:
        stream.close()
    if is_packed:
        raise ConfigError(
            f"{redact(url)}: is compressed, so its samples cannot be read one by one; write a "
            f"plain shard with `energon tar cat {shell_word(redact(url))} -o NAME.tar`"
        )


def _index_remote(url: str) -> PartTable:
    with temporary_folder("index") as folder:
        copy = folder / address_name(url)
        parts, index = _beside(url)
        before = _content(parts)
        if before is not None:
            part_table_path(copy).write_bytes(before)
        table = index_remote(RemoteFile(url), copy, IndexOptions())
    content = table.to_bytes()
    if content != before or not is_file(index):
        write_bytes(parts, content)
        # Readers use an index as soon as this file exists.
        write_bytes(index, encode_tar_index(table.sample_offset))
    return table


def _beside(url: str) -> tuple[str, str]:
    """Return the addresses of the part table and of the index of a shard."""
    return f"{url}.parts", f"{os.path.splitext(url)[0]}.tar.idx"


def _content(url: str) -> bytes | None:
    try:
        return read_bytes(url)
    except DatasetNotFoundError:
        return None
