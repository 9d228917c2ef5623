"""Index JSONL files, local or in a store, and assign their lines to splits."""

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

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EnergonError,
    StorageAccessError,
)
from energon.formats.meta.jsonl import (
    JsonlSplit,
    describe_unmatched_lines,
    is_packed,
    jsonl_copy_path,
    jsonl_index_path,
    jsonl_points_path,
    jsonl_split_path,
    parse_jsonl_split,
    scan_jsonl,
)
from energon.formats.seek_points import LongFrameError, unpacked_blocks
from energon.io.address import (
    address_name,
    join_address,
    local_path,
    parent_address,
    redact,
)
from energon.io.atomic import atomic_path, temporary_folder, write_atomic
from energon.io.backends.base import ObjectInfo
from energon.io.disk_cache import disk_cache
from energon.io.files import file_info, open_store, read_bytes, write_bytes
from energon.local_file import map_file
from energon.prepare.dataset import Progress, no_progress
from energon.prepare.files import reporting
from energon.prepare.verify.quarantine import Exclusions

logger = logging.getLogger("energon")

_ADVICE = {".bz2": "bunzip2 -k", ".xz": "unxz -k"}
"""How to decompress files whose lines cannot be read one by one."""


def prepare_jsonl(
    path: str | os.PathLike[str],
    *,
    split_ratio: Mapping[str, float] | None = None,
    exclude_from: Sequence[str | os.PathLike[str]] = (),
    address: str | None = None,
    progress: Progress = no_progress,
) -> int:
    """Index a JSONL file, and assign its samples to splits.

    A compressed file that is a single member or frame is copied into short ones, from which lines
    are read.

    Args:
        path: The file.
        split_ratio: Ratio by name of the split, for consecutive samples; None keeps the existing
            splits. If there are none, each split is the whole file.
        exclude_from: Quarantine files, or folders of them, whose samples are excluded in addition
            to those already excluded.
        address: The name by which users and quarantine files know it; None for `path`.
        progress: Called with the number of bytes that were read, and the size of the file.

    Returns:
        The number of samples.

    Raises:
        DatasetNotFoundError: If there is no such file.
        ConfigError: If it is compressed so that lines cannot be read one by one, or there is no
            room for a copy, or an excluded sample does not exist.
        FormatError: If a line is not a JSON object, or it is damaged.

    Example:
        >>> with open("notes.jsonl", "w") as file:
        ...     file.writelines(f'{{"text": "note {number}"}}\\n' for number in range(4))
        >>> prepare_jsonl("notes.jsonl", split_ratio={"train": 3, "val": 1})
        4
    """
    file = Path(local_path(path))
    if file.suffix in _ADVICE:
        raise ConfigError(
            f"{file}: lines of a compressed file cannot be read one by one; unpack it first with "
            f"`{_ADVICE[file.suffix]} {file}`"
        )
    name = os.path.abspath(file) if address is None else address
    listed: dict[str, list[str]] = {}
    for where in exclude_from:
        listed |= Exclusions(where, [name]).of(name)
    index = _index_lines if os.access(file.parent, os.W_OK) else _keep_index
    numbers = index(file, progress=progress)
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


def _keep_index(file: Path, *, progress: Progress) -> int:
    """Write the index of a file in a read-only folder to the user's cache."""
    with temporary_folder("jsonl") as folder:
        beside = folder / file.name
        numbers = _index_lines(file, beside, progress=progress)
        _keep(beside, os.fspath(file))
    return numbers


def _keep(beside: Path, address: str) -> None:
    """Keep what was made from a file in the user's cache, since its folder is read-only.

    Args:
        beside: The file in the folder next to which it would have been.
        address: The file.
    """
    logger.warning(
        "%s: cannot write next to it; its index is kept in the user's cache, where this "
        "user's programs on this machine find it",
        redact(address),
    )
    about = file_info(address)
    if about is None:
        raise DatasetNotFoundError(
            f"{redact(address)}: was deleted while it was indexed; restore it and run "
            "`energon prepare` again"
        )
    for path in (jsonl_copy_path, jsonl_index_path, jsonl_points_path):
        made = Path(path(beside))
        if made.exists():
            _check_cacheable(address, made.stat().st_size)
            content: Callable[[], Any] = partial(map_file, made)
            disk_cache().keep_for(path(address), about, content)


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


