"""Turn rows of a table into samples."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from energon.errors import ConfigError, DatasetNotFoundError, MissingExtraError, StorageError
from energon.formats.media import SIGNATURE_BYTES, guess_extension
from energon.io.epath import AnyPath, EPath

Row = Mapping[str, Any]
"""What a source knows about a sample besides its parts: columns of its table, or its `folder`."""
Selects = Callable[[str, Row], bool]
"""Tells from its key and row whether a sample is needed. Called once per sample, in order, right
before the sample is yielded; contents of samples that are not needed need not be read."""


def every(key: str, row: Row) -> bool:
    """Return True: every sample is needed."""
    return True


class PackSource(ABC):
    """Samples in an order that is the same each time, so that an interrupted run can continue."""

    _splits: Mapping[str, Any] = MappingProxyType({"": None})
    _left_out: Sequence[str] = ()

    def split_names(self) -> list[str]:
        """Return the names of the splits; one empty name if the source has none."""
        return list(self._splits)

    @abstractmethod
    def samples(
        self, split: str, start: int = 0, is_selected: Selects = every
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the samples of a split from number `start` on, as `TarWriter` takes them."""

    def part_names(self) -> frozenset[str] | None:
        """Return the names of the parts of all samples; None if only reading them tells."""
        return None

    def record(self) -> dict[str, Any]:
        """Return the settings that an interrupted run must have to continue."""
        return {}

    def notes(self) -> list[str]:
        """Return warnings to show before the samples are packed."""
        return []

    def skipped(self) -> list[str]:
        """Return the skipped rows so far and the reasons, in words; all of them at the end."""
        return [*self._left_out]


class DatasetRows(Protocol):
    """The rows of a dataset of some kind, in an order that is the same each time."""

    @property
    def split_names(self) -> Sequence[str]:
        """The names of the splits; one empty name if the dataset has none."""

    def read(self, split: str, start: int) -> Iterator[tuple[Row, str]]:
        """Yield the rows of a split from number `start` on, and the file that each is in."""


KEY_DIGITS = 9
SKIPPED_ROW = "a file is missing, or all values are null"


@dataclass(frozen=True)
class RowRules:
    """How the columns of a table become the parts of samples.

    Columns that no rule names together become fields of a part `json`; those that hold media, bytes
    or arrays become separate parts, named by the extension of their content, prefixed with the name
    of the column if there are several such columns. Each element of a list of these becomes a part
    `COLUMN.NUMBER.EXTENSION`.

    Args:
        key_column: Column with the keys, which may be paths of files up to their extension; None
            numbers the rows.
        file_columns: Columns with paths of files; their contents become parts.
        parts: Names of parts by column, for columns that become parts under these names.
        leave_out: Columns to drop.
        root: Folder that paths are relative to, and below which all files must be; None for that of
            the table, or else the working directory.
        skip_missing: Whether to skip rows whose files are missing, or whose values are all null.
    """

    key_column: str | None = None
    file_columns: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    leave_out: tuple[str, ...] = ()
    root: AnyPath | None = None
    skip_missing: bool = False

    def sample(self, row: Mapping[str, Any], number: int, origin: str) -> dict[str, Any] | None:
        """Return the sample of a row, or None if it is skipped, see `skip_missing`.

        Args:
            row: Values by column.
            number: Number of the row, from 0.
            origin: Name of the table in messages.

        Raises:
            ConfigError: If a column is missing or cannot become a part, or all values are null.
            DatasetNotFoundError: If a file is missing.
        """
        where = f"{origin}, row {number + 1}"
        self._check(row, where)
        sample: dict[str, Any] = {"__key__": self._key(row, number, where)}
        fields: dict[str, Any] = {}
        own: list[tuple[str, str | None, Any]] = []
        for column, value in row.items():
            if column in self.leave_out or value is None:
                continue
            if column == self.key_column and column not in self.file_columns:
                continue
            if column in self.file_columns:
                if value == "":
                    continue
                path = self._path(value, where)
                if path is None:
                    return None
                own.append((column, path.suffix.lstrip(".").lower() or None, path))
            elif column in self.parts:
                own.append((column, None, _content(value)))
            elif (extension := extension_of(value)) is not None:
                own.append((column, extension, _content(value)))
            elif (files := _numbered(column, value)) is not None:
                sample |= files
            else:
                fields[column] = value
        several = sum(column not in self.parts for column, _, _ in own) > 1
        for column, extension, content in own:
            name = self.parts.get(column) or _part_name(column, extension, several=several)
            if name in sample:
                raise ConfigError(
                    f"{where}: two columns make a part {name!r}; name one with --part COLUMN:PART"
                )
            sample[name] = content
        if fields:
            if "json" in sample:
                raise ConfigError(
                    f"{where}: columns {sorted(fields)} make a part 'json', as another column "
                    "does; name that one with --part COLUMN:PART"
                )
            sample["json"] = fields
        if len(sample) > 1:
            return sample
        if self.skip_missing:
            return None
        raise ConfigError(
            f"{where}: has no value that is not null, so it makes no sample; delete the row, or "
            "skip such rows with --skip-missing"
        )

    def has_file(self, value: str) -> bool:
        """Return whether a value is the path of a file that may be read.

        Raises:
            StorageError: If the store of a remote root cannot be asked.
        """
        try:
            path = self._below_root(value)
            return path is not None and path.is_file()
        except (StorageError, MissingExtraError):
            raise
        except (OSError, ValueError):
            return False

    def address_of(self, value: str) -> str:
        """Return the absolute path or the address of a file."""
        if isinstance(self.root, EPath):
            return str(self.root / value)
        return os.path.abspath(os.path.join(self.root or "", self._relative_name(value)))

    def _relative_name(self, value: str) -> str:
        if isinstance(self.root, EPath) or not os.path.isabs(value):
            return value
        root, path = Path(os.path.abspath(self.root or "")), Path(os.path.normpath(value))
        if not path.is_relative_to(root):
            root, path = root.resolve(), path.resolve()
        return os.path.relpath(path, root)

    def _check(self, row: Mapping[str, Any], where: str) -> None:
        named = {*self.file_columns, *self.parts, *self.leave_out}
        if self.key_column is not None:
            named.add(self.key_column)
        missing = sorted(named - set(row))
        if missing:
            raise ConfigError(f"{where}: no column {missing[0]!r}, there are {', '.join(row)}")

    def _key(self, row: Mapping[str, Any], number: int, where: str) -> str:
        if self.key_column is None:
            return f"{number:0{KEY_DIGITS}}"
        key = row[self.key_column]
        if key is None or key == "":
            raise ConfigError(f"{where}: column {self.key_column!r} has no key")
        if self.key_column not in self.file_columns:
            return str(key)
        folder, _, name = os.path.normpath(self._relative_name(str(key))).rpartition("/")
        stem = os.path.splitext(name)[0].replace(".", "_")
        return f"{folder}/{stem}" if folder else stem

    def _below_root(self, value: str) -> AnyPath | None:
        """Return the path of a file; None if it is not below the root."""
        if isinstance(self.root, EPath):
            address = self.root / value
            return address if address.is_relative_to(self.root) else None
        root = (self.root or Path()).resolve()
        path = (root / value).resolve()
        return path if path.is_relative_to(root) else None

    def _path(self, value: Any, where: str) -> AnyPath | None:
        path = self._below_root(str(value))
        if path is None:
            root = self.root if isinstance(self.root, EPath) else (self.root or Path()).resolve()
            raise ConfigError(
                f"{where}: {value!r} is not below {root}; pass --root with a folder that "
                "contains all files"
            )
        # Whether a remote one exists turns out when it is fetched, a few samples ahead.
        if (isinstance(path, EPath) and not self.skip_missing) or path.is_file():
            return path
        if self.skip_missing:
            return None
        raise DatasetNotFoundError(
            f"{where}: {path}: no such file; pass --root with the folder that paths are relative "
            "to, or skip such rows with --skip-missing"
        )


