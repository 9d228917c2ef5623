"""Read the rows of folders written by `save_to_disk` of Hugging Face `datasets`.

`state.json` lists Arrow files, which are mapped into memory: nothing is decoded, and only the
requested rows are read. With `dataset_dict.json`, there is such a folder for each split.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EnergonError,
    FormatError,
    TruncatedError,
    needs_extra,
)
from energon.formats.arrow import read_batches
from energon.formats.meta.info import chosen_split
from energon.formats.parquet import ParquetFooter
from energon.formats.text import parse_json
from energon.io.address import is_remote, redact
from energon.io.backends.local import local_error
from energon.io.epath import any_path
from energon.io.files import is_file, read_bytes
from energon.io.range_file import RangeFile, range_file
from energon.local_file import map_file
from energon.sources.kinds import description, split_description
from energon.sources.source import TRAIN_SPLIT, SampleSelection
from energon.sources.tables.columns import RowGroups, RowTable
from energon.sources.tables.row_kind import RowKind, RowOptions
from energon.sources.tables.rows import RowSource

if TYPE_CHECKING:
    import pyarrow as pa


ARROW_SUFFIX = ".arrow"
STATE, SPLITS = "state.json", "dataset_dict.json"


class ArrowBatches(RowGroups):
    """The record batches of some files, numbered consecutively. Copies map the files again.

    Args:
        folder: The folder that the files are in.
        names: The files.

    Raises:
        DatasetNotFoundError: If a file is missing.
        FormatError: If a file is not a stream of Arrow.
    """

    suffix = ARROW_SUFFIX

    def __init__(self, folder: str, names: Sequence[str]) -> None:
        self.names = list(names)
        self._batches = [_mapped(folder, name) for name in self.names]
        footers = [
            ParquetFooter(
                name,
                os.path.getsize(os.path.join(folder, name)),
                "",
                b"",
                tuple(batch.num_rows for batch in batches),
            )
            for name, (_, batches) in zip(self.names, self._batches, strict=True)
        ]
        super().__init__(folder, footers)

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrowBatches, (self.folder, self.names)

    def schema_of(self, number: int) -> pa.Schema:
        """Return the columns of a file."""
        return self._batches[number][0]

    def origin(self, number: int) -> str:
        """Return the name of a file for messages."""
        return os.path.join(self.folder, self.names[number])

    def table(self, group: int, columns: tuple[str, ...]) -> RowTable:
        """Return some columns of a record batch without decoding them."""
        import pyarrow as pa

        number, own = self.locate(group)
        schema, batches = self._batches[number]
        names = [name for name in columns if name in schema.names]
        return RowTable(pa.Table.from_batches([batches[own]]).select(names), self.columns)

    def chunks(self, group: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return the approximate range of a record batch in the file."""
        number = int(self.file[group])
        footer = self.footers[number]
        share = footer.size / max(1, sum(footer.rows))
        base = int(self.file_ends[number])
        low, high = (int(end) - base for end in self.ends[group : group + 2])
        return [(int(low * share), int(high * share))]

    def range_file(self, number: int) -> RangeFile:
        """Return a file, open for reading ranges."""
        return range_file(self.origin(number))


def _mapped(folder: str, name: str) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    with needs_extra("parquet", "Arrow files need pyarrow"):
        import pyarrow as pa
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        raise DatasetNotFoundError(f"{path} does not exist, but {STATE} in its folder lists it")
    try:
        return read_batches(pa.py_buffer(map_file(path)), origin=path)
    except EnergonError:
        raise
    except (PermissionError, IsADirectoryError) as error:
        raise local_error(path, error) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TruncatedError(
            f"{path}: is not a complete Arrow stream: {error}; copy it again"
        ) from error


