"""Find the samples of a folder of images, audio and video: its listing, tables and classes.

Files with the same path up to the first dot of their names form a sample, if one of them is a
media file. Folders may be classes; tables named `metadata` describe the files beside them.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from energon.decode.sample_decoder import is_media
from energon.errors import ConfigError, DatasetNotFoundError, FormatError
from energon.formats.csv_text import csv_rows
from energon.formats.folder_listing import (
    LISTING,
    ListedFile,
    ListedFolder,
    dump_listing,
    load_listing,
)
from energon.formats.json_text import parse_json
from energon.formats.meta.info import META
from energon.formats.meta.split import guess_splits, split_of_folders
from energon.formats.tar.names import split_name
from energon.io.address import is_remote, join_address, redact
from energon.io.backends.local import folder_entries, is_hidden
from energon.io.files import is_file, list_files, read_bytes, write_bytes
from energon.local_file import decode_utf8
from energon.messages import warn_once
from energon.metadataset.kind import METADATA_TABLES, TABLES

logger = logging.getLogger("energon")

FILE_NAME = "file_name"
"""The column that names the file of a row; other columns with this suffix name further files."""
_READ_TABLES = tuple(name for name in METADATA_TABLES if not name.endswith(".parquet"))
_OTHER_TABLES = tuple(suffix for suffix in TABLES if suffix != ".json")
_FRESH_NS = 2_000_000_000
"""A folder modified this recently may change again without a new modification time."""


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
    folders, others = folder_entries(folder)
    files = [ListedFile(each.name, each.stat().st_size) for each in others if each.is_file()]
    return ListedFolder(mtime_ns, tuple(folder.name for folder in folders), tuple(files))


def _list_remote(address: str) -> dict[str, ListedFolder]:
    files: dict[str, list[ListedFile]] = {}
    for found in list_files(address):
        folder, _, name = found.key.rpartition("/")
        if not is_hidden(found.key):
            files.setdefault(folder, []).append(ListedFile(name, found.size, found.version))
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
        for folder, found in list_folder(address).items():
            self.sizes |= {f"{folder}/{file.name}".lstrip("/"): file for file in found.files}
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
        """Say which table is not read, though it may describe the files.

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
