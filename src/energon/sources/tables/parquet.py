"""Find Parquet files and their footers, and read rows as samples, a row group at a time."""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from energon.arrays import Ints
from energon.errors import ConfigError, DatasetNotFoundError, EnergonError, FormatError, needs_extra
from energon.formats.meta.info import BY_NAMES, META, chosen_split, guess_splits
from energon.formats.parquet import (
    CARD,
    FOOTERS,
    TAIL_BYTES,
    CardConfig,
    ParquetFooter,
    dump_footers,
    footer_bytes,
    group_rows,
    load_footers,
    parse_card,
    parse_footer,
    row_batches,
)
from energon.io.address import address_name, is_remote, join_address, parent_address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.backends.local import OpenFile, PathPattern
from energon.io.disk_cache import disk_cache
from energon.io.epath import any_path
from energon.io.files import (
    file_info,
    is_file,
    is_pattern,
    list_files,
    match_files,
    open_store,
    read_bytes,
    write_bytes,
)
from energon.io.range_file import RangeFile, range_file
from energon.local_file import decode_utf8
from energon.messages import counted
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Leaf
from energon.sources.decoded_blocks import DecodedBlocks, SliceCost
from energon.sources.kinds import description, split_description
from energon.sources.source import TRAIN_SPLIT, SampleSelection, Submit
from energon.sources.tables.columns import RowGroups, RowTable
from energon.sources.tables.row_kind import RowKind, RowOptions, row_config
from energon.sources.tables.rows import RowSource

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import FileMetaData

logger = logging.getLogger("energon")

PARQUET_SUFFIX = ".parquet"
MANY_FILES = 256
"""From this many files on, reading footers one by one is worth a log message and a copy."""
GUESSED_BYTES = 64 << 10
"""How many bytes to read first at the end of a remote file; most footers are shorter."""


