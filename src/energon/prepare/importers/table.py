"""Pack tables: CSV, TSV, JSON or Parquet, with columns of values and of files."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from energon.decode.sample_decoder import is_media
from energon.errors import ConfigError, FormatError, needs_extra
from energon.formats.meta.info import guess_splits
from energon.formats.parquet import is_json, python_rows
from energon.formats.text import check_columns, csv_rows, parse_json
from energon.io.epath import AnyPath, EPath, open_file
from energon.limits import DOCUMENT_BYTES, document_lines
from energon.metadataset.kind import COMPRESSIONS, LINES, table_suffix
from energon.prepare.files import reporting
from energon.prepare.importers.row import SKIPPED_ROW, PackSource, RowRules, Selects, every
from energon.prepare.importers.selection import FileSelection, open_decompressed

ARRAY_CHARACTERS = 1 << 20
SURE_ROWS = 10_000
"""A column missing from this many rows is considered misspelled."""
MAX_TABLE_ARRAYS = 16
"""If there are more `.json` files than this, each is a sample, not a list of samples."""
MAX_FOLDERS = 64
"""Number of folders next to a table in which files are searched."""
PROBED_ROWS = 16
"""Rows whose values are checked to detect columns that name files."""

_BETWEEN = re.compile(r"[\s,]*")
_FILE_NAME = re.compile(r"[^\n]{1,1024}\.\w{1,8}")


def is_table(name: str) -> bool:
    """Return whether a file is a table, judging by its name."""
    return table_suffix(name) is not None


def is_array(path: AnyPath) -> bool:
    """Return whether a file has a JSON array."""
    with reporting(path), open_file(path) as file:
        return bool(file.read(64).lstrip().startswith(b"["))


@dataclass(frozen=True)
class Table:
    """A file with rows.

    Args:
        path: The file; its suffix tells its kind.
        rules: How its rows become samples.
        prefix: Prefix of keys that do not come from a column.
    """

    path: AnyPath
    rules: RowRules
    prefix: str = ""

    @classmethod
    def at(cls, path: AnyPath, rules: RowRules, prefix: str = "") -> Table:
        """Return the table at a path, whose rows name files next to it unless rules differ."""
        root = path.parent if rules.root is None else rules.root
        return cls(path, replace(rules, root=root), prefix)

    @property
    def root(self) -> AnyPath:
        """The folder below which its rows name files."""
        return self.path.parent if self.rules.root is None else self.rules.root


class TableSource(PackSource):
    """The rows of tables, in their order.

    Args:
        splits: The tables of each split.
        left_out: Files next to them that are not packed, and why.
    """

    def __init__(self, splits: Mapping[str, Sequence[Table]], left_out: Iterable[str] = ()) -> None:
        self._splits = dict(splits)
        self._left_out = list(left_out)
        self._missing: dict[str, None] = {}

    def samples(
        self, split: str, start: int = 0, is_selected: Selects = every
    ) -> Iterator[Mapping[str, Any]]:
        found = 0
        for table in self._splits[split]:
            for number, row in enumerate(read_rows(table)):
                sample = table.rules.sample(row, number, str(table.path))
                if sample is None:
                    self._missing[f"{table.path}, row {number + 1}: {SKIPPED_ROW}"] = None
                    continue
                found += 1
                sample["__key__"] = key = table.prefix + sample["__key__"]
                if found > start and is_selected(key, row):
                    yield sample

    def skipped(self) -> list[str]:
        return [*self._left_out, *self._missing]


def open_tables(files: FileSelection, rules: RowRules) -> TableSource:
    """Return the rows of tables, with splits if the names of all files tell which they are in.

    Rows of several tables are numbered within each, after the name of the table: when tables are
    added, existing keys do not change.
    """
    tables = [name for name in files.names if is_table(name)]
    named = guess_splits(tables, by_file=True, origin=str(files.folder))
    several = len(tables) > 1 and rules.key_column is None
    return TableSource(
        {
            split: [
                Table.at(files.folder / name, rules, f"{_stem(name)}/" if several else "")
                for name in names
            ]
            for split, names in named.items()
        }
    )


def table_columns(path: AnyPath) -> list[str]:
    """Return the columns of the first rows of a table."""
    rows = islice(read_rows(Table.at(path, RowRules())), PROBED_ROWS)
    return list(dict.fromkeys(column for row in rows for column in row))


def table_values(table: Table, column: str) -> Iterator[str]:
    """Yield the values of a column, as text."""
    for row in read_rows(table):
        if row.get(column) is not None:
            yield str(row[column])


def find_file_columns(table: Table) -> list[str]:
    """Return the columns whose first rows contain paths of files below the root."""
    rows = list(islice(read_rows(table), PROBED_ROWS))
    columns = dict.fromkeys(column for row in rows for column in row)
    known = {*table.rules.parts, *table.rules.leave_out}
    return [
        column
        for column in columns
        if column not in known and _names_files([row.get(column) for row in rows], table.rules)
    ]


def find_roots(path: AnyPath, rules: RowRules) -> dict[Path, list[str]]:
    """Return the folders near a table below which its rows name files, and in which columns."""
    if isinstance(path, EPath):
        return {}
    beside = sorted(each for each in path.parent.iterdir() if each.is_dir())[:MAX_FOLDERS]
    found = {root: find_file_columns(Table(path, replace(rules, root=root))) for root in beside}
    return {root: columns for root, columns in found.items() if columns}


def look_like_files(table: Table) -> list[tuple[str, str]]:
    """Return the columns whose first rows seem to contain paths of media, with a value."""
    found = []
    for row in islice(read_rows(table), 1):
        for column, value in row.items():
            if (
                isinstance(value, str)
                and "://" not in value
                and _FILE_NAME.fullmatch(value)
                and is_media(value)
                and column not in {*table.rules.parts, *table.rules.leave_out}
            ):
                found.append((column, value))
    return found


def _names_files(values: Sequence[Any], rules: RowRules) -> bool:
    """Return whether all values are like paths of files, and some of these exist."""
    given = [value for value in values if value not in (None, "")]
    if not given or not all(isinstance(v, str) and _FILE_NAME.fullmatch(v) for v in given):
        return False
    # Where others are missing, packing names them, rather than taking paths for texts.
    return any(rules.has_file(value) for value in given)


def _stem(name: str) -> str:
    """Return the path of a table without its suffixes, the prefix of keys without dots."""
    base = name[: -len(PurePosixPath(name).suffix)] if PurePosixPath(name).suffix else name
    if name.lower().endswith(COMPRESSIONS):
        base = os.path.splitext(base)[0]
    folder, _, file = base.rpartition("/")
    return f"{folder}/{file.replace('.', '_')}".lstrip("/")


def read_rows(table: Table) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table.

    Raises:
        FormatError: If it is damaged.
        ConfigError: If it is JSON, and no row has one of the columns that rules name.
    """
    path = table.path
    suffix = table_suffix(path.name)
    with reporting(path):
        if suffix == ".parquet":
            yield from _parquet_rows(path)
        elif suffix in (".csv", ".tsv"):
            yield from _csv_rows(path, "," if suffix == ".csv" else "\t")
        elif suffix == ".json":
            yield from _filled(_array_rows(path), table)
        else:
            yield from _filled(_json_rows(path), table)


