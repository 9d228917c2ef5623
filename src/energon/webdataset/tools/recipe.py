"""Build tar files from recipes: lines with the name of a member and the source of its content.

000001.jpg photos/a.jpg
000001.txt text:a cat on a mat
000001.json s3://bucket/a.json
000001.cls pipe:classify photos/a.jpg
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from energon.errors import ConfigError, FormatError
from energon.formats.tar.names import split_name
from energon.formats.tar.sample_parser import StreamSample
from energon.io.address import redact
from energon.io.backends.local import walk_files
from energon.webdataset.gopen import open_url
from energon.webdataset.reading.urls import local_path


def recipe_of_folder(folder: str) -> Iterator[tuple[str, str]]:
    """Yield name and source of the files of a folder, sorted so that samples are contiguous.

    Hidden files are ignored, like those in shards.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{redact(folder)}: no such folder; recipes are given with --recipe")
    names = [name for name, entry in walk_files(folder) if entry.is_file()]
    for name in sorted(names, key=lambda name: (split_name(name) or (name, ""), name)):
        yield name, str(root / name)


def parse_recipe(lines: Iterable[str], *, origin: str) -> Iterator[tuple[str, str]]:
    """Yield name and source of each line; empty lines and comments (`#`) are ignored.

    Raises:
        FormatError: If a line has no source.
    """
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip() or text.startswith("#"):
            continue
        parts = text.split(maxsplit=1)
        if len(parts) < 2:
            raise FormatError(f"{origin}:{number}: {text!r} has no source; expected NAME SOURCE")
        yield parts[0], parts[1]


def read_recipe(
    entries: Iterable[tuple[str, str]], *, allowed: Collection[str] = (), base: str = "."
) -> Iterator[StreamSample]:
    """Yield the samples that a recipe describes, with local files as paths.

    Args:
        entries: Names and sources.
        allowed: What is allowed, see `security.resolve`.
        base: The base of relative paths.

    Raises:
        FormatError: If a name belongs to no sample, or the lines of a sample are not contiguous.
    """
    sample: StreamSample = {}
    seen: set[str] = set()
    for name, source in entries:
        parts = split_name(name)
        if parts is None:
            raise FormatError(
                f"{name!r} is not a name of a sample: expected KEY.FIELD, not hidden, and not "
                "below a folder like __this__"
            )
        key, field = parts
        if sample.get("__key__") != key:
            if sample:
                yield sample
            if key in seen:
                raise FormatError(
                    f"{name!r}: sample {key!r} appears again after others, so readers would see "
                    "two samples; sort the recipe, or use --sort"
                )
            seen.add(key)
            sample = {"__key__": key}
        if field in sample:
            raise FormatError(f"{name!r} is listed twice; remove one of the lines")
        sample[field] = _content(source, allowed, base)
    if sample:
        yield sample


def _content(source: str, allowed: Collection[str], base: str) -> Any:
    if source.startswith("text:"):
        return source[len("text:") :].encode()
    if source == "-":
        return sys.stdin.buffer.read()
    path = local_path(source)
    if path is not None:
        path = os.path.join(base, path)
        if not os.path.isfile(path):
            raise ConfigError(f"{path}: no such file, but the recipe names it")
        return Path(path)
    stream = open_url(source, allowed=allowed)
    try:
        return b"".join(iter(lambda: stream.read(1 << 20) or b"", b""))
    finally:
        stream.close()
