"""Samples of token files: their tokens are gathered late, and straight into a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, distinct
from energon.samples.collate import batch_pad_stack
from energon.samples.crude import CrudeSample
from energon.samples.provenance import known_sources
from energon.sources.tokens.corpus import TokenCorpus, TokenRuns


class TokenRows:
    """Samples whose tokens are gathered when their turn comes, straight into a batch.

    Args:
        corpus: The documents that they are taken from.
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
        self._stored = [file.index.dtype for file in corpus.files]
        self._is_uniform = len(set(self._stored)) == 1
        self._buffers, self._low, self._high = self._read(runs)
        sizes = np.array([dtype.itemsize for dtype in self._stored])
        self._ends = np.concatenate(([0], np.cumsum((runs.high - runs.low) // sizes[runs.file])))
        first = np.searchsorted(runs.window, np.arange(len(about["__key__"]) + 1))
        lengths = np.diff(self._ends[first])
        self._is_even = bool((lengths == lengths[:1]).all())
        self._first = first.tolist()
        self._edges = _edges_of_samples(self._ends, first)
        self._edges_at = (first + np.arange(len(first))).tolist()
        self._has_modes = corpus.has_modes

    @property
    def column_names(self) -> tuple[str, ...]:
        """The parts that all samples have: rows with the same ones may share a batch."""
        return ("tokens", "cu_seqlens", *(["modes"] if self._has_modes else []))

    def _read(self, runs: TokenRuns) -> tuple[list[memoryview] | memoryview, list[int], list[int]]:
        """Return the bytes that all runs are in, or those of each; and where in them they are."""
        numbers = distinct(runs.file).tolist()
        if len(numbers) == 1:
            file = self._files[numbers[0]]
            found, low, high = file.read(runs.low, runs.high)
            return file.mapped if found is None else found, low.tolist(), high.tolist()
        buffers: list[Any] = [None] * len(runs.file)
        low, high = np.empty_like(runs.low), np.empty_like(runs.high)
        for number in numbers:
            file, inside = self._files[number], np.flatnonzero(runs.file == number)
            found, low[inside], high[inside] = file.read(runs.low[inside], runs.high[inside])
            for place, buffer in zip(inside.tolist(), found or repeat(file.mapped), strict=False):
                buffers[place] = buffer
        return buffers, low.tolist(), high.tolist()

    def between(self, start: int, stop: int) -> TokenSamples:
        """Return the samples from `start` to `stop`, one by one or many at once."""
        return TokenSamples(self, start, stop)

    def with_sources(self, dataset_path: str) -> TokenRows:
        """Return the same samples, of a dataset, with `__sources__`: where each comes from."""
        about = self.about
        names = ((*about, "tokens", "cu_seqlens", "modes"),)
        known = (about["__key__"], about["__restore_key__"], about["__shard__"], names)
        sources = known_sources(((dataset_path,), *known), len(about["__key__"]))
        self.about = {**about, "__sources__": list(zip(sources))}
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
