"""The table of kinds of datasets: how each is recognized, and where it is implemented.

Names of tables, whose rows can become samples, are listed here as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from energon.errors import ConfigError, MissingExtraError


class KindEntry(NamedTuple):
    """How to recognize one kind, and where it is implemented.

    Args:
        name: Its name in documents and reports.
        home: `module:attribute` of a `DatasetKind`, imported when a dataset of the kind is used;
            empty for metadatasets.
        suffixes: A file with one of these suffixes is of this kind.
        markers: A folder with one of these files in its `.nv-meta` is of this kind.
        has_samples: Whether it can be trained with; False for auxiliary data.
        pair: Suffixes of files that form a dataset together: a folder in which some name occurs
            with each of them is of this kind, as is an address they can be appended to.
        upkeep: `module:attribute` of an `energon.prepare.verify.verify.Upkeep`, for kinds that are
            not folders of shards.
        holds: A folder that contains one of these files is of this kind; `*/` stands for a folder
            whose name tells a split.
        says: Requires this key, or one of several, in the JSON object in that file.
        below: A folder is of this kind if most files below it have this suffix; so is a pattern
            such as `data/*.parquet`.
        media: A folder of no other kind is of this kind if most groups of files below it that
            share a base name include one with such a suffix.
        expected: What messages say can be read: "a metadataset (.yaml, .yml)".
        beside: Suffixes of files beside datasets of this kind that belong to them.
        in_shards: Whether it is a folder of tar shards, which commands maintain without `upkeep`.
        rows: `module:attribute` of a function from an address to an `energon.prepare.importers.row.
            DatasetRows`, for kinds that `energon pack` turns into shards.
        package: The distribution that implements it, if it is not installed.
    """

    name: str
    home: str = ""
    suffixes: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    has_samples: bool = True
    pair: tuple[str, ...] = ()
    upkeep: str = ""
    below: str = ""
    holds: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    says: str | tuple[str, ...] = ""
    expected: str = ""
    beside: tuple[str, ...] = ()
    in_shards: bool = False
    rows: str = ""
    package: str = ""


MEDIA = (
    *(".jpg", ".jpeg", ".png", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff", ".ppm"),
    *(".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".aif", ".aiff", ".aifc"),
    *(".mp4", ".mkv", ".webm", ".mov", ".avi", ".mpg", ".mpeg"),
)
"""Suffixes of the files in a folder of media."""

ARROW_KEYS = ("_data_files", "splits")
"""Keys in the files of a saved Hugging Face dataset; other programs write files of these names."""

KINDS = (
    KindEntry("metadataset", suffixes=(".yaml", ".yml"), expected="a metadataset (.yaml, .yml)"),
    KindEntry(
        "jsonl",
        "energon.sources.tables.jsonl:KIND",
        suffixes=(".jsonl", ".jsonl.gz", ".jsonl.zst"),
        upkeep="energon.prepare.jsonl:UPKEEP",
        expected="a .jsonl, .jsonl.gz or .jsonl.zst file",
        beside=(".jsonl.idx",),
    ),
    KindEntry(
        "webdataset",
        "energon.sources.webdataset_kind:KIND",
        markers=(".info.json", ".info.yaml"),
        expected="the folder of a prepared dataset of tar shards",
        in_shards=True,
    ),
    KindEntry(
        "filesystem",
        "energon.sources.files.open:KIND",
        markers=("index.sqlite",),
        has_samples=False,
    ),
    KindEntry(
        "tokens",
        "energon.sources.tokens.kind:KIND",
        suffixes=(".idx", ".bin"),
        pair=(".idx", ".bin"),
        expected="token files (.idx, .bin)",
    ),
    KindEntry(
        "arrow",
        "energon.sources.tables.arrow:KIND",
        holds=("state.json", "dataset_dict.json"),
        says=ARROW_KEYS,
    ),
    KindEntry(
        "parquet",
        "energon.sources.tables.parquet:KIND",
        suffixes=(".parquet",),
        below=".parquet",
        expected=".parquet files",
    ),
    KindEntry("folder", "energon.sources.media_folder:KIND", media=MEDIA),
)
"""The built-in kinds. The first that applies is taken."""

_INDEXES = ("index.json", "*/index.json")
PACKAGED = (
    KindEntry("mds", holds=_INDEXES, says="shards", package="energon-mds"),
    KindEntry("litdata", holds=_INDEXES, says="chunks", package="energon-mds"),
)
"""Kinds that distributions of this repository add. Without these, errors name the package."""

LINES = (".jsonl", ".ndjson")
"""Suffixes of tables with a JSON object in each line."""
TABLES = (".csv", ".tsv", ".json", *LINES, ".parquet")
"""Suffixes of tables, whose rows may be samples."""
METADATA_TABLES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of tables that describe the files in a folder of media."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files."""


def table_suffix(name: str) -> str | None:
    """Return the suffix that tells what kind of table a file is; None if it is not a table.

    Example:
        >>> table_suffix("a/B.JSONL.gz"), table_suffix("a.tar.gz")
        ('.jsonl', None)
    """
    stem, suffix = os.path.splitext(name.lower())
    if suffix in COMPRESSIONS:
        suffix = os.path.splitext(stem)[1]
    return suffix if suffix in TABLES else None


def name_of_lines(name: str) -> str | None:
    """Return the name that a compressed file of JSON lines needs; None for files of other names.

    Example:
        >>> name_of_lines("a.json.gz"), name_of_lines("a.json")
        ('a.jsonl.gz', None)
    """
    stem, json, packing = name.rpartition(".json.")
    return f"{stem}{LINES[0]}.{packing}" if json and packing in ("gz", "zst") else None


ENTRY_POINTS = "energon.dataset_kinds"
"""The group of entry points by which packages add a `KindEntry`."""


def kind_entry(name: str) -> KindEntry:
    """Return the kind of this name.

    Raises:
        ConfigError: If there is none.
    """
    for entries in known_kinds():
        for entry in entries:
            if entry.name == name:
                check_installed(entry)
                return entry
    names = ", ".join(entry.name for entry in (*KINDS, *added_kinds()))
    raise ConfigError(f"there is no kind of dataset {name!r}; there are {names}")


def check_installed(entry: KindEntry, address: str = "a dataset") -> None:
    """Raise MissingExtraError if the package that implements a kind is not installed."""
    if entry.package:
        extra = entry.package.removeprefix("energon-")
        raise MissingExtraError(
            f"{address}: is of the kind {entry.name!r}, which the package {entry.package} reads; "
            f"install it with `pip install 'energon-loader[{extra}]'`, or from a checkout of "
            f"energon with `pip install ./plugins/{entry.package}`"
        )


def load_attribute(home: str) -> Any:
    """Return the object that `module:attribute` of a `KindEntry` names."""
    module, _, attribute = home.partition(":")
    return getattr(import_module(module), attribute)


def known_kinds() -> Iterator[Sequence[KindEntry]]:
    """Yield the built-in kinds and then those of other packages, whose entry points are read."""
    yield KINDS
    yield added_kinds()


def added_kinds() -> tuple[KindEntry, ...]:
    """Return the kinds of other packages, installed or not."""
    return _entries_on(tuple(sys.path))


@lru_cache(maxsize=4)
def _entries_on(path: tuple[str, ...]) -> tuple[KindEntry, ...]:
    from importlib.metadata import entry_points

    installed = [KindEntry(*point.load()) for point in entry_points(group=ENTRY_POINTS)]
    names = {entry.name for entry in installed}
    return (*installed, *(entry for entry in PACKAGED if entry.name not in names))
