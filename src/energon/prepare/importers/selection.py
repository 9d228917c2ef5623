"""Which files to pack: those of a folder, those that match a pattern, or single ones.

They are read from the beginning to the end, decompressed if necessary.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.compressed import HEAD_BYTES, Unpacked, compression_of
from energon.formats.meta.info import META
from energon.io.address import is_remote
from energon.io.backends.local import is_hidden
from energon.io.epath import AnyPath, EPath, any_path
from energon.io.files import file_size, is_pattern, match_files, open_store, read_bytes
from energon.io.files import list_files as list_objects
from energon.io.range_file import RawReader, RemoteFile, SkippingReader
from energon.io.threads import WaitingThreads
from energon.local_file import open_binary
from energon.metadataset.kind import explain_missing, refuse_metadata
from energon.prepare.files import list_dataset_files

LINES_BYTES = 1 << 20


def open_ascending(path: AnyPath) -> BinaryIO:
    """Open a file to read it from the beginning to the end, possibly with jumps.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If it cannot be read.
    """
    if not isinstance(path, EPath):
        return open_binary(path)
    file = RemoteFile(path.url)
    reader = SkippingReader(file.object)

    def read(start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        # Requests do not end on Ctrl-C; waiting for those of other threads does.
        count = file.object.store.submit(reader.read_into, start, memoryview(data)).result()
        return bytes(data[:count])

    return io.BufferedReader(RawReader(read, file.info.size, file.path), LINES_BYTES)


SAMPLES_AHEAD = 32
MAX_THREADS = 16
MAX_IN_MEMORY_BYTES = 4 << 20
"""Larger files are copied to disk, and only when their turn comes."""


def fetched(samples: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the samples with the contents of remote files in place of their paths.

    Contents on disk exist until the next sample is requested.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If it cannot be read.
    """
    with closing(WaitingThreads(MAX_THREADS, "energon-pack")) as threads:
        waiting: deque[dict[str, Any]] = deque()
        for sample in samples:
            if not waiting and not any(isinstance(value, EPath) for value in sample.values()):
                yield sample
                continue
            waiting.append(_begun(sample, threads))
            if len(waiting) > SAMPLES_AHEAD:
                yield from _arrived(waiting.popleft())
        while waiting:
            yield from _arrived(waiting.popleft())


def _begun(sample: Mapping[str, Any], threads: WaitingThreads) -> dict[str, Any]:
    return {
        name: threads.submit(_fetch, value) if isinstance(value, EPath) else value
        for name, value in sample.items()
    }


