"""Verify and repair JSONL files, local or in a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EnergonError,
    FormatError,
    ShardChangedError,
)
from energon.formats.json_text import parse_json
from energon.formats.meta.jsonl import (
    is_packed,
    jsonl_copy_path,
    jsonl_index_path,
    jsonl_points_path,
    jsonl_split_path,
    load_jsonl_index,
    parse_jsonl_split,
    scan_jsonl,
)
from energon.formats.seek_points import SeekPoints, unpacked_blocks
from energon.io.address import redact
from energon.local_file import open_binary
from energon.messages import shell_word
from energon.plan.leaves.subset import resolve_range
from energon.prepare.files import file_state, reporting
from energon.prepare.index.jsonl import (
    index_content,
    index_jsonl,
    opened_jsonl,
    prepare_jsonl,
)
from energon.prepare.verify.verify import (
    MAX_NAMED,
    Depth,
    Problem,
    Repair,
    Report,
    check_verify_depth,
)


class JsonlUpkeep:
    """Maintains JSONL files, see `energon.prepare.verify.verify.Upkeep`."""

    noun = "a JSONL file"

    def prepare(
        self,
        address: str,
        *,
        split_ratio: Mapping[str, float] | None = None,
        exclude_from: Sequence[str | os.PathLike[str]] = (),
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> int:
        """Index the lines, and assign them to splits; return the number of samples."""
        return prepare_jsonl(
            address, split_ratio=split_ratio, exclude_from=exclude_from, progress=progress
        )

    def verify(self, address: str, depth: Depth) -> Report:
        """Compare the file with its index and its splits.

        Raises:
            DatasetNotFoundError: If there is no such file.
            StorageError: If the store cannot be read.
        """
        with opened_jsonl(address, content=depth != "quick", with_index=True) as file:
            return _report(file, address, depth)

    def repair(self, address: str, depth: Depth) -> Repair:
        """Check the file, and index it again if that helps.

        Raises:
            DatasetNotFoundError: If there is no such file.
            StorageError: If the store cannot be read or written.
        """
        with opened_jsonl(address, with_index=True) as file:
            before = _report(file, address, depth)
            if not any(problem.repairable for problem in before.problems):
                return Repair(before, before, [], [])
            index_jsonl(file, address)
            return Repair(before, _report(file, address, depth), [file.name], [])


UPKEEP = JsonlUpkeep()


def _report(file: Path, address: str, depth: Depth) -> Report:
    check_verify_depth(depth)
    report = Report(str(file), depth, num_shards=1)
    report.num_samples, report.problems = verify_jsonl(file, depth)
    shown = redact(address)
    report.rename(shown, lambda text: text.replace(str(file), shown))
    return report


def verify_jsonl(path: Path, depth: Depth) -> tuple[int, list[Problem]]:
    """Return how many samples a JSONL file has according to its index, and its problems.

    Args:
        path: The file.
        depth: "quick" compares the size of the file with the index; "headers" also looks for
            the lines; "content" also parses each.

    Raises:
        DatasetNotFoundError: If there is no such file.
    """
    size = file_state(path).size
    problems: list[Problem] = []
    known = _index(path, size, depth, problems)
    if depth != "quick":
        try:
            with reporting(path):
                found = np.concatenate(list(scan_jsonl(path)))
        except FormatError as error:
            # Its index is written again once the file is fixed, not before.
            problems = [_damage(path, f"{error}; `energon repair` cannot fix the file itself")]
            return 0 if known is None else len(known) - 1, problems
        problems += _check_lines(path, found, known)
        problems += _check_copy(path, known)
    if depth == "content" and known is not None and not problems:
        problems += _check_contents(path, known)
    if known is None:
        return 0, problems
    problems += _check_splits(path, len(known) - 1)
    return len(known) - 1, problems


def _index(
    path: Path, size: int, depth: Depth, problems: list[Problem]
) -> NDArray[np.uint64] | None:
    index = Path(jsonl_index_path(path))
    try:
        if is_packed(path):
            index = Path(jsonl_points_path(path))
            with reporting(index):
                content = index_content(index, path)
                points = SeekPoints.parse(content, size=size, origin=str(path))
            if points.is_copy:
                index = Path(jsonl_copy_path(path))
                found = index.stat().st_size if index.exists() else len(index_content(index, path))
                if found != points.packed_size:
                    raise FormatError(
                        f"{index}: has {found} bytes, had {points.packed_size} when it was written"
                    )
            index, size = Path(jsonl_index_path(path)), points.unpacked_size
        with reporting(index):
            content = index_content(index, path)
            return load_jsonl_index(content, size=size, origin=str(path))
    except DatasetNotFoundError:
        message = f"{index}: no such file; run `energon prepare {shell_word(path)}`"
        problems.append(Problem("index-missing", index.name, message, True))
    except ShardChangedError as error:
        if depth == "quick":
            problems.append(_change(path, str(error)))
        else:
            problems.append(Problem("index-stale", index.name, str(error), True))
    except FormatError as error:
        problems.append(Problem("index-damaged", index.name, str(error), True))
    return None


def _change(path: Path, message: str) -> Problem:
    """Return the problem of a file of another size, whose lines were not checked."""
    message += f", unless `energon verify {shell_word(path)}` finds damage"
    return Problem("content-changed", path.name, message, False, path.name)


def _damage(path: Path, message: str, key: str | None = None) -> Problem:
    """Return a problem with the file itself, which only its owner can fix."""
    message += f"; run `energon prepare {shell_word(path)}` once it is fixed"
    return Problem("content-damaged", path.name, message, False, path.name, key)


def _check_lines(
    path: Path, found: NDArray[np.uint64], known: NDArray[np.uint64] | None
) -> Iterator[Problem]:
    if known is not None and not np.array_equal(found, known):
        message = f"{path}: its lines do not begin where its index says"
        yield Problem("index-stale", jsonl_index_path(path.name), message, True)


def _check_copy(path: Path, known: NDArray[np.uint64] | None) -> Iterator[Problem]:
    copy = Path(jsonl_copy_path(path))
    if known is None or not copy.exists():
        return
    try:
        with reporting(copy):
            offsets = np.concatenate(list(scan_jsonl(copy, unpack=unpacked_blocks)))
    except FormatError as error:
        yield Problem("index-damaged", copy.name, str(error), True)
        return
    if not np.array_equal(offsets, known):
        message = f"{copy}: its lines do not begin where its index says"
        yield Problem("index-stale", copy.name, message, True)


def _check_contents(path: Path, offsets: NDArray[np.uint64]) -> Iterator[Problem]:
    damaged: list[str] = []
    with reporting(path), open_binary(path) as file:
        bounds = list(pairwise(offsets.tolist()))
        for number, line in enumerate(_lines(file, path, [stop - start for start, stop in bounds])):
            start = bounds[number][0]
            try:
                parse_json(line, origin=f"{path}: sample {number} at byte {start}")
            except FormatError as error:
                damaged.append(str(number))
                if len(damaged) <= MAX_NAMED:
                    yield _damage(path, f"{error}; correct or remove the line", str(number))
    if len(damaged) > MAX_NAMED:
        problem = _damage(path, f"{path}: {len(damaged)} samples are not JSON")
        yield problem._replace(keys=tuple(damaged[MAX_NAMED:]))


def _lines(file: BinaryIO, path: Path, sizes: Sequence[int]) -> Iterator[bytes]:
    """Yield lines of these sizes, unpacked."""
    if not is_packed(path):
        yield from map(file.read, sizes)
        return
    blocks, held, at = unpacked_blocks(file, origin=str(path)), b"", 0
    for size in sizes:
        while len(held) - at < size:
            held, at = held[at:] + next(blocks), 0
        yield held[at : at + size]
        at += size


def _check_splits(path: Path, count: int) -> Iterator[Problem]:
    splits = Path(jsonl_split_path(path))
    if not splits.is_file():
        return
    try:
        split = parse_jsonl_split(splits.read_text(), origin=str(splits))
    except EnergonError as error:
        yield Problem("split-damaged", splits.name, str(error), False)
        return
    for name, bounds in (split.split_parts or {}).items():
        try:
            resolve_range(count, [bounds])
        except ConfigError as error:
            message = f"{splits}: split {name!r}: {error}"
            yield Problem("split-range", splits.name, message, False)
    for line in split.unmatched(path.name, count):
        message = f"{splits}: {line}; correct the entry, or delete it"
        yield Problem("exclude-unmatched", splits.name, message, False)