def _filled(rows: Iterator[Mapping[str, Any]], table: Table) -> Iterator[Mapping[str, Any]]:
    """Yield rows with None for the columns that they lack, as is common in JSON.

    A column that no row has is considered misspelled.
    """
    rules = table.rules
    named = {*rules.file_columns, *rules.parts, *rules.leave_out}
    unseen, there = set(named), dict[str, None]()
    number = 0
    for number, row in enumerate(rows, start=1):
        if unseen:
            unseen -= row.keys()
            there |= dict.fromkeys(row)
            if number >= SURE_ROWS:
                _check_seen(table.path, unseen, number, there)
        yield {**row, **{column: None for column in named if column not in row}}
    if number:
        _check_seen(table.path, unseen, number, there)


def _check_seen(path: AnyPath, unseen: set[str], number: int, there: Iterable[str]) -> None:
    if unseen:
        raise ConfigError(
            f"{path}: none of {number} rows has a column {min(unseen)!r}, only {', '.join(there)}"
        )


def _opened(path: AnyPath) -> AbstractContextManager[BinaryIO]:
    suffix = path.suffix.lower()
    names = {".zst": "zstd"}
    return open_decompressed(path, names.get(suffix, suffix[1:]) if suffix in COMPRESSIONS else "")


def _csv_rows(path: AnyPath, delimiter: str) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(DOCUMENT_BYTES.value)
    with (
        _opened(path) as binary,
        io.TextIOWrapper(binary, newline="", encoding="utf-8-sig") as file,
    ):
        try:
            lines = document_lines(file, origin=str(path))
            for _, row in csv_rows(lines, origin=str(path), delimiter=delimiter):
                yield row
        except UnicodeDecodeError as error:
            raise FormatError(
                f"{path}: is not UTF-8 text ({error}); convert it, e.g. with `iconv -f latin1 "
                f"-t utf-8 {path.name} > utf8_{path.name}`"
            ) from error


