"""A worker that is replaced when it dies or hangs, with no effect on the batches.

After a death, the worker is restarted, a row is skipped, or the run gives up.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from energon.errors import WorkerError
from energon.loader.lane_worker import (
    DescribesRows,
    Event,
    LanesToOpen,
    Pipeline,
    SharedEvent,
    WorkerStatus,
    forget_in_forks,
)
from energon.loader.monitoring.accounts import REBUILD, Spent, account
from energon.loader.options import LoaderOptions, logger
from energon.loader.state import LanePosition
from energon.loader.transport.events import ReadEvent, RebuildClock, Received, UnreadEvent
from energon.loader.transport.slots import Heartbeat
from energon.messages import Lines, counted

POLL_SECONDS = 0.2


class HostLink(Protocol):
    """A process somewhere that hosts lanes, as seen from the training process."""

    heartbeat: Heartbeat
    """Where it is, as far as is known here."""
    num_copied: int
    """How many batches were copied on arrival."""
    rebuilding: RebuildClock
    """How long it took to rebuild events here."""

    @property
    def pid(self) -> int | None:
        """Its process id on this machine; None if it has none here."""

    @property
    def is_connected(self) -> bool:
        """Whether it has not yet been told to exit."""

    @property
    def has_events(self) -> bool:
        """Whether events are waiting to be received."""

    def open(self, opening: LanesToOpen) -> None:
        """Let it host other lanes; events from earlier lanes are dropped from now on."""

    def receive(self, timeout: float) -> Received | None:
        """Return the next events, [] if none come within `timeout` seconds, None after its end."""

    def tick(self) -> None:
        """Do what is due now and then while the trainer takes batches, such as reading logs."""

    @property
    def ending(self) -> Ending | None:
        """How it ended; None while it runs."""

    def traceback(self) -> str:
        """Ask it for its current position, whatever it is doing."""

    def disconnect(self) -> None:
        """Tell it to exit, without waiting."""

    def close(self) -> None:
        """End it, by force if it does not exit at once. Batches that were received stay valid."""

    def kill(self) -> None:
        """End it by force."""


class StartError(WorkerError):
    """A worker could not be started, but perhaps another one can.

    Args:
        message: Why.
        was_killed: Whether something else killed it.
    """

    def __init__(self, message: str, *, was_killed: bool) -> None:
        super().__init__(message)
        self.was_killed = was_killed


StartLink = Callable[[int], HostLink]
"""Starts a host, given how many batches came from those that it replaces; or raises StartError."""


class ReplaceableWorker:
    """Hosts lanes in a process, here or on another machine.

    When the process ends or makes no progress, another one continues after the last batch that was
    taken. So the order of batches and the state match those of a run without a fault, except that
    a row at which workers keep dying is skipped.

    Args:
        pipeline: The pipeline that the lanes run.
        options: How to host lanes.
        name: Name for messages.
        start: Starts the process, and each one that replaces it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        options: LoaderOptions,
        *,
        name: str,
        start: StartLink,
    ) -> None:
        self._pipeline = pipeline
        self._options = options
        self._name = name
        self._start_link = start
        self._owner = os.getpid()
        self._link: HostLink | None = None
        self._events: deque[Event | UnreadEvent | ReadEvent] = deque()
        self.shared: SharedEvent | None = None
        self._positions: Mapping[int, LanePosition] = {}
        self._lanes = 1
        self._ended: set[int] = set()
        self._taken = 0
        self._deaths = DeathRecord(options.max_deaths, options.restart_patience_seconds)
        self._stats = {"worker_deaths": 0, "worker_timeouts": 0, "batches_copied": 0}
        self._rebuild_seconds = 0.0
        forget_in_forks(self)

    @property
    def pid(self) -> int | None:
        """Process id, or None before the first lanes are opened."""
        return None if self._link is None else self._link.pid

    def open(self, positions: Mapping[int, LanePosition], *, lanes: int) -> None:
        """Host these lanes from now on, in the same process if one is running."""
        self._check_owner()
        self._positions, self._lanes = positions, lanes
        self._ended.clear()
        self._events.clear()
        if self._link is not None and self._link.is_connected:
            self._link.open(LanesToOpen(lanes, dict(positions)))
        else:
            self._start()

    def take(self) -> Event:
        """Return the next event, replacing the process as often as is useful."""
        if self._link is not None:
            self._link.tick()
        while not self._events:
            self._receive()
        event, shared = self._events[0], None
        if isinstance(event, UnreadEvent | ReadEvent):
            shared = event.shared
            event = event.read()
        # Only now, so that an interrupt does not lose it.
        self._events.popleft()
        self.shared = shared
        self._taken += 1
        if event.ended:
            self._ended.add(event.lane)
        return event

    def arrived(self) -> Event | None:
        """Return the next event if it has arrived and has arrays."""
        link = self._link
        if (
            not self._events
            and link is not None
            and link.has_events
            and (events := link.receive(0))
        ):
            self._deaths.delivered()
            self._events.extend(events)
        event = self._events[0] if self._events else None
        if isinstance(event, ReadEvent):
            return event.event
        return None if isinstance(event, UnreadEvent) else event

    @property
    def status(self) -> WorkerStatus:
        """Return its status."""
        waiting = self._link is not None and self._link.has_events
        return WorkerStatus(self._name, self.pid, len(self._events) + waiting, thread=self.pid)

    def stats(self) -> dict[str, int]:
        """Return how often the process died or hung, and how many batches were copied."""
        copied, seconds = self._stats["batches_copied"], self._rebuild_seconds
        if self._link is not None:
            copied += self._link.num_copied
            seconds += self._link.rebuilding.seconds
        rebuilt = {account(Spent(REBUILD)): int(seconds * 1e6)}
        return {**self._stats, "batches_copied": copied, **rebuilt}

    def stop(self) -> None:
        """Let the process end."""
        if self._link is not None and self._owner == os.getpid():
            self._link.disconnect()

    def close(self) -> None:
        """End the process."""
        if self._link is not None and self._owner == os.getpid():
            self._link.close()
            self._count(self._link)
        self._link = None
        self._events.clear()

    def _count(self, link: HostLink) -> None:
        """Add the counts of a process that has ended to those of this worker."""
        self._stats["batches_copied"] += link.num_copied
        self._rebuild_seconds += link.rebuilding.seconds

    def _start(self) -> None:
        while True:
            if self._link is not None:
                self._link.close()
                self._link = None
            try:
                self._link = self._start_link(self._taken)
            except StartError as error:
                text = f"{self._name} could not be started: {error}"
                self._decide(None, text, killed=error.was_killed)
                continue
            left = {v: each for v, each in self._positions.items() if v not in self._ended}
            self._link.open(LanesToOpen(self._lanes, left))
            return

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise WorkerError(
                f"this loader belongs to process {self._owner}, not to its fork {os.getpid()}; "
                "create a separate loader in each process"
            )

    def _receive(self) -> None:
        """Wait for events, or for the end of the process that should send them."""
        self._check_owner()
        link = self._link
        if link is None:
            raise WorkerError("this loader is closed; build a new one")
        beats, since = link.heartbeat.beats, time.monotonic()
        while True:
            timeout = self._timeout(beats)
            seconds = POLL_SECONDS if timeout is None else min(timeout, POLL_SECONDS)
            events = link.receive(seconds)
            if events is None or (not events and link.ending is not None):
                return self._died(link)
            if events:
                self._deaths.delivered()
                self._events.extend(events)
                return None
            if link.heartbeat.beats != beats:
                beats, since = link.heartbeat.beats, time.monotonic()
            elif timeout is not None and time.monotonic() - since >= timeout:
                return self._hung(link, timeout)

    def _timeout(self, beats: tuple[int, int]) -> float | None:
        """Return how long to wait for a sign of life, in seconds; None for no limit."""
        if beats[0] == 0:
            return self._options.watchdog_initial_timeout_seconds
        return self._options.watchdog_timeout_seconds

    def _hung(self, link: HostLink, timeout: float) -> None:
        self._stats["worker_timeouts"] += 1
        where = link.traceback()
        cause = f"made no progress for {timeout} s and was killed"
        if self._options.fail_on_timeout:
            location = self._location(link)
            self.close()
            raise WorkerError(f"{self._name} {cause} {location}; it was here:\n{where}")
        self._replace(link, cause, killed=False)

    def _died(self, link: HostLink) -> None:
        ending = link.ending
        link.close()
        self._stats["worker_deaths"] += 1
        ending = ending or link.ending or Ending("has ended", was_killed=False)
        self._replace(link, ending.cause, killed=ending.was_killed)

    def _replace(self, link: HostLink, cause: str, *, killed: bool) -> None:
        """Start another process in place of `link`, or give up."""
        lane_row, trace = link.heartbeat.lane_row, link.heartbeat.traceback()
        location = self._location(link)
        link.kill()
        self._count(link)
        self._link = None
        where = f"; it was here:\n{trace.rstrip()}" if trace else ""
        self._decide(lane_row, f"{self._name} {cause} {location}", where, killed=killed)
        self._start()

    def _decide(
        self, lane_row: LaneRow | None, text: str, where: str = "", *, killed: bool
    ) -> None:
        """Wait until starting another process is useful, or give up.

        Args:
            lane_row: The sample being worked on; None if it was not a single one.
            text: What happened, for messages.
            where: The stack, if there is one.
            killed: Whether it was killed from outside.
        """
        deaths = self._deaths
        decision = deaths.died(lane_row, killed=killed)
        if decision is AfterDeath.GIVE_UP and killed:
            raise WorkerError(
                f"{text}{where}\nIt was killed {counted(deaths.in_a_row, 'time')} in "
                f"{deaths.seconds:.0f} s without a batch in between, and the patience "
                f"(restart_patience_seconds={self._options.restart_patience_seconds:g}) has run "
                "out; `dmesg` shows whether the machine ran out of memory: if so, use fewer "
                "workers or a smaller prefetch_factor"
            )
        if decision is AfterDeath.GIVE_UP:
            raise WorkerError(
                f"{text}{where}\nThis happened too often to continue; run with num_workers=0 to "
                "reproduce it in the training process"
            )
        if decision is AfterDeath.SKIP and lane_row is not None:
            self._skip(lane_row)
        pause = deaths.pause_seconds
        soon = f" in {pause:.1f} s" if pause else ""
        logger.warning("%s; starting another one%s%s", text, soon, Lines(where))
        time.sleep(pause)

    def _skip(self, lane_row: LaneRow) -> None:
        """Skip the sample in a row of a lane, from now on and in saved states."""
        lane, row = lane_row
        position = self._positions[lane]
        position.skip_rows = (*position.skip_rows, row)
        logger.error(
            "lane %d row %d killed %d workers and is skipped from now on%s%s",
            lane,
            row,
            self._options.max_deaths,
            self._describe_row(lane, row),
            self._how_to_exclude(lane, row),
        )

    def _how_to_exclude(self, lane: int, row: int) -> str:
        if not isinstance(self._pipeline, DescribesRows):
            return ""
        state = self._positions[lane].saved_state()
        entry = self._pipeline.quarantine_entry(lane, self._lanes, row, state)
        if entry is None:
            return ""
        return (
            f"; to exclude it from later epochs as well, add the line {entry} to a file and "
            "pass that file as exclude_from"
        )

    def _location(self, link: HostLink) -> str:
        """Describe where a worker was: the row, and the sample there."""
        lane_row = link.heartbeat.lane_row
        return link.heartbeat.where + ("" if lane_row is None else self._describe_row(*lane_row))

    def _describe_row(self, lane: int, row: int) -> str:
        if not isinstance(self._pipeline, DescribesRows):
            return ""
        state = self._positions[lane].saved_state()
        return f": {self._pipeline.describe_row(lane, self._lanes, row, state)}"

    def forget(self) -> None:
        """Give up the events that a fork has inherited: their memory belongs to its parent."""
        self._events.clear()


