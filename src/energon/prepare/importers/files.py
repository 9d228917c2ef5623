"""Import files: those of a folder, and those that a table names beside columns of values.

Files whose paths are equal up to the first dot of their names form a sample. Tables are CSV, TSV,
JSON or Parquet. The table of an image folder, as Hugging Face `datasets` loads it, has one of the
names in `METADATA_TABLES`. Its column `file_name`, and columns like `mask_file_name`, have paths
below the folder of the table.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from energon.decode.sample_decoder import is_decoded, is_media
from energon.errors import ConfigError, DatasetNotFoundError, FormatError, needs_extra
from energon.formats.meta.info import guess_splits
from energon.formats.parquet import is_json, python_rows
from energon.formats.tar.headers import split_name
from energon.formats.text import check_columns, csv_rows, parse_json
from energon.io.epath import AnyPath, EPath, open_file
from energon.io.files import read_document
from energon.limits import DOCUMENT_BYTES, document_lines
from energon.messages import counted, shell_word
from energon.metadataset.kind import COMPRESSIONS, LINES, METADATA_TABLES, TABLES, table_suffix
from energon.prepare.files import reporting
from energon.prepare.importers.row import (
    PackSource,
    RowRules,
    RuledRow,
    Selects,
    TabularSource,
    every,
)
from energon.prepare.importers.selection import FileSelection, is_about_data, open_decompressed

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


class TableSource(TabularSource):
    """The rows of tables, in their order.

    Args:
        splits: The tables of each split.
    """

    def rows(self, split: str, start: int) -> tuple[int, Iterator[RuledRow]]:
        return 0, (
            RuledRow(row, number, str(table.path), table.rules, table.prefix)
            for table in self._splits[split]
            for number, row in enumerate(read_rows(table))
        )


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
    decided = {*table.rules.parts, *table.rules.leave_out}
    return [
        column
        for column in columns
        if column not in decided and _names_files([row.get(column) for row in rows], table.rules)
    ]


def find_roots(path: AnyPath, rules: RowRules) -> dict[Path, list[str]]:
    """Return the folders near a table below which its rows name files, and in which columns."""
    if isinstance(path, EPath):
        return {}
    folders = sorted(folder for folder in path.parent.iterdir() if folder.is_dir())[:MAX_FOLDERS]
    roots = {root: find_file_columns(Table(path, replace(rules, root=root))) for root in folders}
    return {root: columns for root, columns in roots.items() if columns}


def look_like_files(table: Table) -> list[tuple[str, str]]:
    """Return the columns whose first rows seem to contain paths of media, with a value."""
    decided = {*table.rules.parts, *table.rules.leave_out}
    return [
        (column, value)
        for row in islice(read_rows(table), 1)
        for column, value in row.items()
        if isinstance(value, str)
        and "://" not in value
        and _FILE_NAME.fullmatch(value)
        and is_media(value)
        and column not in decided
    ]


def _names_files(values: Sequence[Any], rules: RowRules) -> bool:
    """Return whether all values are like paths of files, and some of these exist."""
    paths = [value for value in values if value not in (None, "")]
    if not paths or not all(isinstance(v, str) and _FILE_NAME.fullmatch(v) for v in paths):
        return False
    # Where others are missing, packing names them, rather than taking paths for texts.
    return any(rules.has_file(path) for path in paths)


def _stem(name: str) -> str:
    """Return the path of a table without its suffixes, the prefix of keys without dots."""
    path = PurePosixPath(name).with_suffix("")
    path = path.with_suffix("") if name.lower().endswith(COMPRESSIONS) else path
    return str(path.with_name(path.name.replace(".", "_")))


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


CONTAINERS = frozenset(
    {
        *("arrow", "feather", "orc", "avro", "tfrecord", "tfrecords", "array_record", "h5", "hdf5"),
        *("zip", "7z", "rar", "gz", "bz2", "xz", "zst", "tar", "tgz", "mdb", "lmdb", "mds"),
        *("sqlite", "sqlite3", "db", "beton", "safetensors", "rec", "riegeli", "vortex", "lance"),
    }
)
"""Extensions of files that hold many samples, or must be unpacked first."""

MEGATRON_MAGIC = b"MMIDIDX\0\0"
MAX_LABELS = 10
MAX_PART_SETS = 8
"""How many labels and combinations of parts are shown."""


class FolderSource(PackSource):
    """Files, sorted by path. Samples are named by their paths below the folder.

    Args:
        files: The files.
        as_files: Whether to take each file as it is, even if it seems to hold many samples.
        label_from_folder: Whether samples get the fields `label` and `label_name` in their part
            `json`: number and name of the folder that they are in, among all such folders.

    Raises:
        DatasetNotFoundError: If there is no such folder, or nothing in it is a sample.
        ConfigError: If the files do not group into samples.
    """

    def __init__(
        self, files: FileSelection, *, as_files: bool = False, label_from_folder: bool = False
    ) -> None:
        self.folder = files.folder
        self._left_out: list[str] = []
        named = groupby(self._named(files.names), key=lambda pair: pair[0][0])
        groups = {key: [(part, name) for (_, part), name in group] for key, group in named}
        if not as_files:
            groups = self._checked(groups)
        self.labels = _labels(groups, self.folder) if label_from_folder else None
        keys = guess_splits(list(groups), by_file=False, origin=str(self.folder))
        self._splits = {split: {key: groups[key] for key in own} for split, own in keys.items()}

    def samples(
        self, split: str, start: int = 0, is_selected: Selects = every
    ) -> Iterator[Mapping[str, Any]]:
        for key, files in islice(self._splits[split].items(), start, None):
            if is_selected(key, {"folder": os.path.dirname(key)}):
                sample = {part: self.folder / name for part, name in files}
                yield {"__key__": key, **self._labelled(key, sample)}

    def part_names(self) -> frozenset[str]:
        splits = self._splits.values()
        parts = {part for groups in splits for files in groups.values() for part, _ in files}
        return frozenset(parts if self.labels is None else {*parts, "json"})

    def record(self) -> dict[str, Any]:
        return {} if self.labels is None else {"labels": self.labels}

    def notes(self) -> list[str]:
        if self.labels is None:
            return self._part_sets()
        classes = [f"{number} {name}" for name, number in self.labels.items()]
        more = [f"… {len(classes)} in total"] if len(classes) > MAX_LABELS else []
        return [*self._part_sets(), f"labels: {', '.join([*classes[:MAX_LABELS], *more])}"]

    def _part_sets(self) -> list[str]:
        """Return how many samples have which parts, unless all have the same."""
        sets: dict[str, list[str]] = {}
        for groups in self._splits.values():
            for key, files in groups.items():
                parts = " + ".join(sorted({part.lower() for part, _ in files}))
                sets.setdefault(parts, []).append(key)
        if len(sets) == 1:
            return []
        ordered = sorted(sets.items(), key=lambda item: -len(item[1]))
        shown = [
            f"{counted(len(keys), 'sample')} with {parts}, e.g. {keys[0]}"
            for parts, keys in ordered[:MAX_PART_SETS]
        ]
        if len(ordered) > MAX_PART_SETS:
            shown.append(f"{len(ordered) - MAX_PART_SETS} more combinations of parts")
        return ["samples differ in their parts:", *(f"  {line}" for line in shown)]

    def _named(self, names: Sequence[str]) -> list[tuple[tuple[str, str], str]]:
        """Return key and part of each file that has both, and its name."""
        pairs = []
        for name in names:
            split = split_name(name)
            if split is None:
                self._left_out.append(f"{name}: not a sample, its name has no extension")
            elif is_about_data(name):
                self._left_out.append(f"{name}: not a sample, it describes the folder")
            else:
                pairs.append((split, name))
        if not pairs:
            raise DatasetNotFoundError(
                f"{self.folder}: no file with an extension in it or below; expected files such as "
                "0001.jpg and 0001.txt"
            )
        return sorted(pairs)

    def _checked(
        self, groups: dict[str, list[tuple[str, str]]]
    ) -> dict[str, list[tuple[str, str]]]:
        """Return the groups that are samples, if this can be told for most of them."""
        self._refuse_token_files(groups)
        lone = {key: files[0] for key, files in groups.items() if len(files) == 1}
        strangers = {key: name for key, (part, name) in lone.items() if not is_decoded(part)}
        lists = [name for part, name in lone.values() if part.lower() == "json"]
        if len(lists) <= MAX_TABLE_ARRAYS:
            arrays = {name for name in lists if is_array(self.folder / name)}
            strangers |= {key: name for key, (_, name) in lone.items() if name in arrays}
        containers = [
            name
            for key, name in strangers.items()
            if is_table(name) or lone[key][0].rpartition(".")[2].lower() in CONTAINERS
        ]
        if containers or 2 * len(strangers) > len(groups):
            raise ConfigError(self._explain(containers or list(strangers.values()), len(groups)))
        for name in strangers.values():
            self._left_out.append(
                f"{name}: not a sample, no other file has its name; --as-files packs it"
            )
        return {key: files for key, files in groups.items() if key not in strangers}

    def _explain(self, names: Sequence[str], num_groups: int) -> str:
        kinds = Counter(f".{name.rpartition('.')[2].lower()}" for name in names)
        extensions = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5))
        start = (
            f"{self.folder}: the files do not group into samples: of {num_groups} names, "
            f"{len(names)} belong to only one file, which is neither media nor text "
            f"({extensions}), e.g. {names[0]}. "
        )
        table = next((name for name in names if is_table(name)), None)
        if table is None:
            return (
                f"{start}Expected files that share a name, such as 0001.jpg and 0001.txt, images, "
                f"audio, video or texts, tables ({', '.join(TABLES)}) or tar archives; unpack or "
                "convert the files, or pass --as-files to make each file a sample"
            )
        return (
            f"{start}If each row of {table} is a sample, run `energon pack "
            f"{shell_word(self.folder / table)} TARGET`, with --file-column COLUMN if rows name "
            f"files. Otherwise select files with a pattern, such as '{self.folder}/*.jpg', or "
            "pass --as-files to make each file a sample"
        )

    def _refuse_token_files(self, groups: Mapping[str, list[tuple[str, str]]]) -> None:
        for key, files in groups.items():
            names = {part.lower(): name for part, name in files}
            if not {"bin", "idx"} <= names.keys():
                continue
            path = self.folder / names["idx"]
            with reporting(path), open_file(path) as file:
                magic = file.read(len(MEGATRON_MAGIC))
            if magic == MEGATRON_MAGIC:
                raise ConfigError(
                    f"{self.folder}: {names['bin']} and {names['idx']} are an indexed dataset of "
                    "Megatron-LM, which needs no packing: train from the folder as it is, and see "
                    f"`energon info {shell_word(self.folder)}`. --as-files would make a single "
                    f"sample of {key!r}"
                )

    def _labelled(self, key: str, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a sample with its label, if it is to have one."""
        if self.labels is None:
            return sample
        name = _class_name(key)
        fields: dict[str, Any] = {"label": self.labels[name], "label_name": name}
        part = next((part for part in sample if part.lower() == "json"), "json")
        if part in sample:
            fields = {**_json_object(sample[part], fields), **fields}
        return {**sample, part: fields}