class ArrowSource(RowSource):
    """The rows of a split of a folder that `save_to_disk` wrote, numbered from 0.

    Args:
        address: The folder.
        selection: Which samples to read, and which columns if `options` say none.
        options: Which columns are read, and which splits there are.

    Raises:
        DatasetNotFoundError: If a file is missing.
        FormatError: If a file is damaged.
        ConfigError: If there is no such split or column, or the folder is remote.
        EmptyDatasetError: If no sample is left.
        MissingExtraError: If pyarrow is not installed.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        selection: SampleSelection = TRAIN_SPLIT,
        options: RowOptions | None = None,
    ) -> None:
        folder = os.fspath(address)
        options = options or RowOptions(origin=redact(folder))
        names, by_ratio = _split_files(folder, options, selection.split_part)
        groups = ArrowBatches(folder, names)
        super().__init__(any_path(folder), groups, selection, options, by_ratio=by_ratio)

    @cached_property
    def mean_sample_bytes(self) -> float:
        """Bytes of a row in the files, on average."""
        size = sum(footer.size for footer in self.groups.footers)
        return size / float(self.groups.ends[-1])


def saved_split_folders(folder: str) -> dict[str, str]:
    """Return the folder of each split, by its name; without splits, there is one called "".

    Raises:
        ConfigError: If it is not on this machine.
        FormatError: If `dataset_dict.json` is invalid.
    """
    if is_remote(folder):
        raise ConfigError(
            f"{redact(folder)}: what save_to_disk writes is mapped into memory, so it must "
            "be on this machine; copy it, or train on the Parquet files of the dataset"
        )
    path = os.path.join(folder, SPLITS)
    if not is_file(path):
        return {"": folder}
    document = parse_json(read_bytes(path), origin=path)
    names = document.get("splits") if isinstance(document, Mapping) else None
    if not isinstance(names, list) or not all(_is_name(name) for name in names):
        raise FormatError(f"{path}: expected the names of splits, found {names!r:.100}")
    return {name: os.path.join(folder, name) for name in names}


def data_files(folder: str) -> list[str]:
    """Return the names of the Arrow files of a folder.

    Raises:
        FormatError: If `state.json` is invalid, or the rows have another order than the files.
    """
    path = os.path.join(folder, STATE)
    document = parse_json(read_bytes(path), origin=path)
    files = document.get("_data_files") if isinstance(document, Mapping) else None
    listed = files if isinstance(files, list) else [None]
    names = [each.get("filename") if isinstance(each, Mapping) else each for each in listed]
    if not all(_is_name(name) for name in names):
        raise FormatError(f"{path}: expected a list of files, found {files!r:.100}")
    if document.get("_indices_data_files"):
        raise FormatError(
            f"{path}: has indices that define another order than that of the files; call "
            "flatten_indices() and save the dataset again"
        )
    return [str(name) for name in names]


def _is_name(name: Any) -> bool:
    """Return whether a name refers to something directly in a folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and os.path.basename(name) == name


def _split_files(folder: str, options: RowOptions, split_part: str) -> tuple[list[str], bool]:
    """Return the files of a split, and whether a ratio selects some of their rows."""
    splits = saved_split_folders(folder)
    split = chosen_split(split_part, splits, origin=folder, by="dataset_dict.json")
    if not split:
        return data_files(folder), True
    if options.split is not None:
        raise ConfigError(
            f"{options.origin}: read: {folder} has the splits {', '.join(splits)}; drop `split`"
        )
    return [f"{split}/{name}" for name in data_files(splits[split])], False


class ArrowKind(RowKind):
    """Folders that `save_to_disk` of Hugging Face `datasets` wrote."""

    name = "arrow"
    noun = "a dataset of Arrow files"
    source = ArrowSource

    def splits_of(self, address: str) -> Collection[str]:
        return saved_split_folders(address)

    def describe(self, address: str, *, parts: bool = True, **documents: str) -> dict[str, Any]:
        splits, size = {}, 0
        columns: dict[str, str] = {}
        for name, folder in saved_split_folders(address).items():
            batches = ArrowBatches(folder, data_files(folder))
            count = int(batches.ends[-1])
            splits[name or "train"] = split_description(count, len(batches.names))
            size += sum(footer.size for footer in batches.footers)
            if batches.names:
                columns = columns or batches.column_types()
        samples = sum(split["samples"] for split in splits.values())
        shards = sum(split["shards"] for split in splits.values())
        return {**description(samples, shards, size, splits), "columns": columns}


KIND = ArrowKind()
