"""Read folders of images, audio and video as samples, with the files that belong to them.

Files with the same path up to the first dot of their names form a sample, if one of them is a
media file. Folders may be classes; tables named `metadata` describe the files beside them.
"""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from energon.arrays import Ints
from energon.decode.sample_decoder import is_media
from energon.errors import ConfigError, DatasetNotFoundError, FormatError, ShardChangedError
from energon.formats.meta.info import (
    BY_NAMES,
    META,
    chosen_split,
    guess_splits,
    ratio_range,
    split_of_folders,
)
from energon.formats.tar.headers import split_name
from energon.formats.text import csv_rows, parse_json
from energon.io.address import is_remote, join_address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.backends.local import folder_entries, is_hidden
from energon.io.epath import any_path
from energon.io.files import is_file, list_files, open_store, read_bytes, write_bytes
from energon.io.range_file import RemoteFile, span_buffer
from energon.local_file import decode_utf8, read_file
from energon.messages import warn_once
from energon.metadataset.kind import METADATA_TABLES, TABLES
from energon.sources.files.open import SystemFileStore
from energon.sources.files.store import FileStore
from energon.sources.kinds import description, split_description
from energon.sources.shards import ShardPool
from energon.sources.source import TRAIN_SPLIT, Extents, SampleSelection
from energon.sources.tables.row_kind import Item, ItemSource, RowKind, RowOptions

FOLDER_MAGIC = b"ENLIST01\n"
LISTING = "folder.listing"


class ListedFile(NamedTuple):
    """A file of a folder."""

    name: str
    size: int
    version: str | None = None


class ListedFolder(NamedTuple):
    """The direct contents of a folder."""

    mtime_ns: int
    folders: tuple[str, ...]
    files: tuple[ListedFile, ...]


def dump_listing(folders: Mapping[str, ListedFolder]) -> bytes:
    """Return the content of the listing of a dataset, of folders by their paths.

    A magic number, and then a line of JSON for each folder:

        {"folder": "train/cat", "mtime_ns": 0, "folders": [], "files": [["0.jpg", 512, null], …]}

    A file has its name, size and, in a store, version. A local folder whose modification time
    differs from the listed one is read again; 0 marks a folder that was modified just before it
    was listed.
    """
    lines = (
        json.dumps({"folder": path, **each._asdict()}).encode() for path, each in folders.items()
    )
    return FOLDER_MAGIC + b"\n".join(lines)


def load_listing(data: bytes, *, origin: str) -> dict[str, ListedFolder]:
    """Return the folders that a listing holds, by their paths.

    Raises:
        FormatError: If it is damaged, or of another version.
    """
    again = "delete it, and run `energon prepare` again"
    if not data.startswith(FOLDER_MAGIC):
        raise FormatError(f"{origin}: begins with {data[:9]!r}, expected {FOLDER_MAGIC!r}; {again}")
    try:
        return dict(_parsed(data[len(FOLDER_MAGIC) :].split(b"\n"), origin))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{origin}: is not a listing of folders: {error!r}; {again}") from error


def _parsed(lines: Iterable[bytes], origin: str) -> Iterable[tuple[str, ListedFolder]]:
    for line in lines:
        entry = parse_json(line, origin=origin)
        files = tuple(ListedFile(str(name), int(size), v) for name, size, v in entry["files"])
        names = [file.name for file in files]
        if any("/" in name or name in ("", ".", "..") for name in (*names, *entry["folders"])):
            raise ValueError("it contains paths where names are expected")
        yield (
            str(entry["folder"]),
            ListedFolder(int(entry["mtime_ns"]), tuple(entry["folders"]), files),
        )


logger = logging.getLogger("energon")

FILE_NAME = "file_name"
"""The column that names the file of a row; other columns with this suffix name further files."""
_READ_TABLES = tuple(name for name in METADATA_TABLES if not name.endswith(".parquet"))
_OTHER_TABLES = tuple(suffix for suffix in TABLES if suffix != ".json")
_FRESH_NS = 2_000_000_000
"""A folder modified this recently may change again without a new modification time."""


def list_folder(address: str) -> dict[str, ListedFolder]:
    """Return the content of a folder and of all folders below it, by their paths.

    What `energon prepare` has noted is checked again on this machine where a folder was changed
    since, and trusted in stores.

    Raises:
        DatasetNotFoundError: If there is no such folder.
    """
    noted = _noted(address)
    if not is_remote(address):
        return dict(_scan(address, noted))
    return noted or _list_remote(address)