def _arrived(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a sample when everything requested for it has arrived."""
    with ExitStack() as stack:
        for name, value in sample.items():
            content = value.result() if isinstance(value, Future) else value
            if isinstance(content, EPath):
                file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="energon-pack-"))
                store, key = open_store(content)
                file.writelines(store.stream(key))  # in one request: a server may have no ranges
                file.flush()
                content = Path(file.name)
            sample[name] = content
        yield sample


def _fetch(path: EPath) -> bytes | EPath:
    """Return a file's content, or its path if it is large."""
    return path if file_size(path) > MAX_IN_MEMORY_BYTES else read_bytes(path)


ABOUT_DATA = frozenset(
    {
        *("readme", "license", "licence", "copying", "notice", "citation", "changelog", "authors"),
        *("dataset_info", "dataset_infos", "thumbs", "desktop", "md5sums", "sha256sums"),
    }
)
"""Names of files that describe a folder and are not samples, in lower case, up to the dot."""

HUGGING_FACE = "hf://"
"""Prefix of the name of a dataset on the Hugging Face Hub."""


@dataclass(frozen=True)
class FileSelection:
    """Files below a folder.

    Args:
        folder: The folder.
        names: Paths of the files below it, sorted.
        is_folder: Whether these are all files of the folder that are not hidden.
    """

    folder: AnyPath
    names: tuple[str, ...]
    is_folder: bool = True

    def only(self, names: Sequence[str]) -> FileSelection:
        """Return a selection of some of the files."""
        return replace(self, names=tuple(names), is_folder=False)


def select(addresses: Sequence[str], *, target: AnyPath | None = None) -> FileSelection:
    """Return the files given on a command line.

    Args:
        addresses: A folder, a file, or a pattern with `*`, `?`, `[…]` or `**`; or several files
            and patterns, as a shell makes them of a pattern.
        target: A folder that may be below and does not count: what is packed into it is not packed
            again when the same command is repeated.

    Raises:
        DatasetNotFoundError: If there is no such file or folder, or none that matches.
        ConfigError: If folders are given together with something else.
        StorageError: If the place cannot list its contents, as web servers cannot.
    """
    alone = len(addresses) == 1
    paths = [path for address in addresses for path in _expand(address, alone=alone)]
    if isinstance(paths[0], FileSelection):
        return _without(paths[0], target)
    files = [path for path in paths if not isinstance(path, FileSelection)]
    if len(files) == 1:
        return FileSelection(files[0].parent, (files[0].name,), is_folder=False)
    return _below_common_folder(files)


def split_datasets(files: FileSelection) -> tuple[FileSelection, list[str]]:
    """Return a selection without prepared datasets in folders below, and their paths.

    If there is nothing else, they are kept.
    """
    if isinstance(files.folder, EPath) or not files.is_folder:
        return files, []
    folders = {str(parent) for name in files.names for parent in PurePosixPath(name).parents} - {
        "."
    }
    inside = sorted(name for name in folders if (files.folder / name / META).is_dir())
    names = [name for name in files.names if not name.startswith(tuple(f"{d}/" for d in inside))]
    if not any(not is_about_data(name) for name in names):
        return files, []
    return replace(files, names=tuple(names)), inside


def names_below(folder: AnyPath) -> list[str]:
    """Return the paths of all files below a folder that are not hidden, relative to it, sorted.

    Raises:
        DatasetNotFoundError: If there is no such folder.
        StorageError: If the place cannot list its contents, as web servers cannot.
    """
    if not isinstance(folder, EPath):
        return list_dataset_files(folder)
    names = [info.key for info in list_objects(folder) if info.key]
    if not names:
        raise DatasetNotFoundError(explain_missing(os.fspath(folder)))
    return [name for name in names if not is_hidden(name)]


def is_about_data(name: str) -> bool:
    """Return whether a file describes those next to it, or is hidden."""
    base = name.rpartition("/")[2]
    return base.startswith(".") or base.partition(".")[0].lower() in ABOUT_DATA


def _expand(address: str, *, alone: bool) -> list[AnyPath | FileSelection]:
    """Return the files that an address stands for, or all those of a folder."""
    if not address:
        raise DatasetNotFoundError("the path of a source is empty; expected a file or a folder")
    path = any_path(address)
    refuse_metadata(address)
    if path.is_file():
        return [path]
    if path.is_dir():
        if alone:
            return [FileSelection(path, tuple(names_below(path)))]
        raise ConfigError(
            f"{path}: is a folder; pack one folder at a time, or several files, e.g. "
            "'data/*.parquet'"
        )
    if not is_pattern(address):
        raise DatasetNotFoundError(explain_missing(address))
    folder, infos = match_files(address)
    if not infos:
        raise DatasetNotFoundError(f"{path}: no file matches this pattern")
    return [any_path(folder) / info.key for info in infos]


def _below_common_folder(files: Sequence[AnyPath]) -> FileSelection:
    """Return files as a selection below the deepest folder that all of them are in."""
    texts = [os.fspath(file) for file in files]
    if len({is_remote(text) for text in texts}) > 1:
        raise ConfigError("some files are in a store and others are not; pack them separately")
    if not is_remote(texts[0]):
        absolute = [os.path.abspath(text) for text in texts]
        top = os.path.commonpath([os.path.dirname(text) for text in absolute])
        names = sorted({os.path.relpath(text, top) for text in absolute})
        return FileSelection(Path(os.path.relpath(top)), tuple(names), is_folder=False)
    folder = EPath(texts[0]).parent
    while not all(EPath(file).is_relative_to(folder) for file in files):
        if folder == folder.parent:
            raise ConfigError("the files are in different stores; pack them separately")
        folder = folder.parent
    names = sorted({EPath(text).relative_to(folder) for text in texts})
    return FileSelection(folder, tuple(names), is_folder=False)


def _without(chosen: FileSelection, target: AnyPath | None) -> FileSelection:
    """Return a selection without the contents of the target, if that is below its folder."""
    try:
        if isinstance(target, EPath):
            below = target.relative_to(EPath(chosen.folder))
        elif target is not None and not isinstance(chosen.folder, EPath):
            below = str(target.resolve().relative_to(chosen.folder.resolve()))
        else:
            return chosen
    except ValueError:
        return chosen
    names = [name for name in chosen.names if not name.startswith(f"{below}/")]
    return replace(chosen, names=tuple(names))


@contextmanager
def open_decompressed(
    path: AnyPath, compression: str | None = None, *, advice: str = "copy the file again"
) -> Iterator[BinaryIO]:
    """Open a file to read it from the beginning to the end, decompressed.

    Args:
        path: The file.
        compression: One of `DECOMPRESSORS`, "" for none; None detects it from the first bytes.
        advice: What to do about damaged data, for messages.

    Raises:
        FormatError: If it is compressed and damaged.
    """
    with open_ascending(path) as file:
        if compression is None:
            compression = compression_of(file.read(HEAD_BYTES))
            file.seek(0)
        if not compression:
            yield file
            return
        unpacked = Unpacked(file, compression, origin=str(path), advice=advice)
        with io.BufferedReader(unpacked) as content:
            yield content
