"""Prepare a folder of shards: index it, split it, and describe its samples."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError
from energon.formats.meta.braces import expand_all
from energon.formats.meta.info import INFO_FILES, META, PACK_RECORD, DatasetInfo, Split, load_info
from energon.formats.meta.yaml import dump_yaml
from energon.formats.tables.part_table import PartTable
from energon.io.address import local_path
from energon.messages import counted, nearest
from energon.metadataset.kind import INTERRUPTED_PACK
from energon.prepare.engines import Engine, Progress, no_progress
from energon.prepare.files import clear_leftovers, dataset_lock, temporary_file
from energon.prepare.index import (
    IndexedShard,
    IndexOptions,
    commit_dataset,
    find_shards,
    has_media,
    index_batch,
    index_paths,
    is_name_index_of,
    open_table,
    run_on_shards,
    sqlite_path,
    write_name_index,
)
from energon.prepare.splits import (
    SplitRequest,
    check_excluded,
    present_split,
    split_dataset,
)
from energon.prepare.verify.duplicates import check_unique, fix_duplicates
from energon.samples.crude import RESERVED, reserved_names
from energon.samples.field_map import FieldMap
from energon.version import __version__

logger = logging.getLogger("energon")
DEFAULT_WORKERS = 16


@dataclass(frozen=True)
class Indexing:
    """How to index the shards of a dataset.

    Args:
        engine: Where to run.
        sqlite: Whether to write `index.sqlite` as well, which training does not need.
        checksum: Whether to read the contents and store a checksum of each.
        force: Whether to read shards even if they have not changed.
        fix_duplicates: Whether to rewrite shards that contain duplicate keys.
        wait: Whether to wait for another process that prepares the dataset.
        is_locked: Whether the caller already holds the lock of the dataset.
        after_kill: Whether the last process that held the lock was killed, see `dataset_lock`.
        progress: Called with the number of finished shards, and the total.
    """

    engine: Engine = field(default_factory=Engine)
    sqlite: bool = True
    checksum: bool = False
    force: bool = False
    fix_duplicates: bool = False
    wait: bool = False
    is_locked: bool = False
    after_kill: bool = False
    progress: Progress = no_progress


def prepare_dataset(
    path: str | Path,
    *,
    split_ratio: Mapping[str, float] | None = None,
    split_parts: Sequence[str] = (),
    split_by_folder: bool = False,
    split_unit: str = "auto",
    shuffle_shards: bool = False,
    exclude: Sequence[str] = (),
    exclude_from: Sequence[str | os.PathLike[str]] = (),
    sample_type: str | None = "auto",
    field_map: Mapping[str, str] | None = None,
    sample_loader: str | None = None,
    dataset_yaml_name: str = "dataset.yaml",
    num_workers: int = DEFAULT_WORKERS,
    progress: Progress = no_progress,
    indexing: Indexing | None = None,
) -> DatasetInfo:
    """Turn a folder of tar shards into a dataset, with files next to the shards and in `.nv-meta`.

    The shards are not modified, and those that have not changed since they were indexed are not
    read again. The change is atomic: readers see the dataset as it was, or as it will be.

    Args:
        path: The folder.
        split_ratio: Ratio by name of the split.
        split_parts: `NAME:REGEX` for each split, instead of ratios.
        split_by_folder: Whether to make each folder of shards a split, instead of these.
        split_unit: What to divide by ratio: "shard", "sample", or "auto" for shards unless there
            are too few.
        shuffle_shards: Whether to shuffle shards, always in the same way, before dividing them.
        exclude: Regular expressions; shards whose paths match any of them are excluded.
        exclude_from: Quarantine files, or folders of them, whose shards and samples are excluded.
        sample_type: "CrudeWebdataset", or the name of a sample type; None writes no dataset.yaml,
            "auto" writes one for CrudeWebdataset unless there is one.
        field_map: How parts become the fields of the sample type.
        sample_loader: The code that makes samples, instead of a field map: the text of
            `sample_loader.py`, which readers run if allowed.
        dataset_yaml_name: Name of the description below `.nv-meta`.
        num_workers: Number of processes that read shards.
        progress: Called with the number of finished shards, and the total.
        indexing: Further settings; None uses `num_workers` and `progress` only.

    Returns:
        The shards and their numbers of samples.

    Raises:
        DatasetNotFoundError: If there are no shards.
        DatasetBusyError: If another process prepares it.
        FormatError: If a shard is damaged or a key occurs twice.
        ConfigError: If the arguments are invalid.
        StorageError: If files cannot be read or written.

    Example:
        >>> info = prepare_dataset(
        ...     "photos",
        ...     split_ratio={"train": 8, "val": 2},
        ...     split_unit="sample",
        ...     sample_type="CaptioningSample",
        ...     field_map={"image": "png", "caption": "txt"},
        ... )
        >>> info.num_samples
        10
    """
    dataset = Path(local_path(path))
    split = SplitRequest(
        ratio=split_ratio,
        parts=split_parts,
        by_folder=split_by_folder,
        unit=split_unit,
        shuffle=shuffle_shards,
        exclude_from=exclude_from,
    )
    if sample_type == "auto":
        is_described = (dataset / META / dataset_yaml_name).exists()
        sample_type = None if is_described or field_map or sample_loader else CRUDE
    description = Description(sample_type, field_map, sample_loader, dataset_yaml_name)
    if indexing is None:
        indexing = Indexing(Engine(num_workers=num_workers), progress=progress)
    return prepare_shards(dataset, split, description, exclude=exclude, indexing=indexing)


def prepare_shards(
    dataset: Path,
    split: SplitRequest,
    description: Description,
    *,
    exclude: Sequence[str] = (),
    indexing: Indexing,
) -> DatasetInfo:
    """Do what `prepare_dataset` does, whose arguments say how to split, describe and index."""
    excluded = split.excluded_of(os.path.abspath(dataset))
    present = find_shards(dataset)
    shards = without_shards(present, exclude)
    split.check(shards)
    check_excluded(dataset, excluded, present_split(dataset), present)
    field_map = FieldMap.parse(description.field_map or {})

    def documents(info: DatasetInfo) -> Iterator[tuple[str, str]]:
        current = present_split(dataset)
        yield "split.yaml", split_dataset(info, split, current, excluded).to_yaml()
        yield from description.documents()

    def check(parts: frozenset[str]) -> None:
        field_map.check_parts(parts, origin=str(dataset))

    with dataset_locked(dataset, indexing) as held:
        if not indexing.is_locked:
            _check_packed(dataset)
        info = index_dataset(dataset, shards, held, documents, check=check)
        if description.field_map:
            warn_of_missing_parts(dataset, shards, field_map, present_split(dataset))
        return info


def _check_packed(dataset: Path) -> None:
    """Refuse to make a dataset of the shards that an interrupted `energon pack` has written."""
    meta = dataset / META
    if (dataset / PACK_RECORD).exists() and not any((meta / name).exists() for name in INFO_FILES):
        raise ConfigError(
            f"{dataset} {INTERRUPTED_PACK}. To make a dataset of only these shards, delete "
            f"{PACK_RECORD} first"
        )


@contextmanager
def dataset_locked(dataset: Path, indexing: Indexing) -> Iterator[Indexing]:
    """Hold the lock of a dataset, and yield the settings for its holder."""
    if indexing.is_locked:
        yield indexing
        return
    with dataset_lock(dataset, wait=indexing.wait) as after_kill:
        yield replace(indexing, is_locked=True, after_kill=after_kill)


def index_dataset(
    dataset: Path,
    shards: Sequence[str],
    indexing: Indexing,
    documents: Callable[[DatasetInfo], Iterator[tuple[str, str]]] = lambda info: iter(()),
    *,
    check: Callable[[frozenset[str]], None] = lambda parts: None,
    rewrite_sqlite: bool = False,
) -> DatasetInfo:
    """Index the shards of a dataset and write `.nv-meta`. Call it with the dataset's lock held.

    Args:
        dataset: The folder.
        shards: Paths below it, in the order of the index.
        indexing: Settings.
        documents: Returns names and contents of further files of `.nv-meta`.
        check: Called with the names of all parts after the indexes of shards are written, before
            anything else is; may raise.
        rewrite_sqlite: Whether indexes of shards were wrong, so that the SQL index is rewritten
            even if it looks current.
    """
    clear_leftovers(dataset, shards)
    if indexing.fix_duplicates:
        options = IndexOptions(checksum=indexing.checksum)
        indexed = run_on_shards(index_batch, dataset, shards, options, engine=indexing.engine)
        fix_duplicates(dataset, list(indexed))
    done: list[IndexedShard] = []
    parts: set[str] = set()
    indexed = _collected(dataset, shards, indexing, done, parts)
    with temporary_file(sqlite_path(dataset)) as sqlite:
        needs_sqlite = indexing.sqlite or has_media(dataset)
        rewrite = indexing.force or rewrite_sqlite
        written = needs_sqlite and write_name_index(
            dataset, shards, indexed, sqlite, rewrite=rewrite
        )
        for _ in indexed:
            pass  # indexes that were not requested
        changed = indexing.after_kill or rewrite_sqlite or any(shard.was_read for shard in done)
        check(frozenset(parts))
        for name in reserved_names(parts):
            logger.warning(
                "%s: samples with a part named %r, %s. Until then each of them fails; `energon "
                "verify` counts them",
                dataset,
                name,
                RESERVED,
            )
        info = DatasetInfo({shard.name: shard.num_samples for shard in done}, __version__)
        commit_dataset(
            dataset,
            info,
            documents(info),
            changed=changed,
            sqlite=sqlite if written else None,
            keeps_sqlite=not rewrite_sqlite
            and is_name_index_of(dataset, shards, or_else=not changed),
            unflushed=[
                path
                for shard in done
                if shard.was_read and _is_flushed_here(indexing)
                for path in index_paths(dataset / shard.name)
            ],
        )
    read = sum(shard.was_read for shard in done)
    logger.info("%s: %d of %d shards were new or changed", dataset, read, len(done))
    return info


def _collected(
    dataset: Path,
    shards: Sequence[str],
    indexing: Indexing,
    done: list[IndexedShard],
    parts: set[str],
) -> Iterator[IndexedShard]:
    """Yield the shards as they are indexed, recording them and their parts and checking keys."""
    options = IndexOptions(
        checksum=indexing.checksum, force=indexing.force, durable=not _is_flushed_here(indexing)
    )
    for shard in run_on_shards(
        index_batch,
        dataset,
        shards,
        options,
        engine=indexing.engine,
        progress=indexing.progress,
    ):
        parts.update(shard.part_names)
        done.append(shard._replace(part_names=()))
        yield shard
    check_unique(done, lambda name: open_table(dataset, name))


def _is_flushed_here(indexing: Indexing) -> bool:
    """Return whether a single flush at the end suffices; much faster with many small shards."""
    return indexing.engine.name == "local"


def without_shards(shards: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Return the shards whose paths match none of the regular expressions.

    Raises:
        ConfigError: If nothing is left, or an expression is malformed or matches none of them.
    """
    expressions = []
    for text in exclude:
        try:
            expressions.append(re.compile(text))
        except re.error as error:
            raise ConfigError(f"exclude {text!r} is not a regular expression: {error}") from error
    for expression in expressions:
        if not any(map(expression.search, shards)):
            close = nearest(expression.pattern, shards)
            hint = f"; did you mean {close!r}?" if close else f", like {shards[0]!r}"
            raise ConfigError(
                f"exclude {expression.pattern!r} matches none of "
                f"{counted(len(shards), 'shard')}{hint}"
            )
    included = [shard for shard in shards if not any(e.search(shard) for e in expressions)]
    if not included:
        raise ConfigError(f"exclude {list(exclude)} leaves none of {len(shards)} shards")
    return included


