"""Decode what lanes will read next in a thread, while the hooks run.

A row group of Parquet is decoded as a whole, which takes milliseconds in which the trainer would
wait. Decoding releases the GIL, and the plan says which row groups come next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import numpy as np

from energon.arrays import Ints
from energon.io.threads import WaitingThreads
from energon.sources.kinds import Source
from energon.stages.blocks import NextRows

AHEAD_BYTES = 128 << 20
"""Memory for blocks that are decoded ahead, of all sources together."""
MIN_SAMPLE_BYTES = 1 << 10
"""Minimum average size of samples; smaller ones are decoded in no time."""

Submit = Callable[..., Future[Any]]
"""Run a function with some arguments in another thread."""


@runtime_checkable
class DecodesAhead(Protocol):
    """A source whose samples are in blocks that are decoded as a whole."""

    def decode_ahead(self, ordinals: Ints, submit: Submit, *, max_bytes: int) -> None:
        """Begin to decode the blocks that samples are in, unless they are decoded already.

        Args:
            ordinals: The samples that are read next.
            submit: Runs what decodes a block.
            max_bytes: Memory for the blocks; those that exceed it are decoded when they are read.
        """


def decoded_ahead(sources: Sequence[Source]) -> dict[int, DecodesAhead]:
    """Return those of the sources that decode large samples in blocks, by leaf."""
    return {
        leaf: source
        for leaf, source in enumerate(sources)
        if isinstance(source, DecodesAhead) and source.mean_sample_bytes >= MIN_SAMPLE_BYTES
    }


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
