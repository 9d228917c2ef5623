"""Shards as those who check them read them, on this machine or in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from energon.formats.tables.part_table import PartTable
from energon.formats.tar.scan import scan_archive, scan_tar
from energon.formats.tar.scan_builder import TarScan
from energon.io.range_file import RemoteFile
from energon.io.readers import SkippingReader
from energon.prepare.files import FileState, file_state, reporting
from energon.prepare.index.checksums import content_crc32
from energon.prepare.index.range_sums import RangeSums


class ShardFile(Protocol):
    """A shard that is compared with its index."""

    path: str
    """For messages, without secrets."""

    def state(self) -> FileState:
        """Return its size and date."""

    def scan(self, checked: PartTable | None) -> TarScan:
        """Return what its headers say.

        Args:
            checked: The table whose contents `crc32` will be asked for; None for none.

        Raises:
            FormatError: If it is no archive, or cut off.
        """

    def crc32(self, checked: PartTable) -> NDArray[np.uint32]:
        """Return the checksums of the contents whose places are in a table.

        Raises:
            TruncatedError: If it ends before the last.
        """


class LocalShard:
    """A shard on this machine.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.path = str(path)

    def state(self) -> FileState:
        return file_state(self._path)

    def scan(self, checked: PartTable | None) -> TarScan:
        with reporting(self._path):
            return scan_tar(self._path)

    def crc32(self, checked: PartTable) -> NDArray[np.uint32]:
        with reporting(self._path):
            return content_crc32(self._path, checked.part_offset, checked.part_size)


class RemoteShard:
    """A shard in a store: headers and contents are read in one pass. Used by one thread.

    Args:
        address: Where it is. All that is read is of the version that it has now.

    Raises:
        DatasetNotFoundError: If there is none.
        StorageError: If the store cannot be asked.
    """

    def __init__(self, address: str) -> None:
        self.file = RemoteFile(address)
        self.path = self.file.path
        self._sums: RangeSums | None = None

    def state(self) -> FileState:
        return FileState(self.file.info.size, self.file.info.mtime_ns)

    def scan(self, checked: PartTable | None) -> TarScan:
        reader = SkippingReader(self.file.object)
        read_into = reader.read_into
        if checked is not None:
            self._sums = RangeSums(checked.part_offset, checked.part_size, reader, self.path)
            read_into = self._sums.read_into
        return scan_archive(read_into, self.file.info.size, origin=self.path)

    def crc32(self, checked: PartTable) -> NDArray[np.uint32]:
        sums, self._sums = self._sums, None
        if sums is None:
            reader = SkippingReader(self.file.object)
            sums = RangeSums(checked.part_offset, checked.part_size, reader, self.path)
        return sums.finish()
