"""Samples that are built only when they are taken, and released as they are passed on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol, TypeVar

from energon.samples.crude import record_sources


class LazyRows(Protocol):
    """Samples whose bytes are in memory, and which are built only when they are taken.

    Building and releasing samples batch by batch takes two thirds of the time of building
    thousands at once, which would evict one another from the CPU cache.
    """

    def between(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the samples from `start` to `stop`.

        The iterator may have a method `columns(count)` that returns the next `count` samples
        already collated, or None if fewer are left; it then also has a length hint. Rows of
        several datasets are collated together if each has the same `column_names`.
        """


class LazyLeafRows(LazyRows, Protocol):
    """Samples of one dataset."""

    def with_sources(self, dataset_path: str) -> LazyRows:
        """Return the same samples with their origin in `__sources__`."""


class ReleasedRows:
    """Base of samples that iterators release as they pass them on.

    The next batch then reuses the memory of the last. Nothing else may keep them until then.
    """


@dataclass(frozen=True)
class RowsAtOnce(ReleasedRows):
    """Samples that are already built."""

    samples: list[Any]

    def between(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the samples from `start` to `stop`."""
        return released(self.samples[start:stop])

    def with_sources(self, dataset_path: str) -> RowsAtOnce:
        """Store the origin of each sample in it."""
        record_sources(dataset_path, self.samples)
        return self


def released(items: list[T]) -> Iterator[T]:
    """Yield items, each of which is taken out of the list first."""
    items.reverse()
    return map(list.pop, repeat(items, len(items)))


T = TypeVar("T")
