"""Import folders of files: as they are, or images with a table that describes them.

Files whose paths are equal up to the first dot of their names form a sample. The table of an
image folder, as Hugging Face `datasets` loads it, has one of the names in `METADATA_TABLES`. Its
column `file_name`, and columns like `mask_file_name`, have paths below the folder of the table.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

from energon.decode.sample_decoder import is_decoded, is_media
from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.meta.info import guess_splits
from energon.formats.tar.headers import split_name
from energon.formats.text import parse_json
from energon.io.epath import AnyPath, open_file
from energon.io.files import read_document
from energon.messages import counted, shell_word
from energon.metadataset.kind import METADATA_TABLES, TABLES
from energon.prepare.files import reporting
from energon.prepare.importers.row import PackSource, RowRules, Selects, every
from energon.prepare.importers.selection import FileSelection, is_about_data
from energon.prepare.importers.table import (
    MAX_TABLE_ARRAYS,
    Table,
    TableSource,
    is_array,
    is_table,
    table_columns,
    table_values,
)

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
        groups = _groups(self._named(files.names))
        if not as_files:
            groups = self._checked(groups)
        self.labels = _labels(groups, self.folder) if label_from_folder else None
        keys = guess_splits(list(groups), by_file=False, origin=str(self.folder))
        self._splits = {split: {key: groups[key] for key in found} for split, found in keys.items()}

    def samples(
        self, split: str, start: int = 0, is_selected: Selects = every
    ) -> Iterator[Mapping[str, Any]]:
        for key, files in islice(self._splits[split].items(), start, None):
            if is_selected(key, {"folder": os.path.dirname(key)}):
                sample = {part: self.folder / name for part, name in files}
                yield {"__key__": key, **self._labelled(key, sample)}

    def part_names(self) -> frozenset[str]:
        splits = self._splits.values()
        found = {part for groups in splits for files in groups.values() for part, _ in files}
        return frozenset(found if self.labels is None else {*found, "json"})

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
        found = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5))
        start = (
            f"{self.folder}: the files do not group into samples: of {num_groups} names, "
            f"{len(names)} belong to only one file, which is neither media nor text ({found}), "
            f"e.g. {names[0]}. "
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


def _groups(
    files: Sequence[tuple[tuple[str, str], str]],
) -> dict[str, list[tuple[str, str]]]:
    return {
        key: [(part, name) for (_, part), name in group]
        for key, group in groupby(files, key=lambda pair: pair[0][0])
    }


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
    found = parse_json(data, origin=str(path), hint="expected JSON, to add the label to")
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected an object to add the label to, found {found!r:.40}")
    known = sorted(fields.keys() & found.keys())
    if known:
        raise ConfigError(f"{path}: already has a field {known[0]!r}; omit --label-from")
    return found


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
    _refuse_lists(path, columns)
    files_of_rows = rules.file_columns or tuple(_file_columns(columns))
    by_path = rules.key_column is None
    is_below_folder = by_path and folder and rules.root is None
    rules = replace(
        rules,
        root=path.parent if rules.root is None else rules.root,
        file_columns=files_of_rows,
        key_column=files_of_rows[0] if by_path else rules.key_column,
    )
    return Table(path, rules, f"{folder}/" if is_below_folder else "")


def _file_columns(columns: Iterable[str]) -> list[str]:
    others = [column for column in columns if column.endswith(f"_{FILE_NAME_COLUMN}")]
    return [FILE_NAME_COLUMN, *others]


def _refuse_lists(path: object, columns: Iterable[str]) -> None:
    for column in columns:
        if column == f"{FILE_NAME_COLUMN}s" or column.endswith(f"_{FILE_NAME_COLUMN}s"):
            raise ConfigError(
                f"{path}: column {column!r} has lists of files, which cannot be parts of a sample; "
                "write a column for each file, or write the samples with energon.ShardWriter"
            )
