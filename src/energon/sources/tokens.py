"""Read the samples of token files, which Megatron-LM calls indexed datasets: `x.bin` and `x.idx`.

A sample is a document, or a window over the documents laid end to end in a shuffled order.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import ConfigError, DatasetNotFoundError, EmptyDatasetError, FormatError
from energon.formats.meta.split import parse_shares, ratio_range
from energon.formats.tokens import DATA, INDEX, TokenIndex, token_prefix
from energon.io.address import address_name, is_remote, join_address, redact
from energon.io.backends.local import OpenFile
from energon.io.disk_cache import map_file
from energon.io.epath import any_path
from energon.io.files import file_info, list_files
from energon.io.range_file import RangeFile, RemoteFile
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Leaf
from energon.plan.subset import include_ordinals, resolve_range
from energon.plan.token_windows import BLOCK_DOCUMENTS, TokenWindows
from energon.samples.crude import CrudeSample
from energon.sources.extents import Extents, PartFilter, read_spans, span_edges
from energon.sources.files.locate import local_copy
from energon.sources.kinds import DatasetKind, Location, SingleSource, content_fingerprint
from energon.sources.part_statistics import PartStatistics, SizeStatistics
from energon.sources.shards import ShardPool
from energon.sources.webdataset import included

Unit = Literal["document", "sequence"]


@dataclass(frozen=True)
class TokenOptions:
    """What a document says under `read` of token files.

    Args:
        unit: Whether a sample is a document, or a window over documents laid end to end.
        length: Tokens of a window.
        overlap: Tokens that a window has in common with the one before.
        seed: Chooses the order in which documents are laid end to end; None keeps theirs.
        split: The shares of train, val and test in the documents, like "99,1,0"; None if all of
            them are "train".
        origin: Where they were written.

    Raises:
        ConfigError: If they make no sense.
    """

    unit: Unit = "document"
    length: int | None = None
    overlap: int = 0
    seed: int | None = 0
    split: str | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise ConfigError(f"{self.origin}: read: {problem}")

    def _problems(self) -> Iterator[str]:
        if self.unit not in get_args(Unit):
            yield f"unit is {self.unit!r}; expected document or sequence"
        for name in ("length", "overlap", "seed"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                yield f"{name} is {value!r}; expected a whole number"
        if self.unit == "document" and (self.length is not None or self.overlap):
            yield "length and overlap are for `unit: sequence`; a document is as long as it is"
        if self.unit == "sequence":
            if self.length is None or self.length < 1:
                yield "`unit: sequence` needs a length, the tokens of a sample, like 4096"
            elif not 0 <= self.overlap < self.length:
                yield f"overlap is {self.overlap}; expected 0 to {self.length - 1}"
        if self.split is not None:
            parse_shares(self.split, origin=self.origin)


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

    @cached_property
    def file(self) -> RangeFile:
        """The tokens, open."""
        address = self.prefix + DATA
        return RemoteFile(address) if is_remote(address) else OpenFile(address)

    def digest(self) -> list[Any]:
        """Return what tells this version of the file from others, without reading all of it."""
        index = self.index
        edges = bytes(index.data[:65_536]) + bytes(index.data[-65_536:])
        digest = hashlib.blake2b(edges, digest_size=8).hexdigest()
        return [index.num_sequences, index.num_documents, index.num_bytes, digest]


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


class TokenSource(SingleSource):
    """The documents of a split of token files, or windows over them, numbered from 0.

    A sample has the parts `tokens` and `cu_seqlens`, and `modes` if the files have them: see
    `TokensSample`. Its key is the number of the document, or of the window.

    Args:
        address: See `token_files`.
        split_part: Which split.
        options: What a sample is, and which splits there are.
        subsets: Ranges to narrow the split to, see `energon.plan.subset`.
        exclude: Keys that are left out.

    Raises:
        DatasetNotFoundError: If a file is missing.
        FormatError: If an index makes no sense.
        ConfigError: If there is no such split.
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        split_part: str = "train",
        options: TokenOptions | None = None,
        subsets: Sequence[Any] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        self._arguments = (os.fspath(address), split_part, options, tuple(subsets), tuple(exclude))
        self.path = any_path(address)
        self.split_part = split_part
        self.options = options or TokenOptions(origin=str(self.path))
        self.files = [TokenFile(prefix) for prefix in token_files(os.fspath(address))]
        counts = [file.index.num_documents for file in self.files]
        self._ends = [0, *accumulate(counts)]
        if len({file.index.has_modes for file in self.files if file.index.num_sequences}) > 1:
            raise FormatError(f"{self.path}: some of its files have modes and some have not")
        total = self._ends[-1]
        self.first, self.last = ratio_range(
            self.options.split,
            split_part,
            total,
            what="documents",
            origin=self.options.origin or str(self.path),
        )
        count = self.last - self.first if self.windows is None else len(self.windows)
        self.excluded = self._excluded(exclude, count)
        self.start, self.stop = resolve_range(count - len(self.excluded), subsets)
        if self.start >= self.stop:
            raise EmptyDatasetError(f"{self.path}: {self._why_empty(total)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, self._arguments

    @property
    def mean_sample_bytes(self) -> float:
        """Bytes of a sample in the files, on average."""
        num_bytes = sum(file.index.num_bytes for file in self.files)
        if self.windows is None:
            return num_bytes / max(1, self._ends[-1])
        return float(self.windows.length * max(file.index.dtype.itemsize for file in self.files))

    @cached_property
    def windows(self) -> TokenWindows | None:
        """The windows over the documents of the split; None if samples are documents."""
        if self.options.unit == "document":
            return None
        return TokenWindows(
            self._block_tokens(),
            self._document_lengths,
            self.last - self.first,
            length=self.options.length or 0,
            overlap=self.options.overlap,
            seed=self.options.seed,
        )

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type of the tokens of samples: int64, which embeddings and losses take."""
        return np.result_type(np.int64, *(file.index.dtype for file in self.files))

    def fingerprint(self) -> dict[str, Any]:
        """Return what a saved state must find unchanged: the samples and their order."""
        options = self.options
        content = {
            "files": [[file.name, *file.digest()] for file in self.files],
            "documents": [self.first, self.last],
            "sequence": [options.length, options.overlap, options.seed],
            "tokens": None if self.windows is None else self.windows.num_tokens,
            "excluded": self.excluded.tolist(),
            "range": [self.start, self.stop],
        }
        return content_fingerprint(len(self), content)

    def read(
        self,
        ordinals: Ints,
        *,
        restore_keys: Sequence[tuple[int, ...]] | None = None,
        subflavors: Mapping[str, Any] | None = None,
    ) -> list[CrudeSample]:
        """Return samples, in the order of `ordinals`; see `Source.read`."""
        numbers = self._numbers(ordinals)
        if not len(numbers):
            return []
        pieces = self._pieces(numbers)
        tokens, ends = self._tokens(pieces, len(numbers))
        first = np.searchsorted(pieces.window, np.arange(len(numbers) + 1))
        modes = self._modes(pieces, ends)
        bounds = zip(first[:-1].tolist(), first[1:].tolist(), strict=True)
        keys = [(n,) for n in ordinals.tolist()] if restore_keys is None else restore_keys
        names = [file.name + DATA for file in self.files]
        shards = [names[number] for number in pieces.file.tolist()]
        edges, all_ends, dtype = _edges_of_samples(ends, first), ends.tolist(), self.dtype
        samples = []
        for place, (number, (low, high)) in enumerate(zip(numbers.tolist(), bounds, strict=True)):
            start, stop = all_ends[low], all_ends[high]
            sample = CrudeSample(
                {
                    "__key__": str(number),
                    "__shard__": shards[low] if low < high else names[0],
                    "__restore_key__": keys[place],
                    "__subflavors__": subflavors,
                    "tokens": tokens[start:stop].astype(dtype),
                    "cu_seqlens": edges[low + place : high + place + 1],
                    "modes": None if modes is None else modes[start:stop],
                }
            )
            samples.append(sample)
        return samples

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the samples lie: of a window, what belongs to the block it begins in."""
        pieces = self._pieces(self._numbers(ordinals))
        first = np.flatnonzero(np.diff(pieces.window, prepend=-1))
        if not len(first):
            return
        block = pieces.document // BLOCK_DOCUMENTS
        of_first = first[np.cumsum(np.diff(pieces.window, prepend=-1) != 0) - 1]
        near = (pieces.file == pieces.file[of_first]) & (block == block[of_first])
        low = np.minimum.reduceat(np.where(near, pieces.low, pieces.low[of_first]), first)
        high = np.maximum.reduceat(np.where(near, pieces.high, pieces.high[of_first]), first)
        number, window = pieces.file[first], pieces.window[first]
        for each in np.unique(number).tolist():
            inside = np.flatnonzero(number == each)
            order = inside[np.argsort(low[inside], kind="stable")]
            yield Extents(self.files[each].file, window[order], low[order], high[order])

    def locate(self, ordinal: int) -> Location:
        """Return where a sample lies; of a window, where its first document does."""
        numbers = self._numbers(np.array([ordinal]))
        pieces = self._pieces(numbers)
        file = self.files[int(pieces.file[0]) if len(pieces.file) else 0]
        return Location(
            key=str(numbers[0]),
            shard=file.name + DATA,
            sample=int(numbers[0]),
            offset=int(pieces.low[0]) if len(pieces.low) else 0,
            parts=("tokens",),
        )

    def find(self, key: str) -> list[int]:
        if not key.isdecimal():
            return []
        return included(self, int(key) - (self.first if self.windows is None else 0))

    def ranges(self) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
        edges = np.array([self.start, self.stop - 1])
        low, high = include_ordinals(edges, self.excluded).tolist()
        if self.windows is None:
            low, high = low + self.first, high + self.first
        elif (low, high) == (0, len(self.windows) - 1):
            low, high = self.first, self.last - 1
        else:
            place = (str(self.path), *map(str, (self.first, self.last, self.options)))
            return ("windows", *place), {"": (low, high + 1)}
        return ("documents", str(self.path)), {"": (low, high + 1)}

    def _numbers(self, ordinals: Ints) -> Ints:
        """Return the keys of samples: numbers of documents in all files, or of windows."""
        outside = ordinals[(ordinals < 0) | (ordinals >= len(self))]
        if len(outside):
            raise IndexError(
                f"{self.path}: split {self.split_part!r} has samples 0 to {len(self) - 1}, not "
                f"{outside[0]}"
            )
        inside = ordinals + self.start
        if len(self.excluded):
            inside = include_ordinals(inside, self.excluded)
        return inside + self.first if self.windows is None else inside

    def _pieces(self, numbers: Ints) -> _TokenRuns:
        """Return where the tokens of samples lie, in the order of the samples.

        A document has a piece for each of its sequences, a window one for each document.
        """
        if self.windows is None:
            return self._sequences(numbers)
        window, _, documents, start, stop = self.windows.pieces(numbers)
        number, own = self._in_files(documents + self.first)
        low, high = np.zeros(len(own), np.int64), np.zeros(len(own), np.int64)
        for each in np.unique(number).tolist():
            inside = np.flatnonzero(number == each)
            index = self.files[each].index
            begin, _ = index.places(own[inside])
            low[inside] = begin + start[inside] * index.dtype.itemsize
            high[inside] = begin + stop[inside] * index.dtype.itemsize
        return _TokenRuns(window, number, own, start, low, high)

    def _sequences(self, documents: Ints) -> _TokenRuns:
        """Return where the sequences of documents lie."""
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
        return _TokenRuns(window, number, own[window], sequence, low, high)

    def _in_files(self, documents: Ints) -> tuple[Ints, Ints]:
        """Return the files that documents are in, and their numbers there."""
        number = np.searchsorted(self._ends, documents, side="right") - 1
        return number, documents - np.array(self._ends)[number]

    def _tokens(self, pieces: _TokenRuns, count: int) -> tuple[NDArray[Any], Ints]:
        """Return the tokens of all pieces behind one another, and where each ends."""
        sizes = pieces.high - pieces.low
        numbers = np.unique(pieces.file).tolist()
        for number in numbers:
            inside = pieces.file == number
            sizes[inside] //= self.files[number].index.dtype.itemsize
        ends = np.concatenate(([0], np.cumsum(sizes)))
        dtypes = {self.files[number].index.dtype for number in numbers}
        tokens = np.empty(int(ends[-1]), dtypes.pop() if len(dtypes) == 1 else self.dtype)
        for number in numbers:
            full = np.flatnonzero((pieces.file == number) & (sizes > 0))
            if not len(full):
                continue
            order = full[np.argsort(pieces.low[full], kind="stable")]
            self._fill(tokens, number, pieces.low[order], pieces.high[order], ends[order])
        return tokens, ends

    def _fill(self, tokens: NDArray[Any], number: int, low: Ints, high: Ints, where: Ints) -> None:
        """Read pieces of a file from `low` to `high`, ascending, into `tokens` at `where`."""
        file, dtype = self.files[number].file, self.files[number].index.dtype
        if isinstance(file, OpenFile) and tokens.dtype == dtype:
            # Between the pieces lie others of the same block. To copy them along costs more than
            # a call for each piece; but a disk is asked for all of it at once.
            edges = span_edges(low, high)
            sizes = np.maximum.reduceat(high, edges) - low[edges]
            for start, size in zip(low[edges].tolist(), sizes.tolist(), strict=True):
                file.will_read(start, size)
            content: Any = tokens
            target, at = memoryview(content).cast("B"), where * dtype.itemsize
            bounds = zip(low.tolist(), at.tolist(), (at + high - low).tolist(), strict=True)
            for start, first, stop in bounds:
                file.pread_into(start, target[first:stop])
            return
        buffers, begin = read_spans(file, low, high)
        offsets = ((low - begin) // dtype.itemsize).tolist()
        lengths = ((high - low) // dtype.itemsize).tolist()
        last, view = None, np.empty(0, dtype)
        for buffer, offset, to, length in zip(
            buffers, offsets, where.tolist(), lengths, strict=True
        ):
            if buffer is not last:
                last, view = buffer, np.frombuffer(buffer, dtype)
            tokens[to : to + length] = view[offset : offset + length]

    def _modes(self, pieces: _TokenRuns, ends: Ints) -> NDArray[np.int8] | None:
        """Return the mode of each token; None if the files have none."""
        if not any(file.index.has_modes for file in self.files):
            return None
        modes = np.empty(int(ends[-1]), np.int8)
        where = zip(pieces.file.tolist(), pieces.document.tolist(), pieces.at.tolist(), strict=True)
        edges = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        for (number, document, at), (low, high) in zip(where, edges, strict=True):
            index = self.files[number].index
            if self.windows is None:
                modes[low:high] = index.modes[at]
            else:
                lengths, own = index.document_modes(document)
                modes[low:high] = np.repeat(own, lengths)[at : at + high - low]
        return modes

    def _block_tokens(self) -> Ints:
        """Return the tokens of each block of documents of the split."""
        blocks = [np.zeros(0, np.int64)]
        for low in range(self.first, self.last, _SUMMED):
            lengths = self._lengths(low, min(low + _SUMMED, self.last))
            blocks.append(np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK_DOCUMENTS)))
        return np.concatenate(blocks)

    def _document_lengths(self, start: int, stop: int) -> Ints:
        """Return the tokens of documents, which are counted from the first of the split."""
        return self._lengths(start + self.first, stop + self.first)

    def _lengths(self, start: int, stop: int) -> Ints:
        """Return the tokens of the documents from `start` to `stop`, counted over all files."""
        found = []
        for number in range(bisect_right(self._ends, start) - 1, len(self.files)):
            base, end = self._ends[number : number + 2]
            if base >= stop:
                break
            index = self.files[number].index
            found.append(index.document_lengths(max(0, start - base), min(stop, end) - base))
            index.forget()
        return np.concatenate(found)

    def _excluded(self, keys: Sequence[str], count: int) -> Ints:
        """Return the places of excluded keys in the split, ascending."""
        base = self.first if self.windows is None else 0
        numbers = {key.rpartition("/")[2] for key in keys}
        inside = {int(number) - base for number in numbers if number.isdecimal()}
        return np.array(sorted(n for n in inside if 0 <= n < count), np.int64)

    def _why_empty(self, total: int) -> str:
        documents = f"split {self.split_part!r} has {self.last - self.first} of {total} documents"
        if self.windows is None:
            return f"{documents}, of which none is left"
        tokens, length = self.windows.num_tokens, self.options.length
        if tokens < self.windows.length:
            return f"{documents} with {tokens} tokens, fewer than one window of {length}"
        return f"{documents} and {len(self.windows)} windows, of which none is left"


_SUMMED = 128 * BLOCK_DOCUMENTS
"""Documents whose lengths are looked at together: an index of gigabytes never lies in memory."""


class _TokenRuns(NamedTuple):
    """Runs of tokens that lie in one place, in the order of the samples that they make up."""

    window: Ints
    """The sample, as its place among those that were asked for."""
    file: Ints
    document: Ints
    """Number of the document in its file."""
    at: Ints
    """The sequence in the file; of a window, the token of the document that the piece begins at."""
    low: Ints
    high: Ints


def _reopen(
    address: str,
    split_part: str,
    options: TokenOptions | None,
    subsets: Sequence[Any],
    exclude: Sequence[str],
) -> TokenSource:
    return TokenSource(
        address, split_part=split_part, options=options, subsets=subsets, exclude=exclude
    )


class TokenKind(DatasetKind):
    """Token files: pairs of `.bin` and `.idx`."""

    name = "tokens"
    noun = "a set of token files"
    options = tuple(field.name for field in fields(TokenOptions) if field.name != "origin")

    prepares = True

    def prepare(self, address: str) -> int:
        files = [TokenFile(prefix) for prefix in token_files(address)]
        for file in files:
            for low in range(0, file.index.num_documents, _SUMMED):
                file.index.places(np.arange(low, min(low + _SUMMED, file.index.num_documents)))
                file.index.forget()
        return sum(file.index.num_documents for file in files)

    def split_names(
        self, address: str, split_config: str | None = None, allow: Collection[str] = ()
    ) -> list[str]:
        return ["train"]

    def config(self, leaf: Leaf) -> DatasetConfig:
        names = ("tokens", "cu_seqlens", "modes")
        return DatasetConfig(
            crude=False,
            sample_type=("energon", "TokensSample"),
            field_map={name: name for name in names},
            given=frozenset({"decoder"}),  # there is nothing to decode
            origin=leaf.path,
        )

    def open(
        self,
        leaf: Leaf,
        config: DatasetConfig,
        *,
        exclude: Sequence[str] = (),
        parts: Collection[str] | PartFilter | None = None,
        pool: ShardPool | None = None,
        allow: Collection[str] = (),
    ) -> TokenSource:
        return TokenSource(
            leaf.path,
            split_part=leaf.split_part,
            options=TokenOptions(**leaf.read, origin=leaf.origin),
            subsets=leaf.subsets,
            exclude=exclude,
        )

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        files = [TokenFile(prefix) for prefix in token_files(address)]
        documents = sum(file.index.num_documents for file in files)
        tokens = sum(file.index.num_bytes // file.index.dtype.itemsize for file in files)
        about = {
            "sample_type": "TokensSample",
            "samples": documents,
            "shards": len(files),
            "bytes": sum(file.index.num_bytes for file in files),
            "missing_shards": [],
            "energon_version": None,
            "splits": {"train": {"samples": documents, "shards": len(files), "excluded": 0}},
            "tokens": tokens,
            "sequences": sum(file.index.num_sequences for file in files),
            "dtypes": sorted({file.index.dtype.name for file in files}),
            "modes": any(file.index.has_modes for file in files),
        }
        if parts and documents:
            sizes = SizeStatistics()
            for file in files:
                for low in range(0, file.index.num_documents, _SUMMED):
                    stop = min(low + _SUMMED, file.index.num_documents)
                    lengths = file.index.document_lengths(low, stop)
                    sizes.add(lengths * file.index.dtype.itemsize)
            about |= PartStatistics(sizes, {"tokens": sizes}).to_json()
        return about


KIND = TokenKind()