def reindex_dataset(path: str | Path, indexing: Indexing) -> DatasetInfo:
    """Bring the index of a dataset up to date.

    The shards keep their numbers; new shards in the folder are not added.

    Args:
        path: Folder of the prepared dataset.
        indexing: How to do it.

    Raises:
        DatasetNotFoundError: If it is not prepared, or a shard is missing.
        DatasetBusyError: If another process prepares it.
        FormatError: If a shard is damaged or a key occurs twice.
    """
    dataset = Path(local_path(path))
    load_info(dataset)  # raises before a lock is left in a folder that is not a dataset
    with dataset_locked(dataset, indexing) as held:
        return index_dataset(dataset, list(load_info(dataset).shard_counts), held)


SHOWN_KEYS = 3


def warn_of_missing_parts(
    dataset: Path, shards: Iterable[str], field_map: FieldMap, split: Split | None
) -> None:
    """Log for each field how many samples have no part for it, excluded ones aside.

    Args:
        dataset: The folder.
        shards: Its indexed shards.
        field_map: Maps fields to parts.
        split: Names what is excluded; None if nothing is.
    """
    excluded = set() if split is None else set(expand_all(split.exclude))
    num_samples, lacking = 0, Counter[str]()
    shown: dict[str, list[str]] = {name: [] for name in field_map.accesses}
    for shard in shards:
        if shard in excluded:
            continue
        table = open_table(dataset, shard)
        num_samples += table.num_samples
        for name, shown_keys in shown.items():
            parts = {access.part.lower() for access in field_map.accesses[name]}
            keys = [
                key
                for key in table.keys(samples_without(table, parts))
                if f"{shard}/{key}" not in excluded
            ]
            lacking[name] += len(keys)
            shown_keys += keys[: SHOWN_KEYS - len(shown_keys)]
    for name, shown_keys in shown.items():
        if shown_keys:
            alternatives = dict.fromkeys(access.part for access in field_map.accesses[name])
            logger.warning(
                "%s: %d of %d samples lack part %s for field %r and will be skipped: %s%s",
                dataset,
                lacking[name],
                num_samples,
                " or ".join(alternatives),
                name,
                ", ".join(shown_keys),
                ", …" if lacking[name] > SHOWN_KEYS else "",
            )


