"""The contract of what can be packed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]
"""What a source knows of a sample besides its parts: columns of its table, or its `folder`."""
Wanted = Callable[[str, Row], bool]
"""Says by its key and row whether a sample is wanted. Asked for each sample once, in order, right
before the sample is yielded; contents of those that are not wanted need not be read."""


def every(key: str, row: Row) -> bool:
    """Return that a sample is wanted, whatever it is."""
    return True


class PackSource(ABC):
    """Samples in an order that is the same each time, so that an interrupted run can go on."""

    def split_names(self) -> list[str]:
        """Return the names of the splits; one empty name if the source has none."""
        return [""]

    @abstractmethod
    def samples(
        self, split: str, start: int = 0, wanted: Wanted = every
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the samples of a split from number `start` on, as `TarWriter` takes them."""

    def part_names(self) -> frozenset[str] | None:
        """Return the names of the parts of all samples; None if only reading them tells."""
        return None

    def record(self) -> dict[str, Any]:
        """Return what has to be the same for an interrupted run to go on."""
        return {}

    def notes(self) -> list[str]:
        """Return what the user should know before the samples are packed."""
        return []

    def skipped(self) -> list[str]:
        """Return what was left out so far and why, in words; once it is read, all of it."""
        return []
