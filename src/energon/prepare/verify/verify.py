"""Check a prepared dataset: shards, their indexes, and what is in `.nv-meta`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from energon.counting import counted
from energon.errors import (
    DuplicateSampleKeyError,
    FormatError,
)
from energon.formats.meta.info import META, DatasetInfo, load_info
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.part_table_file import open_part_table, part_table_path
from energon.formats.tar.scan import scan_tar
from energon.io.address import local_path
from energon.prepare.engines import Engine, run_batches
from energon.prepare.files import list_files
from energon.prepare.index.index import IndexedShard
from energon.prepare.index.name_index import sqlite_path
from energon.prepare.upkeep import upkeep_of
from energon.prepare.verify.documents import check_documents
from energon.prepare.verify.duplicates import check_unique
from energon.prepare.verify.report import Report, check_depth
from energon.prepare.verify.shard import Depth, Problem, ShardReport, verify_batch
from energon.prepare.verify.sqlite import sqlite_difference

BATCH_SHARDS = 16


def verify_dataset(
    path: str | Path,
    *,
    depth: Depth = "headers",
    engine: Engine | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Check a prepared dataset, and return what is wrong with it. Changes nothing.

    Args:
        path: Its folder, or a file that is a dataset.
        depth: How much to read, see `energon.prepare.verify.shard.verify_shard`.
        engine: Where to read.
        progress: Called with the number of shards that are done, and of all.

    Raises:
        DatasetNotFoundError: If the folder is not a prepared dataset.
        ConfigError: If there is no such depth.
    """
    dataset = Path(local_path(path))
    upkeep = upkeep_of(dataset)
    if upkeep is not None:
        return upkeep.verify(str(dataset), depth)

    def compare(shards: list[str]) -> Iterator[ShardReport]:
        return _verify_shards(dataset, shards, depth, engine or Engine(), progress)

    report = check_dataset(dataset, depth, compare, lambda name: _open_table(dataset / name))
    report.dataset = str(path)
    return report


def _open_table(shard: Path) -> PartTable:
    """Return the table of a shard; if it is damaged, what is in the shard."""
    try:
        return open_part_table(shard)
    except FormatError:
        return PartTable.from_scan(scan_tar(shard))


def check_dataset(
    dataset: Path,
    depth: Depth,
    compare: Callable[[list[str]], Iterator[ShardReport]],
    open_table: Callable[[str], PartTable],
) -> Report:
    """Check the folder of a dataset, see `verify_dataset`.

    Args:
        dataset: The folder.
        depth: How much to read.
        compare: Returns what comes out for each of some shards, in their order.
        open_table: Returns the table of a shard that has one, or whose headers could be read.
    """
    check_depth(depth)
    report = Report(str(dataset), depth)
    try:
        info = load_info(dataset)
    except FormatError as error:
        report.problems.append(Problem("info-damaged", f"{META}/.info.json", str(error), False))
        return report
    shards = list(info.shard_counts)
    indexed: list[IndexedShard] = []
    other_dates = 0
    for found in compare(shards):
        other_dates += found.has_other_date and not found.problems
        report.problems += found.problems
        report.num_checksums += found.num_checksums
        if found.indexed is not None:
            indexed.append(found.indexed)
    _note_missing_tables(report, dataset, shards)
    report.num_shards = len(shards)
    report.num_samples = sum(shard.num_samples for shard in indexed)
    report.problems += _check_counts(info, indexed)
    report.problems += _check_keys(open_table, indexed)
    report.problems += _check_sqlite(dataset, shards, indexed, depth, open_table)
    report.problems += check_documents(dataset, info, report.notes)
    if other_dates:
        report.notes.append(
            f"{counted(other_dates, 'shard has', 'shards have')} another date than when indexed, "
            f"as copies have; `energon index {dataset}` notes the new one"
        )
    _note_new_shards(dataset, shards, report.notes)
    if depth == "content" and report.ok and not report.num_checksums:
        report.notes.append(
            "there are no checksums of contents; `energon index --checksum` makes them"
        )
    return report


def _verify_shards(
    dataset: Path,
    shards: list[str],
    depth: Depth,
    engine: Engine,
    progress: Callable[[int, int], None],
) -> Iterator[ShardReport]:
    """Yield what came out for each shard, in their order."""
    batches = [shards[at : at + BATCH_SHARDS] for at in range(0, len(shards), BATCH_SHARDS)]
    if len(batches) == 1 and engine.name == "local":
        engine = Engine(num_workers=1)
    results: dict[int, list[ShardReport]] = {}
    done = 0
    arguments = ((str(dataset), batch, depth) for batch in batches)
    for number, reports in run_batches(engine, verify_batch, arguments):
        results[number] = reports
        done += len(reports)
        progress(done, len(shards))
    for number in sorted(results):
        yield from results[number]


def _note_missing_tables(report: Report, dataset: Path, shards: list[str]) -> None:
    """Only note that no shard has a part table: then another tool has prepared the dataset."""
    missing = {problem.where for problem in report.problems if problem.kind == "index-missing"}
    lost = {problem.shard for problem in report.problems if problem.kind == "shard-missing"}
    present = [name for name in shards if name not in lost]
    tables = {os.path.relpath(part_table_path(dataset / name), dataset) for name in present}
    if tables and tables <= missing:
        report.problems = [p for p in report.problems if p.where not in tables]
        report.notes.append(
            "no shard has a part table, as where another tool has prepared a dataset; "
            f"`energon index {dataset}` makes them, so that shards open faster"
        )


def _check_counts(info: DatasetInfo, indexed: list[IndexedShard]) -> Iterator[Problem]:
    for shard in indexed:
        count = info.shard_counts[shard.name]
        if count != shard.num_samples:
            yield Problem(
                "info-stale",
                f"{META}/.info.json",
                f"{shard.name} has {counted(shard.num_samples, 'sample')} by its index, {count} by "
                ".info.json",
                True,
                shard.name,
            )


def _check_keys(
    open_table: Callable[[str], PartTable], indexed: list[IndexedShard]
) -> Iterator[Problem]:
    # Each repeated part is a problem of its shard already.
    shards = [shard._replace(repeated=None) for shard in indexed]
    try:
        check_unique(shards, open_table)
    except DuplicateSampleKeyError as error:
        yield Problem("duplicate-key", "", str(error), False)


def _check_sqlite(
    dataset: Path,
    shards: list[str],
    indexed: list[IndexedShard],
    depth: Depth,
    open_table: Callable[[str], PartTable],
) -> Iterator[Problem]:
    path = sqlite_path(dataset)
    where = f"{META}/index.sqlite"
    if not path.exists():
        return
    try:
        tables = None if depth == "quick" else open_table
        problem = sqlite_difference(path, shards, indexed, tables)
    except FormatError as error:
        yield Problem("sqlite-damaged", where, str(error), True)
        return
    if problem is not None:
        yield Problem("sqlite-stale", where, f"{path}: {problem}", True)
    if not (dataset / META / "index.uuid").exists():
        yield Problem("uuid-missing", f"{META}/index.uuid", f"{dataset}: no index.uuid", True)


def _note_new_shards(dataset: Path, shards: list[str], notes: list[str]) -> None:
    known = set(shards)
    new = [name for name in list_files(dataset) if name.endswith(".tar") and name not in known]
    if new:
        notes.append(
            f"{counted(len(new), 'shard is', 'shards are')} not in the dataset, e.g. {new[0]}; "
            "`energon prepare` adds them"
        )
