"""Prepare datasets of shards and media from programs, and read the files below `.nv-meta`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

from energon.compat.megatron.worker import note_ignored
from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.meta.braces import expand_braces
from energon.formats.meta.info import DatasetInfo, load_info
from energon.formats.meta.yaml import load
from energon.formats.tables.part_table import open_part_table
from energon.formats.tar.headers import split_name
from energon.formats.tar.scan import iter_members
from energon.io.epath import EPath, any_path
from energon.local_file import open_binary
from energon.metadataset.kind import dataset_kind
from energon.prepare.dataset import Indexing, dataset_locked, index_dataset
from energon.prepare.engines import Engine
from energon.prepare.index import find_shards
from energon.prepare.media import (
    MediaFilter,
    prepare_media,
    prepare_remote_media,
)
from energon.prepare.remote import mirrored
from energon.prepare.splits import SplitRequest, present_split, split_dataset


class MediaFilterStrategy(StrEnum):
    """How media files are recognized."""

    EXTENSION = "EXTENSION"
    HEADER = "HEADER"
    GLOB = "GLOB"


@dataclass(frozen=True)
class MediaFilterConfig:
    """Which files are checked for media metadata.

    Args:
        strategy: How they are recognized.
        patterns: For GLOB: patterns for their names.
    """

    strategy: MediaFilterStrategy
    patterns: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, glob: str | None, header: bool, extension: bool) -> MediaFilterConfig:
        """Return the configuration for options of a command, one of which must be set."""
        if sum(map(bool, (glob, header, extension))) != 1:
            raise ValueError("exactly one of glob, header and extension has to be set")
        if glob:
            return cls(MediaFilterStrategy.GLOB, [each.strip() for each in glob.split(",")])
        return cls(MediaFilterStrategy.HEADER if header else MediaFilterStrategy.EXTENSION)


INDEX_PLACE = "indexes are written where they belong"


def prepare_filesystem_dataset(
    root_path: str | os.PathLike[str],
    media_filter: MediaFilter | MediaFilterConfig,
    *,
    progress: Any = None,
    workers: int = 16,
    index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
) -> int:
    """Store the metadata of the media files of a folder.

    Args:
        root_path: The folder, local or in an object store.
        media_filter: Selects the files.
        progress: Shows the progress if it is a function, see `prepare_dataset`; True has no
            effect, as is logged once.
        workers: Number of processes that read shards or files.
        index_sqlite_tmp_path: Has no effect, as is logged once.

    Returns:
        Number of files with metadata.
    """
    note_ignored("files are not counted in advance", progress=progress is True)
    note_ignored(INDEX_PLACE, index_sqlite_tmp_path=index_sqlite_tmp_path is not None)
    folder, shown = any_path(root_path), _Shown(progress if callable(progress) else None)
    kept = media_filter
    if isinstance(kept, MediaFilterConfig):
        kept = MediaFilter(kept.strategy.value, ",".join(kept.patterns) or None)
    if isinstance(folder, EPath):
        report = prepare_remote_media(folder.url, kept, num_workers=workers, progress=shown)
    else:
        report = prepare_media(folder, kept, engine=Engine(num_workers=workers), progress=shown)
    return report.stored


ProgressBar = Callable[[Iterator[Any], int], Iterator[Any]]
"""Wraps an iterator to show its progress; called with the iterator and its length."""

MAX_PART_NAMES = 50


class PreparesShards:
    """Class methods of datasets of shards that write the files next to the shards."""

    @classmethod
    def prepare_dataset(
        cls,
        parent_path: str | os.PathLike[str],
        paths: Sequence[str] | None = None,
        *,
        split_parts_ratio: Sequence[tuple[str, float]] | None = None,
        split_parts_patterns: Sequence[tuple[str, str]] | None = None,
        split_config: str = "split.yaml",
        shuffle_seed: int | None = 42,
        progress_fn: ProgressBar | None = None,
        workers: int = 4,
        tar_index_only: bool = False,
        media_filter: MediaFilter | MediaFilterConfig | None = None,
        fix_duplicates: bool = False,
        index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
    ) -> set[str]:
        """Prepare a folder of tar shards; no `dataset.yaml` is written.

        Args:
            parent_path: The folder, local or in an object store.
            paths: The shards, or patterns with braces; None for all below the folder.
            split_parts_ratio: Names of splits and their ratios.
            split_parts_patterns: Names of splits and regular expressions, instead of ratios.
            split_config: The file below `.nv-meta` that lists the splits.
            shuffle_seed: None assigns shards to splits in their order, any number in a shuffled
                order.
            progress_fn: Shows the progress: wraps an iterator over shards, given their number.
            workers: Number of processes that read shards.
            tar_index_only: Whether to index shards only, and leave splits unchanged.
            media_filter: Files whose media metadata is stored; None for none.
            fix_duplicates: Whether to rewrite shards that contain duplicate keys.
            index_sqlite_tmp_path: Has no effect, as is logged once: indexes are written where they
                belong.

        Returns:
            The names of the parts of samples, 50 at most.

        Raises:
            ConfigError: If the arguments are invalid.
            DuplicateSampleKeyError: If a key occurs twice.
        """
        note_ignored(INDEX_PLACE, index_sqlite_tmp_path=index_sqlite_tmp_path is not None)
        folder, shown = any_path(parent_path), _Shown(progress_fn)
        if isinstance(folder, EPath) and fix_duplicates:
            raise ConfigError(
                f"{folder}: fix_duplicates rewrites shards, and those in an object store stay "
                "as they are; prepare a local copy with it"
            )
        request: SplitRequest | None = None
        if not tar_index_only:
            request = SplitRequest(
                ratio=None if split_parts_ratio is None else dict(split_parts_ratio),
                parts=[f"{name}:{pattern}" for name, pattern in split_parts_patterns or ()],
                shuffle=shuffle_seed is not None and split_parts_ratio is not None,
            )
        indexing = Indexing(
            engine=Engine(num_workers=workers), fix_duplicates=fix_duplicates, progress=shown
        )
        if isinstance(folder, EPath):
            indexing = replace(indexing, progress=_Shown(None))
            with mirrored(folder.url, progress=shown) as local:
                names = _index_shards(local, paths, indexing, request, split_config)
        else:
            names = _index_shards(folder, paths, indexing, request, split_config)
        if media_filter is not None:
            prepare_filesystem_dataset(parent_path, media_filter, workers=workers)
        return names

    @classmethod
    def add_media_metadata(
        cls,
        parent_path: str | os.PathLike[str],
        *,
        media_filter: MediaFilter | MediaFilterConfig,
        workers: int = 4,
        progress_fn: ProgressBar | None = None,
        index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
    ) -> int:
        """Store the metadata of the media files of a prepared dataset.

        Args:
            parent_path: Its folder, local or in an object store.
            media_filter: Selects the files.
            workers: Number of processes that read shards.
            progress_fn: Shows the progress, see `prepare_dataset`.
            index_sqlite_tmp_path: Has no effect, as is logged once.

        Returns:
            Number of files with metadata.
        """
        return prepare_filesystem_dataset(
            parent_path,
            media_filter,
            progress=progress_fn,
            workers=workers,
            index_sqlite_tmp_path=index_sqlite_tmp_path,
        )

    @staticmethod
    def iter_dataset_content(
        path: str | os.PathLike[str], extract_keys: Collection[str] = ()
    ) -> Iterator[dict[str, bytes | None]]:
        """Yield the parts of each sample of a shard, by name.

        Args:
            path: The shard.
            extract_keys: Parts whose content is included; it is None for all others.
        """
        with open_binary(path) as shard:
            file = shard.fileno()

            def read(offset: int, size: int) -> bytes:
                return os.pread(file, size, offset)

            key, sample = "", dict[str, bytes | None]()
            for member in iter_members(read, os.fstat(file).st_size, origin=str(path)):
                names = split_name(member.name)
                if names is None:
                    continue
                if names[0] != key and sample:
                    yield sample
                    sample = {}
                key, part = names
                is_extracted = part in extract_keys
                sample[part] = read(member.offset, member.size) if is_extracted else None
            if sample:
                yield sample


def _index_shards(
    folder: Path,
    paths: Sequence[str] | None,
    indexing: Indexing,
    request: SplitRequest | None,
    split_config: str,
) -> set[str]:
    """Index the shards of a local folder, and divide them into splits if that is requested.

    Returns:
        The names of the parts of samples.
    """
    shards = _shards(folder, paths)
    if request is not None:
        request.check(shards)

    def documents(info: DatasetInfo) -> Iterator[tuple[str, str]]:
        if request is not None:
            splits = split_dataset(info, request, present_split(folder)).to_yaml()
            as_json = split_config.endswith(".json")
            yield (
                split_config,
                json.dumps(load(splits, origin=split_config)) if as_json else splits,
            )

    with dataset_locked(folder, indexing) as held:
        index_dataset(folder, shards, held, documents)
    return _part_names(folder, shards)


class _Shown:
    """Advances a progress bar to a number of finished shards."""

    def __init__(self, show: ProgressBar | None) -> None:
        self.show = show
        self.bar: Iterator[Any] | None = None
        self.done = 0

    def __call__(self, done: int, total: int) -> None:
        if self.show is None:
            return
        if self.bar is None:
            self.bar = iter(self.show(iter(range(total)), total))
        # The bar finishes only when it is asked for one item more than there are.
        for _ in range(done - self.done + (done == total)):
            next(self.bar, None)
        self.done = done


def _part_names(folder: Path, shards: Sequence[str]) -> set[str]:
    names: set[str] = set()
    for shard in shards:
        names.update(open_part_table(folder / shard).part_names)
        if len(names) > MAX_PART_NAMES:
            break
    return set(sorted(names)[:MAX_PART_NAMES])


def _shards(folder: Path, paths: Sequence[str] | None) -> list[str]:
    """Return the shards that `paths` name, in the order of the folder."""
    shards = [str(shard) for shard in find_shards(folder)]
    if paths is None:
        return shards
    named = {each for path in paths for each in expand_braces(str(path))}
    missing = sorted(named - set(shards))
    if missing:
        raise ConfigError(f"{folder} has no shard {missing[0]}; correct paths, or add the shard")
    return [shard for shard in shards if shard in named]


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One shard of a split.

    Args:
        name: Its path below the dataset.
        path: Where it is.
        count: Its number of samples.
    """

    name: str
    path: str
    count: int


class EnergonDatasetType(Enum):
    """The type of a dataset."""

    METADATASET = "metadataset"
    WEBDATASET = "webdataset"
    JSONL = "jsonl"
    FILESYSTEM = "filesystem"
    INVALID = "invalid"


def get_dataset_type(path: str | os.PathLike[str]) -> EnergonDatasetType:
    """Return the type of the dataset at `path`; INVALID if it cannot be loaded."""
    try:
        return EnergonDatasetType(dataset_kind(path))
    except (DatasetNotFoundError, ValueError):
        return EnergonDatasetType.INVALID


def check_dataset_info_present(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a prepared dataset of shards at `path`."""
    return get_dataset_type(path) is EnergonDatasetType.WEBDATASET


def get_dataset_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of `.nv-meta/.info.json` of a dataset.

    Raises:
        DatasetNotFoundError: If there is no prepared dataset.
    """
    info = load_info(EPath(path))
    return {"energon_version": info.energon_version, "shard_counts": dict(info.shard_counts)}