class RuledRow(NamedTuple):
    """A row, and how it becomes a sample."""

    row: Row
    number: int
    """Its number in the table, from 0."""
    origin: str
    """The name of the table in messages."""
    rules: RowRules
    prefix: str
    """The prefix of its key."""


class TabularSource(PackSource):
    """Rows that become samples by rules, which may skip some of them."""

    def __init__(self, splits: Mapping[str, Any], left_out: Sequence[str] = ()) -> None:
        self._splits = splits
        self._left_out = left_out
        self._skipped: dict[str, None] = {}

    @abstractmethod
    def rows(self, split: str, start: int) -> tuple[int, Iterator[RuledRow]]:
        """Return the rows of a split, and how many samples before them need not be read.

        Args:
            split: The split.
            start: The most that it may be.
        """

    def samples(
        self, split: str, start: int = 0, is_selected: Selects = every
    ) -> Iterator[Mapping[str, Any]]:
        count, rows = self.rows(split, start)
        for row, number, origin, rules, prefix in rows:
            sample = rules.sample(row, number, origin)
            if sample is None:
                self._skipped[f"{origin}, row {number + 1}: {SKIPPED_ROW}"] = None
                continue
            count += 1
            sample["__key__"] = key = prefix + sample["__key__"]
            if count > start and is_selected(key, row):
                yield sample

    def skipped(self) -> list[str]:
        return [*self._left_out, *self._skipped]


def extension_of(value: Any) -> str | None:
    """Return the extension of a value that must be a separate part; None if JSON can hold it."""
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        name = os.fspath(value["path"] or "")
        return Path(name).suffix.lstrip(".").lower() or extension_of(value["bytes"] or b"")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return guess_extension(bytes(value[:SIGNATURE_BYTES])) or "bin"
    kind = type(value).__module__.partition(".")[0]
    if kind == "PIL":
        return "png"
    if kind in ("numpy", "torch") and getattr(value, "ndim", 0) > 0:
        return "npy"
    return None


def _numbered(column: str, values: Any) -> dict[str, Any] | None:
    """Return parts for a list of media, bytes or arrays: `images.0.png` and so on; None for others.

    Missing ones keep their number.
    """
    if not isinstance(values, list):
        return None
    numbered = [(number, value) for number, value in enumerate(values) if value is not None]
    extensions = [extension_of(value) for _, value in numbered]
    if not numbered or None in extensions:
        return None
    return {
        f"{column.replace('/', '_')}.{number}.{extension}": _content(value)
        for (number, value), extension in zip(numbered, extensions, strict=True)
    }


def _part_name(column: str, extension: str | None, *, several: bool) -> str:
    # Tables of Hugging Face call the column of an image `file_name`, of a mask `mask_file_name`.
    column = column.replace("/", "_").removesuffix("_file_name")
    if extension is None or extension == column:
        return column
    if column == "file_name":
        return extension
    return f"{column}.{extension}" if several else extension


def _content(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return value["bytes"] if value["bytes"] is not None else Path(value["path"])
    return value
