"""Datasets as trees of folders and files, to explore them like a file system.

The contents of a folder are determined when someone looks at it: nothing is listed in advance, and
memory does not grow with the number of samples.

Names come from tar files that anyone may have written. Each step of a path becomes a name that
refers only to itself and is not too long for a kernel:

| step | becomes | as in |
|---|---|---|
| an empty one | `%` | `a//b.txt`, `/etc/passwd.txt` |
| `.` and `..` | `%2E` and `%2E%2E` | `../../a.txt` |
| `%`, and a zero byte or a slash in a step | `%25`, `%00`, `%2F` | `100%.txt` |

A mark at the end, `%~` and letters, distinguishes entries that would have the same name, and
replaces the rest of names that are too long.

`Contents` lists the files of a dataset, sample by sample, for people who explore it.
"""

from __future__ import annotations

import io
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from energon.errors import EnergonError
from energon.formats.media import guess_extension
from energon.formats.meta.info import META, load_info
from energon.formats.tables.sqlite_file import SqliteReader, ThreadReaders
from energon.io.range_file import RangeFile, open_range
from energon.io.threads import fork_safe_lock
from energon.plan.leaves.subset import exclude_indices
from energon.samples.crude import PART_FILES, UnreadableSample
from energon.sources.source import Source
from energon.sources.webdataset import WebdatasetSource

SEARCHED_TOGETHER = 64
"""This many shards are opened at a time to search their keys."""
KEPT_BYTES = 32 << 20
"""How many recently viewed rows are kept, since all parts of a row are read together."""
MAX_BYTES = 255
"""The longest name that file systems and programs accept."""
MARK = "%~"
_DOTS = {"": "%", ".": "%2E", "..": "%2E%2E"}
_NAMES = {escaped: name for name, escaped in _DOTS.items()}
_ESCAPED = {"%": "%25", "\0": "%00", "/": "%2F"}
_IMPOSSIBLE = frozenset("/\0")
_SEQUENCE = re.compile(r"%(..)?", re.DOTALL)
_RAW = {escaped[1:]: raw for raw, escaped in _ESCAPED.items()}


def escape_name(name: str) -> str:
    """Return the name of one step of a path in the file system.

    Example:
        >>> [escape_name(name) for name in ("cat", "..", "", "100%")]
        ['cat', '%2E%2E', '%', '100%25']
    """
    if name in _DOTS:
        return _DOTS[name]
    if "%" in name or "\0" in name or "/" in name:
        name = re.sub("[%\0/]", lambda match: _ESCAPED[match[0]], name)
    data = name.encode("utf-8", "surrogateescape")
    if len(data) <= MAX_BYTES:
        return name
    mark = MARK + blake2b(data, digest_size=8).hexdigest()
    return data[: MAX_BYTES - len(mark) - 3].decode("utf-8", "ignore") + mark


