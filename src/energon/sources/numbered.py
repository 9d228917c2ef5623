"""Sources with consecutively numbered items, where a split is a range."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, cast

import numpy as np

from energon.arrays import Ints
from energon.errors import EmptyDatasetError
from energon.io.epath import AnyPath
from energon.messages import counted
from energon.plan.leaves.leaf import block_sizes
from energon.plan.leaves.subset import exclude_indices, resolve_range
from energon.sources.source import FileSamples, Source, SplitSource
from energon.sources.webdataset import included, places_of


class NumberedSource(SplitSource, ABC):
    """The samples of a split, numbered from 0. Items are numbered over the whole dataset.

    Args:
        path: Path or address of the dataset.
        split_part: The split to read.
        bounds: The number of the first item of the split, and the one after its last.
        subsets: Ranges that narrow the split, see `energon.plan.leaves.subset`.
        exclude: Keys of excluded samples, also as `FILE/KEY`, and files.

    Raises:
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        path: AnyPath,
        *,
        split_part: str,
        bounds: tuple[int, int],
        subsets: Sequence[Any] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        self.path = path
        self.split_part = split_part
        self.first, self.last = bounds
        excluded = {place for entry in exclude for place in self._places_listed(entry)}
        self.excluded = np.array(sorted(excluded), np.int64)
        self.places = resolve_range(self.last - self.first, subsets)
        self.start, self.stop = exclude_indices(np.array(self.places), self.excluded).tolist()
        if self.start >= self.stop:
            raise EmptyDatasetError(f"{path}: {self._why_empty()}")

    @abstractmethod
    def numbers_of(self, key: str) -> Sequence[int]:
        """Return the items with a key, or in the file of that name."""

    def numbers(self, ordinals: Ints) -> Ints:
        """Return the numbers in the whole dataset of samples of the split.

        Raises:
            IndexError: If there is no such sample.
        """
        return np.asarray(places_of(self, ordinals) + self.first)

    def file_samples(self) -> list[FileSamples]:
        """Return the split, as one file: items are numbered over all files."""
        low, high = (np.array(self.edges()) - self.first).tolist()
        return [FileSamples(self.split_part, self.last - self.first, low, high)]

    def in_files(self, ordinals: Ints) -> tuple[Ints, Ints]:
        """Return the number of the file of each sample, and that of the sample in its file."""
        return np.zeros(len(ordinals), np.int64), self.numbers(ordinals) - self.first

    def index_stamp(self) -> str | None:
        """Return None: the stamps of files tell whether they have changed."""
        return None

    def file_stamp(self, number: int) -> str:
        """Return a digest of the items of the split."""
        source = copy(self)
        source.excluded = np.empty(0, np.int64)
        source.start, source.stop = source.places = 0, self.last - self.first
        return str(cast("Source", source).fingerprint()["index"])

    def find(self, key: str) -> list[int]:
        """Return the numbers of the samples with a key, which has to match as a whole."""
        found = [n for place in self._places_of(key) for n in included(self, place)]
        keys = self.keys(np.array(found, np.int64)) if found else []
        return [number for number, own in zip(found, keys, strict=True) if own == key]

    def edges(self) -> tuple[int, int]:
        """Return the numbers of the first item that is a sample, and of the one after the last."""
        low, high = self.numbers(np.array([0, len(self) - 1])).tolist()
        return low, high + 1

    def samples_between(self, edges: Ints) -> tuple[int, ...] | None:
        """Return how many samples are between edges, given as numbers in the whole dataset.

        Stretches without any are left out; None if there are too many for slices to follow them.
        """
        places = np.maximum(edges - self.first, 0)
        before = places - np.searchsorted(self.excluded, places) - self.start
        return block_sizes(np.clip(before, 0, len(self)))

    def _places_of(self, key: str) -> list[int]:
        """Return which items of the split have a key, counted from its first."""
        return self._in_split(self.numbers_of(key))

    def _places_listed(self, entry: str) -> list[int]:
        """Return which items of the split an entry excludes; lists of failures have `FILE/KEY`."""
        found = self.numbers_of(entry)
        for at, character in enumerate(entry):
            if character == "/" and not found:
                in_file = self.numbers_of(entry[:at])
                found = [n for n in self.numbers_of(entry[at + 1 :]) if n in in_file]
        return self._in_split(found)

    def _in_split(self, numbers: Sequence[int]) -> list[int]:
        return [n - self.first for n in numbers if self.first <= n < self.last]

    def _why_empty(self) -> str:
        count = counted(self.last - self.first, "sample")
        return f"split {self.split_part!r} has {count}{self._left_none()}"

    def _left_none(self) -> str:
        """Return in words that a split has samples, but not for this reader."""
        return ", but subset and exclude leave none" if self.last > self.first else ""
