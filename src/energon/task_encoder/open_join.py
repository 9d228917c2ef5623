"""Open a join: find its index, or build it.

An index lists the samples of several datasets that have the same key. The keys of all datasets are
hashed, block by block on several threads, and distributed by hash to as many partitions as needed
for one to fit into memory. A large join keeps the partitions in unnamed temporary files, so a
killed process leaves none behind. Within a partition, the hashes of a dataset are sorted, and those
of the first dataset are looked up in them (a Grace hash join). So memory depends on the size of a
partition, and time on the number of keys.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import ConfigError, DuplicateSampleKeyError, EmptyDatasetError, FormatError
from energon.formats.meta.info import META
from energon.formats.tables.part_table import Hashes
from energon.io.address import join_address, redact
from energon.io.atomic import atomic_path, locked
from energon.io.disk_cache import default_folder
from energon.io.files import read_text
from energon.io.settings import StorageSettings
from energon.metadataset.leaf import JoinMember, Leaf
from energon.sources.join import (
    MISSING,
    JoinedSource,
    JoinIndex,
    hashed_keys,
    unexcluded,
    write_join_index,
)
from energon.sources.source import Source

PARTITION_KEYS = 1 << 20
"""Keys of all datasets in a partition; each takes about 100 bytes while it is matched."""
MAX_PARTITIONS = 1024
_CHUNK_ROWS = 1 << 20
_ENTRY_BYTES = 24

Entries = NDArray[np.uint64]
"""Rows of two halves of a hash and the number of a sample."""


@dataclass(frozen=True)
class KeyColumn:
    """The keys of a dataset of a join.

    Args:
        name: Its name in messages.
        num_samples: How many samples it has.
        blocks: Each returns the hashes of the keys of some samples, such as those of a shard, and
            their numbers in the dataset.
        key_of: Returns the key of a sample, for messages.
        nonmatch: What to do if it has no sample with a key.
    """

    name: str
    num_samples: int
    blocks: Sequence[Callable[[], tuple[Hashes, Ints]]]
    key_of: Callable[[int], str]
    nonmatch: Literal["error", "skip", "none"] = "error"


def build_join_index(path: str | os.PathLike[str], columns: Sequence[KeyColumn]) -> int:
    """Write the index of a join; its rows are in the order of the first dataset.

    Args:
        path: The index file. It appears as a whole or not at all.
        columns: The datasets, the first of which determines the rows.

    Returns:
        The number of rows.

    Raises:
        ConfigError: If samples without a match are errors, and there are any.
        DuplicateSampleKeyError: If a dataset has a key twice.
        EmptyDatasetError: If no sample is left.
    """
    first, *others = columns
    total = sum(column.num_samples for column in columns)
    partitions = min(MAX_PARTITIONS, 1 << (-(-total // PARTITION_KEYS) - 1).bit_length())
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        parts = [stack.enter_context(_Partitions(folder, partitions)) for _ in columns]
        for column, part in zip(columns, parts, strict=True):
            for entries in _hashed(column):
                part.add(entries)
        matches = [
            _matched(first, parts[0], column, part, folder)
            for column, part in zip(others, parts[1:], strict=True)
        ]
        _check_matched(first, others, matches)
        rows, kept = _without_skipped(first, others, matches, folder)
        if not rows:
            names = " and ".join(column.name for column in others)
            raise EmptyDatasetError(f"{first.name} has no sample whose key is in {names}, too")
        with atomic_path(path) as temporary:
            write_join_index(temporary, kept, num_rows=rows)
    return rows


def _hashed(column: KeyColumn) -> Iterator[Entries]:
    """Yield the hashed keys of a dataset, a block at a time, with few blocks in memory."""

    def read(block: Callable[[], tuple[Hashes, Ints]]) -> Entries:
        hashes, ordinals = block()
        return np.column_stack((hashes, ordinals.astype(np.uint64)))

    num_threads = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, "energon-join") as threads:
        waiting: deque[Future[Entries]] = deque()
        for block in column.blocks:
            waiting.append(threads.submit(read, block))
            if len(waiting) > 2 * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Partitions:
    """The hashed keys of a dataset, distributed by hash; in memory if there is one partition."""

    def __init__(self, folder: Path, count: int) -> None:
        self.count = count
        self._waiting: list[Entries] = []
        self._num_waiting = 0
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - __exit__ closes it
        self._runs: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        """For each partition, where in the file its entries begin, and how many there are."""

    def __enter__(self) -> _Partitions:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, entries: Entries) -> None:
        self._waiting.append(entries)
        self._num_waiting += len(entries)
        if self.count > 1 and self._num_waiting >= PARTITION_KEYS:
            self._flush()

    def take(self, partition: int) -> Entries:
        """Return the entries of a partition, in the order of their hashes."""
        if self.count == 1:
            entries = np.concatenate([np.empty((0, 3), np.uint64), *self._waiting])
            # Needed again with every other dataset.
            self._waiting = [entries]
        else:
            self._flush()
            entries = np.concatenate(
                [np.empty((0, 3), np.uint64), *map(self._read, self._runs[partition])]
            )
        return entries[np.argsort(entries[:, 0], kind="stable")]

    def _flush(self) -> None:
        if not self._waiting:
            return
        entries = np.concatenate(self._waiting)
        self._waiting, self._num_waiting = [], 0
        shift = np.uint64(64 - (self.count.bit_length() - 1))
        partition = (entries[:, 0] >> shift).astype(np.int64)
        order = np.argsort(partition, kind="stable")
        edges = np.searchsorted(partition[order], np.arange(self.count + 1))
        start = self._file.seek(0, os.SEEK_END)
        for number, rows in enumerate(np.diff(edges).tolist()):
            if rows:
                self._runs[number].append((start, rows))
                start += rows * _ENTRY_BYTES
        self._file.write(entries[order].tobytes())

    def _read(self, run: tuple[int, int]) -> Entries:
        start, rows = run
        self._file.seek(start)
        content = self._file.read(rows * _ENTRY_BYTES)
        return np.frombuffer(content, np.uint64).reshape(-1, 3)


def _matched(
    first: KeyColumn, own: _Partitions, column: KeyColumn, other: _Partitions, folder: Path
) -> Ints:
    """Return for each sample of the first dataset the one of another with the same key, or -1."""
    matches = _on_disk(folder, first.num_samples)
    matches[:] = MISSING
    for partition in range(own.count):
        mine, theirs = own.take(partition), other.take(partition)
        _check_unique(first, mine)
        _check_unique(column, theirs)
        rows, numbers = _look_up(mine, theirs)
        matches[rows] = numbers
    return matches


def _look_up(requested: Entries, entries: Entries) -> tuple[Ints, Ints]:
    """Return the numbers of the requested samples found in `entries`, and of their matches."""
    rows: list[Ints] = []
    matches: list[Ints] = []
    at = np.searchsorted(entries[:, 0], requested[:, 0])
    left = requested
    while len(left):
        inside = at < len(entries)
        left, at = left[inside], at[inside]
        same = entries[at, 0] == left[:, 0]
        left, at = left[same], at[same]
        equal = entries[at, 1] == left[:, 1]
        rows.append(left[equal, 2].astype(np.int64))
        matches.append(entries[at[equal], 2].astype(np.int64))
        # The first halves of different keys may be equal; then the next entry may match.
        left, at = left[~equal], at[~equal] + 1
    none = [np.empty(0, np.int64)]
    return np.concatenate(rows or none), np.concatenate(matches or none)


def _check_unique(column: KeyColumn, entries: Entries) -> None:
    if not (entries[1:, 0] == entries[:-1, 0]).any():
        return
    ordered = entries[np.lexsort((entries[:, 1], entries[:, 0]))]
    twice = np.flatnonzero((ordered[1:, :2] == ordered[:-1, :2]).all(axis=1))
    if len(twice):
        one, other = (int(number) for number in ordered[twice[0] : twice[0] + 2, 2])
        raise DuplicateSampleKeyError(
            f"{column.name}: samples {one} and {other} have the same key "
            f"{column.key_of(one)!r}, so it is not clear which of them to join"
        )


def _check_matched(first: KeyColumn, others: Sequence[KeyColumn], matches: Sequence[Ints]) -> None:
    problems = []
    for column, numbers in zip(others, matches, strict=True):
        if column.nonmatch != "error":
            continue
        missing, example = 0, MISSING
        for start, chunk in _chunks(numbers):
            absent = np.flatnonzero(chunk == MISSING)
            if len(absent) and not missing:
                example = start + int(absent[0])
            missing += len(absent)
        if missing:
            problems.append(
                f"{column.name} lacks {missing} of the {first.num_samples} keys of {first.name}, "
                f"e.g. {first.key_of(example)!r}"
            )
    if problems:
        raise ConfigError(
            "\n".join(problems) + "\nWrite `nonmatch: skip` next to its path to skip such samples, "
            "or `nonmatch: none` to pass None to the joiner"
        )


def _without_skipped(
    first: KeyColumn, others: Sequence[KeyColumn], matches: Sequence[Ints], folder: Path
) -> tuple[int, list[Ints | None]]:
    """Return the number of rows, and the columns without rows that are to be skipped."""
    skipping = [m for column, m in zip(others, matches, strict=True) if column.nonmatch == "skip"]
    if not skipping:
        return first.num_samples, [None, *matches]
    kept = [_on_disk(folder, first.num_samples) for _ in range(len(matches) + 1)]
    count = 0
    for start, chunk in _chunks(skipping[0]):
        stop = start + len(chunk)
        present = np.all([numbers[start:stop] != MISSING for numbers in skipping], axis=0)
        rows = start + np.flatnonzero(present)
        kept[0][count : count + len(rows)] = rows
        for column, numbers in zip(kept[1:], matches, strict=True):
            column[count : count + len(rows)] = numbers[rows]
        count += len(rows)
    return count, [column[:count] for column in kept]


def _chunks(column: Ints) -> Iterable[tuple[int, Ints]]:
    for start in range(0, len(column), _CHUNK_ROWS):
        yield start, column[start : start + _CHUNK_ROWS]


def _on_disk(folder: Path, count: int) -> Ints:
    """Return numbers in memory that can be paged out."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, np.int64, "w+", shape=(count,))


