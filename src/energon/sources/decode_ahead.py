"""Decode what lanes will read next in a thread, while the hooks run.

A row group of Parquet is decoded as a whole, which takes milliseconds in which the trainer would
wait. Decoding releases the GIL, and the plan says which row groups come next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from energon.io.threads import WaitingThreads
from energon.stages.reading.blocks import NextRows

if TYPE_CHECKING:
    from energon.sources.reader import DecodesAhead

AHEAD_BYTES = 128 << 20
"""Memory of a worker for blocks that are decoded ahead, of all its sources together."""


class DecodeAhead:
    """Decodes the blocks that lanes read now and next. Used by one thread.

    Args:
        sources: By leaf.
    """

    planned_blocks = 2

    def __init__(self, sources: Mapping[int, DecodesAhead]) -> None:
        self._sources = sources
        self._threads = WaitingThreads(1, "energon decode")

    def move_to(self, readings: Sequence[NextRows]) -> None:
        """Decode what is needed now, and what is needed next if as many rows are read again."""
        rows = [
            each.planned.pick(slice(block * each.number, (block + 1) * each.number))
            for block in range(self.planned_blocks)
            for each in readings
        ]
        leaf = np.concatenate([each.leaf for each in rows])
        ordinal = np.concatenate([each.ordinal for each in rows])
        own = {number: ordinal[leaf == number] for number in self._sources}
        used = [number for number, ordinals in own.items() if len(ordinals)]
        for number in used:
            self._sources[number].decode_ahead(
                own[number], self._threads.submit, max_bytes=AHEAD_BYTES // len(used)
            )

    def take_counts(self) -> Mapping[str, int]:
        """Return nothing: there are no requests to count."""
        return {}