def note_listing(address: str) -> None:
    """Record what is in a folder, so that opening it lists only what was changed."""
    if is_remote(address):
        folders = _list_remote(address)
    else:
        fresh = time.time_ns() - _FRESH_NS
        folders = {
            path: each if each.mtime_ns < fresh else each._replace(mtime_ns=0)
            for path, each in _scan(address, _noted(address))
        }
    path = join_address(address, f"{META}/{LISTING}")
    try:
        write_bytes(path, dump_listing(folders))
    except OSError as error:
        logger.warning("%s: %s; the folder is listed whenever it is opened", redact(path), error)


def _noted(address: str) -> dict[str, ListedFolder]:
    path = join_address(address, f"{META}/{LISTING}")
    if not is_file(path):
        return {}
    try:
        return load_listing(read_bytes(path), origin=redact(path))
    except FormatError as error:
        logger.warning("%s", error)
        return {}


def _scan(root: str, noted: Mapping[str, ListedFolder]) -> Iterator[tuple[str, ListedFolder]]:
    """Yield the folders below one of this machine, each once, whatever links lead to it."""
    ahead, seen = [""], set()
    while ahead:
        path = ahead.pop()
        where = os.path.join(root, path)
        try:
            status = os.stat(where)
        except FileNotFoundError:
            raise DatasetNotFoundError(f"{where}: there is no such folder") from None
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        content = noted.get(path)
        if content is None or content.mtime_ns != status.st_mtime_ns:
            content = _look_into(where, status.st_mtime_ns)
        yield path, content
        ahead += [f"{path}/{name}".lstrip("/") for name in content.folders]


def _look_into(folder: str, mtime_ns: int) -> ListedFolder:
    folders, others = folder_entries(folder)
    files = [ListedFile(each.name, each.stat().st_size) for each in others if each.is_file()]
    return ListedFolder(mtime_ns, tuple(folder.name for folder in folders), tuple(files))


def _list_remote(address: str) -> dict[str, ListedFolder]:
    files: dict[str, list[ListedFile]] = {}
    for file in list_files(address):
        folder, _, name = file.key.rpartition("/")
        if not is_hidden(file.key):
            files.setdefault(folder, []).append(ListedFile(name, file.size, file.version))
    return {folder: ListedFolder(0, (), tuple(own)) for folder, own in files.items()}


