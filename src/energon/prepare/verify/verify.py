"""Check a prepared dataset: shards, their indexes, and what is in `.nv-meta`.

`Report` and `Repair` describe the results. A kind of dataset that is not a folder of shards names
an `Upkeep` in its `KindEntry`, so commands need not know which kinds there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from energon.arrays import distinct
from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    DuplicateSampleKeyError,
    EnergonError,
    FormatError,
    ShardChangedError,
    TruncatedError,
)
from energon.formats.meta.info import META, DatasetInfo, Split, load_info, load_split
from energon.formats.tables.part_table import PartTable, open_part_table, part_table_path
from energon.formats.tables.part_table_bytes import has_other_version
from energon.formats.tables.sqlite_file import SqliteReader
from energon.formats.tables.sqlite_index import (
    ShardState,
    indexed_shards,
    part_rows,
    sample_rows,
)
from energon.formats.tar.scan import load_tar_index, scan_tar, tar_index_path
from energon.io.address import address_name
from energon.local_file import open_binary
from energon.messages import counted, shell_word
from energon.metadataset.dataset_config import load_dataset_config
from energon.metadataset.kind import COMPRESSIONS, KINDS, load_attribute
from energon.prepare.engines import Engine, Progress, no_progress
from energon.prepare.files import FileState, list_dataset_files, reporting
from energon.prepare.index import (
    IndexedShard,
    IndexOptions,
    ShardFile,
    index_batch,
    run_on_shards,
    sqlite_path,
    summarize,
)
from energon.prepare.verify.duplicates import check_unique
from energon.samples.crude import RESERVED, reserved_names

LOST = ("shard-missing", "shard-truncated", "shard-damaged")
"""Problems that make a shard useless."""


@dataclass
class Report:
    """The result of checking a dataset."""

    dataset: str
    depth: Depth
    num_shards: int = 0
    num_samples: int = 0
    num_checksums: int = 0
    """How many contents were compared with checksums."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Facts worth knowing that are not problems."""

    @property
    def ok(self) -> bool:
        """Whether no problems were found."""
        return not self.problems

    def rename(self, name: str) -> None:
        """Refer to the dataset by another name."""
        previous, self.dataset = self.dataset, name
        self.problems = [
            problem._replace(message=problem.message.replace(previous, name))
            for problem in self.problems
        ]
        self.notes = [note.replace(previous, name) for note in self.notes]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "dataset": self.dataset,
            "ok": self.ok,
            "depth": self.depth,
            "shards": self.num_shards,
            "samples": self.num_samples,
            "checksums": self.num_checksums,
            "problems": [problem._asdict() for problem in self.problems],
            "notes": self.notes,
        }


class Repair(NamedTuple):
    """The result of a repair."""

    before: Report
    after: Report
    indexed: list[str]
    """Shards that were indexed again."""
    dropped: list[str]
    """Shards that are no longer part of the dataset."""


def check_verify_depth(depth: str) -> None:
    """Raise ConfigError if there is no such depth."""
    if depth not in DEPTHS:
        raise ConfigError(f"depth {depth!r}: expected one of {', '.join(DEPTHS)}")


class Upkeep(Protocol):
    """Maintains datasets of one kind. Addresses are local paths or those of an object store."""

    noun: str
    """What such a dataset is, for messages: "a … file"."""

    def prepare(
        self,
        address: str,
        *,
        split_ratio: Mapping[str, float] | None = None,
        exclude_from: Sequence[str | os.PathLike[str]] = (),
        progress: Progress = no_progress,
    ) -> int:
        """Index it, and return the number of samples.

        Args:
            address: Where it is.
            split_ratio: Ratio by name of the split, for consecutive samples; None keeps the
                existing splits.
            exclude_from: Quarantine files, or folders of them, whose samples are excluded.
            progress: Called with the number of bytes that were read, and the total.
        """

    def verify(self, address: str, depth: Depth) -> Report:
        """Check it, and change nothing."""

    def repair(self, address: str, depth: Depth) -> Repair:
        """Check it, and rewrite what is wrong in its index."""


def upkeep_of(address: str | os.PathLike[str], *, compressed: bool = False) -> Upkeep | None:
    """Return the upkeep of the dataset at an address; None for folders of shards.

    Args:
        address: The address; only its name matters.
        compressed: Whether the name may also have the suffix of a compressed file.
    """
    names = [address_name(os.fspath(address))]
    stem, suffix = os.path.splitext(names[0])
    if compressed and suffix in COMPRESSIONS:
        names.append(stem)
    for entry in KINDS:
        if entry.upkeep and any(name.endswith(entry.suffixes) for name in names):
            upkeep: Upkeep = load_attribute(entry.upkeep)
            return upkeep
    return None


