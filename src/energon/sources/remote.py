"""What readers must know of a shard in an object store: its part table, kept on local disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from energon.errors import DatasetNotFoundError, TruncatedError
from energon.formats.part_table import PartTable
from energon.formats.part_table_bytes import has_other_version
from energon.formats.part_table_file import warn_of_other_version
from energon.formats.tar_index import parse_tar_index
from energon.formats.tar_scan import scan_archive
from energon.io.address import address_name, join_address, parent_address, redact
from energon.io.disk_cache import disk_cache
from energon.io.files import read_bytes
from energon.io.range_file import RemoteFile
from energon.io.skipping_reader import SkippingReader


def open_remote_table(file: RemoteFile, dataset: object) -> PartTable:
    """Return the part table of a shard: that beside it, or one made by reading its headers.

    It is fetched or made once on a machine for each version of the shard.

    Args:
        file: The shard.
        dataset: What it belongs to, for warnings.

    Raises:
        TruncatedError: If the shard is shorter than it was when it was indexed.
        FormatError: If the table or the shard is damaged.
    """
    beside = _beside(file, ".parts")

    def fetch() -> bytes:
        try:
            content = read_bytes(beside)
        except DatasetNotFoundError:
            return _scan(file).to_bytes()
        if has_other_version(content):
            warn_of_other_version(dataset)
            return _scan(file).to_bytes()
        return content

    name = redact(beside)

    def parse(data: Any) -> PartTable:
        return PartTable.from_buffer(data, origin=name, verify=True)

    return disk_cache().load(name, _version(file), fetch, parse)


def check_once(file: RemoteFile, table: PartTable, check: Callable[[], None]) -> None:
    """Call `check` unless it did not raise before, on this machine, for this shard and table."""

    def make() -> bytes:
        check()
        return b"as indexed"

    about = f"{_version(file)} {table.shard_size} {table.shard_mtime_ns} {table.num_parts}"
    disk_cache().keep(f"check of {file.path}", about, make)


def _scan(file: RemoteFile) -> PartTable:
    """Return a table made of the headers of a shard, and check it by the index that is there."""
    try:
        index = _beside(file, ".idx")
        indexed = int(parse_tar_index(read_bytes(index), origin=redact(index))[-1])
    except DatasetNotFoundError:
        indexed = 0
    if file.info.size < indexed:
        raise TruncatedError(
            f"{file.path}: has {file.info.size} bytes, had {indexed} when it was indexed; restore "
            "the file, or run `energon prepare` again"
        )
    reader = SkippingReader(file.object)
    scan = scan_archive(reader.read_into, file.info.size, origin=file.path, strict=False)
    return PartTable.from_scan(scan, shard_mtime_ns=file.info.mtime_ns)


def _beside(file: RemoteFile, ending: str) -> str:
    return join_address(parent_address(file.address), address_name(file.address) + ending)


def _version(file: RemoteFile) -> str:
    return f"{file.info.version} {file.info.size}"