class MediaFiles:
    """The samples of all splits of a folder, numbered in the order of their keys.

    Args:
        address: The folder.
        labels: See `FolderOptions`.

    Raises:
        DatasetNotFoundError: If there is no such folder, or no sample in it.
        FormatError: If a table is invalid, or names a file that is missing.
        ConfigError: If samples are in no folder that could be their class.
    """

    def __init__(self, address: str, *, labels: bool | None = None) -> None:
        self.address = address
        self.sizes: dict[str, ListedFile] = {}
        for folder, content in list_folder(address).items():
            self.sizes |= {f"{folder}/{file.name}".lstrip("/"): file for file in content.files}
        groups = self._groups()
        tables = [name for name in self.sizes if name.rpartition("/")[2] in _READ_TABLES]
        self.rows: dict[str, dict[str, Any]] = {}
        if tables:
            groups = self._joined(groups, sorted(tables))
        self.keys = sorted(groups)
        self.parts = [groups[key] for key in self.keys]
        self.splits = guess_splits(self.keys, by_file=False, origin=redact(address))
        self.classes = self._classes(labels, may=not tables)
        if not self.keys:
            raise DatasetNotFoundError(
                f"{redact(address)}: there are no images, audio or video files in it or below"
            )

    def label_of(self, key: str) -> str:
        """Return the name of the class of a sample."""
        return os.path.basename(os.path.dirname(key))

    def _groups(self) -> dict[str, dict[str, str]]:
        """Return the files of each sample by its key, by the names of parts."""
        groups: dict[str, dict[str, str]] = {}
        for name in sorted(self.sizes):
            split = split_name(name)
            if split is None:
                continue
            parts = groups.setdefault(split[0], {})
            part = split[1].lower()
            if part in parts:
                raise FormatError(
                    f"{redact(self.address)}: {parts[part]} and {name} would be the same part of "
                    "a sample; rename one of them"
                )
            parts[part] = name
        samples = {k: own for k, own in groups.items() if any(map(is_media, own))}
        lone = [
            name
            for key, own in groups.items()
            for name in own.values()
            if key not in samples and "/" in name and name.rpartition("/")[2] not in _READ_TABLES
        ]
        if lone:
            warn_once(
                logger,
                f"{self.address}: files of no sample",
                "%s: skipped %d files that belong to no media file of the same name, e.g. %s",
                redact(self.address),
                len(lone),
                lone[0],
            )
        self._warn_of_other_tables({name for own in samples.values() for name in own.values()})
        return samples

    def _warn_of_other_tables(self, parts: Collection[str]) -> None:
        """Log the name of a table that is not read, though it may describe the files.

        Args:
            parts: The files of samples.
        """
        others = [
            name
            for name in self.sizes
            if name.lower().endswith(_OTHER_TABLES)
            and name.rpartition("/")[2] not in _READ_TABLES
            and name not in parts
        ]
        if others:
            shown = redact(self.address).rstrip("/")
            warn_once(
                logger,
                f"{self.address}: other tables",
                "%s: %s is not read; `energon pack %s %s_packed` makes a sample of each of its "
                "rows, and a table called metadata.csv with a column file_name is read without "
                "packing",
                shown,
                others[0],
                shown,
                shown,
            )

    def _joined(
        self, groups: Mapping[str, dict[str, str]], tables: Sequence[str]
    ) -> dict[str, dict[str, str]]:
        """Return the samples that tables name, and note what they say about them."""
        named: dict[str, dict[str, str]] = {}
        for table in tables:
            folder = table.rpartition("/")[0]
            origin = redact(join_address(self.address, table))
            content = read_bytes(join_address(self.address, table))
            for line, row in _table_rows(decode_utf8(content, origin=origin), origin):
                if not isinstance(row.get(FILE_NAME), str):
                    raise FormatError(
                        f"{origin}:{line}: has no {FILE_NAME!r}, the path of a file beside the "
                        f"table; there are {', '.join(row) or 'no columns'}"
                    )
                files = {c: f for c, f in row.items() if c.endswith(FILE_NAME) and f}
                paths = {c: self._path_of(folder, f) for c, f in files.items()}
                missing = next((path for path in paths.values() if path not in self.sizes), None)
                if missing is not None:
                    raise FormatError(
                        f"{origin}:{line}: names {missing!r}, which is not in "
                        f"{redact(self.address)}; add the file, or delete the row"
                    )
                key, _ = split_name(paths[FILE_NAME]) or ("", "")
                if key not in groups or key in self.rows:
                    problem = "is named twice" if key in self.rows else "is not a media file"
                    raise FormatError(f"{origin}:{line}: {paths[FILE_NAME]!r} {problem}")
                others = {
                    f"{c.removesuffix(f'_{FILE_NAME}')}{os.path.splitext(p)[1].lower()}": p
                    for c, p in paths.items()
                    if c != FILE_NAME
                }
                named[key] = {**groups[key], **others}
                self.rows[key] = {c: value for c, value in row.items() if c not in files}
                twice = named[key].keys() & self.rows[key].keys()
                if twice:
                    raise FormatError(
                        f"{origin}:{line}: column {min(twice)!r} has the same name as the file "
                        f"{named[key][min(twice)]}; rename it"
                    )
        return named

    def _path_of(self, folder: str, name: str) -> str:
        """Return the path below the dataset of a file that a table in `folder` names."""
        if not os.path.isabs(name):
            return f"{folder}/{name}".lstrip("/")
        for top in (os.path.abspath(self.address), os.path.realpath(self.address)):
            if name.startswith(f"{top}/"):
                return name[len(top) + 1 :]
        return name

    def _classes(self, labels: bool | None, *, may: bool) -> dict[str, int] | None:
        """Return the number of each class, in the order of their names; None for no classes."""
        by_folder = "" not in self.splits and any(map(split_of_folders, self.keys))
        depth = 3 if by_folder else 2
        if labels is None:
            labels = may and all(key.count("/") + 1 == depth for key in self.keys)
            if labels and len({self.label_of(key) for key in self.keys}) < 2:
                return None
        if not labels:
            return None
        bare = next((key for key in self.keys if key.count("/") + 1 < depth), None)
        if bare is not None:
            raise ConfigError(
                f"{redact(self.address)}: {bare!r} is in no folder that could be its class; "
                "expected folders like cat and dog with all files in them"
            )
        return {name: n for n, name in enumerate(sorted({self.label_of(k) for k in self.keys}))}


