"""Keep `index.sqlite` up to date: leave it, extend it, or rewrite it.

It is replaced together with the dataset, so that both are always either old or new.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from uuid import uuid4

from energon.errors import EnergonError, FormatError
from energon.formats.meta.info import META, DatasetInfo, load_info
from energon.formats.meta.yaml import dump_yaml
from energon.formats.tables.part_table import PartTable, part_table_path
from energon.formats.tables.sqlite_file import SqliteReader, writing_file
from energon.formats.tables.sqlite_index import (
    ShardState,
    ShardToIndex,
    copy_media,
    extend_sqlite_index,
    indexed_shards,
    write_sqlite_index,
)
from energon.io.atomic import publish
from energon.prepare.files import file_state, flush_files, reporting, stage_files
from energon.prepare.index import IndexedShard

logger = logging.getLogger("energon")


def sqlite_path(dataset: Path) -> Path:
    """Return where the SQL index of a dataset is."""
    return dataset / META / "index.sqlite"


def open_table(dataset: Path, name: str) -> PartTable:
    """Return the part table of an indexed shard."""
    path = part_table_path(dataset / name)
    with reporting(path):
        return PartTable.open(path)


def write_name_index(
    dataset: Path,
    names: Sequence[str],
    shards: Iterable[IndexedShard],
    target: Path,
    *,
    rewrite: bool = False,
) -> bool:
    """Write the SQL index of a dataset to `target`, unless the current one is up to date.

    Args:
        dataset: The folder.
        names: All shards, in their order.
        shards: The same shards, as they become indexed; all of them are consumed.
        target: An empty file.
        rewrite: Whether to write all of it, whatever the current one claims.

    Returns:
        Whether it was written.

    Raises:
        DuplicateSampleKeyError: If two samples have the same key.
    """
    known = [] if rewrite else indexed_shards(sqlite_path(dataset)) or []
    current = [ShardState(name, *file_state(dataset / name)) for name in names]
    following = iter(shards)
    if not known or known != current[: len(known)]:
        with _writing(dataset):
            write_sqlite_index(target, _tables(dataset, following))
            _copy_media(sqlite_path(dataset), target)
        return True
    for _ in islice(following, len(known)):
        pass  # indexed, and already in the SQL index
    if len(known) == len(current):
        list(following)
        return False
    with _writing(dataset):
        shutil.copyfile(sqlite_path(dataset), target)
        extend_sqlite_index(target, _tables(dataset, following))
    return True


@contextmanager
def _writing(dataset: Path) -> Iterator[None]:
    """Report errors of the disk on which the SQL index of a dataset is written."""
    path = sqlite_path(dataset)
    with reporting(path), writing_file(path):
        yield


def is_name_index_of(dataset: Path, names: Sequence[str], *, or_else: bool) -> bool:
    """Return whether the SQL index of a dataset matches its current shards.

    Args:
        dataset: The folder.
        names: All shards, in their order.
        or_else: The answer for an index that does not record its shards.
    """
    known = indexed_shards(sqlite_path(dataset))
    if known is None:
        return or_else
    return known == [ShardState(name, *file_state(dataset / name)) for name in names]


def has_media(dataset: Path) -> bool:
    """Return whether the SQL index contains more than can be made from the shards."""
    path = sqlite_path(dataset)
    if not path.is_file():
        return False
    try:
        with SqliteReader(path) as reader:
            return "media_metadata" in reader.tables
    except FormatError:
        return False


def _copy_media(source: Path, target: Path) -> None:
    if not source.is_file():
        return
    try:
        with writing_file(target):
            copy_media(source, target)
    except (FormatError, sqlite3.DatabaseError) as error:
        logger.warning(
            "%s: media metadata that it may have had is lost: %s; `energon prepare-media` "
            "creates it again",
            source,
            error,
        )


def _tables(dataset: Path, shards: Iterator[IndexedShard]) -> Iterator[ShardToIndex]:
    for shard in shards:
        yield ShardToIndex(shard.name, open_table(dataset, shard.name))


def commit_dataset(
    dataset: Path,
    info: DatasetInfo,
    documents: Iterable[tuple[str, str]],
    *,
    changed: bool,
    sqlite: Path | None,
    keeps_sqlite: bool,
    unflushed: Sequence[Path] = (),
) -> None:
    """Write the files of `.nv-meta`.

    The list of shards determines what the dataset consists of. While splits are replaced, it has
    the shards of both the old and the new ones. While the list is replaced, the SQL index, which
    refers to shards by number, is either absent or matches.

    Args:
        dataset: The folder.
        info: The shards.
        documents: Names and contents of other files.
        changed: Whether shards are new or changed.
        sqlite: A new SQL index under a temporary name; None if there is none.
        keeps_sqlite: Whether the current SQL index matches these shards.
        unflushed: Files next to the shards that must be on disk before the dataset has them.
    """
    meta = dataset / META
    present = _present_counts(dataset)
    names = list(info.shard_counts)
    changed |= list(present) != names
    removed = {name: count for name, count in present.items() if name not in info.shard_counts}
    heads = []
    if changed or sqlite is not None or not (meta / "index.uuid").exists():
        heads.append((meta / "index.uuid", str(uuid4())))
    heads += _lists(meta, replace(info, shard_counts={**info.shard_counts, **removed}))
    others = [(meta / name, text) for name, text in documents]
    ends = _lists(meta, info) if removed else []
    first, second, third = (
        stage_files(((path, text.encode()) for path, text in files), durable=False)
        for files in (heads, others, ends)
    )
    staged = [*first.temporaries, *second.temporaries, *third.temporaries]
    flush_files([*unflushed, *staged, *([] if sqlite is None else [sqlite])])
    target = sqlite_path(dataset)
    with reporting(target):
        if list(present) != names[: len(present)] or (sqlite is None and not keeps_sqlite):
            target.unlink(missing_ok=True)
        first.commit()
        if sqlite is not None:
            publish(sqlite, target)
        second.commit()
        third.commit()


def _lists(meta: Path, info: DatasetInfo) -> list[tuple[Path, str]]:
    """Return the files that list the shards, including that of early releases if it exists."""
    files = [(meta / ".info.json", info.to_json())]
    if (meta / ".info.yaml").exists():
        files.insert(0, (meta / ".info.yaml", dump_yaml({"shard_counts": dict(info.shard_counts)})))
    return files


def _present_counts(dataset: Path) -> dict[str, int]:
    try:
        return dict(load_info(dataset).shard_counts)
    except EnergonError:
        return {}