logger = logging.getLogger("energon")

INDEX_VERSION = 1


def open_join(leaf: Leaf, sources: Sequence[Source]) -> JoinedSource:
    """Return the samples of a join; build its index first if necessary.

    Args:
        leaf: The join.
        sources: Its datasets, opened. Samples that one of them excludes are left out.

    Raises:
        ConfigError: If samples have no match where that is an error.
        DuplicateSampleKeyError: If a dataset has a key twice.
        EmptyDatasetError: If no sample is left.
    """
    digest = join_digest(leaf, sources)
    index = join_index(leaf, sources, digest)
    return JoinedSource(sources, index, digest=digest, subsets=leaf.subsets)


def join_digest(leaf: Leaf, sources: Sequence[Source]) -> str:
    """Return the name of the index: a hash of everything that determines its content."""
    content = [
        [unexcluded(source)[0].fingerprint(), _identity(source), member.nonmatch]
        for member, source in zip(leaf.join, sources, strict=True)
    ]
    text = json.dumps([INDEX_VERSION, content], sort_keys=True)
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:32]


def find_index(leaf: Leaf, digest: str) -> JoinIndex | None:
    """Return the index of a join; None if it is missing, or damaged."""
    for folder in cache_folders(leaf):
        index = _load(folder / index_name(digest))
        if index is not None:
            _clear_lock(_lock_path(folder, digest))
            return index
    return None


