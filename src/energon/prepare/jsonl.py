"""Index, verify and repair JSONL files, local or in a store, and assign their lines to splits."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

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
from energon.formats.compressed import LongFrameError, SeekPoints, unpacked_blocks
from energon.formats.meta.jsonl import (
    JsonlSplit,
    describe_unmatched_lines,
    is_packed,
    jsonl_copy_path,
    jsonl_index_path,
    jsonl_points_path,
    jsonl_split_path,
    load_jsonl_index,
    parse_jsonl_split,
    scan_jsonl,
)
from energon.formats.text import parse_json
from energon.io.address import (
    address_name,
    is_remote,
    join_address,
    local_path,
    parent_address,
    redact,
)
from energon.io.atomic import atomic_path, temporary_folder, write_atomic
from energon.io.disk_cache import disk_cache
from energon.io.files import file_info, open_store, write_bytes
from energon.local_file import map_file, open_binary
from energon.messages import shell_word
from energon.plan.leaves.subset import resolve_range
from energon.prepare.engines import Progress, no_progress
from energon.prepare.files import file_state, reporting
from energon.prepare.verify.quarantine import Exclusions
from energon.prepare.verify.verify import (
    MAX_NAMED,
    Depth,
    Problem,
    Repair,
    Report,
    check_verify_depth,
)

logger = logging.getLogger("energon")

_ADVICE = {".bz2": "bunzip2 -k", ".xz": "unxz -k"}
"""How to decompress files whose lines cannot be read one by one."""


def prepare_jsonl(
    path: str | os.PathLike[str],
    *,
    split_ratio: Mapping[str, float] | None = None,
    exclude_from: Sequence[str | os.PathLike[str]] = (),
    progress: Progress = no_progress,
) -> int:
    """Index a JSONL file, here or in a store, and assign its samples to splits.

    A compressed file that is a single member or frame is copied into short ones, from which lines
    are read.

    Args:
        path: Its path or address.
        split_ratio: Ratio by name of the split, for consecutive samples; None keeps the existing
            splits. If there are none, each split is the whole file.
        exclude_from: Quarantine files, or folders of them, whose samples are excluded in addition
            to those already excluded.
        progress: Called with the number of bytes that were read, and the size of the file.

    Returns:
        The number of samples.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If a store cannot be read or written.
        ConfigError: If it is compressed so that lines cannot be read one by one, or there is no
            room for a copy, or an excluded sample does not exist.
        FormatError: If a line is not a JSON object, or it is damaged.

    Example:
        >>> with open("notes.jsonl", "w") as file:
        ...     file.writelines(f'{{"text": "note {number}"}}\\n' for number in range(4))
        >>> prepare_jsonl("notes.jsonl", split_ratio={"train": 3, "val": 1})
        4
    """
    address = os.fspath(path)
    address = address if is_remote(address) else os.path.abspath(local_path(address))
    suffix = os.path.splitext(address_name(address))[1]
    if suffix in _ADVICE:
        shown = redact(os.fspath(path))
        raise ConfigError(
            f"{shown}: lines of a compressed file cannot be read one by one; unpack it first with "
            f"`{_ADVICE[suffix]} {shown}`"
        )
    with opened_jsonl(os.fspath(path)) as file:
        return index_jsonl(
            file,
            address,
            split_ratio=split_ratio,
            exclude_from=exclude_from,
            progress=progress,
        )


def index_jsonl(
    file: Path,
    address: str,
    *,
    split_ratio: Mapping[str, float] | None = None,
    exclude_from: Sequence[str | os.PathLike[str]] = (),
    progress: Progress = no_progress,
) -> int:
    """Write the index and the splits of a JSONL file beside it, see `prepare_jsonl`.

    Args:
        file: The file, from `opened_jsonl`.
        address: The name by which users and quarantine files know it.
        split_ratio: See `prepare_jsonl`, like the others.
        exclude_from: Quarantine files.
        progress: Called with the number of bytes that were read, and the size of the file.
    """
    listed: dict[str, list[str]] = {}
    for path in exclude_from:
        listed |= Exclusions(path, [address]).of(address)
    numbers = _index_lines(file, address, progress=progress)
    splits = Path(jsonl_split_path(file))
    text = splits.read_text() if splits.exists() else None
    split = parse_jsonl_split(text, origin=str(splits))
    for origin, keys in {split.origin: split.exclude, **listed}.items():
        unmatched = describe_unmatched_lines(keys, file.name, numbers - 1)
        if unmatched:
            raise ConfigError(f"{origin}: {unmatched[0]}; correct the entry, or delete it")
    parts = split.split_parts if split_ratio is None else _dealt(numbers - 1, split_ratio)
    keys = [key.removeprefix(f"{file.name}/") for some in listed.values() for key in some]
    exclude = list(dict.fromkeys([*split.exclude, *keys]))
    if split_ratio is not None or exclude != list(split.exclude):
        with reporting(split.origin):
            write_atomic(Path(split.origin), JsonlSplit(parts, exclude).to_yaml())
    return numbers - 1


def _keep(address: str, indexes: Mapping[str, Path]) -> None:
    """Keep the index of a file in the user's cache, since its folder is read-only.

    Args:
        address: The file.
        indexes: The files of its index, by their addresses.
    """
    logger.warning(
        "%s: cannot write next to it; its index is kept in the user's cache, where this "
        "user's programs on this machine find it",
        redact(address),
    )
    info = file_info(address)
    if info is None:
        raise DatasetNotFoundError(
            f"{redact(address)}: was deleted while it was indexed; restore it and run "
            "`energon prepare` again"
        )
    for index, path in indexes.items():
        _check_cacheable(address, path.stat().st_size)
        content: Callable[[], Any] = partial(map_file, path)
        disk_cache().keep_for(index, info, content)


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

    info = file_info(address)
    kept = missing() if info is None else disk_cache().keep_for(index, info, missing)
    return kept if isinstance(kept, bytes) else kept.read_bytes()


def index_content(index: Path, file: Path) -> bytes:
    """Return an index from where it should be, or else from the user's cache."""
    if index.exists():
        return index.read_bytes()
    return _kept_index(os.fspath(index), os.fspath(file))


