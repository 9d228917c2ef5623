"""Find out what hosts of lanes do, by looking at their threads now and then.

Nothing is done where samples are made: a thread looks a few times a second which function a host is
in, and puts the time since its last look to the account of that stage. So a sample costs nothing,
and what hooks read and decode is known, which datasets these are for, and which calls take long.
How long hooks take in total is measured, see `BatchClock`; looks say how it is divided.

The time of each look is set in advance, independently of what hosts do, and the switch interval of
the GIL is shortened just before, see `interpreter.py`.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Protocol
from weakref import WeakSet

from energon.loader.monitoring.accounts import (
    AUX,
    DECODE,
    ELSEWHERE,
    GIL,
    IDLE,
    OTHER,
    READ,
    TRANSFER,
    Spent,
    account,
)
from energon.loader.monitoring.interpreter import switching, thread_frames
from energon.stages.hooks.clock import leaf_of
from energon.stages.lane import CurrentItem

PERIOD_SECONDS = 0.05
"""How often a new host is looked at: often enough for a verdict after some seconds."""
EAGER_SECONDS = 15.0
"""For so long; after that, all hosts are looked at more rarely."""
CALM = 6
"""How much more rarely: often enough for the shares of a minute."""
ARM_SECONDS = 0.006
"""How long before a look the switch interval is shortened: the usual one, and some more."""
UNUSED_SECONDS = 10.0
"""A thread that looks for nobody any more ends after so long."""
GIL_SECONDS = 0.00025
"""A look that is later than this, and has not waited for a CPU, has waited for the GIL. Without
others it is late by 0.06 to 0.17 ms, with two threads that compute by milliseconds."""

_ROOT = str(Path(__file__).parents[2]) + os.sep
_OURS, _USER, _STAGE, _HOST, _LEAF, _BLOCK = "ours", "user", "stage", "host", "leaf", "block"
_ROOMS = {
    "decode/": DECODE,
    "io/": AUX,
    "sources/": AUX,
    "cache/": AUX,
    "stages/reading/read.py": READ,
    "stages/reading/": _OURS,
    "stages/": _STAGE,
}
"""What code of ours is part of, by the beginning of its path."""
_FUNCTIONS = {
    ("sources/reader.py", "_read_leaf"): _LEAF,
    ("sources/reader.py", "_read_leaf_lazily"): _LEAF,
    ("sources/read_ahead.py", "_settle"): _LEAF,
    ("stages/reading/read.py", "_read"): _BLOCK,
    ("loader/hosting.py", "__next__"): _HOST,
    ("loader/processes/main.py", "_serve"): TRANSFER,
    ("loader/processes/main.py", "_wait"): IDLE,
    ("loader/workers.py", "put"): IDLE,
}
"""What single functions mean: a batch is made, passed on, or there is no room for it."""


class Profiled(Protocol):
    """A host of lanes."""

    thread: int
    """Identifier of the thread that makes its batches."""
    spent: Counter[str]
    """Microseconds by account, which only the profiler adds to. The host replaces it when it takes
    what is in it; what is added meanwhile is lost, which is less than a look in a thousand."""

    @property
    def current(self) -> CurrentItem | None:
        """What it works on; None if that is not known."""

    def earn(self, seconds: float) -> None:
        """Let it measure its hooks for some more time, see `BatchClock`."""


class Profiler:
    """Looks at the hosts of this process.

    Args:
        period_seconds: How often on average, while a host is new.
    """

    def __init__(self, period_seconds: float = PERIOD_SECONDS) -> None:
        self.period_seconds = period_seconds
        self._hosts: WeakSet[Profiled] = WeakSet()
        self._kinds: dict[CodeType, str] = {}
        # Batches may take as long as a period each; looks are not to find them at the same point.
        self._random = random.Random()
        self._looked_at = self._due = self._eager_until = 0.0
        self._queued = 0.0
        self._own = _OwnThread()
        self._is_armed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_driven = False

    def add(self, host: Profiled) -> None:
        """Look at a host from now on, for as long as there is one."""
        with self._lock:
            self._hosts.add(host)
            self._eager_until = time.perf_counter() + EAGER_SECONDS
            if self._is_driven or (self._thread is not None and self._thread.is_alive()):
                return
            self._begin()
            self._thread = threading.Thread(target=self._run, name="energon profiler", daemon=True)
            self._thread.start()

    def drive(self) -> None:
        """Take over: the caller looks, with `look_if_due`, so that no thread is needed."""
        self._is_driven = True
        self._begin()

    def look_if_due(self) -> float:
        """Look, or prepare to, if that is due; return the seconds until the next call."""
        now = time.perf_counter()
        if now >= self._due:
            self._disarm()
            late, self._due = now - self._due, max(now, self._due) + self._draw_period()
            self.look(late)
        elif now >= self._due - ARM_SECONDS and not self._is_armed:
            self._is_armed = True
            switching.shorten()
            if self._measures_gil:
                self._queued = self._own.queued_seconds()
        before = 0.0 if self._is_armed else ARM_SECONDS
        return max(0.0, self._due - before - time.perf_counter())

    @property
    def _measures_gil(self) -> bool:
        """Whether several hosts share the GIL; those who drive wait less exactly than a thread."""
        return len(self._hosts) > 1 and not self._is_driven

    def look(self, late: float = 0.0) -> None:
        """Record what each host does, and that it has done so since the last look.

        Args:
            late: Seconds since it was due.
        """
        now, found = time.perf_counter(), []
        microseconds = int((now - self._looked_at) * 1e6)
        self._looked_at = now
        with thread_frames() as frames, self._lock:
            for host in list(self._hosts):
                frame = frames.get(host.thread)
                if frame is not None:
                    found.append((host, self._spent_in(frame, host.current) or Spent(ELSEWHERE)))
        # A file tells whether it waited for the GIL; reading it releases the GIL, hence afterwards.
        waited_for_gil = False
        if self._measures_gil:
            before, self._queued = self._queued, self._own.queued_seconds()
            waited_for_gil = late - (self._queued - before) > GIL_SECONDS
        for host, spent in found:
            host.spent[account(spent)] += microseconds
            host.earn(microseconds / 1e6)
            if waited_for_gil and spent.stage != ELSEWHERE:
                host.spent[account(Spent(GIL))] += microseconds

    def spent_by(self, host: Profiled) -> Spent | None:
        """Return what a host is doing now; None if it is nothing for its batches."""
        with thread_frames() as frames:
            frame = frames.get(host.thread)
            return None if frame is None else self._spent_in(frame, host.current)

    def _begin(self) -> None:
        self._looked_at = time.perf_counter()
        self._due = self._looked_at + self._draw_period()

    def _run(self) -> None:
        needed_at = time.monotonic()
        while True:
            time.sleep(self.look_if_due())
            with self._lock:
                now = time.monotonic()
                if len(self._hosts):
                    needed_at = now
                elif now - needed_at > UNUSED_SECONDS:
                    self._disarm()
                    self._own.close()
                    self._thread = None
                    return

    def _disarm(self) -> None:
        if self._is_armed:
            self._is_armed = False
            switching.restore()

    def _draw_period(self) -> float:
        calm = 1 if time.perf_counter() < self._eager_until else CALM
        return self.period_seconds * calm * self._random.uniform(0.5, 1.5)

    def _spent_in(self, frame: FrameType | None, current: CurrentItem | None) -> Spent | None:
        """Return what a thread is doing; None for what has nothing to do with a host."""
        work, leaf, calls = "", -1, False
        while frame is not None:
            kind = self._kinds.get(frame.f_code) or self._kind_of(frame.f_code)
            if kind == _LEAF:
                leaf = frame.f_locals.get("leaf", -1)
            elif kind == _BLOCK:
                return Spent(READ, leaf, within=READ)
            elif kind == READ:
                return Spent(READ, leaf)
            elif kind == _STAGE:
                return _in_hook(work, current) if calls else Spent(OTHER)
            elif kind == _HOST:
                return Spent(OTHER)
            elif kind in (IDLE, TRANSFER):
                return Spent(kind)
            elif kind in (DECODE, AUX) and not work:
                work = kind
            calls = True
            frame = frame.f_back
        return None

    def _kind_of(self, code: CodeType) -> str:
        path, kind = code.co_filename, _USER
        if path.startswith(_ROOT):
            inside = path.removeprefix(_ROOT).replace(os.sep, "/")
            found = [room for start, room in _ROOMS.items() if inside.startswith(start)]
            kind = _FUNCTIONS.get((inside, code.co_name)) or (found or [_OURS])[0]
        self._kinds[code] = kind
        return kind


def _in_hook(work: str, current: CurrentItem | None) -> Spent:
    """Return what a hook does: what it reads or decodes is put to the account of that."""
    try:
        name, address = ("", None) if current is None else current.call
    except IndexError:  # the thread that is looked at has gone on to other samples meanwhile
        name, address = "", None
    return Spent(work or name or OTHER, leaf_of(address), within=name)


class _OwnThread:
    """What the system knows about the thread that calls.

    The file is kept open, so that the GIL is released for a single short call only.
    """

    def __init__(self) -> None:
        self._thread = 0
        self._file = -1

    def queued_seconds(self) -> float:
        """Return for how long the thread has waited for a CPU; 0 if that is unknown."""
        thread = threading.get_native_id()
        try:
            if thread != self._thread:
                self.close()
                self._file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
                self._thread = thread
            about = os.pread(self._file, 512, 0).split()
        except OSError:
            return 0.0
        return int(about[1]) / 1e9 if len(about) > 1 else 0.0

    def close(self) -> None:
        """Close the file."""
        if self._thread:
            os.close(self._file)
            self._thread = 0


_profiler = Profiler()


def profiler() -> Profiler:
    """Return the profiler of this process."""
    return _profiler


def _reset_after_fork() -> None:
    global _profiler
    _profiler._own.close()
    _profiler = Profiler()


os.register_at_fork(after_in_child=_reset_after_fork)
