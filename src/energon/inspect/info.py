"""Describe a dataset or metadataset as plain data."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from energon.errors import ConfigError, EmptyDatasetError, EnergonError
from energon.formats.info import META, load_info
from energon.formats.split import load_split
from energon.inspect.folder_info import describe_folder
from energon.inspect.leaves import find_leaves, split_names
from energon.inspect.media_statistics import media_statistics
from energon.inspect.mix_info import describe_mix
from energon.inspect.part_statistics import (
    PartStatistics,
    SizeStatistics,
    index_statistics,
)
from energon.io.address import address_name, is_remote, join_address, redact
from energon.io.epath import AnyPath, any_path
from energon.io.files import file_info
from energon.io.registry import open_store
from energon.metadataset.dataset_config import load_dataset_config
from energon.metadataset.kind import dataset_kind
from energon.sources.browse_samples import TableSamples
from energon.sources.file_store_locate import local_copy
from energon.sources.file_store_open import folder_of
from energon.sources.jsonl import JsonlSource
from energon.sources.jsonl_file import JsonlFile
from energon.sources.shards import ShardPool
from energon.sources.webdataset import WebdatasetSource


def describe(
    path: str | os.PathLike[str],
    *,
    split_config: str = "split.yaml",
    dataset_config: str = "dataset.yaml",
    parts: bool = True,
) -> dict[str, Any]:
    """Return what a dataset or metadataset holds.

    Args:
        path: Where it is.
        split_config: File below `.nv-meta` that lists the splits.
        dataset_config: File below `.nv-meta` that describes samples.
        parts: Whether to count parts and their sizes, for which all indexes are read.

    Raises:
        DatasetNotFoundError: If there is nothing.
        ConfigError: If a document makes no sense.
    """
    address = os.fspath(path)
    folder = folder_of(address)
    if folder is not None:
        about = {"name": _name(folder), "path": redact(address), "kind": "filesystem"}
        return {**about, **describe_folder(folder, parts)}
    kind = dataset_kind(address)
    about = {"name": _name(address), "path": redact(address), "kind": kind}
    if kind == "jsonl":
        return {**about, **_jsonl(address, parts)}
    if kind == "filesystem":
        return {**about, **describe_folder(address, parts)}
    if kind == "webdataset":
        return {**about, **_webdataset(address, split_config, dataset_config, parts)}
    return {**about, **_metadataset(address, split_config, dataset_config, parts)}


def _name(address: str) -> str:
    return address_name(address if is_remote(address) else os.path.realpath(address))


def _webdataset(
    address: str, split_config: str, dataset_config: str, parts: bool
) -> dict[str, Any]:
    root = any_path(address)
    info = load_info(root)
    split = load_split(root, split_config)
    sizes = dict(zip(info.shard_counts, _sizes(address, list(info.shard_counts)), strict=True))
    missing = [shard for shard, size in sizes.items() if size is None]
    about: dict[str, Any] = {
        "sample_type": _sample_type(address, dataset_config),
        "samples": info.num_samples,
        "shards": len(info.shard_counts),
        "bytes": sum(size for size in sizes.values() if size is not None),
        "missing_shards": missing,
        "energon_version": info.energon_version,
        "excluded": list(split.exclude),
        "splits": {
            name: _split(address, name, split_config)
            for name in split_names(address, "webdataset", split_config)
        },
    }
    if parts:
        there = {number for number, size in enumerate(sizes.values()) if size is not None}
        unreadable: list[str] = []
        about |= _parts(root, list(sizes), there, unreadable).to_json()
        about["unreadable_shards"] = unreadable
        media = media_statistics(root)
        about |= {} if media is None else {"media": media}
    return about


def _parts(
    root: AnyPath, names: Sequence[str], there: Collection[int], unreadable: list[str]
) -> PartStatistics:
    """Return the statistics of those shards that are there; say which cannot be read, and why."""
    index = root / META / "index.sqlite"
    if there and not (root / f"{names[min(there)]}.parts").is_file() and index.is_file():
        statistics = index_statistics(local_copy(index), there)
        if statistics is not None:
            return statistics
    shards = TableSamples(root, ShardPool())
    statistics = PartStatistics()
    for number in sorted(there):
        try:
            statistics.add(shards.open(number).table)
        except EnergonError as error:
            unreadable.append(str(error))
    return statistics


def _jsonl(address: str, parts: bool) -> dict[str, Any]:
    lines = JsonlFile(address)
    splits = {}
    for name in split_names(address, "jsonl"):
        try:
            source = JsonlSource(address, split_part=name)
        except EmptyDatasetError:
            splits[name] = {"samples": 0, "shards": 0, "excluded": 0}
        else:
            excluded = len(source.excluded)
            splits[name] = {"samples": len(source), "shards": 1, "excluded": excluded}
    about = {
        "sample_type": "CrudeSample",
        "samples": len(lines),
        "shards": 1,
        "bytes": int(lines.offsets[-1]),
        "missing_shards": [],
        "energon_version": None,
        "splits": splits,
    }
    if parts:
        sizes = SizeStatistics()
        sizes.add(np.diff(lines.offsets))
        about |= PartStatistics(sizes, {"json": sizes}).to_json()
    return about


def _split(address: str, name: str, split_config: str) -> dict[str, Any]:
    try:
        source = WebdatasetSource(address, split_part=name, split_config=split_config)
    except EmptyDatasetError:
        return {"samples": 0, "shards": 0, "excluded": 0}
    return {
        "samples": len(source),
        "shards": len(source.shards),
        "excluded": len(source.excluded),
    }


def _metadataset(
    address: str, split_config: str, dataset_config: str, parts: bool
) -> dict[str, Any]:
    found = find_leaves(
        address, split_config=split_config, dataset_config=dataset_config, training=True
    )
    datasets: dict[str, Any] = {}
    for leaves in found.splits.values():
        for leaf in leaves:
            if leaf.path not in datasets:
                datasets[leaf.path] = describe(
                    leaf.path,
                    split_config=leaf.split_config,
                    dataset_config=leaf.dataset_config,
                    parts=parts,
                )
    return {
        "splits": {name: describe_mix(mix) for name, mix in found.mixes.items()},
        "datasets": {redact(path): about for path, about in datasets.items()},
        "problems": [f"split {name!r}: {line}" for name, line in found.problems],
    }


def _sizes(address: str, shards: list[str]) -> list[int | None]:
    places = [(join_address(address, shard),) for shard in shards]
    if is_remote(address):
        store, _ = open_store(address)
        return store.together(_size, places)
    return [_size(place) for (place,) in places]


def _size(address: str) -> int | None:
    found = file_info(address)
    return None if found is None else found.size


def _sample_type(address: str, name: str) -> str | None:
    try:
        config = load_dataset_config(address, name)
    except ConfigError:
        return None
    except EnergonError as error:
        return f"unreadable: {error}"
    if config.crude:
        return "CrudeWebdataset"
    return config.sample_type[1] if config.sample_type else None
