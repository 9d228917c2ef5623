"""The listing of a dataset of files, `.nv-meta/folder.listing`.

A magic number, and then a line of JSON for each folder:

    {"folder": "train/cat", "mtime_ns": 0, "folders": [], "files": [["0.jpg", 512, null], …]}

A file has its name, size and, in a store, version. A local folder whose modification time differs
from the listed one is read again; 0 marks a folder that was modified just before it was listed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from energon.errors import FormatError
from energon.formats.json_text import parse_json

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
    """Return the content of a listing, of folders by their paths."""
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
        about = parse_json(line, origin=origin)
        files = tuple(ListedFile(str(name), int(size), v) for name, size, v in about["files"])
        names = [file.name for file in files]
        if any("/" in name or name in ("", ".", "..") for name in (*names, *about["folders"])):
            raise ValueError("it contains paths where names are expected")
        yield (
            str(about["folder"]),
            ListedFolder(int(about["mtime_ns"]), tuple(about["folders"]), files),
        )
