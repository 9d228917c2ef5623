"""Rewrite what is missing, damaged or out of date in the index of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from energon.errors import ConfigError, EnergonError
from energon.formats.meta.info import META, DatasetInfo, load_info
from energon.formats.meta.split import excludes_any, load_split
from energon.prepare.dataset import Indexing, index_dataset
from energon.prepare.index.index import IndexOptions
from energon.prepare.index.name_index import sqlite_path
from energon.prepare.splits import named_split
from energon.prepare.upkeep import LOST, Repair, Report
from energon.prepare.verify.quarantine import QuarantineEntry, entries_without, write_quarantine
from energon.prepare.verify.verify import FolderCheck

BAD_SQLITE = ("sqlite-damaged", "sqlite-stale")


def repair_folder(
    check: FolderCheck, *, drop: bool, quarantine: str | Path | None, indexing: Indexing
) -> Repair:
    """Check a folder of shards and rewrite what is wrong in its index, see `repair_dataset`."""
    dataset = check.folder
    before = check.run()
    lost = _named(before, LOST)
    if quarantine is not None:
        # A killed run may already have dropped shards, which are then only in the file.
        present = load_info(dataset).shard_counts
        write_lost(quarantine, before, dropped=entries_without(quarantine, present) if drop else ())
    stale = [name for name in _repairable(before) if name not in lost]
    dropped = lost if drop else []
    options = IndexOptions(indexing.checksum)
    if (indexing.after_kill or not before.ok) and (drop or not lost):
        shards = [name for name in load_info(dataset).shard_counts if name not in dropped]
        if not shards:
            raise ConfigError(
                f"{dataset}: no shard would be left; restore the shards, or delete the dataset"
            )
        check.reindex(stale, shards, options)
        bad_sqlite = any(problem.kind in BAD_SQLITE for problem in before.problems)
        rewrite_sqlite = bad_sqlite or bool(stale)
        _index_all(dataset, shards, dropped, indexing, rewrite_sqlite=rewrite_sqlite)
    elif stale:
        check.reindex(stale, stale, options)
    changed = bool(stale or dropped or _repairable_kinds(before))
    return Repair(before, check.run() if changed else before, stale, dropped)


def _repairable_kinds(report: Report) -> list[str]:
    return [problem.kind for problem in report.problems if problem.repairable]


def _named(report: Report, kinds: Sequence[str]) -> list[str]:
    found = (p.shard for p in report.problems if p.kind in kinds and p.shard is not None)
    return list(dict.fromkeys(found))


def _repairable(report: Report) -> list[str]:
    found = (p.shard for p in report.problems if p.repairable and p.shard is not None)
    return list(dict.fromkeys(found))


def write_lost(path: str | Path, *reports: Report, dropped: Iterable[QuarantineEntry] = ()) -> None:
    """List lost shards and samples in a quarantine file, after those `dropped`."""
    entries = list(dropped)
    for report in reports:
        for problem in report.problems:
            if problem.shard and (problem.kind in LOST or problem.kind == "content-damaged"):
                entries += [
                    QuarantineEntry(report.dataset, problem.shard, key, problem.message)
                    for key in problem.keys or [problem.key]
                ]
    write_quarantine(path, entries)


def _index_all(
    dataset: Path,
    shards: Sequence[str],
    dropped: Sequence[str],
    indexing: Indexing,
    *,
    rewrite_sqlite: bool,
) -> None:
    sqlite = indexing.sqlite and sqlite_path(dataset).exists()

    def documents(info: DatasetInfo) -> Iterator[tuple[str, str]]:
        if dropped:
            yield from _splits_without(dataset, dropped)

    how = replace(indexing, sqlite=sqlite)
    index_dataset(dataset, shards, how, documents, rewrite_sqlite=rewrite_sqlite)


def _splits_without(dataset: Path, dropped: Sequence[str]) -> Iterator[tuple[str, str]]:
    try:
        split = load_split(dataset)
    except EnergonError:
        return
    parts = {
        name: [shard for shard in split.shards(name) if shard not in dropped]
        for name in split.split_parts
    }
    ranges = {
        name: {shard: numbers for shard, numbers in shards.items() if shard not in dropped}
        for name, shards in split.sample_ranges.items()
    }
    rest = load_info(dataset).shard_counts.keys() - set(dropped)
    exclude = [
        entry
        for entry in split.exclude
        if excludes_any(entry, rest) or not excludes_any(entry, dropped)
    ]
    left = named_split(parts, exclude, {k: v for k, v in ranges.items() if v})
    yield (
        Path(split.origin).name if (dataset / META / "split.yaml").exists() else "split.yaml",
        (left.to_yaml()),
    )