def _labels(groups: Mapping[str, Any], folder: AnyPath) -> dict[str, int]:
    """Return the number of each class, ordered by name."""
    bare = next((key for key in groups if "/" not in key), None)
    if bare is not None:
        raise ConfigError(
            f"{folder}: {bare!r} is not in a folder that could be its label; expected folders like "
            "cat/ and dog/ that contain all files"
        )
    return {name: number for number, name in enumerate(sorted({_class_name(k) for k in groups}))}


def _class_name(key: str) -> str:
    return os.path.basename(os.path.dirname(key))


def _json_object(path: AnyPath, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object in a file that gets further fields."""
    with reporting(path):
        data = read_document(path)
    value = parse_json(data, origin=str(path), hint="expected JSON, to add the label to")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected an object to add the label to, found {value!r:.40}")
    present = sorted(fields.keys() & value.keys())
    if present:
        raise ConfigError(f"{path}: already has a field {present[0]!r}; omit --label-from")
    return value


FILE_NAME_COLUMN = "file_name"


def is_metadata(name: str) -> bool:
    """Return whether a file is the table of a folder of media files, judging by its name."""
    return name.rpartition("/")[2] in METADATA_TABLES


class ImageFolderSource(TableSource):
    """The rows of all metadata tables of a folder, with the files that they name.

    Keys are the paths of the files, without their extensions.

    Args:
        files: The tables, and the files that they may name.
        rules: How rows become samples; keys and columns of files have their defaults unless given.

    Raises:
        ConfigError: If a table has no column `file_name`.
    """

    def __init__(self, files: FileSelection, rules: RowRules) -> None:
        self.files = files
        tables = [name for name in files.names if is_metadata(name)]
        named = guess_splits(tables, by_file=False, origin=str(files.folder))
        self._tables = {
            name: _table(files, name, rules) for names in named.values() for name in names
        }
        super().__init__(
            {split: [self._tables[name] for name in names] for split, names in named.items()}
        )

    def skipped(self) -> list[str]:
        named = {
            table.rules.address_of(value)
            for table in self._tables.values()
            for column in table.rules.file_columns
            for value in table_values(table, column)
        }
        rules = RowRules(root=self.files.folder)
        unnamed = [n for n in self.files.names if is_media(n) and rules.address_of(n) not in named]
        return [*super().skipped(), *(f"{name}: no row of a metadata table" for name in unnamed)]


def _table(files: FileSelection, name: str, rules: RowRules) -> Table:
    path = files.folder / name
    folder = name.rpartition("/")[0]
    columns = table_columns(path)
    if FILE_NAME_COLUMN not in columns and not rules.file_columns:
        raise ConfigError(
            f"{path}: has no column {FILE_NAME_COLUMN!r} with the paths of files, only "
            f"{', '.join(columns) or 'none'}. Pass --file-column with the column of paths, or "
            "--kind table or --kind folder"
        )
    for column in columns:
        if column == f"{FILE_NAME_COLUMN}s" or column.endswith(f"_{FILE_NAME_COLUMN}s"):
            raise ConfigError(
                f"{path}: column {column!r} has lists of files, which cannot be parts of a sample; "
                "write a column for each file, or write the samples with energon.ShardWriter"
            )
    others = [column for column in columns if column.endswith(f"_{FILE_NAME_COLUMN}")]
    files_of_rows = rules.file_columns or (FILE_NAME_COLUMN, *others)
    by_path = rules.key_column is None
    is_below_folder = by_path and folder and rules.root is None
    rules = replace(
        rules,
        root=path.parent if rules.root is None else rules.root,
        file_columns=files_of_rows,
        key_column=files_of_rows[0] if by_path else rules.key_column,
    )
    return Table(path, rules, f"{folder}/" if is_below_folder else "")
