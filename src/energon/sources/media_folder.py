"""Read folders of images, audio and video as samples, with the files that belong to them.

Files with the same path up to the first dot of their names form a sample, if one of them is a
media file. Folders may be classes; tables named `metadata` describe the files beside them.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from energon.arrays import Ints
from energon.decode.sample_decoder import is_media
from energon.errors import ConfigError, DatasetNotFoundError, FormatError, ShardChangedError
from energon.formats.folder_listing import (
    LISTING,
    ListedFile,
    ListedFolder,
    dump_listing,
    load_listing,
)
from energon.formats.json_text import parse_json
from energon.formats.meta.info import META
from energon.formats.meta.split import find_split, ratio_range, splits_by_name
from energon.formats.tar.headers import split_name
from energon.io.address import is_remote, join_address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.epath import any_path
from energon.io.files import is_file, list_files, open_store, read_bytes, write_bytes
from energon.io.range_file import RemoteFile
from energon.io.ranges import span_buffer
from energon.messages import warn_once
from energon.sources.extents import Extents, PartFilter
from energon.sources.files.open import SystemFileStore
from energon.sources.files.store import FileStore
from energon.sources.shards import ShardPool
from energon.sources.tables.row_kind import ItemSource, RowKind, RowOptions
from energon.utf8 import decode_utf8

log = logging.getLogger("energon")

FILE_NAME = "file_name"
"""The column that names the file of a row; other columns with this suffix name further files."""
TABLES = ("metadata.csv", "metadata.jsonl")
_FRESH_NS = 2_000_000_000
"""A folder modified this recently may change again without a new modification time."""


@dataclass(frozen=True)
class FolderOptions(RowOptions):
    """The options under `read` in a document for a folder of media files.

    Args:
        labels: Whether samples have the parts `label` and `label_name`, the number and the name
            of the folder that they are in; None if all are in folders side by side.
    """

    labels: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels not in (None, True, False):
            raise ConfigError(
                f"{self.origin}: read: labels is {self.labels!r}; expected true or false"
            )


def list_folder(address: str) -> dict[str, ListedFolder]:
    """Return what is in a folder, and in all folders below it, by their paths.

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
        found = _list_remote(address)
    else:
        fresh = time.time_ns() - _FRESH_NS
        found = {
            path: each if each.mtime_ns < fresh else each._replace(mtime_ns=0)
            for path, each in _scan(address, _noted(address))
        }
    path = join_address(address, f"{META}/{LISTING}")
    try:
        write_bytes(path, dump_listing(found))
    except OSError as error:
        log.warning("%s: %s; the folder is listed whenever it is opened", redact(path), error)


def _noted(address: str) -> dict[str, ListedFolder]:
    path = join_address(address, f"{META}/{LISTING}")
    if not is_file(path):
        return {}
    try:
        return load_listing(read_bytes(path), origin=redact(path))
    except FormatError as error:
        log.warning("%s", error)
        return {}


def _scan(root: str, noted: Mapping[str, ListedFolder]) -> Iterator[tuple[str, ListedFolder]]:
    """Yield the folders below one of this machine, each once, whatever links lead to it."""
    ahead, seen = [""], set()
    while ahead:
        path = ahead.pop()
        where = os.path.join(root, path)
        try:
            about = os.stat(where)
        except FileNotFoundError:
            raise DatasetNotFoundError(f"{where}: there is no such folder") from None
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        found = noted.get(path)
        if found is None or found.mtime_ns != about.st_mtime_ns:
            found = _look_into(where, about.st_mtime_ns)
        yield path, found
        ahead += [f"{path}/{name}".lstrip("/") for name in found.folders]


def _look_into(folder: str, mtime_ns: int) -> ListedFolder:
    folders, files = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            elif entry.is_file():
                files.append(ListedFile(entry.name, entry.stat().st_size))
    return ListedFolder(mtime_ns, tuple(sorted(folders)), tuple(sorted(files)))


def _list_remote(address: str) -> dict[str, ListedFolder]:
    files: dict[str, list[ListedFile]] = {}
    for found in list_files(address):
        folder, _, name = found.key.rpartition("/")
        if not any(step.startswith(".") for step in found.key.split("/")):
            files.setdefault(folder, []).append(ListedFile(name, found.size, found.version))
    return {folder: ListedFolder(0, (), tuple(own)) for folder, own in files.items()}