class ParquetFiles:
    """The files of an address, by their names below a folder.

    Args:
        address: A file, a folder of files at any depth, or a pattern with `*`, `?`, `[…]` or `**`.

    Raises:
        DatasetNotFoundError: If there are none.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.folder, self.listed, self._is_noted = _find(address)
        self.is_single = bool(self.listed) and self.path(self.listed[0].key) == address
        if not self.listed:
            raise DatasetNotFoundError(f"{redact(address)}: there are no {PARQUET_SUFFIX} files")

    def path(self, name: str) -> str:
        """Return the address of a file."""
        return join_address(self.folder, name)

    def open(self, info: ObjectInfo) -> RangeFile:
        """Return a listed file, open: its size and version are known from the listing."""
        address = self.path(info.key)
        return range_file(address, info=info._replace(key=open_store(address)[1]))

    def footers(self) -> list[ParquetFooter]:
        """Return the footers of all files, recorded earlier or read now.

        Raises:
            FormatError: If a file is not a Parquet file.
        """
        noted = self._noted()
        missing = [each for each in self.listed if _is_new(each, noted)]
        if missing and (is_remote(self.address) or len(missing) > MANY_FILES):
            noted |= self._kept(missing)
        elif missing:
            noted |= {each.key: self.read_footer(each) for each in missing}
        return [noted[each.key] for each in self.listed]

    def card(self) -> list[CardConfig]:
        """Return the configurations listed on the dataset's card, if it has one.

        Raises:
            FormatError: If it is invalid.
        """
        path = join_address(self.folder, CARD)
        is_hub = self.address.startswith("hf://")
        if is_pattern(self.address) or (is_remote(path) and not is_hub) or not is_file(path):
            return []
        return parse_card(decode_utf8(read_bytes(path), origin=redact(path)), origin=redact(path))

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Return the names of files that match any of the patterns, or are in a matching folder."""
        own = [PathPattern(f"{each}{below}") for each in patterns for below in ("", "/**")]
        names = [file.key for file in self.listed]
        return [name for name in names if any(each.matches(name) for each in own)]

    def prepare(self) -> list[ParquetFooter]:
        """Record the footers of all files next to them, or else in the user's cache."""
        noted = self._noted()
        missing = [each for each in self.listed if _is_new(each, noted)]
        noted |= {footer.name: footer for footer in self._read(missing)}
        footers = [noted[each.key] for each in self.listed]
        if not is_pattern(self.address) and not self.address.endswith(PARQUET_SUFFIX):
            try:
                write_bytes(self._table, dump_footers(footers))
                self._is_noted = True
            except OSError as error:
                logger.warning("%s; the footers are kept in the user's cache", error)
                self._kept(self.listed, read=lambda: footers)
        return footers

    def read_footer(self, info: ObjectInfo) -> ParquetFooter:
        """Return the footer of a file.

        Raises:
            FormatError: If it is not a Parquet file.
        """
        origin, file, size = redact(self.path(info.key)), self.open(info), info.size
        guessed = min(size, GUESSED_BYTES if file.is_remote else TAIL_BYTES)
        tail = file.pread(size - guessed, guessed)
        length = footer_bytes(tail, size=size, origin=origin)
        footer = tail[-length:] if length <= guessed else file.pread(size - length, length)
        rows = group_rows(parse_footer(footer, origin=origin), origin=origin)
        return ParquetFooter(info.key, size, version_of(info), footer, rows)

    def _read(self, files: Sequence[ObjectInfo]) -> list[ParquetFooter]:
        if not is_remote(self.address):
            return [self.read_footer(file) for file in files]
        store, _ = open_store(self.address)
        return store.together(self.read_footer, [(file,) for file in files])

    def _noted(self) -> dict[str, ParquetFooter]:
        """Return the footers that `energon prepare` recorded, by file."""
        if not self._is_noted:
            return {}
        try:
            noted = load_footers(read_bytes(self._table), origin=redact(self._table))
        except FormatError as error:
            logger.warning("%s", error)
            return {}
        except DatasetNotFoundError:  # deleted since it was listed
            return {}
        return {footer.name: footer for footer in noted}

    def _kept(
        self,
        files: Sequence[ObjectInfo],
        read: Callable[[], Sequence[ParquetFooter]] | None = None,
    ) -> dict[str, ParquetFooter]:
        """Return the footers of files from the user's cache, and store them there if missing.

        Args:
            files: The files.
            read: Returns footers that are not in the cache; None reads the files.
        """
        listed = repr([(file.key, file.size, version_of(file)) for file in files])
        version = hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()
        footers = disk_cache().load(
            f"{redact(self.address)}/{FOOTERS}",
            version,
            lambda: dump_footers(self._read_many(files) if read is None else read()),
            lambda data: load_footers(data, origin=redact(self.address)),
        )
        return {footer.name: footer for footer in footers}

    def _read_many(self, files: Sequence[ObjectInfo]) -> list[ParquetFooter]:
        if len(files) > MANY_FILES:
            logger.warning(
                "%s: reading the footers of %d files, which takes a while; `energon prepare` "
                "records them",
                redact(self.address),
                len(files),
            )
        return self._read(files)

    @property
    def _table(self) -> str:
        return join_address(self.folder, f"{META}/{FOOTERS}")


def version_of(info: ObjectInfo) -> str:
    """Return a value that changes with the content of a file."""
    mtime, version = str(info.mtime_ns), info.version
    # The version of a local file contains its inode number, which differs in a copy of the folder.
    is_local = version is None or (info.mtime_ns and version.endswith(mtime))
    return mtime if is_local else str(version)


def _is_new(info: ObjectInfo, noted: dict[str, ParquetFooter]) -> bool:
    footer = noted.get(info.key)
    return footer is None or (footer.size, footer.version) != (info.size, version_of(info))


def _find(address: str) -> tuple[str, list[ObjectInfo], bool]:
    """Return a folder, the files in it that match an address, and whether they are recorded."""
    if not is_pattern(address):
        info = file_info(address) if address.endswith(PARQUET_SUFFIX) else None
        if info is not None:
            return parent_address(address), [info._replace(key=address_name(address))], False
        listed = list_files(address)
        is_noted = any(each.key == f"{META}/{FOOTERS}" for each in listed)
        return address, [each for each in listed if _is_data_file(each.key)], is_noted
    folder, files = match_files(address)
    return folder, [each for each in files if _is_data_file(each.key)], False


def _is_data_file(name: str) -> bool:
    """Return whether a file below a folder has rows: it is neither hidden nor another tool's."""
    steps = name.split("/")
    return steps[-1].endswith(PARQUET_SUFFIX) and not any(
        step.startswith((".", "_")) for step in steps
    )


KEPT_FOOTERS = 64
"""Parsed footers that are kept: those of files with thousands of columns take megabytes."""


