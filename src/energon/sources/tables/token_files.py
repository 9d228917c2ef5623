"""Read the samples of token files, which Megatron-LM calls indexed datasets: `x.bin` and `x.idx`.

A sample is a document, a line of one (what the files call a sequence), or a window over the
documents laid end to end in a shuffled order.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import pairwise, repeat
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, distinct
from energon.errors import ConfigError
from energon.formats.meta.info import (
    BY_NAMES,
    chosen_split,
    numbers_in,
    parse_shares,
    ratio_range,
)
from energon.formats.tokens import DATA
from energon.io.address import redact
from energon.io.epath import any_path
from energon.messages import counted
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Leaf
from energon.plan.leaves.token_windows import BLOCK_DOCUMENTS, TokenWindows
from energon.samples.collate import batch_pad_stack
from energon.samples.crude import CrudeSample
from energon.samples.provenance import known_sources
from energon.sources.kinds import (
    DatasetKind,
    description,
    split_description,
)
from energon.sources.part_statistics import PartStatistics, SizeStatistics
from energon.sources.shard_samples import PartFilter
from energon.sources.source import (
    TRAIN_SPLIT,
    Extents,
    Location,
    OpenRequest,
    SampleSelection,
    content_fingerprint,
)
from energon.sources.tables.row_kind import NumberedSource, RestoreKeys
from energon.sources.tables.token_corpus import TokenCorpus, TokenRuns, token_splits
from energon.stages.lane import Block


class TokenRows(Block):
    """Samples whose tokens are gathered when their turn comes, straight into a batch.

    Args:
        corpus: The documents that they are taken from.
        runs: The same, run by run.
        is_windows: Whether they are windows, or else documents.
        fields: The other fields of each sample: `__key__`, `__shard__`, `__restore_key__`,
            `__subflavors__`.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        runs: TokenRuns,
        *,
        is_windows: bool,
        fields: Mapping[str, Sequence[Any]],
    ) -> None:
        self._runs, self._is_windows = runs, is_windows
        self._files, self._dtype = corpus.files, corpus.dtype
        self.fields = fields
        self._stored = [file.index.dtype for file in corpus.files]
        self._is_uniform = len(set(self._stored)) == 1
        self._buffers, self._low, self._high = self._read(runs)
        sizes = np.array([dtype.itemsize for dtype in self._stored])
        self._ends = np.concatenate(([0], np.cumsum((runs.high - runs.low) // sizes[runs.file])))
        first = np.searchsorted(runs.window, np.arange(len(fields["__key__"]) + 1))
        lengths = np.diff(self._ends[first])
        self._is_even = bool((lengths == lengths[:1]).all())
        self._first = first.tolist()
        self._edges = _edges_of_samples(self._ends, first)
        self._edges_at = (first + np.arange(len(first))).tolist()
        self._has_modes = corpus.has_modes

    @property
    def column_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The parts that all samples have."""
        return ("tokens", "cu_seqlens", *(["modes"] if self._has_modes else []))

    def _read(self, runs: TokenRuns) -> tuple[list[memoryview] | memoryview, list[int], list[int]]:
        """Return the bytes that all runs are in, or those of each; and where in them they are."""
        numbers = distinct(runs.file).tolist()
        if len(numbers) == 1:
            file = self._files[numbers[0]]
            contents, low, high = file.read(runs.low, runs.high)
            return file.mapped if contents is None else contents, low.tolist(), high.tolist()
        buffers: list[Any] = [None] * len(runs.file)
        low, high = np.empty_like(runs.low), np.empty_like(runs.high)
        for number in numbers:
            file, inside = self._files[number], np.flatnonzero(runs.file == number)
            contents, low[inside], high[inside] = file.read(runs.low[inside], runs.high[inside])
            for index, buffer in zip(
                inside.tolist(), contents or repeat(file.mapped), strict=False
            ):
                buffers[index] = buffer
        return buffers, low.tolist(), high.tolist()

    def samples(self, start: int, stop: int) -> list[CrudeSample]:
        return [self.sample(index) for index in range(start, stop)]

    def with_sources(self, dataset_path: str) -> TokenRows:
        """Return the same samples, of a dataset, with `__sources__`: where each comes from."""
        fields = self.fields
        names = ((*fields, "tokens", "cu_seqlens", "modes"),)
        located = (fields["__key__"], fields["__restore_key__"], fields["__shard__"], names)
        sources = known_sources(((dataset_path,), *located), len(fields["__key__"]))
        self.fields = {**fields, "__sources__": list(zip(sources))}
        return self

    def sample(self, index: int) -> CrudeSample:
        """Return a sample."""
        columns = self._values(index, index + 1)
        return CrudeSample(
            {
                **{name: values[index] for name, values in self.fields.items()},
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
        return {**{name: values[start:stop] for name, values in self.fields.items()}, **columns}

    def _values(self, start: int, stop: int) -> dict[str, Any]:
        """Return the tokens and modes of samples one after another, and their edges."""
        first, last, edges = self._first[start], self._first[stop], self._edges
        return {
            "tokens": self._tokens(first, last),
            "cu_seqlens": [edges[a:b] for a, b in pairwise(self._edges_at[start : stop + 1])],
            "modes": self._modes(first, last) if self._has_modes else None,
        }

    def _tokens(self, first: int, last: int) -> NDArray[Any]:
        """Return the tokens of some runs one after another."""
        buffers, low, high = self._buffers, self._low[first:last], self._high[first:last]
        each = repeat(buffers) if isinstance(buffers, memoryview) else buffers[first:last]
        pieces = [buffer[a:b] for buffer, a, b in zip(each, low, high, strict=False)]
        if self._is_uniform:
            # Joining bytes and converting all of them takes half as long as converting each piece.
            return np.frombuffer(b"".join(pieces), self._stored[0]).astype(self._dtype)
        files = self._runs.file[first:last].tolist()
        arrays = [
            np.frombuffer(piece, self._stored[file])
            for piece, file in zip(pieces, files, strict=True)
        ]
        return np.concatenate([np.zeros(0, self._dtype), *arrays], dtype=self._dtype)

    def _stacked(self, values: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """Return values of samples that follow one another, one sample in each row."""
        if self._is_even:
            return values.reshape(stop - start, -1)
        edges = self._ends[self._first[start : stop + 1]]
        return batch_pad_stack(np.split(values, (edges - edges[0])[1:-1]))  # type: ignore[no-any-return]

    def _modes(self, first: int, last: int) -> NDArray[np.int8]:
        """Return the mode of each token of some runs."""
        ends = self._ends[first : last + 1]
        bounds = (ends - ends[0]).tolist()
        runs, modes = self._runs, np.empty(bounds[-1], np.int8)
        for run, (low, high) in zip(range(first, last), pairwise(bounds), strict=True):
            index, at = self._files[int(runs.file[run])].index, int(runs.at[run])
            if self._is_windows:
                lengths, own = index.document_modes(int(runs.document[run]))
                modes[low:high] = np.repeat(own, lengths)[at : at + high - low]
            else:
                modes[low:high] = index.modes[at]  # type: ignore[index]
        return modes


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


Unit = Literal["document", "line", "sequence"]


@dataclass(frozen=True)
class TokenOptions:
    """The options under `read` in a document for token files.

    Args:
        unit: Whether a sample is a document, a line of one, or a window over concatenated
            documents.
        length: Number of tokens in a window.
        overlap: Number of tokens that a window shares with the previous one.
        seed: Determines the order in which documents are concatenated; None keeps theirs.
        split: The shares of train, val and test in the documents, such as "99,1,0"; None if all of
            them are "train".
        origin: Where the options were written.

    Raises:
        ConfigError: If they are invalid.
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
            yield f"unit is {self.unit!r}; expected document, line or sequence"
        for name in ("length", "overlap", "seed"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                yield f"{name} is {value!r}; expected a whole number"
        if self.unit != "sequence" and (self.length is not None or self.overlap):
            yield f"length and overlap are for `unit: sequence`; a {self.unit} has its own length"
        if self.unit == "sequence":
            if self.length is None or self.length < 1:
                yield "`unit: sequence` needs a length, the number of tokens in a sample"
            elif not 0 <= self.overlap < self.length:
                yield f"overlap is {self.overlap}; expected 0 to {self.length - 1}"
        if self.split is not None:
            parse_shares(self.split, origin=self.origin)


class TokenSource(NumberedSource):
    """The documents of a split of token files, their lines or windows, numbered from 0.

    A sample has the parts `tokens` and `cu_seqlens`, and `modes` if the files have them: see
    `TokensSample`. Its key is the number of the document, line or window.

    Args:
        address: See `token_splits`.
        selection: Which samples to read.
        options: What a sample is, and which splits there are.

    Raises:
        DatasetNotFoundError: If a file is missing.
        FormatError: If an index is invalid.
        ConfigError: If there is no such split.
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        selection: SampleSelection = TRAIN_SPLIT,
        options: TokenOptions | None = None,
    ) -> None:
        self._reopen = partial(TokenSource, os.fspath(address), selection, options)
        path, split_part = any_path(address), selection.split_part
        self.options = options or TokenOptions(origin=str(path))
        splits = token_splits(os.fspath(address))
        by_ratio = self.options.split is not None or "" in splits
        if by_ratio:
            prefixes = [prefix for own in splits.values() for prefix in own]
        else:
            prefixes = splits[chosen_split(split_part, splits, origin=str(path), by=BY_NAMES)]
        self.corpus = TokenCorpus(prefixes, origin=str(path))
        self.first_document, self.last_document = 0, self.corpus.num_documents
        if by_ratio:
            self.first_document, self.last_document = ratio_range(
                self.options.split,
                split_part,
                self.corpus.num_documents,
                what="documents",
                origin=self.options.origin or str(path),
            )
        super().__init__(path, selection, bounds=self._bounds())

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, ()

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a sample in the files, in bytes."""
        if self.windows is None:
            is_line, corpus = self.options.unit == "line", self.corpus
            count = corpus.num_lines if is_line else corpus.num_documents
            return corpus.num_bytes / max(1, count)
        return float(
            self.windows.length * max(file.index.dtype.itemsize for file in self.corpus.files)
        )

    def _bounds(self) -> tuple[int, int]:
        """Return the numbers of the first sample of the split, and the one after its last."""
        if self.windows is not None:
            return 0, len(self.windows)
        documents = self.first_document, self.last_document
        if self.options.unit == "document":
            return documents
        first, stop = map(self.corpus.first_line, documents)
        return first, stop

    @cached_property
    def windows(self) -> TokenWindows | None:
        """The windows over the documents of the split; None for other samples."""
        if self.options.unit != "sequence":
            return None
        first, last = self.first_document, self.last_document
        return TokenWindows(
            self.corpus.block_tokens(first, last),
            lambda start, stop: self.corpus.documents(start + first, stop + first),
            last - first,
            length=self.options.length or 0,
            overlap=self.options.overlap,
            seed=self.options.seed,
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of the samples and their order, which a saved state must match."""
        options = self.options
        content = {
            "files": [[file.name, *file.digest()] for file in self.corpus.files],
            "documents": [self.first_document, self.last_document],
            "sequence": [options.length, options.overlap, options.seed],
            "tokens": None if self.windows is None else self.windows.num_tokens,
            "excluded": self.excluded.tolist(),
            "range": [self.start, self.stop],
        }
        if options.unit == "line":
            content["unit"] = "line"
        return content_fingerprint(len(self), content)

    def read_numbers(
        self, numbers: Ints, keys: RestoreKeys, subflavors: Mapping[str, Any] | None
    ) -> TokenRows:
        """Locate samples; tokens are copied when they are made."""
        runs = self._runs(numbers)
        fields: dict[str, Sequence[Any]] = {
            "__key__": list(map(str, numbers.tolist())),
            "__shard__": self._shards(runs, len(numbers)),
            "__restore_key__": keys,
            "__subflavors__": [subflavors] * len(numbers),
        }
        return TokenRows(self.corpus, runs, is_windows=self.windows is not None, fields=fields)

    def _shards(self, runs: TokenRuns, count: int) -> list[str]:
        """Return the file in which each sample begins; the first file for those without tokens."""
        number = np.zeros(count, np.int64)
        number[runs.window[::-1]] = runs.file[::-1]
        names = [file.name + DATA for file in self.corpus.files]
        return list(map(names.__getitem__, number.tolist()))

    def measure(self, name: str, ordinals: Ints) -> NDArray[np.float64] | None:
        """Return `tokens`, the length of samples, in the order of `ordinals`."""
        if name != "tokens":
            return None
        runs = self._runs(self.numbers(ordinals))
        sizes = np.array([file.index.dtype.itemsize for file in self.corpus.files])[runs.file]
        lengths = (runs.high - runs.low) // sizes
        return np.bincount(runs.window, lengths, minlength=len(ordinals)).astype(np.float64)

    def measure_names(self) -> list[str]:
        """Return the names of its measures."""
        return ["tokens"]

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the samples are: for a window, the documents of the block it begins in."""
        pieces = self._runs(self.numbers(ordinals))
        first = np.flatnonzero(np.diff(pieces.window, prepend=-1))
        if not len(first):
            return
        block = pieces.document // BLOCK_DOCUMENTS
        of_first = first[np.cumsum(np.diff(pieces.window, prepend=-1) != 0) - 1]
        near = (pieces.file == pieces.file[of_first]) & (block == block[of_first])
        low = np.minimum.reduceat(np.where(near, pieces.low, pieces.low[of_first]), first)
        high = np.maximum.reduceat(np.where(near, pieces.high, pieces.high[of_first]), first)
        number, window = pieces.file[first], pieces.window[first]
        for each in distinct(number).tolist():
            inside = np.flatnonzero(number == each)
            order = inside[np.argsort(low[inside], kind="stable")]
            yield Extents(self.corpus.files[each].file, window[order], low[order], high[order])

    def locate(self, ordinal: int) -> Location:
        """Return where a sample is; for a window, where its first document is."""
        numbers = self.numbers(np.array([ordinal]))
        pieces = self._runs(numbers)
        file = self.corpus.files[int(pieces.file[0]) if len(pieces.file) else 0]
        return Location(
            key=str(numbers[0]),
            shard=file.name + DATA,
            sample=int(numbers[0]),
            offset=int(pieces.low[0]) if len(pieces.low) else 0,
            parts=("tokens",),
        )

    def keys(self, ordinals: Ints) -> list[str]:
        return list(map(str, self.numbers(ordinals).tolist()))

    def numbers_of(self, key: str) -> Sequence[int]:
        # Lists of failures have FILE/KEY.
        names = (f"{file.name}{DATA}/" for file in self.corpus.files)
        prefix = next((name for name in names if key.startswith(name)), "")
        return numbers_in(key.removeprefix(prefix))

    def ranges(self) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
        low, high = self.edges()
        if self.windows is not None:
            documents = self.first_document, self.last_document
            if (low, high) != (0, len(self.windows)):
                names = (str(self.path), *map(str, (*documents, self.options)))
                return ("windows", *names), {"": (low, high)}
            low, high = documents
        return (f"{self.options.unit}s", str(self.path)), {"": (low, high)}

    def _runs(self, numbers: Ints) -> TokenRuns:
        """Return where the tokens of samples are, in the order of the samples."""
        if self.options.unit == "line":
            return self.corpus.runs_of_lines(numbers)
        if self.windows is None:
            return self.corpus.runs_of_documents(numbers)
        pieces = self.windows.pieces(numbers)
        documents = pieces.document + self.first_document
        return self.corpus.runs_of_windows(pieces._replace(document=documents))

    def _why_empty(self) -> str:
        count, total = self.last_document - self.first_document, self.corpus.num_documents
        documents = f"split {self.split_part!r} has {count} of {counted(total, 'document')}"
        if self.windows is None:
            return f"{documents}{self._left_none()}"
        tokens, length = self.windows.num_tokens, self.options.length
        if tokens < self.windows.length:
            held = counted(tokens, "token")
            return f"{documents} with {held}, fewer than one window of {length}"
        return f"{documents} and {counted(len(self.windows), 'window')}{self._left_none()}"


class TokenKind(DatasetKind):
    """Token files: pairs of `.bin` and `.idx`."""

    name = "tokens"
    noun = "a set of token files"
    options = tuple(field.name for field in fields(TokenOptions) if field.name != "origin")

    def prepare(self, address: str) -> int:
        prefixes = [prefix for own in token_splits(address).values() for prefix in own]
        corpus = TokenCorpus(prefixes, origin=redact(address))
        for file in corpus.files:
            file.check()
        return corpus.num_documents

    def split_names(
        self, address: str, split_config: str | None = None, allow: Collection[str] = ()
    ) -> list[str]:
        return [split or "train" for split in token_splits(address)]

    def config(self, leaf: Leaf) -> DatasetConfig:
        names = ("tokens", "cu_seqlens", "modes")
        return DatasetConfig(
            crude=False,
            sample_type=("energon", "TokensSample"),
            field_map={name: name for name in names},
            given=frozenset({"decoder"}),  # nothing needs decoding
            origin=leaf.path,
        )

    def open(
        self, request: OpenRequest, parts: Collection[str] | PartFilter | None = None
    ) -> TokenSource:
        leaf = request.leaf
        options = TokenOptions(**leaf.read, origin=leaf.origin)
        return TokenSource(leaf.path, SampleSelection.of(request, parts), options)

    def describe(self, address: str, *, parts: bool = True, **documents: str) -> dict[str, Any]:
        prefixes = token_splits(address)
        every = [prefix for own in prefixes.values() for prefix in own]
        corpus = TokenCorpus(every, origin=redact(address))
        counts = {file.prefix: file.index.num_documents for file in corpus.files}
        splits = {
            split or "train": split_description(sum(counts[prefix] for prefix in own), len(own))
            for split, own in prefixes.items()
        }
        indices = [file.index for file in corpus.files]
        count, shards = corpus.num_documents, len(indices)
        size = corpus.num_bytes
        described = {
            **description(count, shards, size, splits, sample_type="TokensSample"),
            "tokens": sum(index.num_bytes // index.dtype.itemsize for index in indices),
            "sequences": sum(index.num_sequences for index in indices),
            "dtypes": sorted({index.dtype.name for index in indices}),
            "modes": corpus.has_modes,
        }
        if parts and count:
            sizes = SizeStatistics()
            for file in corpus.files:
                for lengths in file.lengths():
                    sizes.add(lengths * file.index.dtype.itemsize)
            described |= PartStatistics(sizes, {"tokens": sizes}).to_json()
        return described


KIND = TokenKind()
