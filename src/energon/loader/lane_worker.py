"""What the loader asks of the workers that host its lanes, and what it gets from them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from energon.loader.state import LanePosition
from energon.loader.transport.slots import EventLayout, SharedMemory


class Event(NamedTuple):
    """The next event of a worker: a batch, the end of a lane, or a failure.

    Args:
        lane: The lane it concerns.
        batch: What the lane yielded.
        state: Pickled state of the lane after the batch; later batches do not change it. None if
            all that has changed is that its `since` counts one batch more.
        counts: Statistics of the lane after the batch.
        times: What it has spent time on; None if nothing was added, as with most batches: to send
            it takes longer than to send a small batch.
        ended: The lane has no more batches.
        error: Raised instead of a batch.
    """

    lane: int
    batch: Any = None
    state: bytes | None = None
    counts: Mapping[str, int] | None = None
    times: Mapping[str, int] | None = None
    ended: bool = False
    error: BaseException | None = None


class SharedEvent(NamedTuple):
    """An event as it was written by another process.

    Args:
        layout: Where its pickle and its buffers begin and end.
        content: What these are offsets of.
        lease: The view of shared memory that keeps it from being overwritten.
    """

    layout: EventLayout
    content: bytes | SharedMemory
    lease: Any = None


@dataclass(frozen=True)
class LanesToOpen:
    """Which lanes a worker hosts from now on, and where they continue."""

    lanes: int
    positions: dict[int, LanePosition]


class WorkerStatus(NamedTuple):
    """The status of a worker.

    Args:
        name: Its name in messages.
        pid: Process id; None before the process starts.
        ready: How many batches are ready to be taken, as far as is known without asking.
        thread: Native id of the thread that makes its batches; None before it starts.
    """

    name: str
    pid: int | None
    ready: int
    thread: int | None


class LaneWorker(Protocol):
    """A host of some lanes of a rank: the training process, a thread or a process."""

    def open(self, positions: Mapping[int, LanePosition], *, lanes: int) -> None:
        """Start hosting these lanes, out of `lanes` in total, and drop all others.

        The caller owns `positions` and advances it with every batch taken.
        """

    def take(self) -> Event:
        """Return the next event of the hosted lanes; raise only if there can be none."""

    @property
    def shared(self) -> SharedEvent | None:
        """The last event as other processes can read it; None if it was made in this one."""

    def arrived(self) -> Event | None:
        """Return the event that `take` returns next if it is here already; never wait."""

    @property
    def status(self) -> WorkerStatus:
        """Return its current status."""

    def stats(self) -> dict[str, int]:
        """Return the counts of events so far, by name."""

    def stop(self) -> None:
        """Begin to stop, without waiting."""

    def close(self) -> None:
        """Stop and release all resources. May be called twice."""


class Forgets(Protocol):
    """Something that belongs to one process."""

    def forget(self) -> None:
        """Give up what a fork has inherited."""


def forget_in_forks(owned: Forgets) -> None:
    """Call `forget` of an object in every fork of this process, while the object exists."""
    _owned.add(owned)


_owned: weakref.WeakSet[Forgets] = weakref.WeakSet()


def _forget() -> None:
    for each in list(_owned):
        each.forget()


os.register_at_fork(after_in_child=_forget)
