"""How the processes of a loader end, and which of them react to signals meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Iterator, Sequence
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


def leave_handlers_to_parent() -> None:
    """Let only the training process react to signals for which its program has set handlers.

    Schedulers send them to all processes of a job, and each would save a checkpoint. A handler of
    the worker keeps the default action, which ends a process, from taking their place.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, lambda *_: None)
    # If the training process ignores it, processes of hooks would vanish without an exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_with(descriptor: int) -> None:
    """Let the system kill this process when the other end of a socket closes.

    Even while it holds the interpreter lock in foreign code. The socket must carry no data.
    """
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Block ^C and SIGTERM during a short step, and handle them right after it.

    So a process being started, or a descriptor being opened, is not lost before its owner knows of
    it. A process is born with both signals blocked, since a terminal sends it ^C as well, until it
    calls `leave_signals_to_parent`.
    """
    caught: list[tuple[Any, ...]] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = []
    # Another thread may take a signal, but Python handles it in the main thread.
    if threading.current_thread() is threading.main_thread():
        found = [(number, signal.getsignal(number)) for number in SIGNALS]
        handlers = [(number, handler) for number, handler in found if callable(handler)]
    try:
        # Signals are blocked last and unblocked first, while no handler raises: an exception in
        # between would leave them blocked.
        for number, _ in handlers:
            signal.signal(number, lambda *about: caught.append(about))
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _set_all(handlers)
        for about in caught:
            dict(handlers)[about[0]](*about)


def _set_all(handlers: Sequence[tuple[signal.Signals, Any]]) -> None:
    """Set handlers of signals, even if one that is set raises at once."""
    if handlers:
        try:
            signal.signal(*handlers[0])
        finally:
            _set_all(handlers[1:])
