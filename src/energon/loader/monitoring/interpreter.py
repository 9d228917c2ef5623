"""Look at the frames of other threads, at the right moment and safely.

A look needs the GIL. Python code releases it after the switch interval of 5 ms, or earlier when it
calls something that releases it; a look that waited for that would find the call instead of the
code before it. So the switch interval is shortened just before a look.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SWITCH_SECONDS = 0.000097
"""The short switch interval; nobody else sets just this one."""


class Switching:
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


switching = Switching()


@contextmanager
def prompt_looks() -> Iterator[None]:
    """Let looks in the block come at the moment at which they are due, see above."""
    switching.shorten()
    try:
        yield
    finally:
        switching.restore()


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


def other_stacks() -> Iterator[str]:
    """Yield what each thread except this one is doing."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with thread_frames() as frames:
        stacks = {number: list(traceback.walk_stack(frame)) for number, frame in frames.items()}
    for number, stack in stacks.items():
        if number != threading.get_ident():
            lines = traceback.StackSummary.extract(reversed(stack)).format()
            yield f"{names.get(number, number)}:\n{''.join(lines)}"


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
    global _frames_lock
    _frames_lock = threading.Lock()
    switching.begin_in_child()
    _resume_collection()


os.register_at_fork(after_in_child=_reset_after_fork)
