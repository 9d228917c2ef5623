"""What the pages show: the datasets of a path by split, and their samples part by part."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from energon.errors import ConfigError
from energon.inspect.leaves import find_leaves
from energon.inspect.where import Where
from energon.io.address import address_name, redact
from energon.metadataset.leaf import Leaf
from energon.sources.browse.tree import BrowsedFile, Contents, ShardOrdinals
from energon.sources.kinds import Location, Source, kind_named
from energon.sources.shards import ShardPool
from energon.task_encoder.leaves import open_members
from energon.task_encoder.open_join import open_join

MAX_LOOKED_AT = 5000
"""How many samples a filter looks at for a page."""


class ShownPart(NamedTuple):
    """A part of a sample."""

    number: int
    """Its place among the parts: what addresses call it, as names may be anything."""
    name: str
    label: str
    """The name; in a join, with the dataset that it is from."""
    file: BrowsedFile


class ShownSample(NamedTuple):
    """A sample, none of whose parts has been read."""

    ordinal: int
    where: Location
    parts: list[ShownPart]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.file.size for part in self.parts)


class ShownLeaf:
    """A dataset of a split. It is opened when somebody looks at it; by many threads.

    Args:
        leaf: What the document says of it.
        pool: Where shards are opened.
        allow: What data may do, see `get_train_dataset`.
    """

    def __init__(self, leaf: Leaf, pool: ShardPool, allow: Collection[str]) -> None:
        self.leaf = leaf
        self.name = " & ".join(address_name(each.path) for each, _ in leaf.datasets)
        self.address = " & ".join(redact(each.path) for each, _ in leaf.datasets)
        self._pool = pool
        self._allow = allow

    @cached_property
    def source(self) -> Source:
        """The samples."""
        leaf = self.leaf
        if leaf.joiner is not None:
            return open_join(leaf, open_members(leaf, self._pool, self._allow))
        kind = kind_named(leaf.kind, leaf.path)
        return kind.open(leaf, kind.config(leaf), pool=self._pool, allow=self._allow)

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def shards(self) -> list[ShardOrdinals]:
        """The shards of the first dataset; none of a join, whose samples lie in many."""
        if self.leaf.join:
            return []
        return self._contents(self.source).shards()

    def sample(self, ordinal: int) -> ShownSample:
        """Return a sample by number.

        Raises:
            IndexError: If there is none of this number.
        """
        parts: list[ShownPart] = []
        for source, number in self.source.origins(ordinal):
            before = f"{source.path.name}: " if self.leaf.join else ""
            for name, file in self._contents(source).files(number).items():
                parts.append(ShownPart(len(parts), name, f"{before}{name}", file))
        return ShownSample(ordinal, self.source.locate(ordinal), parts)

    def page(self, start: int, count: int) -> list[ShownSample]:
        """Return samples from a number on, as many as there are."""
        return [self.sample(ordinal) for ordinal in range(start, min(start + count, len(self)))]

    def matching(self, where: Where, start: int, count: int) -> tuple[list[ShownSample], int]:
        """Return samples from a number on that match, and up to which number was looked.

        Looks at so many samples at most that a page does not take long.
        """
        found: list[ShownSample] = []
        stop = min(start + MAX_LOOKED_AT, len(self))
        for ordinal in range(start, stop):
            sample = self.sample(ordinal)
            if where({part.name: part.file for part in sample.parts}):
                found.append(sample)
                if len(found) == count:
                    return found, ordinal + 1
        return found, stop

    def search(self, prefix: str, limit: int) -> list[int]:
        """Return the numbers of samples whose keys begin alike, `limit` at most."""
        source = self.source
        if not self.leaf.join:
            return self._contents(source).search(prefix, limit)
        (first, _), *_ = source.origins(0)
        keys = [first.locate(n).key for n in self._contents(first).search(prefix, limit)]
        return [number for key in keys for number in source.find(key)][:limit]

    def _contents(self, source: Source) -> Contents:
        known = self._known.get(id(source))
        if known is None:
            path = os.fspath(source.path)
            kinds = {os.fspath(each.path): each.kind for each, _ in self.leaf.datasets}
            known = kind_named(kinds.get(path, self.leaf.kind), path).contents(source)
            self._known[id(source)] = known
        return known

    @cached_property
    def _known(self) -> dict[int, Contents]:
        return {}


@dataclass(frozen=True)
class ShownSplit:
    """A split, with its datasets."""

    name: str
    leaves: list[ShownLeaf]


class Shown:
    """All that lies at a path.

    Args:
        path: A dataset or metadataset, here or in an object store.
        allow: What data may do, see `get_train_dataset`.

    Raises:
        DatasetNotFoundError: If there is nothing.
        ConfigError: If it has no samples by number, as a folder of files.
    """

    def __init__(self, path: str | os.PathLike[str], *, allow: Collection[str] = ()) -> None:
        pool = ShardPool()
        self.path = os.fspath(path)
        self.name = address_name(self.path)
        self.address = redact(self.path)
        found = find_leaves(path, training=True, allow=allow)
        self.kind = found.kind
        self.problems = [f"split {name!r}: {line}" for name, line in found.problems]
        self.splits = [
            ShownSplit(name, [ShownLeaf(leaf, pool, allow) for leaf in mix.leaves])
            for name, mix in found.mixes.items()
        ]
        if not self.splits and not self.problems:
            raise ConfigError(
                f"{self.address} has no split with samples to show; a folder of files is packed "
                f"into a dataset by `energon pack {self.address} NEW_FOLDER`"
            )

    def leaf(self, split: int, leaf: int) -> ShownLeaf:
        """Return a dataset by number.

        Raises:
            IndexError: If there is none.
        """
        if split < 0 or leaf < 0:
            raise IndexError
        return self.splits[split].leaves[leaf]
