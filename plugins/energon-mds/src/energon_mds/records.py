"""The records in a chunk, and their fields.

A chunk begins with its number of records N and N + 1 offsets, little-endian 32-bit numbers; a
record with the sizes of its fields, where these differ, followed by their contents.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from energon.errors import DecodeError, EnergonError, FormatError, TruncatedError
from energon.formats.compressed import DECOMPRESSORS, decompressed
from energon.formats.media import guess_extension
from energon.formats.meta.info import MAX_SAMPLES, leads_out
from energon.limits import is_allowed, refusal
from energon.messages import bytes_in_words, describe_error

CHUNK_INDEX = "index.json"
"""The file of a folder that lists its chunks and describes their content."""
COUNT_BYTES = 4


class ChunkFile(NamedTuple):
    """A chunk, as the index describes it."""

    name: str
    num_records: int
    """How many samples it has."""
    size: int
    """Bytes, compressed or not."""


class ChunkFormat(Protocol):
    """How the samples of a dataset are stored in its chunks.

    Attributes:
        chunks: The chunks.
        sizes_are_exact: Whether each of them has as many bytes as the index says.
    """

    chunks: list[ChunkFile]
    sizes_are_exact: bool

    @property
    def columns(self) -> Mapping[str, str]:
        """How each part of a sample is stored.

        Raises:
            FormatError: If that differs between chunks.
        """

    @property
    def is_packed(self) -> bool:
        """Whether a chunk is decompressed as a whole, before a record can be read."""

    def records(self, number: int, data: bytes, origin: object, start: int = 0) -> Iterator[Sized]:
        """Yield the records of a chunk, whose lengths are bytes, from number `start` on.

        Args:
            number: Which chunk it is.
            data: Its bytes.
            origin: Its name in messages.
            start: Number of the first record.

        Raises:
            FormatError: If it is damaged.
        """

    def row(
        self,
        number: int,
        record: Any,
        origin: object,
        takes: Callable[[str], bool] = ...,
    ) -> dict[str, Any]:
        """Return the parts of a record of a chunk; by default, all of them.

        Raises:
            FormatError: If the record is damaged.
        """


def stated_number(value: Any) -> int:
    """Return a number of samples or bytes in an index.

    Raises:
        ValueError: If it is none.
    """
    if type(value) is not int or not 0 <= value <= MAX_SAMPLES:
        raise ValueError(f"expected a number of samples or bytes, got {value!r}")
    return value


def file_name(value: Any) -> str:
    """Return the name of a chunk in an index.

    Raises:
        ValueError: If it is none, or is outside the folder.
    """
    if not isinstance(value, str) or value in ("", ".") or "\0" in value or leads_out(value):
        raise ValueError(f"expected the name of a file in the folder, got {value!r}")
    return value


def check_num_records(count: int, stated: int, origin: object) -> None:
    """Raise FormatError unless a chunk has as many records as the index says."""
    if count != stated:
        raise FormatError(
            f"{origin}: has {count} records, but {CHUNK_INDEX} says {stated}; one of them was "
            "replaced, copy the folder again"
        )


def decompress(data: bytes | memoryview, origin: object, compression: str) -> bytes:
    """Decompress data.

    Raises:
        FormatError: If the compression is unknown, or the data are damaged, or have more content
            than `UNPACKED_BYTES` allows.
        MissingExtraError: If zstandard is not installed.
    """
    check_compression(compression, origin)
    try:
        return decompressed(data, compression.partition(":")[0])
    except DecodeError as error:
        raise FormatError(f"{origin}: {error}") from error


def check_compression(compression: str, origin: object) -> None:
    """Raise FormatError unless data that are compressed in this way can be read."""
    if compression.partition(":")[0] not in DECOMPRESSORS:
        raise FormatError(
            f"{origin}: is compressed with {compression!r}; expected zstd, gz or bz2, which can be "
            "read without the library that wrote it"
        )


def count_of(head: bytes) -> int:
    """Return the number of records from the first bytes of a chunk."""
    return int.from_bytes(head[:COUNT_BYTES], "little")


def record_edges(table: bytes, count: int, size: int, origin: object) -> NDArray[np.int64]:
    """Return where the records of a chunk begin, and the end.

    Args:
        table: The N + 1 offsets.
        count: How many records there are.
        size: Bytes of the chunk.
        origin: Its name in messages.

    Raises:
        FormatError: If they are invalid.
    """
    if len(table) < 4 * (count + 1):
        raise TruncatedError(f"{origin}: {count} records do not fit into {size} bytes")
    edges = np.frombuffer(table, "<u4", count + 1).astype(np.int64)
    if (np.diff(edges) < 0).any() or edges[-1] > size:
        raise FormatError(f"{origin}: its offsets do not ascend, or lead beyond its end")
    return edges


def records(data: bytes, origin: object, start: int = 0) -> Iterator[memoryview]:
    """Yield the records of a chunk from number `start` on.

    Raises:
        FormatError: If its offsets are invalid.
    """
    count = count_of(data)
    table = data[COUNT_BYTES : COUNT_BYTES + 4 * (count + 1)]
    edges = record_edges(table, count, len(data), origin)
    view = memoryview(data)
    for number in range(start, count):
        yield view[edges[number] : edges[number + 1]]


def fields(record: bytes | memoryview, sizes: Sequence[int | None], origin: object) -> list[bytes]:
    """Return the contents of the fields of a record.

    Args:
        record: The record.
        sizes: Bytes of each field; None for those whose size is in the record.
        origin: Name of the chunk in messages.

    Raises:
        FormatError: If the sizes do not add up to the record.
    """
    count = sum(size is None for size in sizes)
    if 4 * count > len(record):
        raise FormatError(f"{origin}: a record has {len(record)} bytes, too few for its fields")
    stated = iter(np.frombuffer(record, "<u4", count).tolist() if count else [])
    position = 4 * count
    contents = []
    for size in sizes:
        length = next(stated) if size is None else size
        contents.append(bytes(record[position : position + length]))
        position += length
    if position != len(record):
        raise FormatError(f"{origin}: a record has {len(record)} bytes, its fields {position}")
    return contents


def decoded(decoders: Iterable[tuple[Callable[[bytes], Any], bytes]], origin: object) -> list[Any]:
    """Return the decoded contents of fields.

    Raises:
        FormatError: If one of them cannot be decoded.
    """
    try:
        return [decode(content) for decode, content in decoders]
    except FormatError as error:
        raise FormatError(f"{origin}: has an invalid record: {error}") from error
    except (EnergonError, MemoryError):
        raise
    except Exception as error:  # of Pillow, numpy, or the library that wrote the records
        problem = describe_error(error)
        raise FormatError(f"{origin}: has an invalid record: {problem}") from error


def check_unpickling(what: str, allow: Collection[str]) -> None:
    """Raise SecurityError unless the user allows unpickling.

    Args:
        what: What holds pickled objects.
        allow: "pickle" permits it.
    """
    if not is_allowed("pickle", allow):
        raise refusal(
            "pickle",
            f"{what}, which could run any code when they are read; write the dataset again with "
            "arrays, text and numbers only",
        )


def unpickle(content: bytes) -> Any:
    """Return a pickled object, which the user must have allowed."""
    try:
        return pickle.loads(content)
    except Exception as error:
        raise FormatError(f"an object cannot be unpickled: {describe_error(error)}") from error


def pil_image(content: bytes) -> Any:
    """Return the image in a field of type `pil`: its sizes, then its mode, then its pixels."""
    from PIL import Image

    width, height, length = np.frombuffer(content, "<u4", 3).tolist()
    mode = content[12 : 12 + length].decode()
    return Image.frombytes(mode, (width, height), content[12 + length :])


def encoded_image(content: bytes) -> bytes:
    """Return the content of an image file, which is decoded later."""
    if guess_extension(content) is None:
        raise FormatError(f"found {bytes_in_words(content)}, expected the content of an image file")
    return content


def image_list(content: bytes) -> list[bytes]:
    """Return images that were stored behind their number and their sizes."""
    sizes = np.frombuffer(content, "<u4", count_of(content), COUNT_BYTES)
    ends = COUNT_BYTES + 4 * len(sizes) + np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    if ends[-1] != len(content):
        raise ValueError(f"images have {ends[-1]} bytes, not {len(content)}")
    return [content[start:stop] for start, stop in pairwise(ends.tolist())]