_GroupColumns = tuple[int, tuple[str, ...]]
"""A row group, and the columns of it that are decoded."""


class _DecodedGroup(NamedTuple):
    """A decoded row group with rows that were not taken yet."""

    table: RowTable
    rows_left: int


class ParquetGroups(RowGroups):
    """The row groups of some files, numbered consecutively.

    Args:
        files: The files of a dataset.
        footers: Those that are read, with what stands at their ends.
    """

    suffix = PARQUET_SUFFIX

    def __init__(self, files: ParquetFiles, footers: Sequence[ParquetFooter]) -> None:
        self.files = files
        super().__init__(files.folder, footers)
        self._metadata: OrderedDict[int, FileMetaData] = OrderedDict()
        self._decoded: DecodedBlocks[_GroupColumns, _DecodedGroup] = DecodedBlocks()
        self._range_files: dict[int, RangeFile] = {}

    @cached_property
    def _listed(self) -> list[ObjectInfo]:
        listed = {each.key: each for each in self.files.listed}
        return [listed[footer.name] for footer in self.footers]

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetGroups, (self.files, self.footers)

    def schema_of(self, number: int) -> pa.Schema:
        """Return the columns of a file."""
        import pyarrow as pa

        try:
            return self.metadata(number).schema.to_arrow_schema()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise FormatError(
                f"{self.origin(number)}: its columns are not known to pyarrow: {error}; write the "
                "file again with other types"
            ) from error

    def metadata(self, number: int) -> FileMetaData:
        """Return the metadata of a file."""
        metadata = self._metadata.get(number)
        if metadata is None:
            footer = self.footers[number].footer
            metadata = self._metadata[number] = parse_footer(footer, origin=self.origin(number))
            if len(self._metadata) > KEPT_FOOTERS:
                self._metadata.popitem(last=False)
        return metadata

    def origin(self, number: int) -> str:
        """Return the name of a file for messages."""
        return redact(self.files.path(self.footers[number].name))

    def table(self, group: int, columns: tuple[str, ...]) -> RowTable:
        """Return some columns of a row group.

        Until all of its rows were taken, the same is returned again, for as long as there is
        memory: an epoch takes each row once, and the memory serves the next row group.

        Raises:
            FormatError: If it is damaged.
        """
        group_columns = group, columns
        decoded = self._decoded.get(group_columns)
        if decoded is None:
            decoded = self._made(group_columns)
        self._decoded.keep(group_columns, decoded, decoded.table.num_bytes)
        return decoded.table

    def count_taken(self, group: int, columns: tuple[str, ...], num_rows: int) -> None:
        """Drop the row group if no rows are left to be taken."""
        group_columns = group, columns
        decoded = self._decoded.get(group_columns)
        if decoded is None:
            return
        if decoded.rows_left > num_rows:
            decoded = decoded._replace(rows_left=decoded.rows_left - num_rows)
            self._decoded.keep(group_columns, decoded, decoded.table.num_bytes)
        else:
            self._decoded.drop(group_columns)

    def decode_ahead(
        self, groups: Sequence[int], columns: tuple[str, ...], submit: Submit, *, most: int
    ) -> None:
        """Begin to decode the row groups that are read next; errors are raised by `table`."""
        needed = [(group, columns) for group in groups]
        self._decoded.begin(needed, self._made_ahead, submit, most=most)

    def chunks(self, group: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return where the contents of some columns of a row group begin and end in the file."""
        number, own = self.locate(group)
        metadata = self.metadata(number).row_group(own)
        ranges = []
        for at in range(metadata.num_columns):
            chunk = metadata.column(at)
            if chunk.path_in_schema.split(".")[0] in columns or chunk.path_in_schema in columns:
                starts = (chunk.data_page_offset, chunk.dictionary_page_offset)
                start = min(each for each in starts if each)
                ranges.append((start, start + chunk.total_compressed_size))
        size = self.footers[number].size
        if any(not 4 <= start <= stop <= size for start, stop in ranges):
            raise FormatError(f"{self.origin(number)}: a column is outside the file; it is damaged")
        return sorted(ranges)

    def range_file(self, number: int) -> RangeFile:
        """Return a file, open for reading ranges."""
        file = self._range_files.get(number)
        if file is None:
            file = self._range_files[number] = self.files.open(self._listed[number])
        return file

    def _made(self, group_columns: _GroupColumns) -> _DecodedGroup:
        table = self._decode(*group_columns)
        return _DecodedGroup(RowTable(table, self.columns, is_kept=True), table.num_rows)

    def _made_ahead(self, group_columns: _GroupColumns) -> _DecodedGroup:
        made = self._made(group_columns)
        made.table.convert()
        return made

    def _decode(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        with needs_extra("parquet", "Parquet files need pyarrow"):
            import pyarrow as pa
        number, own = self.locate(group)
        metadata = self.metadata(number)
        size = self.footers[number].size
        source = _Chunks(self.range_file(number), size, self.chunks(group, columns))
        try:
            batches = row_batches(source, metadata, own, columns, origin=self.origin(number))
            table = pa.Table.from_batches(batches)
        except EnergonError:
            raise
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
        starts, sizes = [start for start, _ in ranges], [stop - start for start, stop in ranges]
        if isinstance(file, OpenFile):
            contents = [_read_to_arrow(file, *each) for each in zip(starts, sizes, strict=True)]
        else:
            contents = [memoryview(content) for content in file.pread_many(starts, sizes)]
        self._chunks = dict(zip(starts, contents, strict=True))
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

    def read(self, size: int = -1) -> Any:
        start = self._at
        stop = self._size if size < 0 else min(start + size, self._size)
        self._at = stop
        for low, content in self._chunks.items():
            if low <= start and stop <= low + len(content):
                return content[start - low : stop - low]
        return self._file.pread(start, max(0, stop - start))


def _read_to_arrow(file: OpenFile, start: int, size: int) -> memoryview:
    """Return a range of a file, in memory that Arrow has used for earlier ones.

    New memory for each row group would take three times as long as reading into it.
    """
    import pyarrow as pa

    content = memoryview(pa.allocate_buffer(size))
    file.pread_into(start, content)
    return content


@dataclass(frozen=True)
class ParquetOptions(RowOptions):
    """The options under `read` in a document for Parquet files.

    config: One of the configurations listed on the card of a Hugging Face dataset; None for its
        default, or the only one.
    """

    config: str | None = field(default=None, kw_only=True)


class ParquetSource(RowSource):
    """The rows of a split of Parquet files, numbered from 0.

    Args:
        address: See `ParquetFiles`.
        selection: Which samples to read, and which columns if `options` say none.
        options: Which columns are read, and which splits there are.

    Raises:
        DatasetNotFoundError: If there are no files.
        FormatError: If one of them is not a Parquet file, or its values do not have a type that
            fits all files.
        ConfigError: If there is no such split or column.
        EmptyDatasetError: If no sample is left.
        MissingExtraError: If pyarrow is not installed.
    """

    groups: ParquetGroups

    def __init__(
        self,
        address: str | os.PathLike[str],
        selection: SampleSelection = TRAIN_SPLIT,
        options: ParquetOptions | None = None,
    ) -> None:
        path = any_path(address)
        options = options or ParquetOptions(origin=str(path))
        files = ParquetFiles(os.fspath(address))
        chosen, by_ratio = _split_files(files, options, selection.split_part)
        footers = {footer.name: footer for footer in files.footers()}
        groups = ParquetGroups(files, [footers[name] for name in chosen])
        super().__init__(path, groups, selection, options, by_ratio=by_ratio)

    @cached_property
    def slice_cost(self) -> SliceCost:
        """A row group is decoded as a whole, so it is a slice."""
        rows = int(np.median(np.diff(self.groups.ends)))
        number = int(np.argmax(np.diff(self.groups.ends)))
        file, own = self.groups.locate(number)
        group = self.groups.metadata(file).row_group(own)
        blocks = self.samples_between(self.groups.ends)
        # A slice that is not aligned with row groups is in two of them.
        size = group.total_byte_size if blocks else 2 * group.total_byte_size
        return SliceCost(max(1, rows), size, blocks)

    def decode_ahead(self, ordinals: Ints, submit: Submit, *, max_bytes: int) -> None:
        """Begin to decode the row groups of samples, see `DecodesAhead`."""
        groups = dict.fromkeys(self._groups_of(self.numbers(ordinals)).tolist())
        most = max_bytes // max(1, self.slice_cost.num_bytes)
        self.groups.decode_ahead(list(groups), self.columns, submit, most=most)


def _split_files(
    files: ParquetFiles, options: ParquetOptions, split_part: str
) -> tuple[list[str], bool]:
    """Return the files of a split, and whether a ratio selects some of their rows."""
    splits = _splits(files, options)
    if options.split is not None:
        return [name for names in splits.values() for name in names], True
    by = "its card" if files.card() else BY_NAMES
    split = chosen_split(split_part, splits, origin=redact(files.address), by=by)
    config = _config(files, options)
    patterns = {} if config is None else config.splits
    for pattern in patterns.get(split) or patterns.get("", ()):
        if not files.matching([pattern]):
            raise DatasetNotFoundError(
                f"{redact(files.address)}: its card assigns {pattern!r} to the split "
                f"{split or split_part!r}, but none of its "
                f"{counted(len(files.listed), 'Parquet file')} matches; correct the card, "
                "README.md, or add the files"
            )
    return splits[split], split == ""


def _splits(files: ParquetFiles, options: ParquetOptions) -> dict[str, list[str]]:
    """Return the files of each split; a single unnamed one if nothing assigns them to splits.

    Raises:
        ConfigError: If the dataset has several configurations and none is chosen.
    """
    config = _config(files, options)
    if config is None:
        names = [file.key for file in files.listed]
        return {"": names} if files.is_single else _guessed(files, names)
    splits = {split: files.matching(patterns) for split, patterns in config.splits.items()}
    return _guessed(files, splits[""]) if "" in splits else splits


def _config(files: ParquetFiles, options: ParquetOptions) -> CardConfig | None:
    """Return the chosen configuration; None if there is none to choose.

    Raises:
        ConfigError: If the dataset has several configurations and none is chosen.
    """
    configs = {config.name: config for config in files.card()}
    chosen = options.config
    if chosen is None and configs:
        given = [config.name for config in configs.values() if config.is_default]
        if not given and len(configs) > 1:
            raise ConfigError(
                f"{options.origin or redact(files.address)}: has the configurations "
                f"{', '.join(configs)}; choose one, as in `read: {{config: {min(configs)}}}`"
            )
        chosen = given[0] if given else min(configs)
    if chosen is None:
        return None
    if chosen not in configs:
        raise ConfigError(
            f"{options.origin}: read: {redact(files.address)} has no configuration {chosen!r}, "
            f"only {', '.join(configs) or 'one without a name'}"
        )
    return configs[chosen]


def _guessed(files: ParquetFiles, names: Sequence[str]) -> dict[str, list[str]]:
    return guess_splits(names, by_file=True, origin=redact(files.address))


class ParquetKind(RowKind):
    """Parquet files, whose rows are samples."""

    name = "parquet"
    noun = "a set of Parquet files"
    source = ParquetSource
    options_type = ParquetOptions
    options = ParquetOptions.names()

    def prepare(self, address: str) -> int:
        return sum(sum(footer.rows) for footer in ParquetFiles(address).prepare())

    def splits_of(self, address: str) -> Collection[str]:
        return _splits(ParquetFiles(address), ParquetOptions())

    def config(self, leaf: Leaf) -> DatasetConfig:
        return row_config(
            leaf,
            has_folder=not (is_pattern(leaf.path) or leaf.path.endswith(PARQUET_SUFFIX)),
            options=ParquetOptions,
        )

    def describe(self, address: str, *, parts: bool = True, **documents: str) -> dict[str, Any]:
        files = ParquetFiles(address)
        groups = ParquetGroups(files, files.footers())
        rows = {footer.name: sum(footer.rows) for footer in groups.footers}
        splits = {}
        for prefix, config in self._configs(files):
            for name, chosen in _splits(files, ParquetOptions(config=config)).items():
                samples = sum(rows[file] for file in chosen)
                splits[f"{prefix}{name or 'train'}"] = split_description(samples, len(chosen))
        size = sum(footer.size for footer in groups.footers)
        described = description(groups.num_rows, len(groups.footers), size, splits)
        return {**described, "columns": groups.column_types(), "row_groups": len(groups.file)}

    @staticmethod
    def _configs(files: ParquetFiles) -> list[tuple[str, str | None]]:
        """Return the configurations whose splits are shown, and the prefix of their names."""
        configs = files.card()
        if len(configs) < 2 or any(config.is_default for config in configs):
            return [("", None)]
        return [(f"{config.name}/", config.name) for config in configs]


KIND = ParquetKind()
