"""How many requests and bytes reading by a plan takes, measured on a few blocks of rows.

Indexes say where samples lie, and which of them are read together follows from the order, so
no sample is read for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.inspect.planned_run import PlannedRun
from energon.io.ranges import merge_ranges
from energon.sources.spans import span_edges
from energon.stages.read import MAX_BLOCK_BYTES, MAX_PLANNED_ROWS

MEASURED_ROWS = 4096
MEASURED_LANES = 4

Ints = NDArray[np.int64]


class LeafReads(NamedTuple):
    """What reading a sample of a leaf takes, on average."""

    requests: float
    bytes_read: float
    """With the gaps that are read along."""


def measure_reads(run: PlannedRun, *, batches: int) -> dict[int, LeafReads]:
    """Return for each leaf that comes in some blocks of rows what reading its samples takes."""
    sums: dict[int, list[Ints]] = {}
    lanes = np.unique(np.linspace(0, run.lanes - 1, MEASURED_LANES).astype(int)).tolist()
    for lane in lanes:
        available = run.rows_until(lane, batches)
        count = min(_block_rows(run), MEASURED_ROWS // len(lanes), available)
        rows = run.plan.rows(lane, (available - count) // 2, count)
        for leaf in np.unique(rows.leaf).tolist():
            sums.setdefault(leaf, []).append(_read(run, leaf, rows.ordinal[rows.leaf == leaf]))
    found = {}
    for leaf, parts in sums.items():
        samples, requests, read = np.sum(parts, axis=0).tolist()
        found[leaf] = LeafReads(requests / samples, read / samples)
    return found


def _block_rows(run: PlannedRun) -> int:
    """Return how many rows of a lane are read at once."""
    sizes = [leaf.source.mean_sample_bytes for leaf in run.leaves]
    return max(1, min(MAX_PLANNED_ROWS, int(MAX_BLOCK_BYTES / max(1.0, sum(sizes) / len(sizes)))))


def _read(run: PlannedRun, leaf: int, ordinals: Ints) -> Ints:
    """Return how many samples, requests and bytes a block of a leaf takes."""
    requests = read = 0
    for file, _, low, high in run.leaves[leaf].source.extents(ordinals):
        order = np.argsort(low, kind="stable")
        low, high = low[order], high[order]
        if file.is_remote:
            start, stop = merge_ranges(low, high)[:2]
        else:
            edges = span_edges(low, high)
            start, stop = low[edges], np.maximum.reduceat(high, edges)
        requests += len(start)
        read += int((stop - start).sum())
    return np.array([len(ordinals), requests, read])
