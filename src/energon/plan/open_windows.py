"""How far a saved run has come in the windows of its lanes, as its state tells without costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon.plan.packs import WINDOW_ROWS, batch_rows


def rows_of_open_windows(saved: Mapping[str, Any], rows: Mapping[int, int]) -> int:
    """Return how many rows lanes have read of windows that some lane has not read to the end.

    Args:
        saved: The fingerprint of a run whose batches are balanced, without packs.
        rows: For each lane of the run, how many rows it has read.
    """
    begin = rows_of_whole_windows(saved, min(rows.values()))
    return sum(rows.values()) - begin * len(rows)


def rows_of_whole_windows(saved: Mapping[str, Any], row: int) -> int:
    """Return how many rows a lane has read of the windows that it has read to the end.

    They are rows of the lane without packs, all of them if the lanes exchange no samples.

    Args:
        saved: The fingerprint of the run.
        row: How many rows it has read.
    """
    if "balance" not in saved:
        return row
    size = _window_rows(saved)
    return row // (WINDOW_ROWS if "window_rows" in saved else size) * size


def unpacked_rows(saved: Mapping[str, Any], row: int) -> tuple[int, int]:
    """Return how many rows a lane has read without packs, and how many may be read beside these.

    Those of a window whose packs are not all read count as unread.
    """
    if "window_rows" not in saved:
        return row, 0
    return rows_of_whole_windows(saved, row), _window_rows(saved) if row % WINDOW_ROWS else 0


def drawn_rows(saved: Mapping[str, Any], row: int) -> int:
    """Return about how many rows a lane has read without packs.

    A state does not tell how many samples the packs have that it has read of a window.
    """
    rows, of_window = unpacked_rows(saved, row)
    if not of_window:
        return rows
    batches: int = saved["balance"]["window"] * _turns(saved)
    done = -(-(row % WINDOW_ROWS) // batch_rows(saved["batch_size"] or 1))
    return rows + of_window * min(done, batches) // batches


def _window_rows(saved: Mapping[str, Any]) -> int:
    """Return the rows of a lane in a window, without packs."""
    window = saved["balance"]["window"]
    of_batch = (1 if window == "step" else window) * (saved["batch_size"] or 1)
    rows: int = saved.get("window_rows", of_batch) * saved["micro_batches"]
    return rows // _lanes_of_step(saved)


def _turns(saved: Mapping[str, Any]) -> int:
    """Return how many batches of a lane a step has."""
    turns: int = saved["micro_batches"] // _lanes_of_step(saved)
    return turns


def _lanes_of_step(saved: Mapping[str, Any]) -> int:
    lanes: int = min(saved["lanes"], saved["micro_batches"])
    return lanes
