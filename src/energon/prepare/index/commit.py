"""Make what was prepared the dataset, so that at any moment it is the old or the new one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from energon.errors import EnergonError
from energon.formats.meta import yaml
from energon.formats.meta.info import META, DatasetInfo, load_info
from energon.prepare.files import flush_files, reporting, stage_files
from energon.prepare.index.name_index import sqlite_path


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

    The list of shards decides what the dataset consists of. While splits are replaced, it has
    the shards of both the old and the new ones. While the list is replaced, the SQL index, which
    goes by the numbers of shards, is either away or fits.

    Args:
        dataset: The folder.
        info: The shards.
        documents: Names and contents of other files.
        changed: Whether shards are new or changed.
        sqlite: A new SQL index, on its way under another name; None if there is none.
        keeps_sqlite: Whether the present SQL index is of these shards.
        unflushed: Files beside the shards that have to be on disk before the dataset has them.
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
            os.replace(sqlite, target)
        second.commit()
        third.commit()


def _lists(meta: Path, info: DatasetInfo) -> list[tuple[Path, str]]:
    """Return the files that list the shards; that of early releases is kept up if it is there."""
    files = [(meta / ".info.json", info.to_json())]
    if (meta / ".info.yaml").exists():
        files.insert(0, (meta / ".info.yaml", yaml.dump({"shard_counts": dict(info.shard_counts)})))
    return files


def _present_counts(dataset: Path) -> dict[str, int]:
    try:
        return dict(load_info(dataset).shard_counts)
    except EnergonError:
        return {}
