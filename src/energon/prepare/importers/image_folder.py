"""Pack a folder of media files with a `metadata` table, as Hugging Face `datasets` loads it.

The table is `metadata.csv`, `metadata.jsonl` or `metadata.parquet`. Its column `file_name`, and
columns like `mask_file_name`, have paths below the folder that the table is in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from energon.decode.sample_decoder import is_media
from energon.errors import ConfigError
from energon.prepare.importers.row import RowRules
from energon.prepare.importers.selection import FileSelection, splits_by_name
from energon.prepare.importers.table import Table, TableSource, table_columns, table_values

FILE_NAME = "file_name"
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def is_metadata(name: str) -> bool:
    """Return whether a file is the table of a folder of media files, by its name."""
    return name.rpartition("/")[2] in METADATA


class ImageFolderSource(TableSource):
    """The rows of all metadata tables of a folder, with the files that they name.

    Keys are the paths of the files, without their extensions.

    Args:
        files: The tables, and the files that they may name.
        rules: How rows become samples; keys and columns of files are as usual, unless given.

    Raises:
        ConfigError: If a table has no column `file_name`.
    """

    def __init__(self, files: FileSelection, rules: RowRules) -> None:
        self.files = files
        named = splits_by_name([n for n in files.names if is_metadata(n)], by_file=False)
        self._tables = {
            name: _table(files, name, rules) for names in named.values() for name in names
        }
        super().__init__(
            {split: [self._tables[name] for name in names] for split, names in named.items()}
        )

    def skipped(self) -> list[str]:
        named = {
            f"{name.rpartition('/')[0]}/{value}".lstrip("/")
            for name, table in self._tables.items()
            for column in table.rules.file_columns
            for value in table_values(table, column)
        }
        unnamed = [n for n in self.files.names if is_media(n) and n not in named]
        return [*super().skipped(), *(f"{name}: no row of a metadata table" for name in unnamed)]


def _table(files: FileSelection, name: str, rules: RowRules) -> Table:
    path = files.folder / name
    folder = name.rpartition("/")[0]
    columns = table_columns(path)
    if FILE_NAME not in columns and not rules.file_columns:
        raise ConfigError(
            f"{path}: has no column {FILE_NAME!r}, as a table called so has beside files that it "
            f"names; there are {', '.join(columns) or 'none'}. Say with --file-column which has "
            "the paths, or with --kind table or --kind folder what it is instead"
        )
    _refuse_lists(path, columns)
    files_of_rows = rules.file_columns or tuple(_file_columns(columns))
    by_path = rules.key_column is None
    rules = replace(
        rules,
        root=path.parent,
        file_columns=files_of_rows,
        key_column=files_of_rows[0] if by_path else rules.key_column,
    )
    return Table(path, rules, f"{folder}/" if by_path and folder else "")


def _file_columns(columns: Iterable[str]) -> list[str]:
    others = [column for column in columns if column.endswith(f"_{FILE_NAME}")]
    return [FILE_NAME, *others]


def _refuse_lists(path: object, columns: Iterable[str]) -> None:
    for column in columns:
        if column == f"{FILE_NAME}s" or column.endswith(f"_{FILE_NAME}s"):
            raise ConfigError(
                f"{path}: column {column!r} has lists of files, which cannot be parts of a sample; "
                "write a column for each file, or the samples with energon.ShardWriter"
            )
