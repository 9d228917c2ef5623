"""Read many samples of a file with few calls: those that lie close together come at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from energon.io.range_file import RangeFile

MAX_GAP_BYTES = 16 << 10
"""Bytes between two samples that are read along rather than skipped."""
MAX_SPAN_BYTES = 4 << 20
"""Most bytes of one read."""


def read_spans(
    file: RangeFile, low: NDArray[np.int64], high: NDArray[np.int64]
) -> tuple[list[bytes], NDArray[np.int64]]:
    """Read samples that lie at `low` to `high`, ascending, with few calls.

    Returns:
        The buffer that each sample lies in, and where in the file that begins.
    """
    edges = span_edges(low, high)
    begin = low[edges]
    size = np.maximum.reduceat(high, edges) - begin
    spans = file.pread_many(begin.tolist(), size.tolist())
    if len(spans) == len(low):
        return spans, low
    counts = np.diff(edges, append=len(low))
    shared = [
        span for span, count in zip(spans, counts.tolist(), strict=True) for _ in range(count)
    ]
    return shared, np.repeat(begin, counts)


def span_edges(low: NDArray[np.int64], high: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which of the samples at `low` to `high`, ascending, are the first of a call."""
    cut = (low[1:] - high[:-1] > MAX_GAP_BYTES) | (
        low[1:] // MAX_SPAN_BYTES != low[:-1] // MAX_SPAN_BYTES
    )
    return np.concatenate(([0], np.flatnonzero(cut) + 1))
