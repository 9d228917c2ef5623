"""Find out what hosts of lanes spend their time on, by looking at their threads now and then.

Nothing is measured where samples are made: a thread looks many times a second which function a
host is in, and puts the time since its last look to the account of that stage. So a sample costs
nothing, and what a stage takes is known to a few percent after a minute.

A look needs the GIL. Python code releases it after the switch interval of 5 ms, or earlier when it
calls something that releases it; a look that waited for that would find the call instead of the
code before it. So the time of each look is set in advance, independently of what hosts do, and the
switch interval is shortened just before. A machine that has no CPU for the look delays it, too.

Shares travel with the statistics of lanes, as microseconds under names made by `account`.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple, Protocol
from weakref import WeakSet

from energon.samples.crude import flat
from energon.stages.lane import CurrentItem

PERIOD_SECONDS = 0.05
ARM_SECONDS = 0.006
"""How long before a look the switch interval is shortened: the usual one, and some more."""
SWITCH_SECONDS = 0.000097
"""The short switch interval; nobody else sets just this one."""
LOOK_SECONDS = 10.0
"""A thread that looks for nobody any more ends after so long."""

READ, DECODE, AUX, TRANSFER, IDLE, OTHER = "read", "decode", "aux", "transfer", "idle", "other"
"""What is not a hook. `aux` is what hooks read, `other` the work of the loader between all that."""
REBUILD = "rebuild"
"""What the trainer does with a batch that a process has sent; not looked at, but measured."""
GIL = "gil"
"""The time before looks that had to wait for the GIL, so that some thread ran Python code."""
GIL_SECONDS = 0.00025
"""A look that is later than this, and has not waited for a CPU, has waited for the GIL. Without
others it is late by 0.06 to 0.17 ms, with two threads that compute by milliseconds."""

_PREFIX = "time "
_ROOT = str(Path(__file__).parents[2]) + os.sep
_OURS, _USER, _STAGE, _HOST, _LEAF = "ours", "user", "stage", "host", "leaf"
_ROOMS = {
    "decode/": DECODE,
    "io/": AUX,
    "sources/": AUX,
    "cache/": AUX,
    "stages/blocks.py": READ,
    "stages/read.py": READ,
    "stages/": _STAGE,
}
"""What code of ours is part of, by the beginning of its path."""
_FUNCTIONS = {
    ("sources/reader.py", "_read_leaf"): _LEAF,
    ("loader/hosting.py", "__next__"): _HOST,
    ("loader/processes/main.py", "_serve"): TRANSFER,
    ("loader/processes/main.py", "_wait"): IDLE,
    ("loader/local_workers.py", "put"): IDLE,
}
"""What single functions mean: a batch is made, passed on, or there is no room for it."""


class Spent(NamedTuple):
    """What time is spent on.

    Args:
        stage: One of the names above, or the name of a hook.
        leaf: Number of the dataset; -1 if there are several, or none.
    """

    stage: str
    leaf: int = -1


def account(spent: Spent) -> str:
    """Return the name under which statistics of a lane have the microseconds for it."""
    return f"{_PREFIX}{spent.stage} {spent.leaf}"


def split_accounts(counts: Mapping[str, int]) -> tuple[dict[Spent, float], dict[str, int]]:
    """Return the seconds that are in statistics, and what else there is.

    Example:
        >>> split_accounts({"batches": 3, account(Spent("read", 1)): 250_000})
        ({Spent(stage='read', leaf=1): 0.25}, {'batches': 3})
    """
    seconds: dict[Spent, float] = {}
    others: dict[str, int] = {}
    for name, count in counts.items():
        if name.startswith(_PREFIX):
            stage, _, leaf = name.removeprefix(_PREFIX).rpartition(" ")
            seconds[Spent(stage, int(leaf))] = count / 1e6
        else:
            others[name] = count
    return seconds, others


class CpuTimes(NamedTuple):
    """How long a thread has run, and how long it was ready to run without a CPU, in seconds."""

    used: float
    waited: float


def cpu_times(thread: int) -> CpuTimes | None:
    """Return the CPU times of a thread by its number; None if the system does not report them."""
    try:
        with open(f"/proc/{thread}/schedstat") as file:
            used, waited, *_ = file.read().split()
        return CpuTimes(int(used) / 1e9, int(waited) / 1e9)
    except (OSError, ValueError):
        return None


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


class Profiler:
    """Looks at the hosts of this process.

    Args:
        period_seconds: How often on average.
    """

    def __init__(self, period_seconds: float = PERIOD_SECONDS) -> None:
        self.period_seconds = period_seconds
        self._hosts: WeakSet[Profiled] = WeakSet()
        self._kinds: dict[CodeType, str] = {}
        # Batches may take as long as a period each; looks are not to find them at the same point.
        self._random = random.Random()
        self._looked_at = self._due = 0.0
        self._queued = 0.0
        self._is_armed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_driven = False

    def add(self, host: Profiled) -> None:
        """Look at a host from now on, for as long as there is one."""
        with self._lock:
            self._hosts.add(host)
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
            looked = self.look()
            # A single host shares its GIL with nobody, and those who drive wait less exactly.
            if len(looked[1]) > 1 and not self._is_driven:
                self._note_gil(late, *looked)
        elif now >= self._due - ARM_SECONDS and not self._is_armed:
            self._is_armed = True
            _switching.shorten()
        before = 0.0 if self._is_armed else ARM_SECONDS
        return max(0.0, self._due - before - time.perf_counter())

    def look(self) -> tuple[int, list[Profiled]]:
        """Record what each host does, and that it has done so since the last look.

        Returns:
            The microseconds since then, and the hosts that were at work or idle.
        """
        now, found = time.perf_counter(), []
        microseconds = int((now - self._looked_at) * 1e6)
        self._looked_at = now
        with thread_frames() as frames, self._lock:
            for host in list(self._hosts):
                frame = frames.get(host.thread)
                spent = None if frame is None else self._spent_in(frame, host.current)
                if spent is not None:
                    host.spent[account(spent)] += microseconds
                    found.append(host)
        return microseconds, found

    def _note_gil(self, late: float, microseconds: int, hosts: Sequence[Profiled]) -> None:
        """Record that a look was late because of the GIL.

        To find out, files are read, which releases the GIL. So this comes after the look.
        """
        times, before = cpu_times(threading.get_native_id()), self._queued
        self._queued = 0.0 if times is None else times.waited
        if late - (self._queued - before) > GIL_SECONDS:
            for host in hosts:
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
                elif now - needed_at > LOOK_SECONDS:
                    self._disarm()
                    self._thread = None
                    return

    def _disarm(self) -> None:
        if self._is_armed:
            self._is_armed = False
            _switching.restore()

    def _draw_period(self) -> float:
        return self.period_seconds * self._random.uniform(0.5, 1.5)

    def _spent_in(self, frame: FrameType | None, current: CurrentItem | None) -> Spent | None:
        """Return what a thread is doing; None for what has nothing to do with a host."""
        work, leaf, calls = "", -1, False
        while frame is not None:
            kind = self._kinds.get(frame.f_code) or self._kind_of(frame.f_code)
            if kind == _LEAF:
                leaf = frame.f_locals.get("leaf", -1)
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
    name, address = ("", ()) if current is None else current.call
    numbers = flat(address)
    leaf = numbers[0] if numbers and isinstance(numbers[0], int) else -1
    return Spent(work or name or OTHER, leaf)


class _Switching:
    """The switch interval of this process, short for as long as anyone is about to look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._usual = 0.0

    def shorten(self) -> None:
        """Shorten the interval until `restore` has been called as many times."""
        with self._lock:
            self._users += 1
            if self._users == 1 and sys.getswitchinterval() > SWITCH_SECONDS:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_SECONDS)

    def restore(self) -> None:
        """Return to the program's interval, unless it has set another one in the meantime."""
        with self._lock:
            self._users -= 1
            if not self._users and abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-9:
                sys.setswitchinterval(self._usual)

    def begin_in_child(self) -> None:
        """Restore the interval in a fork, which has none of the threads that were about to look."""
        self._lock = threading.Lock()
        self._users = 1
        self.restore()


