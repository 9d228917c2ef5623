"""How the processes of a loader end, and which of them react to signals meanwhile."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a program, unless the program handles them."""

GRACE_SECONDS = 0.5
"""How long workers may take to exit on their own, once the training process is gone."""


def leave_signals_to_parent() -> None:
    """Let only the training process react to ^C and to SIGTERM for the whole process group.

    It may need a few more batches to save a checkpoint. Handlers are used, because programs started
    from here would inherit that a signal is ignored.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Block ^C and SIGTERM during a short step, and handle them right after it.

    So a process being started, or a descriptor being opened, is not lost before its owner knows of
    it. A process is born with both signals blocked, since a terminal sends it ^C as well, until it
    calls `leave_signals_to_parent`.
    """
    caught: list[tuple[Any, ...]] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    handlers: dict[signal.Signals, Any] = {}
    try:
        # Another thread may take the signal, but Python handles it in the main thread.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    handlers[number] = handler
                    signal.signal(number, lambda *about: caught.append(about))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for about in caught:
            handlers[about[0]](*about)
