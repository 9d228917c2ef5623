"""Prepared folders of tar shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from energon.arrays import distinct
from energon.errors import EmptyDatasetError, EnergonError
from energon.formats.meta.info import META, load_info, load_split
from energon.io.address import is_remote, join_address
from energon.io.epath import AnyPath, any_path
from energon.io.files import file_info, is_file, open_store
from energon.metadataset.dataset_config import DatasetConfig, load_dataset_config
from energon.metadataset.leaf import Leaf
from energon.samples.field_map import FieldMap
from energon.sources.kinds import DatasetKind, split_description
from energon.sources.shard_samples import PartFilter
from energon.sources.shards import OPEN_THREADS, OpenShard, ShardPool
from energon.sources.source import OpenRequest, SampleSelection
from energon.sources.webdataset import WebdatasetSource

if TYPE_CHECKING:
    from energon.sources.files.store import FileStore
    from energon.sources.part_statistics import PartStatistics
    from energon.sources.tree import BrowsedFolder, Contents


MAX_PROBED_SHARDS = 10_000
"""How many shards are opened at most to determine which parts samples have."""
MAX_SCANNED_SHARDS = 4
"""How many of them may lack a part table, so that all of their headers are read."""


class WebdatasetKind(DatasetKind):
    """Tar shards with a `.nv-meta` folder."""

    name = "webdataset"
    noun = "a prepared dataset of shards"
    has_files = True
    prepares = False

    def split_names(
        self, address: str, split_config: str | None = None, allow: Collection[str] = ()
    ) -> list[str]:
        return list(load_split(any_path(address), split_config or "split.yaml").split_parts)

    def config(self, leaf: Leaf) -> DatasetConfig:
        return load_dataset_config(leaf.path, leaf.dataset_config)

    def open(
        self, request: OpenRequest, parts: Collection[str] | PartFilter | None = None
    ) -> WebdatasetSource:
        leaf, config = request.leaf, request.config
        selection = SampleSelection(
            config.split_part or leaf.split_part,
            (*((config.subset,) if config.subset else ()), *leaf.subsets),
            request.exclude,
            parts,
        )
        return WebdatasetSource(
            leaf.path,
            selection,
            split_config=config.split_config or leaf.split_config,
            pool=request.pool,
            allow=request.allow,
        )

    def unmatched(self, leaf: Leaf) -> list[str]:
        root = any_path(leaf.path)
        split = load_split(root, leaf.split_config)
        lines = split.unmatched(load_info(root).shard_counts)
        return [f"{split.origin}: {line}" for line in lines]

    def lists_nothing(self, leaf: Leaf) -> bool:
        split = load_split(any_path(leaf.path), leaf.split_config)
        return not split.split_parts.get(leaf.split_part)

    def check_field_map(self, source: WebdatasetSource, field_map: FieldMap) -> None:
        """Raise ConfigError if a field map names parts that no sample has, according to the index.

        As many shards are opened as it takes to find all parts, usually one. Nothing is checked if
        shards cannot be opened, or if too many would have to be.
        """
        parts: set[str] = set()
        for names in _part_names(source):
            if names is None:
                return
            parts |= names
            if not field_map.unmapped(parts):
                return
        field_map.check_parts(parts, origin=str(source.path))

    def file_store(
        self, address: str, *, pool: ShardPool | None = None, allow: Collection[str] = ()
    ) -> FileStore[bytes]:
        from energon.sources.files.samples import WebdatasetFileStore

        return WebdatasetFileStore(address, pool=pool)

    def browse(
        self, address: str, *, pool: ShardPool | None = None, sample_folders: bool = False
    ) -> BrowsedFolder:
        from energon.sources.open_tree import FlatFolder, SampleFolder, open_samples

        samples = open_samples(any_path(address), pool or ShardPool())
        return SampleFolder(samples) if sample_folders else FlatFolder(samples)

    def contents(self, source: WebdatasetSource) -> Contents:
        from energon.sources.tree import TarContents

        return TarContents(source)

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        from energon.sources.part_statistics import media_statistics

        root = any_path(address)
        info = load_info(root)
        split = load_split(root, split_config)
        sizes = dict(zip(info.shard_counts, _sizes(address, list(info.shard_counts)), strict=True))
        missing = [shard for shard, size in sizes.items() if size is None]
        sample_type, problems = _sample_type(address, dataset_config)
        described: dict[str, Any] = {
            "sample_type": sample_type,
            "samples": info.num_samples,
            "shards": len(info.shard_counts),
            "bytes": sum(size for size in sizes.values() if size is not None),
            "missing_shards": missing,
            "problems": problems,
            "energon_version": info.energon_version,
            "excluded": list(split.exclude),
            "splits": {name: _split(address, name, split_config) for name in split.split_parts},
        }
        if parts:
            there = {number for number, size in enumerate(sizes.values()) if size is not None}
            unreadable: list[str] = []
            described |= _parts(root, list(sizes), there, unreadable).to_json()
            described["unreadable_shards"] = unreadable
            media = media_statistics(root)
            described |= {} if media is None else {"media": media}
        return described


KIND = WebdatasetKind()


def _part_names(source: WebdatasetSource) -> Iterator[frozenset[str] | None]:
    """Yield the names of the parts in each shard; None where they cannot be determined."""
    count = len(source.shards)
    spread = np.linspace(0, count - 1, min(count, MAX_PROBED_SHARDS)).astype(int)
    scanned = 0
    for opened in _opened(source, distinct(spread).tolist()):
        scanned += opened is not None and not opened.table.shard_mtime_ns
        if opened is None or scanned > MAX_SCANNED_SHARDS:
            yield None
        else:
            yield frozenset(opened.table.part_names)
    if count > MAX_PROBED_SHARDS:
        yield None


def _opened(source: WebdatasetSource, shards: Sequence[int]) -> Iterator[OpenShard | None]:
    """Yield open shards; remote ones are opened several at a time, except for the first."""
    if source.is_remote:
        for start in (0, *range(1, len(shards), OPEN_THREADS)):
            yield from source.open_shards(shards[start : start + (OPEN_THREADS if start else 1)])
        return
    for shard in shards:
        try:
            yield source.open_shard(shard)
        except EnergonError:
            yield None


def _parts(
    root: AnyPath, names: Sequence[str], there: Collection[int], unreadable: list[str]
) -> PartStatistics:
    """Return the statistics of the shards that exist; list those that cannot be read, and why."""
    from energon.sources.files.locate import local_copy
    from energon.sources.part_statistics import PartStatistics, index_statistics

    index = root / META / "index.sqlite"
    if there and not (root / f"{names[min(there)]}.parts").is_file() and index.is_file():
        statistics = index_statistics(local_copy(index), there)
        if statistics is not None:
            return statistics
    from energon.sources.open_tree import TableSamples

    shards = TableSamples(root, ShardPool())
    statistics = PartStatistics()
    for number in sorted(there):
        try:
            statistics.add(shards.open(number).table)
        except EnergonError as error:
            unreadable.append(str(error))
    return statistics


def _split(address: str, name: str, split_config: str) -> dict[str, int]:
    try:
        source = WebdatasetSource(address, SampleSelection(name), split_config=split_config)
    except EmptyDatasetError:
        return split_description(0, 0)
    return split_description(len(source), len(source.shards), excluded=len(source.excluded))


def _sizes(address: str, shards: list[str]) -> list[int | None]:
    arguments = [(join_address(address, shard),) for shard in shards]
    if is_remote(address):
        store, _ = open_store(address)
        return store.together(_size, arguments)
    return [_size(path) for (path,) in arguments]


def _size(address: str) -> int | None:
    info = file_info(address)
    return None if info is None else info.size


def _sample_type(address: str, name: str) -> tuple[str | None, list[str]]:
    """Return the type of the samples, if there is one, and the problems of the description."""
    try:
        config = load_dataset_config(address, name)
    except EnergonError as error:
        if name != "dataset.yaml":
            raise  # someone has asked for it by name
        return None, [str(error)] if is_file(join_address(address, f"{META}/{name}")) else []
    if config.dataset_class is not None:
        return ".".join(config.dataset_class), []
    if config.crude:
        return "CrudeWebdataset", []
    return config.sample_type[1] if config.sample_type else None, []
