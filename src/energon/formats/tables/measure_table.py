"""Files of measures: a number for each sample of a dataset, which are mapped into memory.

    magic       8 bytes, "energonM"
    size        uint64: bytes of the header
    header      JSON, padded with spaces so that it ends at a multiple of 64 bytes
    checksums   uint32: CRC-32 of the values of each file
    values      int32 or float32: one for each sample, file by file

The header has the `name` of the measure, the `function` that computed it, the `dtype` of the
values, the `index` of the dataset that it was made for, and the `files` of the dataset in order,
each with its number of samples and a stamp that changes with the file. All numbers are
little-endian.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, distinct
from energon.errors import FormatError
from energon.formats.text import parse_json

MAGIC = b"energonM"
VERSION = 1
SUFFIX = ".measure"
HEADER_ALIGNMENT = 64
NO_VALUE = {"int32": np.iinfo(np.int32).min, "float32": np.nan}
"""The values of samples that were not measured, which no split had."""


class MeasuredFile(NamedTuple):
    """A file of a dataset."""

    num_samples: int
    stamp: str
    """Changes with the content of the file."""


@dataclass(frozen=True)
class MeasureHeader:
    """What a file of measures says about itself.

    Args:
        name: Name of the measure.
        function: What computed it, as `module:function`.
        dtype: Type of the values.
        index: Changes with the index of the dataset; None if only the stamps of files tell.
        files: The files of the dataset, by their names.
    """

    name: str
    function: str
    dtype: Literal["int32", "float32"]
    index: str | None
    files: Mapping[str, MeasuredFile]

    def to_bytes(self) -> bytes:
        """Return the header of the file."""
        text = json.dumps({"version": VERSION, **vars(self)})
        text += " " * (-(len(text) + 16) % HEADER_ALIGNMENT)
        return MAGIC + len(text).to_bytes(8, "little") + text.encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, origin: str) -> MeasureHeader:
        """Return the header in the first bytes of a file.

        Raises:
            FormatError: If it is damaged.
        """
        header = parse_json(data[16:], origin=origin)
        try:
            version, dtype = header.pop("version"), header["dtype"]
            if version != VERSION or dtype not in NO_VALUE:
                raise ValueError(f"version {version!r}, dtype {dtype!r}")
            header["files"] = {
                str(name): MeasuredFile(int(count), str(stamp))
                for name, (count, stamp) in header["files"].items()
            }
            return cls(**header)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{origin}: expected the header of a measure: {error!r}") from error


class MeasureTable:
    """The values of a measure.

    Args:
        data: Content of the file, as a buffer.
        origin: The file, for messages.

    Raises:
        FormatError: If it is damaged.
    """

    def __init__(self, data: Any, *, origin: str) -> None:
        self.origin = origin
        view = memoryview(data)
        if bytes(view[:8]) != MAGIC:
            raise FormatError(f"{origin} begins with {bytes(view[:8])!r}, expected {MAGIC!r}")
        end = 16 + int.from_bytes(view[8:16], "little")
        header = bytes(view[:end])
        self.header = MeasureHeader.from_bytes(header, origin=origin)
        counts = [file.num_samples for file in self.header.files.values()]
        self.bounds = np.cumsum([0, *counts])
        begin = end + 4 * len(counts)
        expected = begin + 4 * int(self.bounds[-1])
        if len(view) != expected:
            raise FormatError(f"{origin} has {len(view)} bytes, expected {expected}")
        self._checksums = np.frombuffer(view[end:begin], "<u4")
        self.values: NDArray[Any] = np.frombuffer(view[begin:], f"<{self.header.dtype[0]}4")
        self.digest = blake2b(header + bytes(view[end:begin]), digest_size=8).hexdigest()
        self._is_checked = np.zeros(len(counts), bool)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each file, by its name."""
        return {name: number for number, name in enumerate(self.header.files)}

    def of_file(self, number: int) -> NDArray[Any]:
        """Return the values of a file.

        Raises:
            FormatError: If they are damaged.
        """
        values = self.values[self.bounds[number] : self.bounds[number + 1]]
        if not self._is_checked[number]:
            if zlib.crc32(values.data) != self._checksums[number]:
                name = list(self.header.files)[number]
                raise FormatError(
                    f"{self.origin}: the values of {name!r} do not match their checksum"
                )
            self._is_checked[number] = True
        return values

    def at(self, files: Ints, samples: Ints) -> NDArray[np.float64]:
        """Return the values of samples, NaN for those that were not measured.

        Args:
            files: The number of the file of each sample.
            samples: The number of each sample in its file.

        Raises:
            FormatError: If the values are damaged.
        """
        for number in distinct(files[~self._is_checked[files]]).tolist():
            self.of_file(number)
        return as_floats(self.values[self.bounds[files] + samples])


def as_floats(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return stored values as numbers, NaN for those that are missing."""
    numbers = values.astype(np.float64)
    if values.dtype.kind == "i":
        numbers[values == NO_VALUE["int32"]] = np.nan
    return numbers


def write_measures(
    target: IO[bytes],
    header: MeasureHeader,
    values_of: Callable[[str], Iterator[tuple[int, NDArray[np.float64]]]],
) -> None:
    """Write a file of measures.

    Args:
        target: The file, open and empty.
        header: Its header.
        values_of: Yields pieces of the values of a file: the number of the first sample, and the
            values.
    """
    line, checksums = header.to_bytes(), []
    target.write(line)
    target.write(bytes(4 * len(header.files)))
    for name, file in header.files.items():
        values = np.full(file.num_samples, NO_VALUE[header.dtype], f"<{header.dtype[0]}4")
        for start, piece in values_of(name):
            there = ~np.isnan(piece)
            values[start : start + len(piece)][there] = piece[there]
        checksums.append(zlib.crc32(values.data))
        target.write(values.data)
    target.seek(len(line))
    target.write(np.array(checksums, "<u4").tobytes())
