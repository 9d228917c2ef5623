"""Part tables and indexes of shards in object stores."""

from __future__ import annotations

from typing import Any

from energon.errors import DatasetNotFoundError
from energon.formats.part_table import PartTable
from energon.formats.tar_index import parse_tar_index
from energon.formats.tar_scan import scan_archive
from energon.io.address import address_name, join_address, parent_address, redact
from energon.io.files import read_bytes
from energon.io.range_file import RemoteFile


def open_remote_table(file: RemoteFile) -> PartTable:
    """Return the part table of a shard: that beside it, or one made by reading its headers."""
    beside = join_address(parent_address(file.address), f"{address_name(file.address)}.parts")
    try:
        return PartTable.from_buffer(read_bytes(beside), origin=redact(beside))
    except DatasetNotFoundError:
        pass

    def read_into(offset: int, buffer: Any) -> int:
        view = memoryview(buffer)
        data = file.pread(offset, min(len(view), file.info.size - offset))
        view[: len(data)] = data
        return len(data)

    return PartTable.from_scan(
        scan_archive(read_into, file.info.size, origin=file.path, strict=False)
    )


def remote_indexed_size(address: str) -> int:
    """Return what a shard must have at least, by the index that other tools write beside it."""
    name = address_name(address).rpartition(".")[0] + ".tar.idx"
    beside = join_address(parent_address(address), name)
    try:
        return int(parse_tar_index(read_bytes(beside), origin=redact(beside))[-1])
    except FileNotFoundError:
        return 0
