"""Prepare, verify and repair JSONL files, here and in stores.

Their lines are indexed, and assigned to splits.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate, pairwise
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
    StorageAccessError,
)
from energon.formats.json_text import parse_json
from energon.formats.meta.jsonl import (
    JsonlSplit,
    describe_unmatched_lines,
    is_packed,
    jsonl_index_path,
    jsonl_points_path,
    jsonl_split_path,
    load_jsonl_index,
    parse_jsonl_split,
    scan_jsonl,
)
from energon.formats.seek_points import PointFinder, SeekPoints
from energon.io.address import (
    address_name,
    is_remote,
    join_address,
    local_path,
    parent_address,
    redact,
)
from energon.io.atomic import atomic_path, write_atomic
from energon.io.disk_cache import disk_cache
from energon.io.files import file_info, open_store, read_bytes, write_bytes
from energon.plan.subset import resolve_range
from energon.prepare.files import file_state, reporting
from energon.prepare.upkeep import LOST, Repair, Report, check_depth
from energon.prepare.verify.quarantine import load_quarantine, quarantine_files
from energon.prepare.verify.shard import MAX_NAMED, Depth, Problem

log = logging.getLogger("energon")

_ADVICE = {".bz2": "bunzip2 -k", ".xz": "unxz -k"}
"""How to decompress files whose lines cannot be read one by one."""


def prepare_jsonl(
    path: str | os.PathLike[str],
    *,
    split_ratio: Mapping[str, float] | None = None,
    exclude_from: Sequence[str | os.PathLike[str]] = (),
    address: str | None = None,
) -> int:
    """Index a JSONL file, and assign its samples to splits.

    Args:
        path: The file.
        split_ratio: Ratio by name of the split, for consecutive samples; None keeps the existing
            splits. If there are none, each split is the whole file.
        exclude_from: Quarantine files, or folders of them, whose samples are excluded in addition
            to those already excluded.
        address: The name by which users and quarantine files know it; None for `path`.

    Returns:
        The number of samples.

    Raises:
        DatasetNotFoundError: If there is no such file.
        ConfigError: If it is compressed so that lines cannot be read one by one, or an excluded
        sample
            does not exist.
        FormatError: If a line is not a JSON object, or it is damaged.
    """
    file = Path(local_path(path))
    if file.suffix in _ADVICE:
        raise ConfigError(
            f"{file}: lines of a compressed file cannot be read one by one; unpack it first with "
            f"`{_ADVICE[file.suffix]} {file}`"
        )
    name = str(file.resolve()) if address is None else address
    listed = {
        str(source): load_quarantine(source)
        for where in exclude_from
        for source in quarantine_files(where, name)
    }
    numbers = _index_lines(file) if os.access(file.parent, os.W_OK) else _keep_index(file)
    split = _present_split(file)
    for origin, keys in {split.origin: split.exclude, **listed}.items():
        unmatched = describe_unmatched_lines(keys, file.name, numbers - 1)
        if unmatched:
            raise ConfigError(f"{origin}: {unmatched[0]}; correct the entry, or delete it")
    parts = split.split_parts if split_ratio is None else _dealt(numbers - 1, split_ratio)
    keys = [key.removeprefix(f"{file.name}/") for each in listed.values() for key in each]
    exclude = list(dict.fromkeys([*split.exclude, *keys]))
    if split_ratio is not None or exclude != list(split.exclude):
        with reporting(split.origin):
            write_atomic(Path(split.origin), JsonlSplit(parts, exclude).to_yaml())
    return numbers - 1


def _keep_index(file: Path) -> int:
    """Write the index of a file in a read-only folder to the user's cache."""
    with tempfile.TemporaryDirectory(prefix="energon-jsonl-") as folder:
        beside = Path(folder) / file.name
        numbers = _index_lines(file, beside)
        _keep(beside, os.fspath(file))
    return numbers


def _keep(beside: Path, address: str) -> None:
    """Keep what was made from a file in the user's cache, since its folder is read-only.

    Args:
        beside: The file in the folder next to which it would have been.
        address: The file.
    """
    log.warning(
        "%s: cannot write next to it; its index is kept in the user's cache, where this "
        "user's programs on this machine find it",
        redact(address),
    )
    about = file_info(address)
    assert about is not None  # it was just read
    for path in (jsonl_index_path, jsonl_points_path):
        made = Path(path(beside))
        if made.exists():
            disk_cache().keep_for(path(address), about, made.read_bytes)


def _kept_index(index: str, address: str) -> bytes:
    """Return an index from the user's cache, where those of read-only folders are.

    Args:
        index: Where it would be next to its file.
        address: The file.

    Raises:
        DatasetNotFoundError: If it is missing, or belongs to another version of the file.
    """

    def missing() -> bytes:
        raise DatasetNotFoundError(f"{redact(index)}: no such file")

    about = file_info(address)
    kept = missing() if about is None else disk_cache().keep_for(index, about, missing)
    return kept if isinstance(kept, bytes) else kept.read_bytes()


def _index_content(index: Path, file: Path) -> bytes:
    if index.exists():
        return index.read_bytes()
    return _kept_index(os.fspath(index), os.fspath(file))