def _index_lines(file: Path, address: str, *, progress: Progress) -> int:
    """Write the index of a file beside it; return how many numbers it has."""
    try:
        numbers = _write_index(file, progress=progress, copies=False)
    except LongFrameError as error:
        _announce_copy(file, str(error).replace(str(file), redact(address)))
        return _write_index(file, progress=progress, copies=True)
    Path(jsonl_copy_path(file)).unlink(missing_ok=True)  # of an earlier version of the file
    return numbers


def _write_index(file: Path, *, progress: Progress, copies: bool) -> int:
    numbers = 0
    with ExitStack() as stack:

        def create(path: str) -> BinaryIO:
            return stack.enter_context(open(stack.enter_context(atomic_path(path)), "wb"))

        stack.enter_context(reporting(file))
        out, unpack = create(jsonl_index_path(file)), None
        if is_packed(file):
            copy = create(jsonl_copy_path(file)) if copies else None
            table = create(jsonl_points_path(file))
            unpack = partial(unpacked_blocks, table=table, copy=copy)
        for offsets in scan_jsonl(file, unpack=unpack, progress=progress):
            out.write(offsets.astype("<u8").tobytes())
            numbers += len(offsets)
    return numbers


def _check_cacheable(address: str, size: int) -> None:
    """Raise ConfigError if a copy of this size is too large for the user's cache."""
    limit = disk_cache().max_bytes
    if limit is not None and size > limit:
        raise ConfigError(
            f"{redact(address)}: needs a copy in short frames, of about {_gigabytes(size)}, which "
            "is too large for the user's cache; raise ENERGON_STORAGE_CACHE_BYTES, or copy the "
            "file to a folder in which you may write and prepare it there"
        )