Depth = Literal["quick", "headers", "content"]
DEPTHS: tuple[Depth, ...] = ("quick", "headers", "content")
UNKNOWN_DATE = 0
"""In reports: no index records when the shard was written."""
MAX_NAMED = 100
"""Maximum number of damaged samples, or duplicate parts, reported one by one for a shard."""


class Problem(NamedTuple):
    """A problem of a dataset."""

    kind: str
    """The kind of problem, in a word: see docs/check.md."""
    where: str
    """Path of the file below the dataset folder."""
    message: str
    repairable: bool
    """Whether `energon repair` can fix it by rewriting an index."""
    shard: str | None = None
    """The shard that it concerns."""
    key: str | None = None
    """The sample that it concerns."""
    keys: tuple[str, ...] = ()
    """The samples that it concerns, if these are too many to be reported one by one."""


class ShardReport(NamedTuple):
    """The result for a shard."""

    problems: list[Problem]
    indexed: IndexedShard | None
    """Its table according to the index; None without one."""
    num_checksums: int = 0
    """How many contents were compared with their checksums."""
    has_other_date: bool = False
    """Whether the shard was written, or copied, after it was indexed."""
    headers: PartTable | None = None
    """The content of its headers, if they were read."""


def verify_batch(dataset: str, names: Sequence[str], depth: Depth) -> list[ShardReport]:
    """Compare some shards with their indexes, see `verify_shard`."""
    # Headers may be large, and are of no use to others.
    return [verify_shard(Path(dataset), name, depth)._replace(headers=None) for name in names]


def verify_shard(
    dataset: Path, name: str, depth: Depth, shard: ShardFile | None = None
) -> ShardReport:
    """Compare a shard with its index.

    Args:
        dataset: Folder of the dataset.
        name: Path of the shard below it.
        depth: "quick" compares size and date, and the index with its own checksum; "headers" also
            reads all headers of the shard and compares the positions of samples and parts;
            "content" reads all of it, and compares contents with their checksums.
        shard: The shard, if it is not in the folder.
    """
    try:
        shard = ShardFile(dataset / name) if shard is None else shard
        state = shard.state()
    except DatasetNotFoundError:
        return ShardReport([missing_shard(str(dataset / name), name)], None)
    problems: list[Problem] = []
    table = headers = None
    with _recording_index_problems(
        part_table_path(dataset / name), dataset, name, problems
    ) as path:
        table = PartTable.open(path, verify=True)
    if depth == "quick":
        problems += [] if table is None else _compare_sizes(shard.path, name, state, table)
    else:
        has_checksums = table is not None and table.part_crc32 is not None
        checked = table if depth == "content" and has_checksums else None
        headers = _scan(shard, name, state, checked, problems)
        if headers is not None and table is not None:
            problems += _compare(shard.path, name, state, table, headers)
        # Other tools write no part tables: the rest is compared with the shard itself.
        table = headers if table is None else table
    with _recording_index_problems(tar_index_path(dataset / name), dataset, name, problems) as path:
        offsets = load_tar_index(path)
        if table is not None and not np.array_equal(offsets, table.sample_offset):
            raise ShardChangedError(f"{path}: its offsets are not those of the samples")
    checksums = 0
    if depth == "content" and table is not None and not problems:
        checksums = _check_contents(shard, name, table, problems)
    if table is None:
        return ShardReport(problems, None)
    problems += _repeated_parts(shard.path, name, table)
    problems += _reserved_parts(shard.path, name, table)
    indexed = summarize(name, table, was_read=False)
    if table is headers:
        indexed = indexed._replace(state=FileState(state.size, UNKNOWN_DATE))
    has_other_date = state.mtime_ns != table.shard_mtime_ns
    return ShardReport(problems, indexed, checksums, has_other_date, headers)


@contextmanager
def _recording_index_problems(
    path: Path, dataset: Path, name: str, problems: list[Problem]
) -> Iterator[Path]:
    """Yield the path of a file of the index of a shard; record that it is missing or damaged."""
    try:
        with reporting(path):
            yield path
        return
    except FileNotFoundError:
        kind, message = "index-missing", f"{path}: no such file"
    except ShardChangedError as error:
        kind, message = "index-stale", str(error)
    except FormatError as error:
        with open_binary(path) as file:
            kind = "index-stale" if has_other_version(file.read(8)) else "index-damaged"
        message = str(error)
    problems.append(Problem(kind, os.path.relpath(path, dataset), message, True, name))