def _table_rows(text: str, origin: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of a table, and their numbers."""
    if not origin.endswith(".csv"):
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                row = parse_json(line, origin=f"{origin}:{number}", hint="expected an object")
                if not isinstance(row, dict):
                    raise FormatError(f"{origin}:{number}: expected an object, found {row!r:.40}")
                yield number, row
        return
    lines = io.StringIO(text.removeprefix("\ufeff"), newline="")
    yield from csv_rows(lines, origin=origin)


@dataclass(frozen=True)
class FolderOptions(RowOptions):
    """The options under `read` in a document for a folder of media files.

    Args:
        labels: Whether samples have the parts `label` and `label_name`, the number and name of the
            folder that they are in; None if they are all in folders side by side.
    """

    labels: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels not in (None, True, False):
            raise ConfigError(
                f"{self.origin}: read: labels is {self.labels!r}; expected true or false"
            )


class MediaFolderSource(ItemSource):
    """The samples of a split of a folder of media files.

    A sample has a part for each of its files, named by their extensions, and for each fact from
    tables or class names. Its key is its path below the folder.

    Args:
        address: The folder.
        selection: Which samples to read, and which parts if `options` name none.
        options: The options in the document.

    Raises:
        ConfigError: If there is no such split or part.
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        selection: SampleSelection = TRAIN_SPLIT,
        options: FolderOptions | None = None,
    ) -> None:
        options = options or FolderOptions(origin=redact(address))
        self.media = MediaFiles(os.fspath(address), labels=options.labels)
        self.chosen = _split_numbers(self.media, options, selection.split_part)
        self._split = (selection.split_part, options.split or "")
        bounds = (0, len(self.chosen))
        super().__init__(any_path(address), selection, bounds=bounds, columns=options.columns)

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of the files of a sample in bytes."""
        sizes = self.media.sizes
        some = self.chosen[:: max(1, len(self.chosen) // 1000)].tolist()
        files = [name for n in some for name in self.media.parts[n].values()]
        return max(1.0, sum(sizes[name].size for name in files) / len(some))

    @property
    def number_space(self) -> tuple[str, ...]:
        return ("files", str(self.path), *self._split)

    @property
    def all_parts(self) -> list[str]:
        own = dict.fromkeys(part for parts in self.media.parts for part in parts)
        columns = dict.fromkeys(name for row in self.media.rows.values() for name in row)
        labels = () if self.media.classes is None else ("label", "label_name")
        return [*own, *columns, *labels]

    def key_of(self, number: int) -> str:
        return self.media.keys[int(self.chosen[number])]

    def numbers_of(self, key: str) -> Sequence[int]:
        keys = [key] if key in self._items else [(split_name(key) or ("", ""))[0]]
        return [self._items[each] for each in keys if each in self._items]

    def shard_of(self, number: int) -> str:
        return self._first_file(number)

    def position(self, number: int) -> tuple[str, int, int]:
        return self._first_file(number), 0, 0

    def content(self) -> Any:
        digest = blake2b(digest_size=8)
        for number in self.chosen.tolist():
            for name in self.media.parts[number].values():
                digest.update(os.fsencode(f"{name}\0{self.media.sizes[name].size}\0"))
        return [digest.hexdigest(), self.media.classes]

    def items(self, numbers: Ints) -> list[Item]:
        media = self.media
        keys = [self.key_of(number) for number in numbers.tolist()]
        names = [
            {p: f for p, f in media.parts[int(self.chosen[n])].items() if self.takes(p)}
            for n in numbers.tolist()
        ]
        contents = iter(self._read([file for own in names for file in own.values()]))
        items: list[tuple[dict[str, Any], dict[str, str]]] = []
        for key, own in zip(keys, names, strict=True):
            parts: dict[str, Any] = {part: next(contents) for part in own}
            more = dict(media.rows.get(key, {}))
            if media.classes is not None:
                name = media.label_of(key)
                more |= {"label": media.classes[name], "label_name": name}
            parts |= {part: value for part, value in more.items() if self.takes(part)}
            items.append((parts, {}))
        return items

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the files of samples in a store are, each as a whole."""
        if not self.is_remote:
            return
        for index, number in enumerate(self.numbers(ordinals).tolist()):
            for part, name in self.media.parts[int(self.chosen[number])].items():
                size = self.media.sizes[name].size
                if self.takes(part) and size:
                    bounds = np.array([0]), np.array([size])
                    yield Extents(self._remote(name), np.array([index]), *bounds)

    @cached_property
    def _items(self) -> dict[str, int]:
        keys = (self.media.keys[n] for n in self.chosen.tolist())
        return {key: item for item, key in enumerate(keys)}

    def _first_file(self, number: int) -> str:
        return next(iter(self.media.parts[int(self.chosen[number])].values()))

    def _read(self, names: Sequence[str]) -> list[bytes]:
        if not self.is_remote:
            return [self._read_local(name) for name in names]
        objects = [self._remote(name).object for name in names]
        buffer = span_buffer()
        contents = [buffer.find(each, 0, each.info.size) for each in objects]
        missing = [n for n, content in enumerate(contents) if content is None]
        if missing:
            store = objects[0].store
            read = [(objects[n],) for n in missing]
            answers = store.together(lambda each: each.read(0, each.info.size), read)
            for n, content in zip(missing, answers, strict=True):
                contents[n] = content
        return [content or b"" for content in contents]

    def _read_local(self, name: str) -> bytes:
        path = os.path.join(self.media.address, name)
        try:
            return read_file(path)
        except OSError as error:
            raise ShardChangedError(
                f"{path}: cannot be read ({error.strerror or error}), but existed when the folder "
                "was listed; restore it, or start again without it"
            ) from error

    def _remote(self, name: str) -> RemoteFile:
        address = join_address(self.media.address, name)
        listed = self.media.sizes[name]
        _, key = open_store(address)
        return RemoteFile(address, info=ObjectInfo(key, listed.size, listed.version))