class MediaFiles:
    """The samples of all splits of a folder, numbered through in the order of their keys.

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
        for folder, found in list_folder(address).items():
            self.sizes |= {f"{folder}/{file.name}".lstrip("/"): file for file in found.files}
        groups = self._groups()
        tables = [name for name in self.sizes if name.rpartition("/")[2] in TABLES]
        self.rows: dict[str, dict[str, Any]] = {}
        if tables:
            groups = self._joined(groups, sorted(tables))
        self.keys = sorted(groups)
        self.parts = [groups[key] for key in self.keys]
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
            if key not in samples and "/" in name and name.rpartition("/")[2] not in TABLES
        ]
        if lone:
            warn_once(
                log,
                f"{self.address}: files of no sample",
                "%s: %d files belong to no media file of the same name, and are left out, e.g. %s",
                redact(self.address),
                len(lone),
                lone[0],
            )
        return samples

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
                paths = {c: f"{folder}/{f}".lstrip("/") for c, f in files.items()}
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
                        f"{origin}:{line}: column {min(twice)!r} is called like the file "
                        f"{named[key][min(twice)]}; rename it"
                    )
        return named

    def _classes(self, labels: bool | None, *, may: bool) -> dict[str, int] | None:
        """Return the number of each class, in the order of their names; None for no classes."""
        splits = splits_by_name(self.keys, by_file=False)
        depth = 2 if "" in splits else 3
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
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise FormatError(
                    f"{origin}:{reader.line_num}: does not have {len(reader.fieldnames or ())} "
                    f"fields as the first line"
                )
            yield reader.line_num, row
    except csv.Error as error:
        raise FormatError(f"{origin}:{reader.line_num}: {error}") from error


class MediaFolderSource(ItemSource):
    """The samples of a split of a folder of media files.

    A sample has a part for each of its files, called like their extensions, and for what tables
    or the names of classes say about it. Its key is its path below the folder.

    Args:
        address: The folder.
        split_part: The split to read.
        options: The options in the document.
        parts: Parts to read unless `options` name them; None for all.
        subsets: Ranges that narrow the split, see `energon.plan.subset`.
        exclude: Keys of excluded samples, or names of files.

    Raises:
        ConfigError: If there is no such split or part.
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        split_part: str = "train",
        options: FolderOptions | None = None,
        parts: Collection[str] | PartFilter | None = None,
        subsets: Sequence[Any] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        options = options or FolderOptions(origin=redact(address))
        self.media = MediaFiles(os.fspath(address), labels=options.labels)
        self.chosen = _split_numbers(self.media, options, split_part)
        self._split = (split_part, options.split or "")
        super().__init__(
            any_path(address),
            split_part=split_part,
            bounds=(0, len(self.chosen)),
            columns=options.columns,
            parts=parts,
            subsets=subsets,
            exclude=exclude,
        )

    @property
    def mean_sample_bytes(self) -> float:
        """Bytes of the files of a sample, on average."""
        sizes = self.media.sizes
        some = self.chosen[:: max(1, len(self.chosen) // 1000)].tolist()
        files = [name for n in some for name in self.media.parts[n].values()]
        return max(1.0, sum(sizes[name].size for name in files) / len(some))

    @property
    def place(self) -> tuple[str, ...]:
        return ("files", str(self.path), *self._split)

    @property
    def all_parts(self) -> list[str]:
        own = dict.fromkeys(part for parts in self.media.parts for part in parts)
        said = dict.fromkeys(name for row in self.media.rows.values() for name in row)
        labels = () if self.media.classes is None else ("label", "label_name")
        return [*own, *said, *labels]

    def key_of(self, number: int) -> str:
        return self.media.keys[int(self.chosen[number])]

    def numbers_of(self, key: str) -> Sequence[int]:
        keys = [key] if key in self._places else [(split_name(key) or ("", ""))[0]]
        return [self._places[each] for each in keys if each in self._places]

    def shard_of(self, number: int) -> str:
        return self._first_file(number)

    def position(self, number: int) -> tuple[str, int, int]:
        return self._first_file(number), 0, 0

    def content(self) -> Any:
        digest = blake2b(digest_size=8)
        for number in self.chosen.tolist():
            for name in self.media.parts[number].values():
                digest.update(f"{name}\0{self.media.sizes[name].size}\0".encode())
        return [digest.hexdigest(), self.media.classes]

    def items(self, numbers: Ints) -> list[tuple[dict[str, Any], dict[str, str]]]:
        media = self.media
        keys = [self.key_of(number) for number in numbers.tolist()]
        names = [
            {p: f for p, f in media.parts[int(self.chosen[n])].items() if self.takes(p)}
            for n in numbers.tolist()
        ]
        contents = iter(self._read([file for own in names for file in own.values()]))
        found: list[tuple[dict[str, Any], dict[str, str]]] = []
        for key, own in zip(keys, names, strict=True):
            parts: dict[str, Any] = {part: next(contents) for part in own}
            more = dict(media.rows.get(key, {}))
            if media.classes is not None:
                name = media.label_of(key)
                more |= {"label": media.classes[name], "label_name": name}
            parts |= {part: value for part, value in more.items() if self.takes(part)}
            found.append((parts, {}))
        return found

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the files of samples in a store are, each as a whole."""
        if not self.is_remote:
            return
        for place, number in enumerate(self.numbers(ordinals).tolist()):
            for part, name in self.media.parts[int(self.chosen[number])].items():
                size = self.media.sizes[name].size
                if self.takes(part) and size:
                    bounds = np.array([0]), np.array([size])
                    yield Extents(self._remote(name), np.array([place]), *bounds)

    @cached_property
    def _places(self) -> dict[str, int]:
        keys = (self.media.keys[n] for n in self.chosen.tolist())
        return {key: place for place, key in enumerate(keys)}

    def _first_file(self, number: int) -> str:
        return next(iter(self.media.parts[int(self.chosen[number])].values()))

    def _read(self, names: Sequence[str]) -> list[bytes]:
        if not self.is_remote:
            return [self._read_local(name) for name in names]
        objects = [self._remote(name).object for name in names]
        buffer = span_buffer()
        found = [buffer.find(each, 0, each.info.size) for each in objects]
        missing = [n for n, content in enumerate(found) if content is None]
        if missing:
            store = objects[0].store
            read = [(objects[n],) for n in missing]
            answers = store.together(lambda each: each.read(0, each.info.size), read)
            for n, content in zip(missing, answers, strict=True):
                found[n] = content
        return [content or b"" for content in found]

    def _read_local(self, name: str) -> bytes:
        path = os.path.join(self.media.address, name)
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise ShardChangedError(
                f"{path}: cannot be read ({error.strerror}), but was there when the folder was "
                "listed; restore it, or start again without it"
            ) from error

    def _remote(self, name: str) -> RemoteFile:
        address = join_address(self.media.address, name)
        listed = self.media.sizes[name]
        _, key = open_store(address)
        return RemoteFile(address, info=ObjectInfo(key, listed.size, listed.version))


def _split_numbers(media: MediaFiles, options: FolderOptions, split_part: str) -> Ints:
    """Return which of all samples belong to a split, ascending."""
    origin = options.origin or redact(media.address)
    splits = splits_by_name(media.keys, by_file=False)
    if options.split is not None or "" in splits:
        low, high = ratio_range(
            options.split, split_part, len(media.keys), what="samples", origin=origin
        )
        if options.split is None:
            return np.arange(low, high)
        # Samples of a class lie together, and each split is to have some of each.
        digests = [blake2b(key.encode(), digest_size=8).digest() for key in media.keys]
        order = sorted(range(len(digests)), key=digests.__getitem__)
        return np.array(sorted(order[low:high]), np.int64)
    found = find_split(split_part, splits)
    if found is None:
        raise ConfigError(
            f"{redact(media.address)}: there is no split {split_part!r}, only "
            f"{', '.join(splits)}, by the names of its folders"
        )
    own = set(splits[found])
    return np.array([n for n, key in enumerate(media.keys) if key in own], np.int64)


class MediaFolderKind(RowKind):
    """Folders of images, audio and video."""

    name = "folder"
    noun = "a folder of media files"
    has_files = True
    source = MediaFolderSource
    options_type = FolderOptions
    options = FolderOptions.names()
    prepares = True

    def prepare(self, address: str) -> int:
        note_listing(address)
        return len(MediaFiles(address).keys)

    def splits_of(self, address: str) -> Collection[str]:
        return splits_by_name(MediaFiles(address).keys, by_file=False)

    def file_store(self, address: str, *, pool: ShardPool | None = None) -> FileStore[bytes]:
        return SystemFileStore(address)

    def browse(self, address: str, **_: Any) -> Any:
        raise ConfigError(f"{redact(address)} is a folder already and needs no mounting")

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        media = MediaFiles(address)
        splits = {}
        for name in self.split_names(address):
            chosen = _split_numbers(media, FolderOptions(), name).tolist()
            files = sum(len(media.parts[n]) for n in chosen)
            splits[name] = {"samples": len(chosen), "shards": files, "excluded": 0}
        names = [file for own in media.parts for file in own.values()]
        return {
            "sample_type": "CrudeSample",
            "samples": len(media.keys),
            "shards": len(names),
            "bytes": sum(media.sizes[name].size for name in names),
            "missing_shards": [],
            "energon_version": None,
            "splits": splits,
            "classes": media.classes or {},
        }


KIND = MediaFolderKind()
