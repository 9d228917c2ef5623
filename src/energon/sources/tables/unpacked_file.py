"""Read ranges of the content of a compressed file, through points from which to decompress it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import ClassVar

import numpy as np

from energon.arrays import Ints
from energon.errors import TruncatedError
from energon.formats.seek_points import SeekPoints
from energon.io.range_file import RangeFile

HELD_BYTES = 256 << 20
"""Content kept in memory: the content between two points is unpacked once for its slices."""
MAX_SLICES = 16


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
        self._held: OrderedDict[int, bytes] = OrderedDict()
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
            self._unpack({n for a, b in zip(first, last, strict=True) for n in range(a, b + 1)})
            found = []
            for a, b, start, stop in zip(first, last, low.tolist(), high.tolist(), strict=True):
                pieces = [self._held[n] for n in range(a, b + 1)]
                content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                begin = int(self.points.starts[a])
                found.append(content[start - begin : stop - begin])
            self._forget()
        return found

    def packed_extents(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the bytes of the file that ranges of the content need."""
        starts, _ = self.points.packed_range(self.points.holding(low))
        _, stops = self.points.packed_range(self.points.holding(high - 1))
        return starts, stops

    @property
    def preferred_slices(self) -> tuple[float, int]:
        """Bytes that are best read together, and how many such slices may be open at a time."""
        content = self.points.unpacked_size / len(self.points)
        # A slice is not aligned with points, so it spans up to three intervals.
        return content, int(max(1, min(MAX_SLICES, HELD_BYTES // (2 * content + 1))))

    def _unpack(self, numbers: set[int]) -> None:
        for number in sorted(numbers & self._held.keys()):
            self._held.move_to_end(number)
        missing = np.array(sorted(numbers - self._held.keys()), np.int64)
        low, high = self.points.packed_range(missing)
        data = self.packed.pread_many(low.tolist(), (high - low).tolist())
        for number, each in zip(missing.tolist(), data, strict=True):
            self._held[number] = self.points.unpack(number, each)

    def _forget(self) -> None:
        held = sum(map(len, self._held.values()))
        while held > HELD_BYTES and len(self._held) > 2:
            held -= len(self._held.popitem(last=False)[1])
