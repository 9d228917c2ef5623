"""What lies where in a dataset, sample by sample: for people who look at it, not for training."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from energon.io.range_file import RangeFile
from energon.plan.subset import exclude_indices
from energon.sources.browse.tree import BrowsedFile
from energon.sources.webdataset import WebdatasetSource, included

if TYPE_CHECKING:
    from energon.sources.kinds import Source


class ShardOrdinals(NamedTuple):
    """Which samples of a source lie in a shard."""

    name: str
    start: int
    """Ordinal of the first."""
    stop: int
    """The ordinal behind the last."""


class Contents:
    """What every source can be asked for; kinds that know more override it.

    Args:
        source: The samples.
    """

    def __init__(self, source: Source) -> None:
        self._any = source

    def files(self, ordinal: int) -> dict[str, BrowsedFile]:
        """Return the parts of a sample as files; values that are no bytes as files that hold them.

        Raises:
            IndexError: If there is no such sample.
        """
        (sample,) = self._any.read(np.array([ordinal]))
        shard = str(sample.get("__shard__", ""))
        files = (_as_file(name, value) for name, value in sample.items() if name[:2] != "__")
        return {
            name: BrowsedFile(partial(MemoryFile, shard, content), 0, len(content))
            for name, content in files
        }

    def search(self, prefix: str, limit: int) -> list[int]:
        """Return the ordinals of samples whose key begins with `prefix`, `limit` at most.

        Here, of those whose key is `prefix`.
        """
        return self._any.find(prefix)[:limit]

    def shards(self) -> list[ShardOrdinals]:
        """Return the shards that have samples, in their order; here, there is but one."""
        return [ShardOrdinals(self._any.path.name, 0, len(self._any))]


class TarContents(Contents):
    """The samples of shards: no part is read before somebody opens it."""

    def __init__(self, source: WebdatasetSource) -> None:
        super().__init__(source)
        self._source = source
        edges = source.bounds
        if len(source.excluded):
            edges = exclude_indices(edges, source.excluded)
        self._edges = np.clip(edges - source.start, 0, len(source)).tolist()

    def files(self, ordinal: int) -> dict[str, BrowsedFile]:
        where = self._source.locate(ordinal)
        shard = self._source.shards.index(where.shard)
        table = self._source.open_shard(shard).table
        find = partial(_open_file, self._source, shard)
        found: dict[str, BrowsedFile] = {}
        for name, offset, size in table.sample_parts(where.sample):
            found.setdefault(name, BrowsedFile(find, offset, size, table.shard_mtime_ns))
        return found

    def search(self, prefix: str, limit: int) -> list[int]:
        return list(islice(self._matches(prefix.encode("utf-8", "surrogateescape")), limit))

    def shards(self) -> list[ShardOrdinals]:
        found = zip(self._source.shards, self._edges[:-1], self._edges[1:], strict=True)
        return [ShardOrdinals(*each) for each in found if each[1] < each[2]]

    def _matches(self, prefix: bytes) -> Iterator[int]:
        source = self._source
        for shard in range(len(source.shards)):
            low, high = source.bounds[shard : shard + 2].tolist()
            for sample in source.open_shard(shard).table.starting_with(prefix):
                place = low + sample - int(source.firsts[shard])
                if low <= place < high:
                    yield from included(source, place)


def _open_file(source: WebdatasetSource, shard: int) -> RangeFile:
    return source.open_shard(shard).file


def _as_file(name: str, value: Any) -> tuple[str, bytes]:
    """Return a value as the name and the content of a file."""
    if isinstance(value, bytes | bytearray | memoryview):
        return name, bytes(value)
    if isinstance(value, str):
        return f"{name}.txt", value.encode("utf-8", "surrogateescape")
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        buffer = io.BytesIO()
        np.save(buffer, value, allow_pickle=False)
        return f"{name}.npy", buffer.getvalue()
    return f"{name}.json", json.dumps(value, default=repr).encode()


@dataclass
class MemoryFile:
    """Bytes as a file."""

    path: str
    data: bytes
    is_remote: ClassVar[bool] = False

    def pread(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        return [self.pread(*each) for each in zip(offsets, sizes, strict=True)]
