"""Check a prepared dataset: shards, their indexes, and what is in `.nv-meta`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from energon.errors import (
    ConfigError,
    DuplicateSampleKeyError,
    EnergonError,
    FormatError,
)
from energon.formats.meta.info import META, DatasetInfo, load_info
from energon.formats.meta.split import Split, load_split
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.part_table_file import open_part_table, part_table_path
from energon.formats.tables.sqlite_file import SqliteReader
from energon.formats.tables.sqlite_index import ShardState, indexed_shards
from energon.formats.tar.scan import scan_tar
from energon.messages import counted, shell_word
from energon.metadataset.dataset_config import load_dataset_config
from energon.prepare.engines import Engine, run_batches
from energon.prepare.files import list_dataset_files
from energon.prepare.index.index import IndexedShard, IndexOptions, index_shards
from energon.prepare.index.name_index import sqlite_path
from energon.prepare.upkeep import Report, check_verify_depth
from energon.prepare.verify.duplicates import check_unique
from energon.prepare.verify.shard import UNKNOWN_DATE, Depth, Problem, ShardReport, verify_batch


def check_documents(dataset: Path, info: DatasetInfo, notes: list[str]) -> Iterator[Problem]:
    """Yield problems of the splits and the description of a dataset.

    Args:
        dataset: Its folder.
        info: Its shards.
        notes: Receives facts worth knowing that are not problems.
    """
    try:
        split = load_split(dataset)
    except EnergonError as error:
        yield Problem("split-damaged", f"{META}/split.yaml", str(error), False)
    else:
        yield from _check_split(split, info, notes)
    if not (dataset / META / "dataset.yaml").exists():
        notes.append("there is no dataset.yaml; loading needs one, or a dataset_config")
        return
    try:
        load_dataset_config(dataset)
    except EnergonError as error:
        yield Problem("description-damaged", f"{META}/dataset.yaml", str(error), False)


def _check_split(split: Split, info: DatasetInfo, notes: list[str]) -> Iterator[Problem]:
    where = f"{META}/split.yaml"
    listed: set[str] = set()
    for name in split.split_parts:
        shards = split.shards(name)
        listed.update(shards)
        for shard in shards:
            if shard not in info.shard_counts:
                message = f"{where}: split {name!r} lists {shard}, which is not in the index"
                yield Problem("split-unknown-shard", where, message, False, shard)
                continue
            try:
                split.sample_range(name, shard, info.shard_counts[shard])
            except ConfigError as error:
                yield Problem("split-range", where, str(error), False, shard)
    for line in split.unmatched(info.shard_counts):
        message = f"{where}: {line}; correct the entry, or delete it"
        yield Problem("exclude-unmatched", where, message, False)
    left_out = [shard for shard in info.shard_counts if shard not in listed]
    if left_out:
        several = counted(len(left_out), "shard is", "shards are")
        notes.append(f"{several} in no split, e.g. {left_out[0]}")


_SAMPLES = """
SELECT CAST(sample_key AS BLOB), byte_offset, byte_size FROM samples
WHERE tar_file_id = ? ORDER BY sample_index
"""
_PARTS = """
SELECT sample_index, CAST(part_name AS BLOB), content_byte_offset, content_byte_size
FROM sample_parts WHERE tar_file_id = ? ORDER BY sample_index, content_byte_offset
"""


def sqlite_difference(
    path: Path,
    shards: Sequence[str],
    indexed: Sequence[IndexedShard],
    open_table: Callable[[str], PartTable] | None,
) -> str | None:
    """Return the problem of an SQL index, or None.

    Args:
        path: The index.
        shards: All shards, in the order of their numbers.
        indexed: Shards that have a part table, or whose headers could be read.
        open_table: Returns the table of a shard, to compare all rows with; None compares only which
            shards it covers, and whether it is complete.

    Raises:
        FormatError: If it is not an SQLite file, or damaged.
    """
    known = indexed_shards(path)
    if known is not None and not _is_of(shards, indexed, known):
        return "it does not match the current shards"
    with SqliteReader(path) as reader:
        if open_table is None:
            return None
        _check_pages(reader)
        numbers = {name: number for number, name in enumerate(shards)}
        for shard in indexed:
            table = open_table(shard.name)
            difference = _shard_difference(reader, numbers[shard.name], table)
            if difference is not None:
                return f"it has {difference} of {shard.name}"
    return None


def _is_of(
    shards: Sequence[str], indexed: Sequence[IndexedShard], known: Sequence[ShardState]
) -> bool:
    """Return whether the SQL index covers all shards in these versions."""
    by_name = {shard.name: shard for shard in known}
    if list(by_name) != list(shards):
        return False
    for shard in indexed:
        other = by_name[shard.name]
        size, date = shard.state
        if other.byte_size != size or date not in (other.mtime_ns, UNKNOWN_DATE):
            return False
    return True


def _check_pages(reader: SqliteReader) -> None:
    """Raise FormatError if the pages of a file contradict each other."""
    found = reader.first("PRAGMA integrity_check(1)")
    if found != ("ok",):
        raise FormatError(f"{reader.name}: {found[0] if found else 'cannot be checked'}")


def _shard_difference(reader: SqliteReader, number: int, table: PartTable) -> str | None:
    """Return the difference between the rows of a shard and its part table, or None."""
    samples = list(reader.rows(_SAMPLES, (number,)))
    if len(samples) != table.num_samples:
        return f"{counted(len(samples), 'sample')}, expected {table.num_samples},"
    begin, end = table.sample_extents(np.arange(table.num_samples))
    keys = [os.fsencode(key) for key in table.keys(np.arange(table.num_samples))]
    if samples != list(zip(keys, begin.tolist(), (end - begin).tolist(), strict=True)):
        return "other keys or places of samples"
    if "sample_parts" not in reader.tables:
        return None  # early releases of Megatron-Energon wrote none
    names = [os.fsencode(name) for name in table.part_names]
    owners = np.repeat(np.arange(table.num_samples), np.diff(table.first_part))
    parts = zip(
        owners.tolist(),
        [names[name] for name in table.part_name.tolist()],
        table.part_offset.tolist(),
        table.part_size.tolist(),
        strict=True,
    )
    if list(reader.rows(_PARTS, (number,))) != list(parts):
        return "other names or places of parts"
    return None


BATCH_SHARDS = 16


class FolderCheck:
    """The check of a folder of shards, which can be repeated after shards were indexed again.

    Args:
        folder: The folder.
        depth: How much to read, see `verify_dataset`.
        engine: Where to read.
        progress: Called with the number of finished shards, and the total.

    Raises:
        ConfigError: If there is no such depth.
    """

    def __init__(
        self, folder: Path, depth: Depth, engine: Engine, progress: Callable[[int, int], None]
    ) -> None:
        check_verify_depth(depth)
        self.folder = folder
        self.depth = depth
        self.engine = engine
        self.progress = progress

    def run(self) -> Report:
        """Check the dataset, and return its problems."""
        dataset, depth = self.folder, self.depth
        report = Report(str(dataset), depth)
        try:
            info = load_info(dataset)
        except FormatError as error:
            report.problems.append(Problem("info-damaged", f"{META}/.info.json", str(error), False))
            return report
        shards = list(info.shard_counts)
        indexed: list[IndexedShard] = []
        other_dates = 0
        for result in self.compare(shards):
            other_dates += result.has_other_date and not result.problems
            report.problems += result.problems
            report.num_checksums += result.num_checksums
            if result.indexed is not None:
                indexed.append(result.indexed)
        _note_missing_tables(report, dataset, shards)
        report.num_shards = len(shards)
        report.num_samples = sum(shard.num_samples for shard in indexed)
        report.problems += _check_counts(info, indexed)
        report.problems += _check_keys(self.open_table, indexed)
        report.problems += _check_sqlite(dataset, shards, indexed, depth, self.open_table)
        report.problems += check_documents(dataset, info, report.notes)
        if other_dates:
            report.notes.append(
                f"{counted(other_dates, 'shard has', 'shards have')} another date than when "
                f"indexed, as after copying; `energon index {shell_word(dataset)}` records the new "
                "one"
            )
        _note_new_shards(dataset, shards, report.notes)
        if depth == "content" and report.ok and not report.num_checksums:
            report.notes.append("contents have no checksums; `energon index --checksum` adds them")
        return report

    def compare(self, shards: list[str]) -> Iterator[ShardReport]:
        """Yield the result for each shard, in order."""
        batches = [shards[at : at + BATCH_SHARDS] for at in range(0, len(shards), BATCH_SHARDS)]
        is_alone = len(batches) == 1 and self.engine.name == "local"
        engine = Engine(num_workers=1) if is_alone else self.engine
        results: dict[int, list[ShardReport]] = {}
        done = 0
        arguments = ((str(self.folder), batch, self.depth) for batch in batches)
        for number, reports in run_batches(engine, verify_batch, arguments):
            results[number] = reports
            done += len(reports)
            self.progress(done, len(shards))
        for number in sorted(results):
            yield from results[number]

    def open_table(self, name: str) -> PartTable:
        """Return the table of a shard that has one, or whose headers could be read."""
        try:
            return open_part_table(self.folder / name)
        except FormatError:
            return PartTable.from_scan(scan_tar(self.folder / name))

    def reindex(self, stale: Sequence[str], shards: Sequence[str], options: IndexOptions) -> None:
        """Index shards again.

        Args:
            stale: Shards whose index is wrong.
            shards: Shards whose index has to record when they were written.
            options: How to index.
        """
        forced = options._replace(force=True)
        for _ in index_shards(self.folder, stale, engine=self.engine, options=forced):
            pass


def _note_missing_tables(report: Report, dataset: Path, shards: list[str]) -> None:
    """Only note that no shard has a part table: then another tool has prepared the dataset."""
    missing = {problem.where for problem in report.problems if problem.kind == "index-missing"}
    lost = {problem.shard for problem in report.problems if problem.kind == "shard-missing"}
    present = [name for name in shards if name not in lost]
    tables = {os.path.relpath(part_table_path(dataset / name), dataset) for name in present}
    if tables and tables <= missing:
        report.problems = [p for p in report.problems if p.where not in tables]
        report.notes.append(
            "no shard has a part table, as after preparing with another tool; "
            f"`energon index {shell_word(dataset)}` makes them, so that shards open faster"
        )


def _check_counts(info: DatasetInfo, indexed: list[IndexedShard]) -> Iterator[Problem]:
    for shard in indexed:
        count = info.shard_counts[shard.name]
        if count != shard.num_samples:
            yield Problem(
                "info-stale",
                f"{META}/.info.json",
                f"{shard.name} has {counted(shard.num_samples, 'sample')} in its index, {count} in "
                ".info.json",
                True,
                shard.name,
            )


def _check_keys(
    open_table: Callable[[str], PartTable], indexed: list[IndexedShard]
) -> Iterator[Problem]:
    # Each repeated part is already a problem of its shard.
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
    new = [
        name for name in list_dataset_files(dataset) if name.endswith(".tar") and name not in known
    ]
    if new:
        notes.append(
            f"{counted(len(new), 'shard is', 'shards are')} not in the dataset, e.g. {new[0]}, "
            "because they are new or `energon repair --drop` removed them; `energon prepare` adds "
            "them if they are intact"
        )
