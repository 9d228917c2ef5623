"""The contract of what can be packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class PackSource(Protocol):
    """Samples in an order that is the same each time, so that an interrupted run can go on."""

    def split_names(self) -> list[str]:
        """Return the names of the splits; one empty name if the source has none."""

    def samples(self, split: str, start: int) -> Iterator[Mapping[str, Any]]:
        """Yield the samples of a split from number `start` on, as `TarWriter` takes them."""

    def skipped(self) -> list[str]:
        """Return what was left out so far and why, in words; once it is read, all of it."""
