"""Compare a shard with its index."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from energon.arrays import distinct
from energon.errors import DatasetNotFoundError, FormatError, TruncatedError
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.part_table_bytes import has_other_version
from energon.formats.tables.part_table_file import part_table_path
from energon.formats.tar.scan import load_tar_index, tar_index_path
from energon.local_file import open_binary
from energon.messages import counted
from energon.prepare.files import FileState, reporting
from energon.prepare.index.index import IndexedShard, ShardFile, summarize
from energon.samples.crude import RESERVED, reserved_names

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
    found: PartTable | None = None
    """The content of its headers, if they were read."""


def verify_batch(dataset: str, names: Sequence[str], depth: Depth) -> list[ShardReport]:
    """Compare some shards with their indexes, see `verify_shard`."""
    # What was found may be large, and is of no use to others.
    return [verify_shard(Path(dataset), name, depth)._replace(found=None) for name in names]


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
    table = _open_table(dataset, name, problems)
    if depth == "quick":
        problems += [] if table is None else _compare_sizes(shard.path, name, state, table)
        found = None
    else:
        checked = table if depth == "content" and _has_checksums(table) else None
        found = _scan(shard, name, state, checked, problems)
        if found is not None and table is not None:
            problems += _compare(shard.path, name, state, table, found)
        # Other tools write no part tables: the rest is compared with the shard itself.
        table = found if table is None else table
    _check_tar_index(dataset, name, table, problems)
    checksums = 0
    if depth == "content" and table is not None and not problems:
        checksums = _check_contents(shard, name, table, problems)
    if table is None:
        return ShardReport(problems, None)
    problems += _repeated_parts(shard.path, name, table)
    problems += _reserved_parts(shard.path, name, table)
    indexed = summarize(name, table, was_read=False)
    if table is found:
        indexed = indexed._replace(state=FileState(state.size, UNKNOWN_DATE))
    has_other_date = state.mtime_ns != table.shard_mtime_ns
    return ShardReport(problems, indexed, checksums, has_other_date, found)


def _repeated_parts(path: str, name: str, table: PartTable) -> list[Problem]:
    """Return the parts that occur twice in samples of a shard."""
    found = table.repeated_parts()
    problems = [
        Problem("duplicate-part", name, str(each.error(path)), False, name, each.key)
        for each in found[:MAX_NAMED]
    ]
    if len(found) > MAX_NAMED:
        message = f"{path}: {len(found)} parts occur twice in their sample"
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


def _has_checksums(table: PartTable | None) -> bool:
    return table is not None and table.part_crc32 is not None


def _open_table(dataset: Path, name: str, problems: list[Problem]) -> PartTable | None:
    path = part_table_path(dataset / name)
    where = os.path.relpath(path, dataset)
    try:
        with reporting(path):
            return PartTable.open(path, verify=True)
    except FileNotFoundError:
        problems.append(Problem("index-missing", where, f"{path}: no such file", True, name))
    except FormatError as error:
        with open_binary(path) as file:
            kind = "index-stale" if has_other_version(file.read(8)) else "index-damaged"
        problems.append(Problem(kind, where, str(error), True, name))
    return None


def _check_tar_index(
    dataset: Path, name: str, table: PartTable | None, problems: list[Problem]
) -> None:
    path = tar_index_path(dataset / name)
    where = os.path.relpath(path, dataset)
    try:
        with reporting(path):
            offsets = load_tar_index(path)
    except FileNotFoundError:
        problems.append(Problem("index-missing", where, f"{path}: no such file", True, name))
        return
    except FormatError as error:
        problems.append(Problem("index-damaged", where, str(error), True, name))
        return
    if table is not None and not np.array_equal(offsets, table.sample_offset):
        message = f"{path}: its offsets are not those of the samples"
        problems.append(Problem("index-stale", where, message, True, name))


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
    path: str, name: str, state: FileState, table: PartTable, found: PartTable
) -> list[Problem]:
    difference = _difference(table, found)
    if difference is not None:
        message = f"{path}: {difference} than its index says"
        return [Problem("index-stale", name, message, True, name)]
    return _compare_sizes(path, name, state, table)


def _difference(table: PartTable, found: PartTable) -> str | None:
    if found.num_samples != table.num_samples:
        return f"has {counted(found.num_samples, 'sample')} and not {table.num_samples}, other"
    if bytes(found.key_bytes) != bytes(table.key_bytes):
        return "has samples with other keys"
    for what, one, other in (
        ("numbers of parts", table.first_part, found.first_part),
        ("places of parts", table.part_offset, found.part_offset),
        ("sizes of parts", table.part_size, found.part_size),
        ("places of samples", table.sample_offset, found.sample_offset),
    ):
        if not np.array_equal(one, other):
            return f"has other {what}"
    names = [
        [one.part_names[number] for number in one.part_name.tolist()] for one in (table, found)
    ]
    return "has other names of parts" if names[0] != names[1] else None


def _check_contents(shard: ShardFile, name: str, table: PartTable, problems: list[Problem]) -> int:
    """Compare contents with their checksums; return how many there are."""
    stated = table.part_crc32
    if stated is None:
        return 0
    path, found = shard.path, shard.crc32(table)
    damaged = np.flatnonzero(found != stated)
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