def index_content(index: Path, file: Path) -> bytes:
    """Return an index from where it should be, or else from the user's cache."""
    if index.exists():
        return index.read_bytes()
    return _kept_index(os.fspath(index), os.fspath(file))


def _index_lines(file: Path, beside: Path | None = None, *, progress: Progress) -> int:
    """Write the index of a file, next to it or elsewhere; return how many numbers it has."""
    beside = beside or file
    try:
        numbers = _write_index(file, beside, progress=progress, copies=False)
    except LongFrameError as error:
        _announce_copy(file, beside, error)
        return _write_index(file, beside, progress=progress, copies=True)
    Path(jsonl_copy_path(beside)).unlink(missing_ok=True)  # of an earlier version of the file
    return numbers


def _write_index(file: Path, beside: Path, *, progress: Progress, copies: bool) -> int:
    numbers = 0
    with ExitStack() as stack:

        def create(path: str) -> BinaryIO:
            return stack.enter_context(open(stack.enter_context(atomic_path(path)), "wb"))

        stack.enter_context(reporting(file))
        out, unpack = create(jsonl_index_path(beside)), None
        if is_packed(file):
            copy = create(jsonl_copy_path(beside)) if copies else None
            table = create(jsonl_points_path(beside))
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


def _announce_copy(file: Path, beside: Path, error: LongFrameError) -> None:
    """Say that a copy is written, and how to do without.

    Raises:
        ConfigError: If there is no room for it.
    """
    size, free = file.stat().st_size, shutil.disk_usage(beside.parent).free
    if beside != file:
        _check_cacheable(os.fspath(file), size)
    if size > free:
        raise ConfigError(
            f"{error}. A copy in such frames would take about {_gigabytes(size)} next to it, where "
            f"{_gigabytes(free)} are free"
        ) from error
    logger.warning(
        "%s. Otherwise, lines are read from a copy in short frames, %s, of about %s, which is "
        "written now",
        *(error, jsonl_copy_path(file.name), _gigabytes(size)),
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


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
        with temporary_folder("jsonl") as folder:
            copy = cls(address, folder)
            info = file_info(address)
            if info is None:
                raise DatasetNotFoundError(f"{redact(address)}: there is no such file")
            _fetch_large(address, info, copy.path, content=content)
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

    @property
    def frames(self) -> Path:
        """Where the copy in short frames is, if one was made."""
        return Path(jsonl_copy_path(self.path))

    def fetch_index(self, *, content: bool = True) -> None:
        """Copy the index, if there is one, also from the user's cache.

        Args:
            content: Whether to copy the content of short frames; see `opened`.
        """
        frames = self.beside(self.frames)
        if is_packed(self.path) and (info := file_info(frames)) is not None:
            _fetch_large(frames, info, self.frames, content=content)
        for path in self.indexes:
            self.fetch(self.beside(path), path)
            if not path.exists():
                with suppress(DatasetNotFoundError):
                    path.write_bytes(_kept_index(self.beside(path), self.address))

    def write_index(self) -> None:
        """Put the index next to the remote file, or in the user's cache if that is read-only."""
        made = [self.frames] if self.frames.exists() else []
        try:
            for path in [*made, *self.indexes]:
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


def _fetch_large(address: str, info: ObjectInfo, path: Path, *, content: bool) -> None:
    """Copy a remote file; without its content, write one of the same size."""
    store, key = open_store(address)
    with open(path, "wb") as file:
        if content:
            file.writelines(store.stream(key, version=info.version))
        else:
            file.truncate(info.size)


def prepare_remote_jsonl(
    address: str,
    *,
    split_ratio: Mapping[str, float] | None = None,
    exclude_from: Sequence[str | os.PathLike[str]] = (),
    progress: Progress = no_progress,
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
            copy.path,
            split_ratio=split_ratio,
            exclude_from=exclude_from,
            address=address,
            progress=progress,
        )
        if copy.splits.exists() and copy.splits.read_bytes() != before:
            write_bytes(copy.beside(copy.splits), copy.splits)
        copy.write_index()
    return num_samples