def _lock_path(folder: Path, digest: str) -> Path:
    return folder / f".{digest}.lock"


def _clear_lock(path: Path) -> None:
    """Delete the lock of a process that was killed after it had completed the index."""
    if path.exists():
        with suppress(OSError), locked(path, deletes=True):
            pass


def join_index(leaf: Leaf, sources: Sequence[Source], digest: str) -> JoinIndex:
    """Return the index of a join, built in the first folder that can be written if necessary."""
    index = find_index(leaf, digest)
    if index is not None:
        return index
    columns = _columns(leaf, sources)
    problems = []
    for folder in cache_folders(leaf):
        path = folder / index_name(digest)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Processes of one machine build it once; others wait and read it.
            with locked(_lock_path(folder, digest), deletes=True):
                if _load(path) is None:
                    logger.info("building the join index %s", path)
                    build_join_index(path, columns)
            return JoinIndex.open(path)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
    raise ConfigError(
        f"{leaf.origin}: the index of the join cannot be written anywhere ({'; '.join(problems)}); "
        "set ENERGON_STORAGE_CACHE_DIR to a writable folder"
    )


def check_join(leaf: Leaf, sources: Sequence[Source], folder: Path) -> None:
    """Check that a join has matches, as building its index does, unless that is done.

    Args:
        leaf: The join.
        sources: Its datasets, opened.
        folder: For what has to be written on the way.

    Raises:
        EnergonError: As `open_join`.
    """
    if find_index(leaf, join_digest(leaf, sources)) is None:
        build_join_index(folder / "index.bin", _columns(leaf, sources))


def _load(path: Path) -> JoinIndex | None:
    try:
        return JoinIndex.open(path)
    except FileNotFoundError:
        return None
    except (FormatError, OSError) as error:
        logger.warning("building a join index again: %s", error)
        return None


def index_name(digest: str) -> str:
    """Return the name of the file of an index."""
    return f"join_index_{digest}.bin"


def cache_folders(leaf: Leaf) -> Iterator[Path]:
    """Yield the folders that may hold indexes: next to the document, then the user's cache."""
    document = leaf.joiner.document if leaf.joiner else None
    if document is not None:
        yield Path(f"{document}.cache")
    yield Path(StorageSettings.from_environment().cache_dir or default_folder()) / "joins"


def _identity(source: Source) -> str:
    """Return data that change whenever the dataset is prepared again."""
    try:
        return read_text(join_address(source.path, f"{META}/index.uuid")).strip()
    except (FileNotFoundError, NotADirectoryError):
        # Written by each preparation of shards, but copies of them and other kinds may lack it.
        return redact(source.path)


def _columns(leaf: Leaf, sources: Sequence[Source]) -> list[KeyColumn]:
    return [_column(member, source) for member, source in zip(leaf.join, sources, strict=True)]


def _column(member: JoinMember, opened: Source) -> KeyColumn:
    source, _ = unexcluded(opened)
    return KeyColumn(
        name=f"{redact(source.path)} (split {member.leaf.split_part})",
        num_samples=len(source),
        blocks=hashed_keys(source),
        key_of=lambda ordinal: source.locate(ordinal).key,
        nonmatch=member.nonmatch,
    )