def _split_numbers(media: MediaFiles, options: FolderOptions, split_part: str) -> Ints:
    """Return which of all samples belong to a split, ascending."""
    origin = options.origin or redact(media.address)
    splits = media.splits
    if options.split is not None or "" in splits:
        low, high = ratio_range(
            options.split, split_part, len(media.keys), what="samples", origin=origin
        )
        if options.split is None:
            return np.arange(low, high)
        # Samples of a class are adjacent, and each split should have some of each class.
        digests = [blake2b(os.fsencode(key), digest_size=8).digest() for key in media.keys]
        order = sorted(range(len(digests)), key=digests.__getitem__)
        return np.array(sorted(order[low:high]), np.int64)
    own = set(splits[chosen_split(split_part, splits, origin=redact(media.address), by=BY_NAMES)])
    return np.array([n for n, key in enumerate(media.keys) if key in own], np.int64)


class MediaFolderKind(RowKind):
    """Folders of images, audio and video."""

    name = "folder"
    noun = "a folder of media files"
    has_files = True
    source = MediaFolderSource
    options_type = FolderOptions
    options = FolderOptions.names()
    hint = (
        "files are read one by one from the folder; `energon pack` writes them to tar shards, "
        "which load faster from stores and network disks"
    )

    def prepare(self, address: str) -> int:
        note_listing(address)
        return len(MediaFiles(address).keys)

    def splits_of(self, address: str) -> Collection[str]:
        return MediaFiles(address).splits

    def file_store(
        self, address: str, *, pool: ShardPool | None = None, allow: Collection[str] = ()
    ) -> FileStore[bytes]:
        return SystemFileStore(address)

    def browse(self, address: str, **_: Any) -> Any:
        raise ConfigError(f"{redact(address)} is a folder already and needs no mounting")

    def describe(self, address: str, *, parts: bool = True, **documents: str) -> dict[str, Any]:
        media = MediaFiles(address)
        splits = {}
        for name in self.split_names(address):
            chosen = _split_numbers(media, FolderOptions(), name).tolist()
            files = sum(len(media.parts[n]) for n in chosen)
            splits[name] = split_description(len(chosen), files)
        names = [file for own in media.parts for file in own.values()]
        size = sum(media.sizes[name].size for name in names)
        described = description(len(media.keys), len(names), size, splits)
        return {**described, "classes": media.classes or {}}


KIND = MediaFolderKind()
