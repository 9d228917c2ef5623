"""Read the rows of Parquet files as samples, a row group at a time."""

from __future__ import annotations

import io
import os
import re
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from energon.errors import ConfigError, FormatError, needs_extra
from energon.formats.meta.split import (
    SPLIT_WORDS,
    find_split,
    splits_by_name,
)
from energon.formats.parquet import ParquetFooter, parse_footer
from energon.io.address import redact
from energon.io.backends.base import ObjectInfo
from energon.io.epath import any_path
from energon.io.range_file import RangeFile
from energon.limits import DECODED_BYTES
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Leaf
from energon.sources.extents import PartFilter
from energon.sources.tables.parquet_files import SUFFIX, ParquetFiles, is_pattern
from energon.sources.tables.row_kind import RowKind, RowOptions, row_config
from energon.sources.tables.rows import RowSource

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import FileMetaData


HELD_BYTES = 512 << 20
"""Decoded row groups that a source keeps: those of the slices that are open."""
MAX_SLICES = 16
OPEN_FILES = 64


@dataclass(frozen=True)
class ParquetOptions(RowOptions):
    """The options under `read` in a document for Parquet files.

    Args:
        config: Which of the configurations that the card of a dataset of Hugging Face lists;
            None for its default, or the only one.
    """

    config: str | None = field(default=None, kw_only=True)


