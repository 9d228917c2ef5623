"""The datasets to show, by path and split, and their samples part by part."""

from __future__ import annotations

import io
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import ConfigError, EnergonError, FormatError
from energon.inspect.info import find_leaves
from energon.inspect.saved_state import curve_in_words
from energon.inspect.text_index import SourceTexts, open_texts
from energon.inspect.where import PartKind, Where, part_extension, part_kind
from energon.io.address import address_name, redact
from energon.io.epath import any_path
from energon.io.range_file import RangeFile
from energon.messages import shell_word
from energon.metadataset.leaf import BlendMode, Leaf, LeafList
from energon.plan.blends.mix import Mix
from energon.sources.files.open import SystemFileStore, open_file_store
from energon.sources.files.store import FileStore
from energon.sources.kinds import kind_named
from energon.sources.measures import SourceMeasures
from energon.sources.shards import ShardPool
from energon.sources.source import Location, OpenRequest, Source
from energon.sources.tree import BrowsedFile, Contents, MemoryFile, ShardOrdinals
from energon.task_encoder.leaves import open_members
from energon.task_encoder.open_join import open_join

MEDIA_KINDS: tuple[PartKind, ...] = ("image", "video", "audio")
"""The kinds of parts that represent a sample in a gallery, the best first."""
SEARCH_SECONDS = 20.0
"""A search takes up to this long, and"""
SEARCH_BYTES = 1 << 30
"""it reads up to this much, before someone asks for more."""
PROGRESS_SECONDS = 0.25
SEARCHED_AHEAD = 32
"""Rows are read ahead in groups of this many, when they are searched."""
MEASURED_AT_ONCE = 1 << 16
MAX_MEASURED = 5_000_000
"""Up to this many samples of a dataset are measured, and"""
MEASURE_SECONDS = 2.0
"""this is how long it may take."""


class ShownPart(NamedTuple):
    """A part of a sample."""

    number: int
    """Its place among the parts, which is used in addresses because names may be anything."""
    name: str
    label: str
    """The name; in a join, with the dataset it belongs to."""
    file: BrowsedFile
    is_own: bool = True
    """Whether it belongs to the sample; False for a file that the sample names."""

    @property
    def is_stored(self) -> bool:
        """Whether its bytes are in the shard; values of rows are encoded when they are read."""
        return self.is_own and not isinstance(self.file.find(), MemoryFile)

    @property
    def kind(self) -> PartKind:
        """How it is shown; gzipped media are not unpacked."""
        kind = part_kind(part_extension(self.name, self.file))
        return "bytes" if kind in MEDIA_KINDS and self.name.lower().endswith(".gz") else kind


class ShownSample(NamedTuple):
    """A sample, of which no part has been read."""

    ordinal: int
    where: Location
    parts: list[ShownPart]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.file.size for part in self.parts)