def _repeated_parts(path: str, name: str, table: PartTable) -> list[Problem]:
    """Return the parts that occur twice in samples of a shard."""
    repeated = table.repeated_parts()
    problems = [
        Problem("duplicate-part", name, str(part.error(path)), False, name, part.key)
        for part in repeated[:MAX_NAMED]
    ]
    if len(repeated) > MAX_NAMED:
        message = f"{path}: {len(repeated)} parts occur twice in their sample"
        problems.append(Problem("duplicate-part", name, message, False, name))
    return problems


def _reserved_parts(path: str, name: str, table: PartTable) -> Iterator[Problem]:
    """Yield the names of parts that crude samples use for entries of their own."""
    for part in reserved_names(table.part_names):
        numbers = np.flatnonzero(table.part_name == table.part_names.index(part))
        samples = distinct(np.searchsorted(table.first_part, numbers, side="right") - 1)
        if len(samples):
            key = table.key_of(int(samples[0]))
            more = f" and {len(samples) - 1} more" if len(samples) > 1 else ""
            message = f"{path}: sample {key!r}{more} has a part named {part!r}, {RESERVED}"
            yield Problem("reserved-part", name, message, False, name, key)


def missing_shard(path: str, name: str) -> Problem:
    """Return the problem of a missing shard."""
    return Problem("shard-missing", name, f"{path}: no such file", False, name)


def _compare_sizes(path: str, name: str, state: FileState, table: PartTable) -> list[Problem]:
    if state.size == table.shard_size:
        return []
    message = f"{path}: has {state.size} bytes, had {table.shard_size} when it was indexed"
    if state.size > table.shard_size:
        return [Problem("index-stale", name, message, True, name)]
    return [Problem("shard-truncated", name, f"{message}; restore the shard", False, name)]


def _scan(
    shard: ShardFile,
    name: str,
    state: FileState,
    checked: PartTable | None,
    problems: list[Problem],
) -> PartTable | None:
    try:
        return PartTable.from_scan(shard.scan(checked), shard_mtime_ns=state.mtime_ns)
    except FormatError as error:
        truncated = isinstance(error, TruncatedError)
        kind = "shard-truncated" if truncated else "shard-damaged"
        problems.append(Problem(kind, name, str(error), False, name))
        return None


def _compare(
    path: str, name: str, state: FileState, table: PartTable, headers: PartTable
) -> list[Problem]:
    difference = _difference(table, headers)
    if difference is not None:
        message = f"{path}: {difference} than its index says"
        return [Problem("index-stale", name, message, True, name)]
    return _compare_sizes(path, name, state, table)


def _difference(table: PartTable, headers: PartTable) -> str | None:
    if headers.num_samples != table.num_samples:
        return f"has {counted(headers.num_samples, 'sample')} and not {table.num_samples}, other"
    if bytes(headers.key_bytes) != bytes(table.key_bytes):
        return "has samples with other keys"
    for aspect, one, other in (
        ("numbers of parts", table.first_part, headers.first_part),
        ("places of parts", table.part_offset, headers.part_offset),
        ("sizes of parts", table.part_size, headers.part_size),
        ("places of samples", table.sample_offset, headers.sample_offset),
    ):
        if not np.array_equal(one, other):
            return f"has other {aspect}"
    names = [
        [one.part_names[number] for number in one.part_name.tolist()] for one in (table, headers)
    ]
    return "has other names of parts" if names[0] != names[1] else None


def _check_contents(shard: ShardFile, name: str, table: PartTable, problems: list[Problem]) -> int:
    """Compare contents with their checksums; return how many there are."""
    stated = table.part_crc32
    if stated is None:
        return 0
    path = shard.path
    damaged = np.flatnonzero(shard.crc32(table) != stated)
    owners = np.searchsorted(table.first_part, damaged, side="right") - 1
    for number, sample in zip(damaged[:MAX_NAMED].tolist(), owners.tolist(), strict=False):
        key = table.key_of(sample)
        part = table.part_names[table.part_name[number]]
        message = f"{path}: {key}.{part} at byte {table.part_offset[number]} has another checksum"
        problems.append(Problem("content-damaged", name, message, False, name, key))
    if len(damaged) > MAX_NAMED:
        message = f"{path}: {len(damaged)} contents have other checksums"
        keys = tuple(map(table.key_of, np.unique(owners[MAX_NAMED:]).tolist()))
        problems.append(Problem("content-damaged", name, message, False, name, keys=keys))
    return len(stated)


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
    unlisted = [shard for shard in info.shard_counts if shard not in listed]
    if unlisted:
        several = counted(len(unlisted), "shard is", "shards are")
        notes.append(f"{several} in no split, e.g. {unlisted[0]}")