class ParquetGroups:
    """The row groups of some files, numbered consecutively.

    Args:
        files: The files of a dataset.
        footers: Those that are read, with what stands at their ends.
    """

    def __init__(self, files: ParquetFiles, footers: Sequence[ParquetFooter]) -> None:
        self.files = files
        self.footers = list(footers)
        counts = [len(footer.rows) for footer in footers]
        self.file = np.repeat(np.arange(len(counts)), counts)
        self.first = np.array([0, *accumulate(counts)])
        rows = np.array([n for footer in footers for n in footer.rows], np.int64)
        self.ends = np.concatenate(([0], np.cumsum(rows)))
        """The first row of each, and the number of all rows."""
        sizes = [sum(footer.rows) for footer in footers]
        self.file_ends = np.array([0, *accumulate(sizes)])
        self._metadata: OrderedDict[int, FileMetaData] = OrderedDict()
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._tables: OrderedDict[tuple[int, tuple[str, ...]], pa.Table] = OrderedDict()
        self._range_files: dict[int, RangeFile] = {}

    @cached_property
    def _listed(self) -> list[ObjectInfo]:
        listed = {each.key: each for each in self.files.found}
        return [listed[footer.name] for footer in self.footers]

    @property
    def folder(self) -> str:
        """The folder that the files are in."""
        return self.files.folder

    @property
    def suffix(self) -> str:
        """What the names of files end with."""
        return SUFFIX

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetGroups, (self.files, self.footers)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return int(self.ends[-1])

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the first file."""
        return self.schema_of(0)

    def schema_of(self, number: int) -> pa.Schema:
        """Return the columns of a file."""
        return self.metadata(number).schema.to_arrow_schema()

    def metadata(self, number: int) -> FileMetaData:
        """Return what a file says about its content."""
        found = self._metadata.get(number)
        if found is None:
            footer = self.footers[number].footer
            found = self._metadata[number] = parse_footer(footer, origin=self.origin(number))
            if len(self._metadata) > OPEN_FILES:
                self._metadata.popitem(last=False)
        return found

    def origin(self, number: int) -> str:
        """Return the name of a file for messages."""
        return redact(self.files.path(self.footers[number].name))

    def table(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        """Return some columns of a row group; the same again for as long as there is memory.

        Raises:
            FormatError: If it is damaged.
        """
        found = self._tables.get((group, columns))
        if found is None:
            found = self._tables[group, columns] = self._decode(group, columns)
            held = sum(table.nbytes for table in list(self._tables.values()))
            while held > HELD_BYTES and len(self._tables) > 2:
                held -= self._tables.popitem(last=False)[1].nbytes
        else:
            self._tables.move_to_end((group, columns))
        return found

    def chunks(self, group: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return where the contents of some columns of a row group begin and end in the file."""
        number = int(self.file[group])
        metadata = self.metadata(number).row_group(group - int(self.first[number]))
        found = []
        for at in range(metadata.num_columns):
            chunk = metadata.column(at)
            if chunk.path_in_schema.split(".")[0] in columns or chunk.path_in_schema in columns:
                starts = (chunk.data_page_offset, chunk.dictionary_page_offset)
                start = min(each for each in starts if each)
                found.append((start, start + chunk.total_compressed_size))
        size = self.footers[number].size
        if any(not 4 <= start <= stop <= size for start, stop in found):
            raise FormatError(
                f"{self.origin(number)}: a column lies outside of the file; it is damaged"
            )
        return sorted(found)

    def range_file(self, number: int) -> RangeFile:
        """Return a file, open for reading ranges."""
        found = self._range_files.get(number)
        if found is None:
            found = self._range_files[number] = self.files.open(self._listed[number])
            if len(self._range_files) > OPEN_FILES:
                del self._range_files[next(iter(self._range_files))]
        return found

    def _decode(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        with needs_extra("parquet", "Parquet files need pyarrow"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        number = int(self.file[group])
        own = group - int(self.first[number])
        metadata = self.metadata(number)
        size = metadata.row_group(own).total_byte_size
        if size > DECODED_BYTES.value:
            raise FormatError(
                f"{self.origin(number)}: row group {own} has {size} bytes, more than "
                f"{DECODED_BYTES.value}; {DECODED_BYTES.hint}"
            )
        size = self.footers[number].size
        source = _Chunks(self.range_file(number), size, self.chunks(group, columns))
        try:
            # What it would read ahead of time, in threads of its own, was read above.
            reader = pq.ParquetFile(pa.PythonFile(source, "r"), metadata=metadata, pre_buffer=False)
            table = reader.read_row_group(own, columns=list(columns), use_threads=False)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            reason = " ".join(str(error).split()).rstrip(".")  # several lines of pyarrow
            raise FormatError(
                f"{self.origin(number)}: row group {own} cannot be read: {reason}; the file is "
                "damaged or changed, restore it or run `energon prepare` again"
            ) from error
        if table.num_rows != self.footers[number].rows[own]:
            raise FormatError(
                f"{self.origin(number)}: row group {own} has {table.num_rows} rows, not "
                f"{self.footers[number].rows[own]}"
            )
        return table


class _Chunks(io.RawIOBase):
    """A file of which some ranges are read at once, and the rest when it is asked for."""

    def __init__(self, file: RangeFile, size: int, ranges: Sequence[tuple[int, int]]) -> None:
        starts = [start for start, _ in ranges]
        self._chunks = dict(
            zip(starts, file.pread_many(starts, [b - a for a, b in ranges]), strict=True)
        )
        self._file = file
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        start = self._at
        stop = self._size if size < 0 else min(start + size, self._size)
        self._at = stop
        for low, content in self._chunks.items():
            if low <= start and stop <= low + len(content):
                return content[start - low : stop - low]
        return self._file.pread(start, max(0, stop - start))


class ParquetSource(RowSource):
    """The rows of a split of Parquet files, numbered from 0.

    Args:
        address: See `ParquetFiles`.
        split_part: The split to read.
        options: Which columns are read, and which splits there are.
        parts: The columns to read, if `options` say none; None for all.
        subsets: Ranges that narrow the split, see `energon.plan.subset`.
        exclude: Keys of excluded samples, or names of files.

    Raises:
        DatasetNotFoundError: If there are no files.
        FormatError: If one of them is not a Parquet file, or has other columns than the first.
        ConfigError: If there is no such split or column.
        EmptyDatasetError: If no sample is left.
        MissingExtraError: If pyarrow is not installed.
    """

    groups: ParquetGroups

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        split_part: str = "train",
        options: ParquetOptions | None = None,
        parts: Collection[str] | PartFilter | None = None,
        subsets: Sequence[Any] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        path = any_path(address)
        options = options or ParquetOptions(origin=str(path))
        files = ParquetFiles(os.fspath(address))
        chosen, by_ratio = _split_files(files, options, split_part)
        footers = {footer.name: footer for footer in files.footers()}
        super().__init__(
            path,
            ParquetGroups(files, [footers[name] for name in chosen]),
            split_part=split_part,
            by_ratio=by_ratio,
            options=options,
            parts=parts,
            subsets=subsets,
            exclude=exclude,
        )

    @cached_property
    def preferred_slices(self) -> tuple[int, int]:
        """Rows that are best read together, and how many such slices may be open at a time.

        A row group is decoded as a whole, so a slice is as long as one, and as many are open as
        there is memory for.
        """
        rows = int(np.median(np.diff(self.groups.ends)))
        number = int(np.argmax(np.diff(self.groups.ends)))
        file = int(self.groups.file[number])
        group = self.groups.metadata(file).row_group(number - int(self.groups.first[file]))
        # A slice that is not laid out with row groups is in two of them.
        most = HELD_BYTES // max(1, 2 * group.total_byte_size)
        return max(1, rows), max(1, min(MAX_SLICES, most))


def _split_files(
    files: ParquetFiles, options: ParquetOptions, split_part: str
) -> tuple[list[str], bool]:
    """Return the files that a split is in, and whether a ratio says which of their rows."""
    splits = _splits(files, options)
    if options.split is not None:
        return [name for names in splits.values() for name in names], True
    if "" in splits:
        return splits[""], True
    found = find_split(split_part, splits)
    if found is None:
        by = "its card" if files.card() else "the names of its files"
        raise ConfigError(
            f"{redact(files.address)}: there is no split {split_part!r}, only {', '.join(splits)}, "
            f"by {by}"
        )
    return splits[found], False


def _splits(files: ParquetFiles, options: ParquetOptions) -> dict[str, list[str]]:
    """Return the files of each split; one without a name if nothing says which they are in.

    Raises:
        ConfigError: If the dataset has several configurations, and nobody says which.
    """
    configs = {config.name: config for config in files.card()}
    names = [found.key for found in files.found]
    chosen = options.config
    if chosen is None and configs:
        given = [config.name for config in configs.values() if config.is_default]
        if not given and len(configs) > 1:
            raise ConfigError(
                f"{options.origin or redact(files.address)}: has the configurations "
                f"{', '.join(configs)}; say which to read, as in `read: {{config: {min(configs)}}}`"
            )
        chosen = given[0] if given else min(configs)
    if chosen is None:
        return _splits_of(names)
    if chosen not in configs:
        raise ConfigError(
            f"{options.origin}: read: {redact(files.address)} has no configuration {chosen!r}, "
            f"only {', '.join(configs) or 'one without a name'}"
        )
    splits = {split: files.matching(patterns) for split, patterns in configs[chosen].splits.items()}
    return _splits_of(splits[""]) if "" in splits else splits


def _splits_of(names: list[str]) -> dict[str, list[str]]:
    """Return the files of each split by their names, as in `train_sft-00000-of-00003.parquet`."""
    named = [(_SHARD_NAME.fullmatch(name.rpartition("/")[2]), name) for name in names]
    splits: dict[str, list[str]] = {}
    for match, name in named:
        splits.setdefault(match[1] if match else "", []).append(name)
    is_known = "" in splits or all(split.lower() in SPLIT_WORDS for split in splits)
    return splits_by_name(names, by_file=True) if is_known or len(splits) < 2 else splits


_SHARD_NAME = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}(?:-[0-9a-f]{16})?\.parquet")
"""What `datasets` calls the files of a split."""


class ParquetKind(RowKind):
    """Parquet files, whose rows are samples."""

    name = "parquet"
    noun = "a set of Parquet files"
    source = ParquetSource
    options_type = ParquetOptions
    options = ParquetOptions.names()
    prepares = True

    def prepare(self, address: str) -> int:
        return sum(sum(footer.rows) for footer in ParquetFiles(address).prepare())

    def splits_of(self, address: str) -> Collection[str]:
        return _splits(ParquetFiles(address), ParquetOptions())

    def config(self, leaf: Leaf) -> DatasetConfig:
        return row_config(
            leaf,
            has_folder=not (is_pattern(leaf.path) or leaf.path.endswith(SUFFIX)),
            options=ParquetOptions,
        )

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        files = ParquetFiles(address)
        groups = ParquetGroups(files, files.footers())
        rows = {footer.name: sum(footer.rows) for footer in groups.footers}
        splits = {}
        for prefix, config in self._configs(files):
            for name, chosen in _splits(files, ParquetOptions(config=config)).items():
                splits[f"{prefix}{name or 'train'}"] = {
                    "samples": sum(rows[file] for file in chosen),
                    "shards": len(chosen),
                    "excluded": 0,
                }
        return {
            "sample_type": "CrudeSample",
            "samples": groups.num_rows,
            "shards": len(groups.footers),
            "bytes": sum(footer.size for footer in groups.footers),
            "missing_shards": [],
            "energon_version": None,
            "splits": splits,
            "columns": {field.name: str(field.type) for field in groups.schema},
            "row_groups": len(groups.file),
        }

    @staticmethod
    def _configs(files: ParquetFiles) -> list[tuple[str, str | None]]:
        """Return the configurations whose splits are shown, and what goes before their names."""
        configs = files.card()
        if len(configs) < 2 or any(config.is_default for config in configs):
            return [("", None)]
        return [(f"{config.name}/", config.name) for config in configs]


KIND = ParquetKind()