def samples_without(table: PartTable, names: set[str]) -> NDArray[np.int64]:
    """Return the indices of samples that have none of some parts, named in lower case."""
    numbers = [number for number, name in enumerate(table.part_names) if name.lower() in names]
    if table.schema is not None:
        has_one = any(number in numbers for number in table.schema)
        return np.arange(0 if has_one else table.num_samples)
    owners = np.repeat(np.arange(table.num_samples), np.diff(table.first_part))
    lacks = np.ones(table.num_samples, np.bool_)
    lacks[owners[np.isin(table.part_name, numbers)]] = False
    return np.flatnonzero(lacks)


CRUDE = "CrudeWebdataset"
LOADER_FILE = "sample_loader.py"


@dataclass(frozen=True)
class Description:
    """How the samples of a dataset are described.

    Args:
        sample_type: "CrudeWebdataset", or the name of a sample type; None writes no dataset.yaml.
        field_map: How parts become the fields of the sample type.
        sample_loader: The code that makes samples, instead of a field map.
        yaml_name: Name of the description below `.nv-meta`.

    Raises:
        ConfigError: If there is no such type, the field map does not fit it, or the name cannot
            be that of a description.
    """

    sample_type: str | None = None
    field_map: Mapping[str, str] | None = None
    sample_loader: str | None = None
    yaml_name: str = "dataset.yaml"

    def __post_init__(self) -> None:
        name = self.yaml_name
        is_ours = name == "split.yaml" or name.startswith(".")
        if name != os.path.basename(name) or is_ours or not name.endswith((".yaml", ".yml")):
            raise ConfigError(
                f"dataset_yaml_name {name!r}: expected the name of a file in .nv-meta, like "
                "dataset.yaml or dataset_crude.yaml"
            )
        self._content()

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield the names and the contents of its files."""
        content = self._content()
        if content is not None:
            yield self.yaml_name, dump_yaml(content)
        if self.sample_loader is not None:
            yield LOADER_FILE, self.sample_loader

    def _content(self) -> dict[str, Any] | None:
        """Return the content of `dataset.yaml`; None if there is to be no such file."""
        with_loader = self.sample_loader is not None
        if self.sample_type is None:
            if self.field_map:
                raise ConfigError("a field_map requires the sample_type that it maps to")
            if with_loader:
                raise ConfigError("a sample_loader requires the sample_type that it makes")
            return None
        if self.sample_type == CRUDE:
            if self.field_map:
                raise ConfigError(f"{CRUDE} takes no field_map: cookers make its samples")
            if with_loader:
                raise ConfigError(f"{CRUDE} takes no sample_loader: cookers make its samples")
            return {"__module__": "megatron.energon", "__class__": CRUDE}
        # Crude datasets need neither sample types nor the time to import them.
        from energon.samples.sample_types import resolve_class

        resolved = resolve_class("megatron.energon", self.sample_type)
        kind = {"__module__": "megatron.energon", "__class__": resolved.__name__}
        if with_loader:
            if self.field_map:
                raise ConfigError("choose one of field_map and sample_loader")
            return {
                "sample_type": kind,
                "part_filter": f"{LOADER_FILE}:part_filter",
                "sample_loader": f"{LOADER_FILE}:sample_loader",
            }
        FieldMap.parse(self.field_map or {}).check(resolved)
        return {"sample_type": kind, "field_map": dict(self.field_map or {})}
