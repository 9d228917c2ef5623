"""What the files below `.nv-meta` say of a split, for tools that look at shards themselves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from energon.errors import DatasetNotFoundError
from energon.formats.meta.info import load_info
from energon.formats.meta.split import load_split
from energon.io.epath import EPath
from energon.metadataset.kind import dataset_kind


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One shard of a split.

    Args:
        name: Its path below the dataset.
        path: Where it is.
        count: How many samples it has.
    """

    name: str
    path: str
    count: int


@dataclass(frozen=True, kw_only=True)
class WebdatasetMeta:
    """The shards of a split.

    Args:
        sample_excludes: Samples that are left out, as `SHARD/KEY`.
        shards: The shards that are not left out.
        split_part_files: Their names, as the split has them.
        info_shard_files: The names of all shards of the dataset.
    """

    sample_excludes: set[str]
    shards: list[ShardInfo]
    split_part_files: list[str]
    info_shard_files: list[str]

    @classmethod
    def from_config(
        cls,
        path: str | os.PathLike[str],
        *,
        split_part: str,
        split_config: str | None = None,
    ) -> Self:
        """Read the files of a prepared dataset.

        Args:
            path: Its folder.
            split_part: Which split.
            split_config: File below `.nv-meta` that lists the splits; None for split.yaml.

        Raises:
            ConfigError: If there is no such split.
            DatasetNotFoundError: If there is no prepared dataset.
        """
        counts = load_info(path).shard_counts
        split = load_split(path, split_config or "split.yaml")
        names = split.shards(split_part)
        return cls(
            sample_excludes={f"{shard}/{key}" for shard, key in split.excluded_samples},
            shards=[
                ShardInfo(name=name, path=os.path.join(path, name), count=counts[name])
                for name in names
            ],
            split_part_files=names,
            info_shard_files=list(counts),
        )


class EnergonDatasetType(Enum):
    """What lies at a path."""

    METADATASET = "metadataset"
    WEBDATASET = "webdataset"
    JSONL = "jsonl"
    FILESYSTEM = "filesystem"
    INVALID = "invalid"


def get_dataset_type(path: str | os.PathLike[str]) -> EnergonDatasetType:
    """Return what lies at `path`: INVALID if it is nothing that can be loaded."""
    try:
        return EnergonDatasetType(dataset_kind(path))
    except (DatasetNotFoundError, ValueError):
        return EnergonDatasetType.INVALID


def check_dataset_info_present(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a prepared dataset of shards at `path`."""
    return get_dataset_type(path) is EnergonDatasetType.WEBDATASET


def get_dataset_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `.nv-meta/.info.json` of a dataset says.

    Raises:
        DatasetNotFoundError: If there is no prepared dataset.
    """
    info = load_info(EPath(path))
    return {"energon_version": info.energon_version, "shard_counts": dict(info.shard_counts)}


def get_info_shard_files(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of all shards of a dataset."""
    return list(load_info(EPath(path)).shard_counts)
