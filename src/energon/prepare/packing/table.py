"""Pack a table: CSV, TSV, JSON or Parquet, with columns of values and of files."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from energon.errors import ConfigError, FormatError
from energon.extra import needs_extra
from energon.io.epath import AnyPath
from energon.prepare.files import reporting
from energon.prepare.packing.place import open_ascending
from energon.prepare.packing.row import RowRules

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet")
BATCH_ROWS = 256
MAX_FIELD_BYTES = 1 << 30
ARRAY_CHARACTERS = 1 << 20
SURE_ROWS = 10_000
"""A column that so many rows lack is taken for misspelled."""

_BETWEEN = re.compile(r"[\s,]*")


class TableSource:
    """The rows of a table, in their order.

    Args:
        path: The file, of a kind that its suffix tells.
        rules: How rows become samples.
    """

    def __init__(self, path: AnyPath, rules: RowRules) -> None:
        self.path = path
        self.rules = rules
        self._left_out: list[str] = []

    def split_names(self) -> list[str]:
        return [""]

    def samples(self, split: str, start: int) -> Iterator[Mapping[str, Any]]:
        found = 0
        for number, row in enumerate(self._rows()):
            sample = self.rules.sample(row, number, str(self.path))
            if sample is None:
                self._left_out.append(f"{self.path}, row {number + 1}: a file is missing")
                continue
            found += 1
            if found > start:
                yield sample

    def skipped(self) -> list[str]:
        return self._left_out

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        suffix = self.path.suffix.lower()
        with reporting(self.path):
            if suffix == ".parquet":
                yield from _parquet_rows(self.path)
            elif suffix in (".csv", ".tsv"):
                yield from _csv_rows(self.path, "," if suffix == ".csv" else "\t")
            elif suffix == ".json":
                yield from self._filled(_array_rows(self.path))
            else:
                yield from self._filled(_json_rows(self.path))

    def _filled(self, rows: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yield rows with None for the columns that they lack, as is usual in JSON.

        A column that no row has is misspelled.
        """
        rules = self.rules
        wanted = {*rules.file_columns, *rules.parts, *rules.leave_out}
        unseen, there = set(wanted), dict[str, None]()
        number = 0
        for number, row in enumerate(rows, start=1):
            if unseen:
                unseen -= row.keys()
                there |= dict.fromkeys(row)
                if number >= SURE_ROWS:
                    self._check_seen(unseen, number, there)
            yield {**row, **{column: None for column in wanted if column not in row}}
        if number:
            self._check_seen(unseen, number, there)

    def _check_seen(self, unseen: set[str], number: int, there: Iterable[str]) -> None:
        if unseen:
            raise ConfigError(
                f"{self.path}: in {number} rows there is no column {min(unseen)!r}, there are "
                f"{', '.join(there)}"
            )


def _csv_rows(path: AnyPath, delimiter: str) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(MAX_FIELD_BYTES)
    with (
        open_ascending(path) as binary,
        io.TextIOWrapper(binary, newline="", encoding="utf-8-sig") as file,
    ):
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise FormatError(
                        f"{path}:{reader.line_num}: has not {len(reader.fieldnames or [])} fields "
                        "as the first line"
                    )
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise FormatError(f"{path}:{reader.line_num}: {error}") from error


def _json_rows(path: AnyPath) -> Iterator[Mapping[str, Any]]:
    with open_ascending(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FormatError(f"{path}:{number}: {error}; wanted are JSON lines") from error
            if not isinstance(row, dict):
                raise FormatError(f"{path}:{number}: wanted are JSON objects")
            yield row


def _array_rows(path: AnyPath) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a JSON array, of which only a part is in memory."""
    decode = json.JSONDecoder().raw_decode
    with open_ascending(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig") as file:
        text = _read_text(file, path, ARRAY_CHARACTERS).lstrip()
        if not text.startswith("["):
            raise FormatError(
                f"{path}: begins with {text[:20]!r}; wanted is an array with an object for each "
                "sample. Write the samples as JSON lines, into a .jsonl file"
            )
        number, position = 0, 1
        while True:
            position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
            if text.startswith("]", position):
                return
            try:
                row, position = decode(text, position)
            except ValueError as error:
                # The object goes on in what was not read yet, of which ever more is taken.
                more = _read_text(file, path, max(ARRAY_CHARACTERS, len(text)))
                if not more or len(text) - position > MAX_FIELD_BYTES:
                    raise FormatError(f"{path}: element {number}: {error}") from error
                text, position = text[position:] + more, 0
                continue
            if not isinstance(row, dict):
                raise FormatError(f"{path}: element {number}: wanted are JSON objects")
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
    with path.open("rb") as binary:
        try:
            file = pq.ParquetFile(binary)
        except pa.ArrowInvalid as error:
            raise FormatError(f"{path}: {error}") from error
        with file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                yield from batch.to_pylist()
