"""Index a shard that is read by ranges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from energon.errors import FormatError
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.part_table_file import find_misplaced, part_table_path
from energon.formats.tar.scan import scan_archive
from energon.formats.tar.scan_builder import TarScan
from energon.io.range_file import RemoteFile
from energon.io.readers import SkippingReader
from energon.prepare.index.checksums import RangeSums
from energon.prepare.index.index import IndexOptions

PROBED_SAMPLES = 8


def index_remote(file: RemoteFile, copy: Path, options: IndexOptions) -> PartTable:
    """Return the part table of a shard in a store.

    Args:
        file: The shard.
        copy: Local path beside which the table of an earlier run may lie. If it only has
            another date, as where shards were indexed before they were uploaded, it is kept.
        options: How to index.

    Raises:
        FormatError: If the shard is damaged, cut off or has no samples.
    """
    if not options.force and (table := _present(file, copy, options)) is not None:
        return replace(table, shard_mtime_ns=file.info.mtime_ns)
    reader = SkippingReader(file.object)
    scan = scan_archive(reader.read_into, file.info.size, origin=file.path)
    if not scan.num_samples:
        raise FormatError(
            f"{file.path}: has no samples. Files in a shard are named KEY.EXTENSION, and links "
            "and folders do not count; remove the shard, or leave it out with --exclude"
        )
    if options.checksum:
        scan = _with_checksums(file, scan)
    return PartTable.from_scan(scan, shard_mtime_ns=file.info.mtime_ns)


def _present(file: RemoteFile, copy: Path, options: IndexOptions) -> PartTable | None:
    try:
        table = PartTable.open(part_table_path(copy), verify=True)
    except (FileNotFoundError, FormatError):
        return None
    if table.shard_size != file.info.size or (options.checksum and table.part_crc32 is None):
        return None
    misplaced = find_misplaced(table, file.pread, count=PROBED_SAMPLES)
    return table if misplaced is None else None


def _with_checksums(file: RemoteFile, scan: TarScan) -> TarScan:
    """Return what was found in a shard, with the checksum of each part; fetches all of it."""
    sums = RangeSums(scan.part_offset, scan.part_size, SkippingReader(file.object), file.path)
    return replace(scan, part_crc32=sums.finish())