class ShownLeaf:
    """A dataset of a split, opened when it is first shown. Thread-safe.

    Args:
        leaf: Its entry in the metadataset.
        pool: Where shards are opened.
    """

    def __init__(self, leaf: Leaf, pool: ShardPool) -> None:
        self.leaf = leaf
        self.name = " & ".join(address_name(each.path) for each, _ in leaf.datasets)
        self.address = " & ".join(redact(each.path) for each, _ in leaf.datasets)
        self.aux = list(dict.fromkeys(name for each, _ in leaf.datasets for name in each.aux))
        self.texts_problem = ""
        """Why its text index cannot be used."""
        self._pool = pool
        self._stored_measures: dict[tuple[int, str], Any] = {}
        self._contents_of: dict[int, Contents] = {}

    @cached_property
    def source(self) -> Source:
        """The samples."""
        leaf = self.leaf
        if leaf.joiner is not None:
            return open_join(leaf, open_members(leaf, self._pool))
        kind = kind_named(leaf.kind, leaf.path)
        return kind.open(OpenRequest(leaf, kind.config(leaf), pool=self._pool))

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def shards(self) -> list[ShardOrdinals]:
        """The shards; none for a join, whose samples are in several datasets."""
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
        return self.samples(range(start, min(start + count, len(self))))

    def samples(self, ordinals: Sequence[int]) -> list[ShownSample]:
        """Return samples by number."""
        self.read_ahead(ordinals)
        return [self.sample(ordinal) for ordinal in ordinals]

    def read_ahead(self, ordinals: Sequence[int]) -> None:
        """Read rows together before they are requested one by one."""
        if not self.leaf.join:
            self._contents(self.source).read_ahead(ordinals)

    @cached_property
    def field_map(self) -> Mapping[str, str]:
        """The parts from which the fields of the type of its samples are taken; {} without one."""
        if self.leaf.join:
            return {}
        config = kind_named(self.leaf.kind, self.leaf.path).config(self.leaf)
        return config.field_map or {}

    @cached_property
    def measures(self) -> list[str]:
        """The names of its measures; [] if they cannot be listed."""
        with suppress(EnergonError, OSError):
            return list(SourceMeasures(self.source, np.zeros(1, np.int64)))
        return []

    def measure(self, name: str, ordinals: Ints) -> NDArray[np.float64]:
        """Return a measure of samples, in the order of `ordinals`, without reading the samples.

        Raises:
            ConfigError: If there is no such measure.
        """
        return SourceMeasures(self.source, ordinals, self._stored_measures)[name]

    def measure_all(self, name: str) -> NDArray[np.float64]:
        """Return a measure of all samples, or of as many of the first as a limited time permits."""
        end = time.monotonic() + MEASURE_SECONDS
        measured = []
        stop = min(len(self), MAX_MEASURED)
        for start in range(0, stop, MEASURED_AT_ONCE):
            ordinals = np.arange(start, min(start + MEASURED_AT_ONCE, stop))
            measured.append(self.measure(name, ordinals))
            if time.monotonic() > end:
                break
        return np.concatenate(measured)

    @cached_property
    def texts(self) -> SourceTexts | None:
        """The index of its texts; None if there is none that can be used."""
        try:
            return open_texts(self.source)
        except (EnergonError, OSError) as error:
            self.texts_problem = str(error)
        return None

    def search(self, prefix: str, limit: int) -> list[int]:
        """Return the numbers of up to `limit` samples whose keys begin with `prefix`."""
        source = self.source
        if not self.leaf.join:
            return self._contents(source).search(prefix, limit)
        (first, _), *_ = source.origins(0)
        keys = [first.locate(n).key for n in self._contents(first).search(prefix, limit)]
        return [number for key in keys for number in source.find(key)][:limit]

    def find_file(self, name: str) -> BrowsedFile | None:
        """Return the file that a sample names, in an aux store or beside the data; None if none."""
        for store in self._stores:
            with suppress(EnergonError, OSError), store.open(name) as file:
                written = 0
                with suppress(OSError):
                    written = os.fstat(file.fileno()).st_mtime_ns
                find = partial(StoredFile, f"{store.get_path()}/{name}", store, name)
                return BrowsedFile(find, 0, file.seek(0, io.SEEK_END), written)
        return None

    @cached_property
    def _stores(self) -> list[FileStore[Any]]:
        """Where samples may name files; stores that cannot be opened are left to `energon lint`."""
        stores: list[FileStore[Any]] = []
        for leaf, _ in self.leaf.datasets:
            for address in leaf.aux.values():
                with suppress(EnergonError):
                    stores.append(open_file_store(address, pool=self._pool))
        for leaf, _ in self.leaf.datasets:
            path = any_path(leaf.path)
            with suppress(EnergonError):
                stores.append(SystemFileStore(path.parent if path.is_file() else path))
        return stores

    def _contents(self, source: Source) -> Contents:
        contents = self._contents_of.get(id(source))
        if contents is None:
            path = os.fspath(source.path)
            kinds = {os.fspath(each.path): each.kind for each, _ in self.leaf.datasets}
            contents = kind_named(kinds.get(path, self.leaf.kind), path).contents(source)
            self._contents_of[id(source)] = contents
        return contents


