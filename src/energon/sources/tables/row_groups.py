"""Rows of files, in groups that are read as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from energon.errors import FormatError
from energon.formats.parquet import ParquetFooter
from energon.io.range_file import RangeFile
from energon.sources.tables.columns import RowTable, common_type, is_data, plain_type

if TYPE_CHECKING:
    import pyarrow as pa


class RowGroups(ABC):
    """The row groups of some files, numbered consecutively.

    Args:
        folder: The folder that the files are in.
        footers: The files, with the number of rows of each of their groups.

    Attributes:
        suffix: The suffix of the file names.
        file: The file of each group.
        first: The first group of each file, and the number of groups.
        ends: The first row of each group, and the number of rows.
        file_ends: The first row of each file, and the number of rows.
    """

    suffix: str

    def __init__(self, folder: str, footers: Sequence[ParquetFooter]) -> None:
        self.folder = folder
        self.footers = list(footers)
        counts = [len(footer.rows) for footer in footers]
        self.file = np.repeat(np.arange(len(counts)), counts)
        self.first = np.array([0, *accumulate(counts)])
        rows = np.array([n for footer in footers for n in footer.rows], np.int64)
        self.ends = np.concatenate(([0], np.cumsum(rows)))
        self.file_ends = np.array([0, *accumulate(sum(footer.rows) for footer in footers)])

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self.ends[-1])

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the first file."""
        return self.schema_of(0)

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The columns of all files, with the types to which their values are converted.

        If the values of two files cannot have the same type, it is that of the first one.
        """
        return self._columns[0]

    def check_columns(self, names: Iterable[str]) -> None:
        """Make sure that columns have the same type in all files, or can be converted to one.

        Raises:
            FormatError: If that is not the case, or a file has two columns of the same name.
        """
        _, problems = self._columns
        for name in names:
            if name in problems:
                raise FormatError(problems[name])

    @cached_property
    def _columns(self) -> tuple[dict[str, pa.DataType], dict[str, str]]:
        """The types of the columns, and the problems of some."""
        kinds: dict[str, pa.DataType] = {}
        files: dict[str, int] = {}
        problems: dict[str, str] = {}
        schemas = set()
        for number in range(len(self.footers)):
            schema = self.schema_of(number)
            if schema in schemas:
                continue
            schemas.add(schema)
            try:
                fields = list(zip(schema.names, schema, strict=True))
            except ValueError as error:
                raise FormatError(
                    f"{self.origin(number)}: the name of a column is not UTF-8 text: {error}; "
                    "write the file again"
                ) from error
            for name, field in fields:
                kind = plain_type(field.type)
                known = kinds.setdefault(name, kind)
                common = common_type(known, kind)
                if schema.names.count(name) > 1:
                    problems.setdefault(name, f"{self.origin(number)}: has two columns {name!r}")
                elif common is None:
                    problems.setdefault(
                        name,
                        f"{self.origin(number)}: has {kind} in column {name!r}, but "
                        f"{self.origin(files[name])} has {known} there, and no type has room for "
                        "both; write one of them with the type of the other, or leave the column "
                        "out with `read: {columns: […]}`",
                    )
                elif name not in files or common != known:
                    kinds[name], files[name] = common, number
        return kinds, problems

    @cached_property
    def partitions(self) -> dict[str, list[Any]]:
        """The values in the names of folders, as in `year=2024/`: by key, that of each file.

        They are whole numbers if all of a key are.
        """
        files = [_partitions(footer.name) for footer in self.footers]
        keys = dict.fromkeys(key for file in files for key in file)
        return {key: _whole_numbers([file.get(key) for file in files]) for key in keys}

    def column_types(self) -> dict[str, str]:
        """Return the types of the columns, and of the values in the names of folders."""
        types = {name: str(kind) for name, kind in self.columns.items() if is_data(name)}
        for key, values in self.partitions.items():
            types[key] = "int64" if any(isinstance(value, int) for value in values) else "string"
        return types

    def place(self, group: int) -> tuple[int, int]:
        """Return the file of a group, and the number of the group in it."""
        number = int(self.file[group])
        return number, group - int(self.first[number])

    @abstractmethod
    def schema_of(self, number: int) -> pa.Schema:
        """Return the columns of a file."""

    @abstractmethod
    def origin(self, number: int) -> str:
        """Return the name of a file for messages."""

    @abstractmethod
    def table(self, group: int, columns: tuple[str, ...]) -> RowTable:
        """Return some columns of a group."""

    def count_taken(self, group: int, columns: tuple[str, ...], num_rows: int) -> None:  # noqa: B027
        """Note that a number of rows were taken from the table of a group."""

    @abstractmethod
    def chunks(self, group: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return where some columns of a group begin and end in the file."""

    @abstractmethod
    def range_file(self, number: int) -> RangeFile:
        """Return a file, open for reading ranges."""


def _partitions(name: str) -> dict[str, str | None]:
    """Return the values encoded in the folders of a file name.

    Example:
        >>> _partitions("year=2024/lang=en/0.parquet")
        {'year': '2024', 'lang': 'en'}
    """
    steps = [step.partition("=") for step in name.split("/")[:-1] if "=" in step]
    return {
        unquote(key): None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
        for key, _, value in steps
    }


def _whole_numbers(values: list[str | None]) -> list[Any]:
    """Return values as whole numbers if all of them are, and otherwise as they are."""
    given = [value for value in values if value is not None]
    if not all(value.isascii() and value.isdecimal() for value in given):
        return values
    return [None if value is None else int(value) for value in values]
