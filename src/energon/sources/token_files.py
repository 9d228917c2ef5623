"""Token files as one corpus: where the tokens of its documents lie, and samples made of them."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import DatasetNotFoundError, FormatError
from energon.formats.tokens import DATA, INDEX, TokenIndex, token_prefix
from energon.io.address import address_name, is_remote, join_address, redact
from energon.io.backends.local import OpenFile, cut_off
from energon.io.disk_cache import map_file
from energon.io.epath import any_path
from energon.io.files import file_info, list_files
from energon.io.range_file import RangeFile, RemoteFile
from energon.plan.token_windows import BLOCK_DOCUMENTS, Pieces
from energon.samples.collate import batch_pad_stack
from energon.samples.crude import CrudeSample, known_sources
from energon.sources.extents import MAX_SPAN_BYTES, read_spans, span_edges
from energon.sources.files.locate import local_copy

SUMMED_DOCUMENTS = 128 * BLOCK_DOCUMENTS
"""Documents whose lengths are checked together: an index of gigabytes never is in memory."""


class TokenFile:
    """The documents of a pair of files. Copies open them again.

    Args:
        prefix: What their names have in common.

    Raises:
        DatasetNotFoundError: If one of them is missing.
        FormatError: If the index is none, or is not that of the tokens.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.name = address_name(prefix)
        index = any_path(prefix + INDEX)
        size = None
        for suffix in (INDEX, DATA):
            about = file_info(prefix + suffix)
            if about is None:
                raise DatasetNotFoundError(
                    f"{redact(prefix + suffix)} does not exist; token files come in pairs, "
                    f"{self.name}{INDEX} and {self.name}{DATA}"
                )
            size = about.size
        copy = local_copy(index)
        data = copy if isinstance(copy, bytes) else map_file(copy)
        self.index = TokenIndex.parse(data, num_bytes=int(size or 0), origin=str(index))
        self._fetched: set[int] = set()

    @cached_property
    def file(self) -> RangeFile:
        """The tokens, open."""
        address = self.prefix + DATA
        return RemoteFile(address) if is_remote(address) else OpenFile(address)

    @cached_property
    def mapped(self) -> NDArray[Any]:
        """All tokens of a local file, which are in memory as far as they are checked."""
        dtype = self.index.dtype
        data = map_file(Path(self.prefix + DATA))
        return np.frombuffer(data, dtype, len(data) // dtype.itemsize)

    def digest(self) -> list[Any]:
        """Return what tells this version of the file from others, without reading all of it."""
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
            self.index.places(np.arange(low, min(low + SUMMED_DOCUMENTS, self.index.num_documents)))
            self.index.forget()

    def arrays(self, low: Ints, high: Ints) -> tuple[list[NDArray[Any]] | None, Ints, Ints]:
        """Read runs of tokens, which are in the file from byte `low` to `high`.

        Returns:
            An array for each run, and where in it the tokens begin and end. None stands for
            `mapped`: then nothing is read but what is checked.
        """
        file, size = self.file, self.index.dtype.itemsize
        order = np.argsort(low, kind="stable")
        if isinstance(file, OpenFile) and not (low % size).any():
            end = os.fstat(file.descriptor).st_size
            if high.max() > end:  # to look behind the end of what is mapped would be fatal
                raise cut_off(file.path, end, int(low[order[-1]]), int(high.max() - low[order[-1]]))
            self._will_read(file, low[order], high[order])
            return None, low // size, high // size
        buffers, begin = read_spans(file, low[order], high[order])
        counts = (high - low) // size
        found: list[Any] = [None] * len(low)
        offsets = (low[order] - begin).tolist()
        for place, buffer, offset in zip(order.tolist(), buffers, offsets, strict=True):
            found[place] = np.frombuffer(buffer, self.index.dtype, counts[place], offset)
        return found, np.zeros_like(counts), counts

    def _will_read(self, file: OpenFile, low: Ints, high: Ints) -> None:
        """Let the system fetch runs from the disk, ascending, in few calls."""
        edges = span_edges(low, high, max_gap=MAX_SPAN_BYTES)
        sizes = np.maximum.reduceat(high, edges) - low[edges]
        if sizes.sum() > _DENSE * (high - low).sum():  # far apart, as in a global shuffle
            edges = span_edges(low, high)
            sizes = np.maximum.reduceat(high, edges) - low[edges]
            for start, size in zip(low[edges].tolist(), sizes.tolist(), strict=True):
                file.will_read(start, size)
            return
        # Between the runs lie those of the next blocks of the same slices: all of it is fetched at
        # once, and asked for only once.
        for start, size in zip(low[edges].tolist(), sizes.tolist(), strict=True):
            if start // MAX_SPAN_BYTES not in self._fetched:
                file.will_read(start, size)
        if len(self._fetched) > _FETCHED_SPANS:
            self._fetched.clear()
        self._fetched.update((low[edges] // MAX_SPAN_BYTES).tolist())


_DENSE = 32
"""How many times the bytes of runs may be between them to be fetched along."""
_FETCHED_SPANS = 1024


def token_files(address: str) -> list[str]:
    """Return what the names of the pairs of files at an address have in common.

    Args:
        address: An `.idx` or `.bin` file, what the names of the two have in common, or a folder of
            such pairs.

    Raises:
        DatasetNotFoundError: If there are none.
    """
    prefix = token_prefix(address)
    if prefix != address or file_info(prefix + INDEX) is not None:
        return [prefix]
    names = {found.key for found in list_files(address)}
    found = sorted(
        name.removesuffix(INDEX)
        for name in names
        if name.endswith(INDEX) and token_prefix(name) + DATA in names
    )
    if not found:
        raise DatasetNotFoundError(
            f"{redact(address)}: has no token files, which are pairs of {INDEX} and {DATA} files"
        )
    return [join_address(address, name) for name in found]


class TokenRuns(NamedTuple):
    """Runs of tokens that are in one place, in the order of the samples that they make up."""

    window: Ints
    """The sample, as its place among those that were asked for."""
    file: Ints
    document: Ints
    """Number of the document in its file."""
    at: Ints
    """The sequence in the file; of a window, the token of the document that the piece begins at."""
    low: Ints
    high: Ints


class TokenCorpus:
    """The documents of several token files, numbered from 0 through all of them.

    Args:
        address: See `token_files`.

    Raises:
        DatasetNotFoundError: If a file is missing.
        FormatError: If an index is invalid.
    """

    def __init__(self, address: str) -> None:
        self.files = [TokenFile(prefix) for prefix in token_files(address)]
        self._ends = [0, *accumulate(file.index.num_documents for file in self.files)]
        modes = {file.index.has_modes for file in self.files if file.index.num_sequences}
        if len(modes) > 1:
            raise FormatError(f"{redact(address)}: some of its files have modes and some have not")
        self.has_modes = True in modes
        self.num_documents = self._ends[-1]
        self.num_bytes = sum(file.index.num_bytes for file in self.files)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type of the tokens of samples: int64, which embeddings and losses take."""
        return np.result_type(np.int64, *(file.index.dtype for file in self.files))

    def block_tokens(self, first: int, last: int) -> Ints:
        """Return the tokens of each block of the documents from `first` to `last`."""
        blocks = [np.zeros(0, np.int64)]
        for low in range(first, last, SUMMED_DOCUMENTS):
            lengths = self.lengths(low, min(low + SUMMED_DOCUMENTS, last))
            blocks.append(np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK_DOCUMENTS)))
        return np.concatenate(blocks)

    def lengths(self, start: int, stop: int) -> Ints:
        """Return the tokens of the documents from `start` to `stop`."""
        found = []
        for number in range(bisect_right(self._ends, start) - 1, len(self.files)):
            base, end = self._ends[number : number + 2]
            if base >= stop:
                break
            index = self.files[number].index
            found.append(index.document_lengths(max(0, start - base), min(stop, end) - base))
            index.forget()
        return np.concatenate(found)

    def runs_of_windows(self, pieces: Pieces) -> TokenRuns:
        """Return where the tokens of windows lie: a run for each document."""
        number, own = self._in_files(pieces.document)
        low, high = np.zeros(len(own), np.int64), np.zeros(len(own), np.int64)
        for each in np.unique(number).tolist():
            inside = np.flatnonzero(number == each)
            index = self.files[each].index
            begin, _ = index.places(own[inside])
            low[inside] = begin + pieces.start[inside] * index.dtype.itemsize
            high[inside] = begin + pieces.stop[inside] * index.dtype.itemsize
        return TokenRuns(pieces.window, number, own, pieces.start, low, high)

    def runs_of_documents(self, documents: Ints) -> TokenRuns:
        """Return where the tokens of documents lie: a run for each sequence."""
        number, own = self._in_files(documents)
        first, stop = np.zeros(len(own), np.int64), np.zeros(len(own), np.int64)
        for each in np.unique(number).tolist():
            inside = number == each
            first[inside], stop[inside] = self.files[each].index.sequences(own[inside])
        counts = stop - first
        window = np.repeat(np.arange(len(own)), counts)
        sequence = first[window] + np.arange(len(window)) - (np.cumsum(counts) - counts)[window]
        number = number[window]
        low, high = np.zeros(len(window), np.int64), np.zeros(len(window), np.int64)
        for each in np.unique(number).tolist():
            inside = number == each
            low[inside], high[inside] = self.files[each].index.extents(sequence[inside])
        return TokenRuns(window, number, own[window], sequence, low, high)

    def _in_files(self, documents: Ints) -> tuple[Ints, Ints]:
        """Return the files that documents are in, and their numbers there."""
        number = np.searchsorted(self._ends, documents, side="right") - 1
        return number, documents - np.array(self._ends)[number]


class TokenRows:
    """Samples whose tokens are gathered when their turn comes, straight into a batch.

    Args:
        corpus: Where they lie.
        runs: The same, run by run.
        is_windows: Whether they are windows, or else documents.
        about: What is known of each sample: `__key__`, `__shard__`, `__restore_key__`,
            `__subflavors__`.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        runs: TokenRuns,
        *,
        is_windows: bool,
        about: Mapping[str, Sequence[Any]],
    ) -> None:
        self._runs, self._is_windows = runs, is_windows
        self._files, self._dtype = corpus.files, corpus.dtype
        self.about = about
        self._arrays, self._low, self._high = self._read(runs)
        self._ends = np.concatenate(([0], np.cumsum(self._high - self._low)))
        first = np.searchsorted(runs.window, np.arange(len(about["__key__"]) + 1))
        lengths = np.diff(self._ends[first])
        self._is_even = bool((lengths == lengths[:1]).all())
        self._first = first.tolist()
        self._edges = _edges_of_samples(self._ends, first)
        self._edges_at = (first + np.arange(len(first))).tolist()
        self._has_modes = corpus.has_modes

    def _read(self, runs: TokenRuns) -> tuple[list[NDArray[Any]] | NDArray[Any], Ints, Ints]:
        """Return the array of all runs, or one for each; and where in it their tokens are."""
        numbers = np.unique(runs.file).tolist()
        if len(numbers) == 1:
            file = self._files[numbers[0]]
            found, low, high = file.arrays(runs.low, runs.high)
            return file.mapped if found is None else found, low, high
        arrays: list[Any] = [None] * len(runs.file)
        low, high = np.empty_like(runs.low), np.empty_like(runs.high)
        for number in numbers:
            file, inside = self._files[number], np.flatnonzero(runs.file == number)
            found, low[inside], high[inside] = file.arrays(runs.low[inside], runs.high[inside])
            for place, array in zip(inside.tolist(), found or repeat(file.mapped), strict=False):
                arrays[place] = array
        return arrays, low, high

    def between(self, start: int, stop: int) -> TokenSamples:
        """Return the samples from `start` to `stop`, one by one or many at once."""
        return TokenSamples(self, start, stop)

    def noting_sources(self, dataset_path: str) -> TokenRows:
        """Return the same samples, of a dataset, with `__sources__`: where each comes from."""
        about = self.about
        names = ((*about, "tokens", "cu_seqlens", "modes"),)
        known = (about["__key__"], about["__restore_key__"], about["__shard__"], names)
        sources = known_sources(((dataset_path,), *known), len(about["__key__"]))
        self.about = {**about, "__sources__": sources}
        return self

    def sample(self, place: int) -> CrudeSample:
        """Return a sample."""
        columns = self._values(place, place + 1)
        return CrudeSample(
            {
                **{name: values[place] for name, values in self.about.items()},
                "tokens": columns["tokens"],
                "cu_seqlens": columns["cu_seqlens"][0],
                "modes": columns["modes"],
            }
        )

    def columns(self, start: int, stop: int) -> dict[str, Any]:
        """Return samples as one whose values are columns; shorter ones are padded with zeros."""
        columns = self._values(start, stop)
        for name in ("tokens", "modes"):
            if columns[name] is not None:
                columns[name] = self._stacked(columns[name], start, stop)
        return {**{name: values[start:stop] for name, values in self.about.items()}, **columns}

    def _values(self, start: int, stop: int) -> dict[str, Any]:
        """Return the tokens and modes of samples one after another, and their edges."""
        first, last = self._first[start], self._first[stop]
        ends, arrays, edges = self._ends[first : last + 1], self._arrays, self._edges
        bounds = (ends - ends[0]).tolist()
        tokens = np.empty(bounds[-1], self._dtype)
        data = repeat(arrays) if isinstance(arrays, np.ndarray) else arrays[first:last]
        low, high = self._low[first:last].tolist(), self._high[first:last].tolist()
        for array, begin, end, at, to in zip(data, low, high, bounds, bounds[1:], strict=False):
            tokens[at:to] = array[begin:end]
        return {
            "tokens": tokens,
            "cu_seqlens": [edges[a:b] for a, b in pairwise(self._edges_at[start : stop + 1])],
            "modes": self._modes(first, last, bounds) if self._has_modes else None,
        }

    def _stacked(self, values: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """Return values of samples that follow one another, one sample in each row."""
        if self._is_even:
            return values.reshape(stop - start, -1)
        edges = self._ends[self._first[start : stop + 1]]
        return batch_pad_stack(np.split(values, (edges - edges[0])[1:-1]))  # type: ignore[no-any-return]

    def _modes(self, first: int, last: int, bounds: Sequence[int]) -> NDArray[np.int8]:
        """Return the mode of each token of some runs."""
        runs, modes = self._runs, np.empty(bounds[-1], np.int8)
        for run, (low, high) in zip(range(first, last), pairwise(bounds), strict=True):
            index, at = self._files[int(runs.file[run])].index, int(runs.at[run])
            if self._is_windows:
                lengths, own = index.document_modes(int(runs.document[run]))
                modes[low:high] = np.repeat(own, lengths)[at : at + high - low]
            else:
                modes[low:high] = index.modes[at]  # type: ignore[index]
        return modes


class TokenSamples(Iterator[CrudeSample]):
    """The next samples of `rows`, which can be taken one by one or many at once."""

    def __init__(self, rows: TokenRows, start: int, stop: int) -> None:
        self._rows, self._start, self._stop = rows, start, stop

    def __next__(self) -> CrudeSample:
        if self._start == self._stop:
            raise StopIteration
        self._start += 1
        return self._rows.sample(self._start - 1)

    def __length_hint__(self) -> int:
        return self._stop - self._start

    def columns(self, count: int) -> dict[str, Any] | None:
        """Return the next `count` samples as one of columns; None if there are fewer."""
        if count > self._stop - self._start:
            return None
        self._start += count
        return self._rows.columns(self._start - count, self._start)


def _edges_of_samples(ends: Ints, first: Ints) -> NDArray[np.int32]:
    """Return where the pieces of each sample begin in it, and the end: one sample after the other.

    Args:
        ends: Where each piece begins in the tokens of all samples, and the end.
        first: The first piece of each sample, and the number of pieces.
    """
    counts = np.diff(first) + 1
    sample = np.repeat(np.arange(len(counts)), counts)
    edge = np.arange(len(sample)) - sample
    return np.asarray(ends[edge] - ends[first[sample]], np.int32)
