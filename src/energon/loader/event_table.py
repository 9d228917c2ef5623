"""Where the events are that share a slot: a table of integers behind them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

Span = tuple[int, int]


class EventLayout(NamedTuple):
    """Where the pickle of one event and its buffers begin and stop, in bytes of the slot."""

    lane: int
    start: int
    stop: int
    buffers: Sequence[Span] = ()


class EventTable:
    """The table as it grows, in the worker.

    Example:
        >>> table = EventTable()
        >>> table.append(EventLayout(lane=2, start=0, stop=9, buffers=[(64, 80)]))
        >>> read_table(memoryview(table.to_bytes()))
        [EventLayout(lane=2, start=0, stop=9, buffers=[(64, 80)])]
    """

    def __init__(self) -> None:
        self._numbers = array("q")
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, layout: EventLayout) -> None:
        """Add an event."""
        lane, start, stop, buffers = layout
        self._numbers.extend((lane, start, stop, len(buffers)))
        for span in buffers:
            self._numbers.extend(span)
        self._length += 1

    def clear(self) -> None:
        """Begin a new table."""
        del self._numbers[:]
        self._length = 0

    def to_bytes(self) -> bytes:
        """Return the table as what `read_table` reads."""
        return self._numbers.tobytes()


def read_table(data: memoryview) -> list[EventLayout]:
    """Return the events of a table, in order."""
    numbers = data.cast("q").tolist()
    layouts, at = [], 0
    while at < len(numbers):
        lane, start, stop, count = numbers[at : at + 4]
        at += 4 + 2 * count
        spans = numbers[at - 2 * count : at]
        buffers = list(zip(spans[::2], spans[1::2], strict=True))
        layouts.append(EventLayout(lane, start, stop, buffers))
    return layouts