def _announce_copy(file: Path, reason: str) -> None:
    """Say that a copy is written, and how to do without.

    Raises:
        ConfigError: If there is no room for it.
    """
    size, free = file.stat().st_size, shutil.disk_usage(file.parent).free
    if size > free:
        raise ConfigError(
            f"{reason}. A copy in such frames would take about {_gigabytes(size)} next to it, "
            f"where {_gigabytes(free)} are free"
        )
    logger.warning(
        "%s. Otherwise, lines are read from a copy in short frames, %s, of about %s, which is "
        "written now",
        *(reason, jsonl_copy_path(file.name), _gigabytes(size)),
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _dealt(num_samples: int, ratios: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Return the bounds of splits that together contain every sample, in consecutive ranges."""
    names = [name for name, ratio in ratios.items() if ratio > 0]
    total = sum(ratios[name] for name in names)
    shares = accumulate((ratios[name] for name in names), initial=0.0)
    edges = [round(num_samples * share / total) for share in shares]
    return {name: (a, b) for name, (a, b) in zip(names, pairwise(edges), strict=True) if a < b}


_INDEXES = (jsonl_copy_path, jsonl_index_path, jsonl_points_path)
_FRAMES = os.path.splitext(jsonl_copy_path("x"))[1]


@contextmanager
def opened_jsonl(address: str, *, content: bool = True, with_index: bool = False) -> Iterator[Path]:
    """Yield the local path of a JSONL file, beside which its index and splits are written.

    A file in a store or a read-only folder is in a temporary folder meanwhile. What the block
    writes there is written beside the file at the end, or, if that is impossible, an index is kept
    in the user's cache.

    Args:
        address: The file.
        content: Whether the content is read; if not, the file only has the size.
        with_index: Whether its index is read.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If a store cannot be read or written.
    """
    in_store = is_remote(address)
    if not in_store and os.access(Path(local_path(address)).parent, os.W_OK):
        yield Path(local_path(address))
        return
    with temporary_folder("jsonl") as folder:
        file = folder / address_name(address)
        if not _fetch(address, file, content=content):
            raise DatasetNotFoundError(f"{redact(address)}: no such file")
        splits = Path(jsonl_split_path(file))
        _fetch(_beside(address, splits), splits)
        paths = _INDEXES if is_packed(file) else (jsonl_index_path,)
        indexes = {path(address): Path(path(file)) for path in paths}
        for index, path in indexes.items() if with_index else ():
            is_read = content or path.suffix != _FRAMES
            if not _fetch(_beside(address, path), path, content=is_read):
                with suppress(DatasetNotFoundError):
                    path.write_bytes(_kept_index(index, address))
        before = {path: _identity(path) for path in (splits, *indexes.values())}
        try:
            yield file
        except EnergonError as error:
            # Users know the file by its address.
            raise type(error)(str(error).replace(str(file), redact(address))) from error
        changed = [path for path in before if _identity(path) not in (None, before[path])]
        made = {index: path for index, path in indexes.items() if path in changed}
        if splits in changed:
            write_bytes(_beside(address, splits), splits)
        try:
            if made and not in_store:
                raise StorageAccessError(f"{address}: is in a read-only folder")
            for path in made.values():
                write_bytes(_beside(address, path), path)
        except StorageAccessError:
            _keep(address, made)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when a file is written; None if there is no file."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def _beside(address: str, path: Path) -> str:
    """Return the address of the file beside another whose local copy is at `path`."""
    if not is_remote(address):
        return os.fspath(Path(local_path(address)).absolute().with_name(path.name))
    return join_address(parent_address(address), path.name)


def _fetch(address: str, path: Path, *, content: bool = True) -> bool:
    """Copy a remote file, or link to a local one; return False if there is none.

    Without its content, a copy only has its size.
    """
    info = file_info(address)
    if info is None:
        return False
    if not is_remote(address):
        path.symlink_to(os.path.abspath(local_path(address)))
        return True
    store, key = open_store(address)
    with open(path, "wb") as file:
        if content:
            file.writelines(store.stream(key, version=info.version))
        else:
            file.truncate(info.size)
    return True


class JsonlUpkeep:
    """Maintains JSONL files, see `energon.prepare.verify.verify.Upkeep`."""

    noun = "a JSONL file"

    prepare = staticmethod(prepare_jsonl)

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
    """Compare a file with its index and its splits.

    Args:
        file: The file on this machine.
        address: Its name in the report.
        depth: "quick" compares the size of the file with the index; "headers" also looks for
            the lines; "content" also parses each.

    Raises:
        DatasetNotFoundError: If there is no such file.
    """
    check_verify_depth(depth)
    report = Report(str(file), depth, num_shards=1)
    problems = report.problems
    offsets = _index(file, file_state(file).size, depth, problems)
    report.num_samples = 0 if offsets is None else len(offsets) - 1
    if depth != "quick":
        try:
            with reporting(file):
                lines = np.concatenate(list(scan_jsonl(file)))
        except FormatError as error:
            # Its index is written again once the file is fixed, not before.
            problem = _damage(file, f"{error}; `energon repair` cannot fix the file itself")
            report.problems = [problem]
            report.rename(redact(address))
            return report
        if offsets is not None:
            problems += _compare_lines(file, Path(jsonl_index_path(file.name)), lines, offsets)
            problems += _check_copy(file, offsets)
    if offsets is not None:
        if depth == "content" and not problems:
            problems += _check_contents(file, offsets)
        problems += _check_splits(file, report.num_samples)
    report.rename(redact(address))
    return report


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
                copy_size = (
                    index.stat().st_size if index.exists() else len(index_content(index, path))
                )
                if copy_size != points.packed_size:
                    raise FormatError(
                        f"{index}: has {copy_size} bytes, had {points.packed_size} when it was "
                        "written"
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
            hint = f", unless `energon verify {shell_word(path)}` finds damage"
            problem = Problem("content-changed", path.name, f"{error}{hint}", False, path.name)
            problems.append(problem)
        else:
            problems.append(Problem("index-stale", index.name, str(error), True))
    except FormatError as error:
        problems.append(Problem("index-damaged", index.name, str(error), True))
    return None


def _damage(path: Path, message: str, key: str | None = None) -> Problem:
    """Return a problem with the file itself, which only its owner can fix."""
    message += f"; run `energon prepare {shell_word(path)}` once it is fixed"
    return Problem("content-damaged", path.name, message, False, path.name, key)


def _compare_lines(
    file: Path, index: Path, lines: NDArray[np.uint64], offsets: NDArray[np.uint64]
) -> Iterator[Problem]:
    if not np.array_equal(lines, offsets):
        message = f"{file}: its lines do not begin where its index says"
        yield Problem("index-stale", index.name, message, True)


def _check_copy(path: Path, offsets: NDArray[np.uint64]) -> Iterator[Problem]:
    copy = Path(jsonl_copy_path(path))
    if not copy.exists():
        return
    try:
        with reporting(copy):
            lines = np.concatenate(list(scan_jsonl(copy, unpack=unpacked_blocks)))
    except FormatError as error:
        yield Problem("index-damaged", copy.name, str(error), True)
        return
    yield from _compare_lines(copy, copy, lines, offsets)


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