LaneRow = tuple[int, int]
"""Lane and row."""


MAX_SKIPPED = 16
"""How many rows may be skipped before the next batch arrives."""

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 10.0


class Ending(NamedTuple):
    """How a worker ended.

    Args:
        cause: In words, as the predicate of a sentence.
        was_killed: Whether it was killed from outside, so that another one may survive.
    """

    cause: str
    was_killed: bool


class AfterDeath(Enum):
    """What to do after a death."""

    RETRY = "retry"
    SKIP = "skip"
    GIVE_UP = "give up"


@dataclass
class DeathRecord:
    """The deaths of one worker and its successors.

    After `max_deaths` deaths at the same row, the row is skipped. Crashes elsewhere (while
    starting, between samples, or in a hook that gets several) end the run after the same number in
    a row. If no batch arrives in between, four times that number of crashes at ever-changing rows
    end the run as well, and so does skipping more than `MAX_SKIPPED` rows: something else is
    killing the workers then.

    A worker that is killed from outside may survive next time: such deaths end the run once no
    batch has arrived for `patience_seconds`.

    Args:
        max_deaths: How often a worker may die at the same row.
        patience_seconds: How long to keep starting workers that are killed before their first
            batch.
        clock: Returns the time in seconds.
    """

    max_deaths: int
    patience_seconds: float
    clock: Callable[[], float] = time.monotonic
    in_a_row: int = 0
    """Deaths since the last batch."""
    _at: Counter[LaneRow] = field(default_factory=Counter)
    _first: float = 0.0
    _elsewhere: int = 0
    _since_skip: int = 0
    _skipped: int = 0

    def died(self, lane_row: LaneRow | None, *, killed: bool = False) -> AfterDeath:
        """Count a death.

        Args:
            lane_row: The sample being worked on; None if it was not a single one.
            killed: Whether it was killed from outside.
        """
        self.in_a_row += 1
        if self.in_a_row == 1:
            self._first = self.clock()
        if lane_row is not None:
            self._at[lane_row] += 1
            if self._at[lane_row] >= self.max_deaths:
                self._since_skip = 0
                self._skipped += 1
                return AfterDeath.SKIP if self._skipped <= MAX_SKIPPED else AfterDeath.GIVE_UP
        if killed:
            given_up = self.seconds >= self.patience_seconds
        elif lane_row is None:
            self._elsewhere += 1
            given_up = self._elsewhere >= self.max_deaths
        else:
            self._since_skip += 1
            given_up = self._since_skip >= 4 * self.max_deaths
        return AfterDeath.GIVE_UP if given_up else AfterDeath.RETRY

    @property
    def seconds(self) -> float:
        """How long ago the first death after the last batch was."""
        return self.clock() - self._first if self.in_a_row else 0.0

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next start: no time at first, then longer each time."""
        if self.in_a_row < 2:
            return 0.0
        return float(min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(self.in_a_row - 2, 30)))

    def delivered(self) -> None:
        """Record that a batch has arrived."""
        self.in_a_row = self._elsewhere = self._since_skip = self._skipped = 0


def describe_exit_code(code: int | None) -> str:
    """Return how a process ended, in words."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (the system does this when memory runs out)"
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with code {code}"