@dataclass
class StoredFile:
    """A file of a store, read by range."""

    path: str
    store: FileStore[Any]
    name: str
    is_remote: ClassVar[bool] = False

    def pread(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`."""
        with self.store.open(self.name) as file:
            file.seek(offset)
            return file.read(size)

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return several ranges."""
        return [self.pread(*each) for each in zip(offsets, sizes, strict=True)]


class Search:
    """A search for samples that meet conditions. Iterate over it to search.

    It stops after a limited time and a limited number of bytes read: continue at `stop`.

    Args:
        leaf: The dataset.
        where: The conditions.
        start: The number of the first sample to check.
        most: How many matching samples to find.

    Attributes:
        is_indexed: Whether a text index tells which samples to check.
        stop: The number after that of the last sample checked.
        found: How many samples match.
        read: How many bytes have been read.
        unreadable: How many samples could not be checked.
        problem: Why the search ended early; "" if it did not.
    """

    def __init__(self, leaf: ShownLeaf, where: Where, start: int, most: int) -> None:
        self.leaf, self.where, self.most = leaf, where, most
        self.stop, self.found, self.read, self.unreadable = start, 0, 0, 0
        self.problem = ""
        texts = leaf.texts if where.texts else None
        self._candidates = None if texts is None else texts.candidates(where.texts, start)
        self.is_indexed = self._candidates is not None

    def __iter__(self) -> Iterator[ShownSample | None]:
        """Yield samples as they are found, and None now and then, to report progress."""
        now = time.monotonic()
        end, report = now + SEARCH_SECONDS, now + PROGRESS_SECONDS
        ordinals = self._ordinals()
        while together := list(islice(ordinals, SEARCHED_AHEAD)):
            self.leaf.read_ahead(together)
            for ordinal in together:
                sample = self._check(ordinal)
                self.stop = ordinal + 1
                if sample is not None:
                    self.found += 1
                    yield sample
                now = time.monotonic()
                if self.found == self.most or now > end or self.read > SEARCH_BYTES:
                    return
                if now > report:
                    report = now + PROGRESS_SECONDS
                    yield None
        self.stop = len(self.leaf)

    def _ordinals(self) -> Iterator[int]:
        """Yield the samples to check: those of the text index, or all of them."""
        at = self.stop
        try:
            if self._candidates is not None:
                for ordinal in self._candidates:
                    at = ordinal + 1
                    yield ordinal
                return
        except FormatError as error:
            self.leaf.texts_problem, self.is_indexed = str(error), False
        yield from range(at, len(self.leaf))

    def _check(self, ordinal: int) -> ShownSample | None:
        """Return a sample if it matches; None if it does not, or cannot be read."""
        try:
            sample = self.leaf.sample(ordinal)
            files = {part.name: self._counted(part.file) for part in sample.parts}
            return sample if self.where(files, sample.where.key) else None
        except ConfigError:
            raise  # the conditions are wrong
        except EnergonError:
            self.unreadable += 1
            return None

    def _counted(self, file: BrowsedFile) -> BrowsedFile:
        return replace(file, find=lambda: _CountedFile(file.find(), self))


class _CountedFile:
    """A file whose reads count for a search."""

    def __init__(self, file: RangeFile, search: Search) -> None:
        self._file, self._search = file, search
        self.path, self.is_remote = file.path, file.is_remote

    def pread(self, offset: int, size: int) -> bytes:
        self._search.read += size
        return self._file.pread(offset, size)

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        self._search.read += sum(sizes)
        return self._file.pread_many(offsets, sizes)


class MixRow(NamedTuple):
    """A row of the tree of a metadataset."""

    level: int
    name: str
    leaf: int | None
    """The number of a dataset; None for a blend in a blend."""
    weight: str
    share: str
    """At the beginning of a run; "" if it depends on sizes."""


@dataclass(frozen=True)
class ShownSplit:
    """A split, with its datasets.

    Args:
        name: Its name.
        label: A name that is unique among all splits shown.
        path: Its dataset or metadataset.
        leaves: Its datasets.
        mix: How they are mixed.
    """

    name: str
    label: str
    path: str
    leaves: list[ShownLeaf]
    mix: LeafList

    @property
    def mixed(self) -> str:
        """How its datasets are mixed, in words; "" if there is nothing to mix."""
        if self.is_weighted:
            return "blend by weights"
        return "by repetitions" if self.mix.blend_mode is BlendMode.SAMPLE_REPETITIONS else ""

    @property
    def is_weighted(self) -> bool:
        """Whether its datasets are blended by weights."""
        return self.mix.blend_mode is BlendMode.DATASET_WEIGHT

    @property
    def total_share(self) -> str:
        """The sum of the shares; "" if one depends on sizes."""
        return self._share_of(self.rows)

    @property
    def rows(self) -> list[MixRow]:
        """The tree of its blends and datasets, from the top down."""
        if self.mix.mix is None or not self.is_weighted:
            return [self._row(number, 0) for number in range(len(self.leaves))]
        return list(self._rows(self.mix.mix, 0))

    def _rows(self, mix: Mix, level: int) -> Iterator[MixRow]:
        for entry in mix.entries:
            weight = "by size" if entry.weight is None else curve_in_words(entry.weight)
            if entry.max_epochs is not None:
                weight += f", {entry.max_epochs:g} epochs at most"
            if isinstance(entry.node, Mix):
                below = list(self._rows(entry.node, level + 1))
                yield MixRow(level, "blend", None, weight, self._share_of(below))
                yield from below
                continue
            line = self.mix.sources[entry.node]
            if len(line) == 1:
                yield self._row(line[0], level, weight)
                continue
            yield MixRow(level, f"{len(line)} datasets end to end", None, weight, "")
            yield from (self._row(leaf, level + 1) for leaf in line)

    def _share_of(self, rows: Sequence[MixRow]) -> str:
        """Return the share of the datasets in some rows; "" if one depends on sizes."""
        weights = [self.leaves[row.leaf].leaf.weight for row in rows if row.leaf is not None]
        return "" if None in weights else f"{100 * sum(weight or 0 for weight in weights):.3g} %"

    def _row(self, number: int, level: int, weight: str = "") -> MixRow:
        leaf = self.leaves[number].leaf
        share = ""
        if self.is_weighted and leaf.weight is not None:
            share = f"{100 * leaf.weight:.3g} %"
        if leaf.repetitions != 1 or self.mix.blend_mode is BlendMode.SAMPLE_REPETITIONS:
            weight = weight or f"{leaf.repetitions:g} times"
        return MixRow(level, self.leaves[number].name, number, weight, share)


class ShownPath(NamedTuple):
    """A dataset or metadataset, with the numbers of its splits."""

    path: str
    name: str
    address: str
    splits: range
    problems: list[str]
    """Why splits cannot be shown."""


class Shown:
    """The datasets and metadatasets at some paths.

    Args:
        paths: Datasets or metadatasets, here or in object stores.

    Raises:
        DatasetNotFoundError: If a path does not exist.
        ConfigError: If a path has no numbered samples, like a folder of files.
    """

    def __init__(self, *paths: str | os.PathLike[str]) -> None:
        self._pool = ShardPool()
        self.splits: list[ShownSplit] = []
        names = name_apart([os.fspath(path) for path in paths])
        self.paths = [
            self._open(os.fspath(path), name if len(names) > 1 else "")
            for path, name in zip(paths, names, strict=True)
        ]
        self.name = names[0] if len(names) == 1 else f"{len(names)} datasets"

    def leaf(self, split: int, leaf: int) -> ShownLeaf:
        """Return a dataset by number.

        Raises:
            IndexError: If there is none.
        """
        if split < 0 or leaf < 0:
            raise IndexError
        return self.splits[split].leaves[leaf]

    def _open(self, path: str, label: str) -> ShownPath:
        opened = find_leaves(path, training=True)
        problems = [f"split {name!r}: {line}" for name, line in opened.problems]
        if not opened.mixes:
            raise ConfigError(
                "\n".join(problems)
                or f"{redact(path)} has no split with samples to show; a folder of files is packed "
                f"into a dataset by `energon pack {shell_word(redact(path))} NEW_FOLDER`"
            )
        first = len(self.splits)
        for name, mix in opened.mixes.items():
            leaves = [ShownLeaf(leaf, self._pool) for leaf in mix.leaves]
            own = f"{label}: {name}" if label else name
            self.splits.append(ShownSplit(name, own, path, leaves, mix))
        numbers = range(first, len(self.splits))
        return ShownPath(path, label or address_name(path), redact(path), numbers, problems)


def name_apart(paths: Sequence[str]) -> list[str]:
    """Return a unique name for each path: its last part, and as many before it as needed.

    Example:
        >>> name_apart(["a/train", "b/train/", "c/val"])
        ['a/train', 'b/train', 'val']
    """
    names = [address_name(path) for path in paths]
    steps = [redact(path).rstrip("/").split("/") for path in paths]
    for count in range(2, max(map(len, steps), default=0) + 1):
        twice = {name for name, often in Counter(names).items() if often > 1}
        if not twice:
            break
        names = [
            "/".join(own[-count:]) if name in twice else name
            for name, own in zip(names, steps, strict=True)
        ]
    return names