def mark_name(name: str, mark: str) -> str:
    """Return an escaped name with a mark, so that nothing else has it.

    Example:
        >>> mark_name("cat.jpg", "2")
        'cat.jpg%~2'
    """
    data = f"{name}{MARK}{mark}".encode("utf-8", "surrogateescape")
    if len(data) <= MAX_BYTES:
        return f"{name}{MARK}{mark}"
    whole = blake2b(data, digest_size=8).hexdigest()
    return name[: MAX_BYTES // 4 - len(whole)] + MARK + whole


def unescape_name(name: str) -> str | None:
    """Return the step whose `escape_name` this is; None if there is none, or if it has a mark.

    Example:
        >>> [unescape_name(name) for name in ("cat", "%2E%2E", "100%25", "100%")]
        ['cat', '..', '100%', None]
    """
    if name in _NAMES:
        return _NAMES[name]
    if not _IMPOSSIBLE.isdisjoint(name):
        return None
    if "%" not in name:
        return None if name in _DOTS else name
    if any(sequence not in _RAW for sequence in _SEQUENCE.findall(name)):
        return None
    raw = _SEQUENCE.sub(lambda match: _RAW[match[1]], name)
    return None if raw in _DOTS else raw


class TreeEntry(NamedTuple):
    """An entry of a folder's listing."""

    name: str
    is_folder: bool


@dataclass(frozen=True)
class BrowsedFile:
    """A file: a range of another one, which is opened when someone reads it.

    Args:
        find: Opens the other file.
        offset: Where it begins there.
        size: Bytes of it.
        mtime_ns: When it was written, in nanoseconds since 1970; 0 if unknown.
    """

    find: Callable[[], RangeFile]
    offset: int
    size: int
    mtime_ns: int = 0

    def open(self) -> BufferedReader:
        """Return it open for reading, by one thread at a time."""
        return open_range(self.find(), self.offset, self.size)

    def read(self) -> bytes:
        """Return all of it."""
        return self.find().pread(self.offset, self.size)


class BrowsedFolder(Protocol):
    """A folder. May be used by many threads."""

    def entries(self) -> Iterator[TreeEntry]:
        """Yield the entries, each name once."""

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return the entry with this name, or None."""


@dataclass(frozen=True)
class NamedFolders:
    """A folder of known folders."""

    folders: Mapping[str, BrowsedFolder]

    def entries(self) -> Iterator[TreeEntry]:
        """Yield the names of the folders."""
        return (TreeEntry(name, True) for name in self.folders)

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return a folder by name."""
        return self.folders.get(name)


def first_file(folder: BrowsedFolder) -> BrowsedFile | None:
    """Return the first file listed in a folder or below it; None if there is none."""
    for name, _ in folder.entries():
        entry = folder.find(name)
        if entry is not None and not isinstance(entry, BrowsedFile):
            entry = first_file(entry)
        if entry is not None:
            return entry
    return None


def find_path(root: BrowsedFolder, path: str) -> BrowsedFolder | BrowsedFile | None:
    """Return the entry at a path below a folder, such as `a/b/c`; None if there is none."""
    entry: BrowsedFolder | BrowsedFile | None = root
    for name in path.split("/"):
        if not name:
            continue
        if entry is None or isinstance(entry, BrowsedFile):
            return None
        entry = entry.find(name)
    return entry


class ShardOrdinals(NamedTuple):
    """Which samples of a source are in a shard."""

    name: str
    start: int
    """Ordinal of the first."""
    stop: int
    """The ordinal after the last."""


class Contents:
    """The samples of a source for people who explore it: their files, shards, and a search by key.

    This works with every source; kinds that know more override it.

    Args:
        source: The samples.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._kept: OrderedDict[int, dict[str, BrowsedFile]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = fork_safe_lock()

    def read_ahead(self, ordinals: Sequence[int]) -> None:
        """Read samples together before they are requested one by one; a few are kept in memory."""
        if type(self).files is not Contents.files:
            return  # a kind that knows where parts are reads none before it is opened
        missing = [ordinal for ordinal in ordinals if ordinal not in self._kept]
        # Read errors are reported where a sample is requested.
        with suppress(EnergonError, IndexError):
            if missing:
                self._keep(missing)

    def files(self, ordinal: int) -> dict[str, BrowsedFile]:
        """Return the parts of a sample as files; values that are not bytes become files with them.

        Raises:
            IndexError: If there is no such sample.
        """
        kept = self._kept.get(ordinal)
        return self._keep([ordinal])[0] if kept is None else kept

    def _keep(self, ordinals: Sequence[int]) -> list[dict[str, BrowsedFile]]:
        """Return samples as files, and keep them until others replace them."""
        kept = []
        samples = self.source.read(np.array(ordinals)).samples(0, len(ordinals))
        for ordinal, sample in zip(ordinals, samples, strict=True):
            if isinstance(sample, UnreadableSample):
                raise sample.error
            shard = str(sample.get("__shard__", ""))
            file_names = sample.get(PART_FILES) or {}
            contents = [
                file
                for name, value in sample.items()
                if name[:2] != "__"
                for file in _as_files(name, value, file_names.get(name, ""))
            ]
            files = {
                name: BrowsedFile(partial(MemoryFile, shard, content), 0, len(content))
                for name, content in contents
            }
            kept.append(files)
            with self._lock:
                self._kept_bytes += _bytes_of(files) - _bytes_of(self._kept.pop(ordinal, {}))
                self._kept[ordinal] = files
                while self._kept_bytes > KEPT_BYTES:
                    self._kept_bytes -= _bytes_of(self._kept.popitem(last=False)[1])
        return kept

    def search(self, prefix: str, limit: int) -> list[int]:
        """Return up to `limit` ordinals of samples whose key begins with `prefix`.

        Here, only those whose key equals `prefix`.
        """
        return self.source.find(prefix)[:limit]

    def shards(self) -> list[ShardOrdinals]:
        """Return the shards that contain samples, in order; here, there is only one."""
        return [ShardOrdinals(self.source.path.name, 0, len(self.source))]


_BEGIN_ALIKE = (
    "SELECT tar_file_id, sample_index FROM samples WHERE sample_key >= ? AND sample_key < ? "
    "ORDER BY sample_key"
)


class TarContents(Contents):
    """The samples of shards: no part is read before someone opens it."""

    source: WebdatasetSource

    def __init__(self, source: WebdatasetSource) -> None:
        super().__init__(source)
        edges = source.bounds
        if len(source.excluded):
            edges = exclude_indices(edges, source.excluded)
        self._edges = np.clip(edges - source.start, 0, len(source)).tolist()

    def files(self, ordinal: int) -> dict[str, BrowsedFile]:
        where = self.source.locate(ordinal)
        shard = self.source.shards.index(where.shard)
        table = self.source.open_shard(shard).table
        find = partial(_open_file, self.source, shard)
        files: dict[str, BrowsedFile] = {}
        for name, offset, size in table.sample_parts(where.sample):
            files.setdefault(name, BrowsedFile(find, offset, size, table.shard_mtime_ns))
        return files

    def search(self, prefix: str, limit: int) -> list[int]:
        if self._index is not None:
            return list(islice(self._indexed(self._index.get(), prefix), limit))
        return list(islice(self._matches(prefix.encode("utf-8", "surrogateescape")), limit))

    def shards(self) -> list[ShardOrdinals]:
        ranges = zip(self.source.shards, self._edges[:-1], self._edges[1:], strict=True)
        return [ShardOrdinals(*each) for each in ranges if each[1] < each[2]]

    @cached_property
    def _index(self) -> ThreadReaders | None:
        """`index.sqlite`, for shards without part tables, which would otherwise have to be read."""
        path = self.source.path
        first = next(iter(self.source.shards), None)
        if not isinstance(path, Path) or first is None or (path / f"{first}.parts").is_file():
            return None
        index = path / META / "index.sqlite"
        return ThreadReaders(index) if index.is_file() else None

    def _indexed(self, reader: SqliteReader, prefix: str) -> Iterator[int]:
        """Yield the samples in `index.sqlite`, in the order of their keys."""
        source = self.source
        numbers = {name: number for number, name in enumerate(source.shards)}
        shards = [numbers.get(name) for name in load_info(source.path).shard_counts]
        low = prefix.encode("utf-8", "replace").decode()
        # No character sorts after this one.
        for row in reader.rows(_BEGIN_ALIKE, (low, low + chr(0x10FFFF))):
            file, sample = reader.numbers(*row)
            shard = shards[file] if file < len(shards) else None
            if shard is not None:
                yield from source.ordinals_of(shard, sample)

    def _matches(self, prefix: bytes) -> Iterator[int]:
        source = self.source
        for shard in range(len(source.shards)):
            if not shard % SEARCHED_TOGETHER:
                # Opened one by one, shards on a busy disk would take seconds.
                source.open_shards(range(shard, min(shard + SEARCHED_TOGETHER, len(source.shards))))
            for sample in source.open_shard(shard).table.starting_with(prefix):
                yield from source.ordinals_of(shard, sample)


def _bytes_of(files: Mapping[str, BrowsedFile]) -> int:
    return sum(file.size for file in files.values())


def _open_file(source: WebdatasetSource, shard: int) -> RangeFile:
    return source.open_shard(shard).file


def _as_files(name: str, value: Any, file: Any) -> Iterator[tuple[str, bytes]]:
    """Yield a value as a file, a list of files as each of these; `file` names what has a name."""
    if isinstance(value, list) and any(isinstance(each, bytes) for each in value):
        names = file if isinstance(file, list) else [""] * len(value)
        for number, (each, own) in enumerate(zip(value, names, strict=True)):
            yield _as_file(f"{name}.{number}", each or b"", own or "")
    else:
        yield _as_file(name, value, file)


def _as_file(name: str, value: Any, file: str) -> tuple[str, bytes]:
    """Return a value as the name and the content of a file; `file` is its name, if it has one."""
    if isinstance(value, bytes | bytearray | memoryview):
        content = bytes(value)
        _, dot, extension = file.rpartition(".")
        # Most images tell what they are, others only by the names of their files.
        is_told = not dot or guess_extension(content) is not None
        return name if is_told else f"{name}.{extension}", content
    if isinstance(value, str):
        return f"{name}.txt", value.encode("utf-8", "surrogateescape")
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        buffer = io.BytesIO()
        np.save(buffer, value, allow_pickle=False)
        return f"{name}.npy", buffer.getvalue()
    return f"{name}.json", json.dumps(value, default=repr).encode()


@dataclass
class MemoryFile:
    """Bytes as a file."""

    path: str
    data: bytes
    is_remote: ClassVar[bool] = False

    def pread(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        return [self.pread(*each) for each in zip(offsets, sizes, strict=True)]