_switching = _Switching()


@contextmanager
def prompt_looks() -> Iterator[None]:
    """Let looks in the block come at the moment at which they are due, see above."""
    _switching.shorten()
    try:
        yield
    finally:
        _switching.restore()


_profiler = Profiler()


def profiler() -> Profiler:
    """Return the profiler of this process."""
    return _profiler


COLLECTS_WITHIN_CALLS = sys.version_info < (3, 12)
"""Whether this Python may collect garbage wherever it allocates memory."""

NEVER_REACHED = 2**31 - 59
"""The threshold that stands for "no collections during a look"; nobody else sets just this one."""

_frames_lock = threading.Lock()
_threshold = gc.get_threshold()
"""What the program has set, while it is replaced."""


@contextmanager
def thread_frames() -> Iterator[dict[int, FrameType]]:
    """Yield the frame of each thread; only inside the block may the callers be looked up.

    CPython 3.11 makes frame objects when they are asked for, and could collect garbage in the
    middle of that: finalizers then let other threads run, while the lock that new threads need is
    held, or a frame is checked that ends. So garbage is not collected meanwhile. From 3.12 on it
    is only collected between two instructions, and nothing is paused.
    """
    if not COLLECTS_WITHIN_CALLS:
        yield sys._current_frames()
        return
    with _frames_lock:
        _pause_collection()
        try:
            yield sys._current_frames()
        finally:
            _resume_collection()


def _pause_collection() -> None:
    """Let the collector wait for more objects than there can be.

    It is not disabled: whether the program has done so meanwhile could not be told afterwards. A
    threshold that it sets meanwhile is another one than this, and stays.
    """
    global _threshold
    found = gc.get_threshold()
    if found[0] != NEVER_REACHED:  # else the program has read ours during a look, and set it since
        _threshold = found
    gc.set_threshold(NEVER_REACHED, *_threshold[1:])


def _resume_collection() -> None:
    if gc.get_threshold()[0] == NEVER_REACHED:
        gc.set_threshold(*_threshold)


def _reset_after_fork() -> None:
    global _profiler, _frames_lock
    _profiler = Profiler()
    _frames_lock = threading.Lock()
    _switching.begin_in_child()
    _resume_collection()


os.register_at_fork(after_in_child=_reset_after_fork)
