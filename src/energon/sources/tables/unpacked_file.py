"""Read ranges of the content of a compressed file, through points from which to decompress it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import ClassVar

import numpy as np

from energon.arrays import Ints
from energon.errors import TruncatedError
from energon.formats.seek_points import SeekPoints
from energon.io.range_file import RangeFile
from energon.sources.decoded_blocks import DecodedBlocks


class UnpackedFile:
    """The content of a compressed file. May be used by many threads.

    Args:
        file: The compressed file.
        points: Its table of points.
    """

    is_remote: ClassVar[bool] = False

    def __init__(self, file: RangeFile, points: SeekPoints) -> None:
        self.path = file.path
        self.packed = file
        self.points = points
        self._unpacked: DecodedBlocks[int, bytes] = DecodedBlocks()
        self._lock = Lock()

    def pread(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes of the content from `offset`.

        Raises:
            TruncatedError: If it ends earlier.
            FormatError: If the file is damaged.
        """
        return self.pread_many([offset], [size])[0]

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return several ranges, see `pread`."""
        low = np.asarray(offsets, np.int64)
        high = low + np.asarray(sizes, np.int64)
        if len(high) and high.max() > self.points.unpacked_size:
            raise TruncatedError(
                f"{self.path}: its content ends at byte {self.points.unpacked_size}, expected "
                f"bytes up to {high.max()}"
            )
        first = self.points.holding(low)
        last = self.points.holding(np.maximum(low, high - 1))
        with self._lock:
            numbers = {n for a, b in zip(first, last, strict=True) for n in range(a, b + 1)}
            unpacked = self._unpack(sorted(numbers))
            found = []
            for a, b, start, stop in zip(first, last, low.tolist(), high.tolist(), strict=True):
                pieces = [unpacked[n] for n in range(a, b + 1)]
                content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                begin = int(self.points.starts[a])
                found.append(content[start - begin : stop - begin])
        return found

    def packed_extents(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the bytes of the file that ranges of the content need."""
        starts, _ = self.points.packed_range(self.points.holding(low))
        _, stops = self.points.packed_range(self.points.holding(high - 1))
        return starts, stops

    @property
    def mean_interval(self) -> float:
        """Average number of bytes between two points, which are unpacked together."""
        return self.points.unpacked_size / len(self.points)

    def _unpack(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the content behind some points, up to the next one, by their numbers."""
        kept = {number: self._unpacked.get(number) for number in numbers}
        found = {number: content for number, content in kept.items() if content is not None}
        missing = np.array([number for number in numbers if number not in found], np.int64)
        low, high = self.points.packed_range(missing)
        data = self.packed.pread_many(low.tolist(), (high - low).tolist())
        for number, each in zip(missing.tolist(), data, strict=True):
            content = found[number] = self.points.unpack(number, each)
            self._unpacked.keep(number, content, len(content))
        return found
