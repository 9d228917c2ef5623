"""Notice that something takes too long in a thread that is at work on it."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from energon.errors import WorkerTimeoutError
from energon.loader.log import log


class _HangError(BaseException):
    """Raised in a thread that is to stop what it does."""


class Watchdog:
    """Watches the thread that works inside of `watching`, and calls a function if it hangs.

    Args:
        what: What takes too long, for the log.
        on_timeout: Called from another thread, after the stacks of all threads were logged. If it
            raises, the watched thread gets a `WorkerTimeoutError` that says so, as soon as it runs
            Python code again. None only logs.
    """

    def __init__(self, what: str, on_timeout: Callable[[], None] | None = None) -> None:
        self.what = what
        self.on_timeout = on_timeout
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._watched = 0
        self._seconds = 0.0
        self._raised: Exception | None = None
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"what": self.what, "on_timeout": self.on_timeout}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @contextmanager
    def watching(self, seconds: float | None) -> Iterator[None]:
        """Watch what runs inside, which may take so many seconds; None is for ever.

        Raises:
            WorkerTimeoutError: If it hung, and `on_timeout` raised.
        """
        if seconds is None:
            yield
            return
        self._start(seconds)
        try:
            yield
        except BaseException as error:
            if self._raised is None:
                raise
            raise WorkerTimeoutError(str(self._raised)) from error
        finally:
            with self._changed:
                self._deadline = None

    def _start(self, seconds: float) -> None:
        with self._changed:
            self._watched, self._seconds = threading.get_ident(), seconds
            self._raised = None
            self._deadline = time.monotonic() + seconds
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._wait, name="energon watchdog", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def _wait(self) -> None:
        while True:
            with self._changed:
                if self._deadline is None:
                    # A loader that nobody uses any more keeps no thread.
                    if not self._changed.wait(10):
                        self._thread = None
                        return
                    continue
                left = self._deadline - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                self._deadline = None
                self._trigger()

    def _trigger(self) -> None:
        log.warning(
            "Watchdog triggered: %s takes longer than %g s; what the threads do:\n%s",
            self.what,
            self._seconds,
            "\n".join(_stacks()),
        )
        try:
            if self.on_timeout is not None:
                self.on_timeout()
        except Exception as error:
            self._raised = error
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._watched), ctypes.py_object(_HangError)
            )


def _stacks() -> Iterator[str]:
    """Yield what each thread but this one does."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():
            yield f"{names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
