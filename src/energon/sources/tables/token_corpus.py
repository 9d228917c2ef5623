"""Token files as one corpus: where the tokens of its documents are."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from energon.arrays import Ints, distinct
from energon.errors import DatasetNotFoundError, FormatError
from energon.formats.meta.info import guess_splits
from energon.formats.tokens import DATA, TOKEN_INDEX, TokenIndex, token_prefix
from energon.io.address import address_name, join_address, redact
from energon.io.backends.local import OpenFile, cut_off, local_error
from energon.io.epath import any_path
from energon.io.files import file_info, list_files
from energon.io.range_file import RangeFile, range_file
from energon.local_file import map_file
from energon.plan.leaves.token_windows import BLOCK_DOCUMENTS, Documents, Pieces
from energon.sources.files.locate import local_copy
from energon.sources.shards import MAX_SPAN_BYTES, read_spans, span_edges

SUMMED_DOCUMENTS = 128 * BLOCK_DOCUMENTS
"""Documents whose lengths are checked together: an index of gigabytes is never in memory."""


class TokenFile:
    """The documents of a pair of files. Copies open them again.

    Args:
        prefix: The common part of their names.

    Raises:
        DatasetNotFoundError: If one of them is missing.
        FormatError: If the index is invalid, or does not match the tokens.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.name = address_name(prefix)
        index = any_path(prefix + TOKEN_INDEX)
        size = None
        for suffix in (TOKEN_INDEX, DATA):
            info = file_info(prefix + suffix)
            if info is None:
                raise DatasetNotFoundError(
                    f"{redact(prefix + suffix)} does not exist; token files come in pairs, "
                    f"{self.name}{TOKEN_INDEX} and {self.name}{DATA}"
                )
            size = info.size
        copy = local_copy(index)
        try:
            data = copy if isinstance(copy, bytes) else map_file(copy)
        except OSError as error:
            raise local_error(str(copy), error) from error
        self.index = TokenIndex.parse(data, num_bytes=int(size or 0), origin=str(index))
        self._fetched: set[int] = set()

    @cached_property
    def file(self) -> RangeFile:
        """The open file of tokens."""
        return range_file(self.prefix + DATA)

    @cached_property
    def mapped(self) -> memoryview:
        """All bytes of a local file, which are in memory as far as they have been checked."""
        return memoryview(map_file(self.prefix + DATA))

    def digest(self) -> list[Any]:
        """Return the version of the file, without reading all of it."""
        index = self.index
        edges = bytes(index.data[:65_536]) + bytes(index.data[-65_536:])
        digest = hashlib.blake2b(edges, digest_size=8).hexdigest()
        return [index.num_sequences, index.num_documents, index.num_bytes, digest]

    def lengths(self) -> Iterator[Ints]:
        """Yield the tokens of all documents, many at a time."""
        for low in range(0, self.index.num_documents, SUMMED_DOCUMENTS):
            stop = min(low + SUMMED_DOCUMENTS, self.index.num_documents)
            yield self.index.document_lengths(low, stop)
            self.index.forget()

    def check(self) -> None:
        """Raise FormatError or ShardChangedError if a document is outside the file."""
        for low in range(0, self.index.num_documents, SUMMED_DOCUMENTS):
            self.index.document_extents(
                np.arange(low, min(low + SUMMED_DOCUMENTS, self.index.num_documents))
            )
            self.index.forget()

    def read(self, low: Ints, high: Ints) -> tuple[list[memoryview] | None, Ints, Ints]:
        """Read runs of tokens, from byte `low` to `high` of the file.

        Returns:
            The bytes in which each run is, and where it begins and ends in them. None stands for
            `mapped`: then only what is checked is read.
        """
        file = self.file
        order = np.argsort(low, kind="stable")
        if isinstance(file, OpenFile):
            end = file.size
            if high.max() > end:  # looking past the end of the mapping would be fatal
                raise cut_off(file.path, end, int(low[order[-1]]), int(high.max() - low[order[-1]]))
            self._will_read(file, low[order], high[order])
            return None, low, high
        buffers, begin = read_spans(file, low[order], high[order])
        contents: list[Any] = [None] * len(low)
        for index, buffer in zip(order.tolist(), buffers, strict=True):
            contents[index] = memoryview(buffer)
        offset = np.empty_like(low)
        offset[order] = begin
        return contents, low - offset, high - offset

    def _will_read(self, file: OpenFile, low: Ints, high: Ints) -> None:
        """Let the system fetch ascending runs from the disk, in few calls."""
        edges = span_edges(low, high, max_gap=MAX_SPAN_BYTES)
        sizes = np.maximum.reduceat(high, edges) - low[edges]
        if sizes.sum() > _DENSE * (high - low).sum():  # far apart, as in a global shuffle
            edges = span_edges(low, high)
            sizes = np.maximum.reduceat(high, edges) - low[edges]
            for start, size in zip(low[edges].tolist(), sizes.tolist(), strict=True):
                file.will_read(start, size)
            return
        # Runs of the next blocks of the same slices are in between: everything is fetched together,
        # and requested only once.
        for start, size in zip(low[edges].tolist(), sizes.tolist(), strict=True):
            if start // MAX_SPAN_BYTES not in self._fetched:
                file.will_read(start, size)
        if len(self._fetched) > _FETCHED_SPANS:
            self._fetched.clear()
        self._fetched.update((low[edges] // MAX_SPAN_BYTES).tolist())


_DENSE = 32
"""How many times the bytes of runs may be between them to be fetched along."""
_FETCHED_SPANS = 1024


def token_splits(address: str) -> dict[str, list[str]]:
    """Return the common parts of the names of the file pairs of each split at an address.

    Args:
        address: An `.idx` or `.bin` file, the common part of the two names, or a folder of such
            pairs.

    Returns:
        Pairs by split; a single split "" if their names do not tell.

    Raises:
        DatasetNotFoundError: If there are none.
    """
    prefix = token_prefix(address)
    if prefix != address or file_info(prefix + TOKEN_INDEX) is not None:
        return {"": [prefix]}
    names = {file.key for file in list_files(address)}
    data = sorted(
        token_prefix(name) + DATA
        for name in names
        if name.endswith(TOKEN_INDEX) and token_prefix(name) + DATA in names
    )
    if not data:
        raise DatasetNotFoundError(
            f"{redact(address)}: has no token files, which are pairs of {TOKEN_INDEX} and {DATA} "
            "files"
        )
    splits = guess_splits(data, by_file=True, origin=redact(address))
    return {
        split: [join_address(address, token_prefix(name)) for name in own]
        for split, own in splits.items()
    }


class TokenRuns(NamedTuple):
    """Runs of contiguous tokens, in the order of the samples that they make up."""

    window: Ints
    """The sample, as its index among the requested ones."""
    file: Ints
    document: Ints
    """Number of the document in its file; of a line, that of the line."""
    at: Ints
    """The sequence in the file; of a window, the token of the document that the piece begins at."""
    low: Ints
    high: Ints


class TokenCorpus:
    """The documents of several token files, numbered from 0 across all of them.

    Args:
        prefixes: The common parts of the names of the file pairs, see `token_splits`.
        origin: The dataset, for messages.

    Raises:
        DatasetNotFoundError: If a file is missing.
        FormatError: If an index is invalid.
    """

    def __init__(self, prefixes: Sequence[str], *, origin: str) -> None:
        self.files = [TokenFile(prefix) for prefix in prefixes]
        self._ends = [0, *accumulate(file.index.num_documents for file in self.files)]
        modes = {file.index.has_modes for file in self.files if file.index.num_sequences}
        if len(modes) > 1:
            raise FormatError(f"{origin}: some of its files have modes, and others do not")
        self.has_modes = True in modes
        self.num_documents = self._ends[-1]
        self._line_ends = [0, *accumulate(file.index.num_sequences for file in self.files)]
        self.num_lines = self._line_ends[-1]
        self.num_bytes = sum(file.index.num_bytes for file in self.files)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type of the tokens of samples: int64, which embeddings and losses accept."""
        return np.result_type(np.int64, *(file.index.dtype for file in self.files))

    def block_tokens(self, first: int, last: int) -> Ints:
        """Return the tokens of each block of the documents from `first` to `last`."""
        blocks = [np.zeros(0, np.int64)]
        for low in range(first, last, SUMMED_DOCUMENTS):
            lengths = np.concatenate(
                [
                    file.index.document_lengths(start, stop)
                    for file, start, stop in self._files(low, min(low + SUMMED_DOCUMENTS, last))
                ]
            )
            blocks.append(np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK_DOCUMENTS)))
        return np.concatenate(blocks)

    def documents(self, start: int, stop: int) -> Documents:
        """Return the documents from `start` to `stop`; they originate in a byte of their file."""
        tokens, origins = [], []
        for file, first, last in self._files(start, stop):
            lengths = file.index.document_lengths(first, last)
            origin, sizes = file.index.document_extents(np.arange(first, last))
            if (sizes != lengths).any():
                raise file.index.damaged("sequences of a document do not follow each other")
            tokens.append(lengths)
            origins.append(origin)
        return Documents(np.concatenate(tokens), np.concatenate(origins))

    def _files(self, start: int, stop: int) -> Iterator[tuple[TokenFile, int, int]]:
        """Yield the files that have the documents from `start` to `stop`, and their range there.

        The pages of an index that were used for a range are released after it.
        """
        for number in range(bisect_right(self._ends, start) - 1, len(self.files)):
            base, end = self._ends[number : number + 2]
            if base >= stop:
                break
            yield self.files[number], max(0, start - base), min(stop, end) - base
            self.files[number].index.forget()

    def runs_of_windows(self, pieces: Pieces) -> TokenRuns:
        """Return where the tokens of windows are: a run for each document."""
        number, own = _in_files(self._ends, pieces.document)
        sizes = np.array([file.index.dtype.itemsize for file in self.files])[number]
        low, high = pieces.origin + pieces.start * sizes, pieces.origin + pieces.stop * sizes
        return TokenRuns(pieces.window, number, own, pieces.start, low, high)

    def runs_of_documents(self, documents: Ints) -> TokenRuns:
        """Return where the tokens of documents are: a run for each sequence."""
        number, own = _in_files(self._ends, documents)
        first, stop = np.zeros(len(own), np.int64), np.zeros(len(own), np.int64)
        for each in distinct(number).tolist():
            inside = number == each
            first[inside], stop[inside] = self.files[each].index.sequences(own[inside])
        counts = stop - first
        window = np.repeat(np.arange(len(own)), counts)
        sequence = first[window] + np.arange(len(window)) - (np.cumsum(counts) - counts)[window]
        return self._runs_of_sequences(window, number[window], own[window], sequence)

    def first_line(self, document: int) -> int:
        """Return the number of the first line of a document; of the one after the last, all."""
        if document == self.num_documents:
            return self.num_lines
        ((number,), (own,)) = _in_files(self._ends, np.array([document]))
        first, _ = self.files[number].index.sequences(np.array([own]))
        return int(self._line_ends[number] + first[0])

    def runs_of_lines(self, lines: Ints) -> TokenRuns:
        """Return where the tokens of lines are: a run for each."""
        number, own = _in_files(self._line_ends, lines)
        return self._runs_of_sequences(np.arange(len(lines)), number, own, own)

    def _runs_of_sequences(
        self, window: Ints, number: Ints, document: Ints, sequence: Ints
    ) -> TokenRuns:
        low, high = np.zeros(len(window), np.int64), np.zeros(len(window), np.int64)
        for each in distinct(number).tolist():
            inside = number == each
            low[inside], high[inside] = self.files[each].index.extents(sequence[inside])
        return TokenRuns(window, number, document, sequence, low, high)


def _in_files(ends: list[int], numbers: Ints) -> tuple[Ints, Ints]:
    """Return the files that documents or lines are in, and their numbers there."""
    file = np.searchsorted(ends, numbers, side="right") - 1
    return file, numbers - np.array(ends)[file]
