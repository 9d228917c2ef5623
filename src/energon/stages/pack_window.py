"""The windows of a stream that is packed, and how they are divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from energon.errors import FatalSampleError
from energon.packing.selection import Selection
from energon.stages.base import Place, State
from energon.stages.hook import SKIPPED
from energon.stages.map import row_of


class Entry(NamedTuple):
    """A sample of a window, and where it was; None if it was made of those of the window."""

    sample: Any
    place: Place = None

    @property
    def row(self) -> int:
        """The row that it came from; -1 if that is not known."""
        return row_of(self.place)


@dataclass
class Window:
    """A window that was divided.

    Args:
        groups: Those not yet given; a given one is emptied, to free its samples.
        carried: What is offered again with the next window.
        stop: State of the stream after its last new sample.
        stop_row: Row of the stream there.
        opened_at: Which of the groups was the first to be given since it was read.
    """

    groups: list[list[Entry]]
    carried: list[Entry]
    stop: State
    stop_row: int
    opened_at: int


@dataclass
class Start:
    """Where a window begins, as it is saved.

    Args:
        inner: State of the stream before its first new sample.
        carried: Places of the samples carried over from the window before.
        group: How many of its groups have been drawn.
        skipped: Rows that were left out when the window was first divided; None before.
        batch: The batch of the lane for which its new samples are read; None before.
        opened: That for which it was divided, and the next window is read; None before.
    """

    inner: State
    carried: list[Place] = field(default_factory=list)
    group: int = 0
    skipped: list[int] | None = None
    batch: int | None = None
    opened: int | None = None


def divided(
    selected: Any, entries: list[Entry], *, hook: str
) -> tuple[list[list[Entry]], list[Entry]]:
    """Return the groups of a window and what is carried over to the next, as a hook says.

    Args:
        selected: What the hook returned: groups of samples or a `Selection`, or SKIPPED.
        entries: The samples that it was given.
        hook: How messages call it.

    Raises:
        FatalSampleError: If it returned something else, or carries what it was not given.
    """
    if selected is SKIPPED:
        return [], []
    if not isinstance(selected, Selection):
        selected = Selection(selected)
    try:
        groups = [list(group) for group in selected.groups]
    except TypeError as error:
        raise FatalSampleError(
            f"{hook} returned {type(selected.groups).__name__}; wanted are lists of samples, one "
            "for each pack, or a Selection"
        ) from error
    known = {id(entry.sample): entry for entry in entries}
    return (
        [[known.get(id(sample)) or Entry(sample) for sample in group] for group in groups if group],
        _entries_of(selected.carry, entries),
    )


def _entries_of(samples: Sequence[Any], entries: list[Entry]) -> list[Entry]:
    """Return the entries of these `samples`, known by identity."""
    known: dict[int, list[Entry]] = {}
    for entry in reversed(entries):
        known.setdefault(id(entry.sample), []).append(entry)
    found = []
    for sample in samples:
        if not known.get(id(sample)):
            raise FatalSampleError(
                "a sample that is to be carried over to the next window is not one of this window, "
                "or is named twice; carry the objects that the hook was given"
            )
        found.append(known[id(sample)].pop())
    return found