_SAMPLES = """
SELECT tar_file_id, CAST(sample_key AS BLOB), sample_index, byte_offset, byte_size FROM samples
WHERE tar_file_id = ? ORDER BY sample_index
"""
_PARTS = """
SELECT tar_file_id, sample_index, CAST(part_name AS BLOB), content_byte_offset, content_byte_size
FROM sample_parts WHERE tar_file_id = ? ORDER BY sample_index, content_byte_offset
"""


def _sqlite_difference(
    check: FolderCheck, path: Path, shards: Sequence[str], indexed: Sequence[IndexedShard]
) -> str | None:
    """Return the problem of an SQL index, or None.

    A quick check compares only which shards it covers, and whether it is complete.

    Args:
        check: Opens the tables of shards.
        path: The index.
        shards: All shards, in the order of their numbers.
        indexed: Shards that have a part table, or whose headers could be read.

    Raises:
        FormatError: If it is not an SQLite file, or damaged.
    """
    listed = indexed_shards(path)
    if listed is not None and not _is_of(shards, indexed, listed):
        return "it does not match the current shards"
    with SqliteReader(path) as reader:
        if check.depth == "quick":
            return None
        result = reader.first("PRAGMA integrity_check(1)")
        if result != ("ok",):
            raise FormatError(f"{reader.name}: {result[0] if result else 'cannot be checked'}")
        numbers = {name: number for number, name in enumerate(shards)}
        for shard in indexed:
            table = check.open_table(shard.name)
            difference = _shard_difference(reader, numbers[shard.name], table)
            if difference is not None:
                return f"it has {difference} of {shard.name}"
    return None


def _is_of(
    shards: Sequence[str], indexed: Sequence[IndexedShard], listed: Sequence[ShardState]
) -> bool:
    """Return whether the SQL index covers all shards in these versions."""
    by_name = {shard.name: shard for shard in listed}
    return list(by_name) == list(shards) and all(
        by_name[shard.name].byte_size == shard.state.size
        and shard.state.mtime_ns in (by_name[shard.name].mtime_ns, UNKNOWN_DATE)
        for shard in indexed
    )


def _shard_difference(reader: SqliteReader, number: int, table: PartTable) -> str | None:
    """Return the difference between the rows of a shard and its part table, or None."""
    samples = list(reader.rows(_SAMPLES, (number,)))
    if len(samples) != table.num_samples:
        return f"{counted(len(samples), 'sample')}, expected {table.num_samples},"
    keys = [os.fsencode(key) for key in table.keys(np.arange(table.num_samples))]
    if samples != list(sample_rows(number, table, keys)):
        return "other keys or places of samples"
    if "sample_parts" not in reader.tables:
        return None  # early releases of Megatron-Energon wrote none
    names = [os.fsencode(name) for name in table.part_names]
    if list(reader.rows(_PARTS, (number,))) != list(part_rows(number, table, names)):
        return "other names or places of parts"
    return None


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

    def __init__(self, folder: Path, depth: Depth, engine: Engine, progress: Progress) -> None:
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
        try:
            # Each repeated part is already a problem of its shard.
            check_unique([shard._replace(repeated=None) for shard in indexed], self.open_table)
        except DuplicateSampleKeyError as error:
            report.problems.append(Problem("duplicate-key", "", str(error), False))
        report.problems += _check_sqlite(self, shards, indexed)
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
        return run_on_shards(
            verify_batch,
            self.folder,
            shards,
            self.depth,
            engine=self.engine,
            progress=self.progress,
        )

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
        for _ in run_on_shards(index_batch, self.folder, stale, forced, engine=self.engine):
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


def _check_sqlite(
    check: FolderCheck, shards: list[str], indexed: list[IndexedShard]
) -> Iterator[Problem]:
    dataset = check.folder
    path = sqlite_path(dataset)
    where = f"{META}/index.sqlite"
    if not path.exists():
        return
    try:
        problem = _sqlite_difference(check, path, shards, indexed)
    except FormatError as error:
        yield Problem("sqlite-damaged", where, str(error), True)
        return
    if problem is not None:
        yield Problem("sqlite-stale", where, f"{path}: {problem}", True)
    if not (dataset / META / "index.uuid").exists():
        yield Problem("uuid-missing", f"{META}/index.uuid", f"{dataset}: no index.uuid", True)


def _note_new_shards(dataset: Path, shards: list[str], notes: list[str]) -> None:
    tars = [name for name in list_dataset_files(dataset) if name.endswith(".tar")]
    new = sorted(set(tars).difference(shards))
    if new:
        notes.append(
            f"{counted(len(new), 'shard is', 'shards are')} not in the dataset, e.g. {new[0]}, "
            "because they are new or `energon repair --drop` removed them; `energon prepare` adds "
            "them if they are intact"
        )