def _json_rows(path: AnyPath) -> Iterator[Mapping[str, Any]]:
    with _opened(path) as file:
        for number, line in enumerate(document_lines(file, origin=str(path)), start=1):
            if not line.strip():
                continue
            row = parse_json(line, origin=f"{path}:{number}", hint="expected JSON lines")
            if not isinstance(row, dict):
                raise FormatError(f"{path}:{number}: expected JSON objects")
            yield row


def _array_rows(path: AnyPath) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a JSON array, only part of which is in memory."""
    decode = json.JSONDecoder().raw_decode
    with _opened(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig") as file:
        text = _read_text(file, path, ARRAY_CHARACTERS).lstrip()
        if not text.startswith("["):
            raise FormatError(
                f"{path}: begins with {text[:20]!r}; expected an array with an object for each "
                f"sample. Write the samples as JSON lines, into a {LINES[0]} file"
            )
        number, position = 0, 1
        while True:
            position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
            if text.startswith("]", position):
                return
            try:
                row, position = decode(text, position)
            except ValueError as error:
                # The object continues in the unread part, of which more and more is read.
                more = _read_text(file, path, max(ARRAY_CHARACTERS, len(text)))
                if not more or len(text) - position > DOCUMENT_BYTES.value:
                    raise FormatError(f"{path}: element {number}: {error}") from error
                text, position = text[position:] + more, 0
                continue
            if not isinstance(row, dict):
                raise FormatError(f"{path}: element {number}: expected JSON objects")
            number += 1
            yield row


def _read_text(file: io.TextIOWrapper, path: AnyPath, size: int) -> str:
    try:
        return file.read(size)
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: {error}") from error


def _parquet_rows(path: AnyPath) -> Iterator[Mapping[str, Any]]:
    with needs_extra("parquet", f"{path}: Parquet needs pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    with open_file(path) as binary:
        try:
            file = pq.ParquetFile(binary)
        except pa.ArrowInvalid as error:
            raise FormatError(f"{path}: {error}") from error
        with file:
            check_columns(file.schema_arrow.names, str(path))
            names = file.schema_arrow.names
            texts = [field.name for field in file.schema_arrow if is_json(field.type)]
            for group in range(file.num_row_groups):
                for row in python_rows(binary, file.metadata, group, names, origin=str(path)):
                    parsed = {
                        name: parse_json(row[name], origin=f"{path}: column {name!r}")
                        for name in texts
                        if row[name] is not None
                    }
                    yield row | parsed
