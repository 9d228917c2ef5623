"""Token files: `x.bin` holds the tokens of all documents, `x.idx` the start of each.

The layout is that of Megatron-LM's indexed datasets (MMIDIDX, version 1). Numbers are
little-endian and follow one another without padding:

| bytes | content of `x.idx` |
|---|---|
| 9 | `MMIDIDX\\0\\0` |
| 8 | version, 1 |
| 1 | type of the tokens, see `TOKEN_TYPES` |
| 8 | S, the number of sequences |
| 8 | D + 1, the number of documents and one more |
| 4 S | tokens of each sequence (int32) |
| 8 S | where each sequence begins in `x.bin`, in bytes (int64) |
| 8 (D + 1) | the first sequence of each document, and S (int64) |
| S | the mode of each sequence (int8); only multimodal files have it |

A document is one or more sequences, whose tokens follow one another in `x.bin`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import ConfigError, FormatError, ShardChangedError, TruncatedError
from energon.local_file import release_pages

TOKENS_MAGIC = b"MMIDIDX\x00\x00"
TOKENS_VERSION = 1
TOKEN_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
"""The types of tokens, by their codes."""
TOKEN_INDEX, DATA = ".idx", ".bin"
_HEADER = struct.Struct("<9sQBQQ")


def token_prefix(path: str) -> str:
    """Return the common prefix of the two files, given either of them or the prefix.

    Example:
        >>> token_prefix("data/wiki.idx"), token_prefix("data/wiki")
        ('data/wiki', 'data/wiki')
    """
    for suffix in (TOKEN_INDEX, DATA):
        if path.endswith(suffix):
            return path.removesuffix(suffix)
    return path


@dataclass(frozen=True)
class TokenIndex:
    """The content of an `.idx` file.

    Args:
        data: Its bytes, mapped or read.
        dtype: The type of the tokens.
        num_sequences: How many sequences there are.
        num_documents: How many documents there are.
        num_bytes: Size of the `.bin` file.
        origin: The `.idx` file, for messages.
    """

    data: Any
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int
    num_bytes: int
    origin: str

    @classmethod
    def parse(cls, data: Any, *, num_bytes: int, origin: str) -> TokenIndex:
        """Return the index in `data`.

        Reads its head and its end, so that it takes no longer for a long one. What is between
        is checked where it is used.

        Raises:
            FormatError: If it is not valid.
            TruncatedError: If its end is missing.
            ShardChangedError: If the `.bin` file has fewer bytes than it lists.
        """
        if bytes(data[: len(TOKENS_MAGIC)]) != TOKENS_MAGIC:
            raise FormatError(
                f"{origin}: begins with {bytes(data[: len(TOKENS_MAGIC)])!r}, not with "
                f"{TOKENS_MAGIC!r}; it is not an index of a token file"
            )
        if len(data) < _HEADER.size:
            raise TruncatedError(
                f"{origin}: has {len(data)} bytes, not a complete header; copy it again"
            )
        _, version, code, sequences, documents = _HEADER.unpack(data[: _HEADER.size])
        if version != TOKENS_VERSION:
            raise FormatError(f"{origin}: has version {version}, expected {TOKENS_VERSION}")
        if code not in TOKEN_TYPES:
            types = ", ".join(f"{code} ({dtype.name})" for code, dtype in TOKEN_TYPES.items())
            raise FormatError(
                f"{origin}: its tokens have the unknown type {code}; expected {types}"
            )
        index = cls(data, TOKEN_TYPES[code], sequences, documents - 1, num_bytes, origin)
        index._check_size()
        index._check_end()
        return index

    @property
    def has_modes(self) -> bool:
        """Whether sequences have modes."""
        return self.num_sequences > 0 and len(self.data) > self._end(0)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """The number of tokens in each sequence."""
        return self._array("<i4", self.num_sequences, _HEADER.size)

    @cached_property
    def pointers(self) -> Ints:
        """The byte of the `.bin` file at which each sequence begins."""
        return self._array("<i8", self.num_sequences, _HEADER.size + 4 * self.num_sequences)

    @cached_property
    def documents(self) -> Ints:
        """The first sequence of each document, and the number of sequences."""
        at = _HEADER.size + 12 * self.num_sequences
        return self._array("<i8", self.num_documents + 1, at)

    @cached_property
    def modes(self) -> NDArray[np.int8] | None:
        """The mode of each sequence; None if there are none."""
        return self._array("i1", self.num_sequences, self._end(0)) if self.has_modes else None

    def sequences(self, documents: Ints) -> tuple[Ints, Ints]:
        """Return the first sequence of each document, and the one after its last.

        Raises:
            FormatError: If the index is invalid there.
        """
        first, stop = self.documents[documents], self.documents[documents + 1]
        if ((first < 0) | (stop < first) | (stop > self.num_sequences)).any():
            raise self.damaged("its documents do not ascend")
        return first, stop

    def document_lengths(self, start: int, stop: int) -> Ints:
        """Return the number of tokens in each document from `start` to `stop`.

        Raises:
            FormatError: If the index is invalid there.
        """
        if start >= stop:
            return np.zeros(0, np.int64)
        edges = self.documents[start : stop + 1]
        low, high = int(edges[0]), int(edges[-1])
        if low < 0 or high > self.num_sequences or (edges[1:] < edges[:-1]).any():
            raise self.damaged("its documents do not ascend")
        lengths = self.lengths[low:high]
        if (lengths < 0).any():
            raise self.damaged("a sequence has a negative length")
        if high - low == stop - start and (edges[1:] > edges[:-1]).all():
            return lengths.astype(np.int64)
        ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        return np.diff(ends[edges - low])

    def document_extents(self, documents: Ints) -> tuple[Ints, Ints]:
        """Return the offsets of documents in the `.bin` file, and their numbers of tokens.

        Raises:
            FormatError: If the index is invalid there.
            ShardChangedError: If they do not lie within the `.bin` file.
        """
        first, stop = self.sequences(documents)
        begin = np.zeros(len(documents), np.int64)
        length = np.zeros(len(documents), np.int64)
        full = np.flatnonzero(stop > first)
        first, last = first[full], stop[full] - 1
        begin[full] = self.pointers[first]
        end = self.pointers[last] + self.lengths[last].astype(np.int64) * self.dtype.itemsize
        size = end - begin[full]
        length[full] = size // self.dtype.itemsize
        self._check_begin(begin[full])
        bad = (size < 0) | (size % self.dtype.itemsize != 0)
        if (bad | (self.lengths[first] < 0)).any():
            raise self.damaged("sequences of a document do not follow each other")
        self._check_inside(end)
        return begin, length

    def extents(self, sequences: Ints) -> tuple[Ints, Ints]:
        """Return the start and end of sequences in the `.bin` file, in bytes.

        Raises:
            FormatError: If the index is invalid there.
            ShardChangedError: If they do not lie within the `.bin` file.
        """
        low = self.pointers[sequences]
        size = self.lengths[sequences].astype(np.int64) * self.dtype.itemsize
        self._check_begin(low)
        if (size < 0).any():
            raise self.damaged("a sequence has a negative length")
        self._check_inside(low + size)
        return low, low + size

    def document_modes(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        """Return the tokens of each sequence of a document, and their modes."""
        first, stop = self.documents[document : document + 2].tolist()
        modes = np.zeros(0, np.int8) if self.modes is None else self.modes
        return self.lengths[first:stop], modes[first:stop]

    def forget(self) -> None:
        """Release the mapped pages from memory; they are read again on demand."""
        release_pages(self.data)

    def damaged(self, why: str) -> FormatError:
        """Return the error for an invalid index."""
        return FormatError(f"{self.origin}: {why}; it is damaged, write it again")

    def _check_begin(self, begin: Ints) -> None:
        bad = (begin < 0) | (begin % self.dtype.itemsize != 0)
        if bad.any():
            raise self.damaged(
                f"a sequence begins at byte {begin[bad][0]}, where no token of "
                f"{self.dtype.itemsize} bytes begins"
            )

    def _check_inside(self, end: Ints) -> None:
        if (end > self.num_bytes).any():
            raise ShardChangedError(
                f"{self.origin}: lists tokens up to byte {end.max()}, but the {DATA} file has "
                f"{self.num_bytes} bytes; the two do not belong together, copy both again"
            )

    def _array(self, dtype: str, count: int, offset: int) -> NDArray[Any]:
        return np.frombuffer(self.data, dtype, count, offset) if count else np.zeros(0, dtype)

    def _end(self, mode_bytes: int) -> int:
        numbers = (12 + mode_bytes) * self.num_sequences + 8 * (self.num_documents + 1)
        return _HEADER.size + numbers

    def _check_size(self) -> None:
        if self.num_documents < 0:
            raise self.damaged("it has no end of documents")
        size = len(self.data)
        if size in (self._end(0), self._end(1)):
            return
        counts = f"{self.num_sequences} sequences and {self.num_documents} documents"
        message = f"{self.origin}: has {size} bytes, but {counts} take {self._end(0)}"
        if size < self._end(0):
            raise TruncatedError(f"{message}; its end is missing, copy it again")
        raise FormatError(f"{message}, or {self._end(1)} with modes; it is damaged, write it again")

    def _check_end(self) -> None:
        if self.documents[0] != 0 or self.documents[-1] != self.num_sequences:
            raise self.damaged(
                f"its documents are those of the sequences {self.documents[0]} to "
                f"{self.documents[-1]}, not of 0 to {self.num_sequences}"
            )
        if self.num_sequences:
            listed = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
            if listed != self.num_bytes:
                raise ShardChangedError(
                    f"{self.origin}: lists {listed} bytes of tokens, but the {DATA} file has "
                    f"{self.num_bytes}; the two do not belong together, copy both again"
                )


def token_dtype(vocabulary_size: int | None) -> np.dtype[Any]:
    """Return the smallest type that token files use for a vocabulary; None for any size.

    Example:
        >>> str(token_dtype(50_000)), str(token_dtype(None))
        ('uint16', 'int32')
    """
    is_small = vocabulary_size is not None and vocabulary_size < 65_500
    return np.dtype("<u2" if is_small else "<i4")


def token_index_bytes(
    dtype: np.dtype[Any],
    lengths: Sequence[int] | NDArray[np.integer[Any]],
    documents: Sequence[int] | NDArray[np.integer[Any]] | None = None,
    modes: Sequence[int] | NDArray[np.integer[Any]] | None = None,
) -> Iterator[bytes]:
    """Yield the content of an `.idx` file, piece by piece.

    Args:
        dtype: The type of the tokens.
        lengths: Tokens of each sequence, which follow one another.
        documents: The first sequence of each document, and the number of all sequences; None if
            each sequence is a document.
        modes: The mode of each sequence; None for a file without.

    Raises:
        ConfigError: If token files have no such type.
    """
    codes = {type_: code for code, type_ in TOKEN_TYPES.items()}
    if dtype not in codes:
        names = ", ".join(type_.name for type_ in codes)
        raise ConfigError(f"token files hold no {dtype.name}, only {names}")
    sizes = np.asarray(lengths, "<i4")
    first = np.arange(len(sizes) + 1, dtype="<i8")
    if documents is not None:
        first = np.asarray(documents, "<i8")
    ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
    yield _HEADER.pack(TOKENS_MAGIC, TOKENS_VERSION, codes[dtype], len(sizes), len(first))
    yield sizes.tobytes()
    yield np.concatenate(([0], ends[:-1])).astype("<i8")[: len(sizes)].tobytes()
    yield first.tobytes()
    if modes is not None:
        yield np.asarray(modes, "i1").tobytes()