def _index_lines(file: Path, beside: Path | None = None) -> int:
    """Write the index of a file, next to it or elsewhere; return how many numbers it has."""
    numbers, beside = 0, beside or file
    with ExitStack() as stack:
        stack.enter_context(reporting(file))
        index = stack.enter_context(atomic_path(jsonl_index_path(beside)))
        finder = None
        if is_packed(file):
            table = stack.enter_context(atomic_path(jsonl_points_path(beside)))
            finder = PointFinder(stack.enter_context(open(table, "wb")), origin=str(file))
        out = stack.enter_context(open(index, "wb"))
        for offsets in scan_jsonl(file, finder):
            out.write(offsets.astype("<u8").tobytes())
            numbers += len(offsets)
    return numbers


def _present_split(file: Path) -> JsonlSplit:
    path = Path(jsonl_split_path(file))
    return parse_jsonl_split(path.read_text() if path.exists() else None, origin=str(path))


def _dealt(num_samples: int, ratios: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Return the bounds of splits that together contain every sample, in consecutive ranges."""
    names = [name for name, ratio in ratios.items() if ratio > 0]
    total = sum(ratios[name] for name in names)
    shares = accumulate((ratios[name] for name in names), initial=0.0)
    edges = [round(num_samples * share / total) for share in shares]
    return {name: (a, b) for name, (a, b) in zip(names, pairwise(edges), strict=True) if a < b}


class JsonlCopy:
    """A local file that stands for a remote one; `opened` returns it.

    Args:
        address: The remote file.
        folder: Where to put the copy.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.path = folder / address_name(address)

    @classmethod
    @contextmanager
    def opened(cls, address: str, *, content: bool = True) -> Iterator[JsonlCopy]:
        """Yield a copy of the file and its splits, which is deleted at the end.

        Args:
            address: The remote file.
            content: Whether to copy the content; if not, the copy only has the size.

        Raises:
            DatasetNotFoundError: If there is no such file.
            StorageError: If it cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="energon-jsonl-") as folder:
            copy = cls(address, Path(folder))
            store, key = open_store(address)
            info = file_info(address)
            if info is None:
                raise DatasetNotFoundError(f"{redact(address)}: there is no such file")
            with open(copy.path, "wb") as file:
                if content:
                    file.writelines(store.stream(key, version=info.version))
                else:
                    file.truncate(info.size)
            copy.fetch(copy.beside(copy.splits), copy.splits)
            try:
                yield copy
            except EnergonError as error:
                # Users know the file by its address.
                raise type(error)(copy.said(str(error))) from error

    @property
    def splits(self) -> Path:
        """Where the splits are."""
        return Path(jsonl_split_path(self.path))

    @property
    def indexes(self) -> list[Path]:
        """Where the index is, if `fetch_index` was called or it was made."""
        made = [jsonl_index_path(self.path)]
        if is_packed(self.path):
            made.append(jsonl_points_path(self.path))
        return [Path(path) for path in made]

    def fetch_index(self) -> None:
        """Copy the index, if there is one, also from the user's cache."""
        for path in self.indexes:
            self.fetch(self.beside(path), path)
            if not path.exists():
                with suppress(DatasetNotFoundError):
                    path.write_bytes(_kept_index(self.beside(path), self.address))

    def write_index(self) -> None:
        """Put the index next to the remote file, or in the user's cache if that is read-only."""
        try:
            for path in self.indexes:
                write_bytes(self.beside(path), path)
        except StorageAccessError:
            _keep(self.path, self.address)

    def beside(self, copy: Path) -> str:
        """Return the remote address of the file whose copy is or will be next to this one."""
        return join_address(parent_address(self.address), copy.name)

    def said(self, text: str) -> str:
        """Return a message about the copy as one about the address."""
        return text.replace(os.fspath(self.path), redact(self.address))

    @staticmethod
    def fetch(address: str, path: Path) -> None:
        """Copy a file next to the remote one, if it exists."""
        try:
            path.write_bytes(read_bytes(address))
        except DatasetNotFoundError:
            return


def prepare_remote_jsonl(
    address: str,
    *,
    split_ratio: Mapping[str, float] | None = None,
    exclude_from: Sequence[str | os.PathLike[str]] = (),
) -> int:
    """Index a JSONL file, and assign its samples to splits; see `prepare_jsonl`.

    Returns:
        The number of samples.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If the store cannot be read or written.
    """
    with JsonlCopy.opened(address) as copy:
        before = copy.splits.read_bytes() if copy.splits.exists() else None
        num_samples = prepare_jsonl(
            copy.path, split_ratio=split_ratio, exclude_from=exclude_from, address=address
        )
        if copy.splits.exists() and copy.splits.read_bytes() != before:
            write_bytes(copy.beside(copy.splits), copy.splits)
        copy.write_index()
    return num_samples


class JsonlUpkeep:
    """Maintains JSONL files, see `energon.prepare.upkeep.Upkeep`."""

    noun = "a JSONL file"

    def prepare(
        self,
        address: str,
        *,
        split_ratio: Mapping[str, float] | None = None,
        exclude_from: Sequence[str | os.PathLike[str]] = (),
    ) -> int:
        """Index the lines, and assign them to splits; return the number of samples."""
        prepare = prepare_remote_jsonl if is_remote(address) else prepare_jsonl
        return prepare(address, split_ratio=split_ratio, exclude_from=exclude_from)

    def verify(self, address: str, depth: Depth) -> Report:
        """Compare the file with its index and its splits.

        Raises:
            DatasetNotFoundError: If there is no such file.
            StorageError: If the store cannot be read.
        """
        if not is_remote(address):
            return _report(Path(address), depth)
        with JsonlCopy.opened(address, content=depth != "quick") as copy:
            copy.fetch_index()
            return _copy_report(copy, depth)

    def repair(self, address: str, depth: Depth) -> Repair:
        """Check the file, and index it again if that helps.

        Raises:
            DatasetNotFoundError: If there is no such file.
            StorageError: If the store cannot be read or written.
        """
        if not is_remote(address):
            path = Path(address)
            before = _report(path, depth)
            if not _can_be_repaired(before):
                return Repair(before, before, [], [])
            prepare_jsonl(path)
            return Repair(before, _report(path, depth), [path.name], [])
        with JsonlCopy.opened(address) as copy:
            copy.fetch_index()
            before = _copy_report(copy, depth)
            if not _can_be_repaired(before):
                return Repair(before, before, [], [])
            prepare_jsonl(copy.path)
            copy.write_index()
            return Repair(before, _copy_report(copy, depth), [copy.path.name], [])


UPKEEP = JsonlUpkeep()


def _report(path: Path, depth: Depth) -> Report:
    check_depth(depth)
    report = Report(str(path), depth, num_shards=1)
    report.num_samples, report.problems = verify_jsonl(path, depth)
    return report


def _copy_report(copy: JsonlCopy, depth: Depth) -> Report:
    report = _report(copy.path, depth)
    report.rename(redact(copy.address), copy.said)
    return report


def _can_be_repaired(report: Report) -> bool:
    kinds = {problem.kind for problem in report.problems}
    return kinds.isdisjoint(LOST) and any(problem.repairable for problem in report.problems)


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
    known = _index(path, size, problems)
    if depth != "quick":
        problems += _check_lines(path, known)
    if depth == "content" and known is not None and not problems:
        problems += _check_contents(path, known)
    if known is None:
        return 0, problems
    problems += _check_splits(path, len(known) - 1)
    return len(known) - 1, problems


def _index(path: Path, size: int, problems: list[Problem]) -> NDArray[np.uint64] | None:
    index = Path(jsonl_index_path(path))
    try:
        if is_packed(path):
            index = Path(jsonl_points_path(path))
            with reporting(index):
                content = _index_content(index, path)
                points = SeekPoints.parse(content, size=size, origin=str(path))
            index, size = Path(jsonl_index_path(path)), points.unpacked_size
        with reporting(index):
            content = _index_content(index, path)
            return load_jsonl_index(content, size=size, origin=str(path))
    except DatasetNotFoundError:
        message = f"{index}: no such file; run `energon prepare {path}`"
        problems.append(Problem("index-missing", index.name, message, True))
    except ShardChangedError as error:
        problems.append(Problem("index-stale", index.name, str(error), True))
    except FormatError as error:
        problems.append(Problem("index-damaged", index.name, str(error), True))
    return None


def _check_lines(path: Path, known: NDArray[np.uint64] | None) -> Iterator[Problem]:
    try:
        with reporting(path):
            found = np.concatenate(list(scan_jsonl(path)))
    except FormatError as error:
        yield Problem("shard-damaged", path.name, str(error), False, path.name)
        return
    if known is not None and not np.array_equal(found, known):
        message = f"{path}: its lines do not begin where its index says"
        yield Problem("index-stale", jsonl_index_path(path.name), message, True)


def _check_contents(path: Path, offsets: NDArray[np.uint64]) -> Iterator[Problem]:
    damaged = 0
    with reporting(path), open(path, "rb") as file:
        bounds = list(pairwise(offsets.tolist()))
        for number, line in enumerate(_lines(file, path, [stop - start for start, stop in bounds])):
            start = bounds[number][0]
            try:
                parse_json(line, origin="JSON")
            except FormatError as error:
                damaged += 1
                if damaged <= MAX_NAMED:
                    message = f"{path}: sample {number} at byte {start} is not JSON: {error}"
                    yield Problem(
                        "content-damaged", path.name, message, False, path.name, str(number)
                    )
    if damaged > MAX_NAMED:
        message = f"{path}: {damaged} samples are not JSON"
        yield Problem("content-damaged", path.name, message, False, path.name)


def _lines(file: BinaryIO, path: Path, sizes: Sequence[int]) -> Iterator[bytes]:
    """Yield lines of these sizes, unpacked."""
    if not is_packed(path):
        yield from map(file.read, sizes)
        return
    blocks, held, at = PointFinder(None, origin=str(path)).blocks(file), b"", 0
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
