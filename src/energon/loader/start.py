"""Start worker processes in one of three ways, and know how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

from energon.errors import WorkerError
from energon.loader import fork_server
from energon.loader.end import GRACE_SECONDS
from energon.loader.options import StartMethod


class WorkerProcess(Protocol):
    """A process that was started."""

    pid: int

    def exit_code(self) -> int | None:
        """Return how it has ended (negative: by which signal), or None while it runs."""


def start_process(
    method: StartMethod, descriptors: Sequence[int], *, imports_torch: bool = False
) -> WorkerProcess:
    """Start a process that runs `worker_main.main(*descriptors)`; they stay open here.

    Args:
        method: How to start it.
        descriptors: Sockets that the process inherits.
        imports_torch: Whether all workers of the fork server, which share its memory, had
            better find torch imported already.
    """
    if method == "forkserver":
        return _ServedProcess(descriptors, imports_torch=imports_torch)
    if method == "spawn":
        return _SpawnedProcess(descriptors)
    return _ForkedProcess(descriptors)


class _ServedProcess:
    """A child of the fork server."""

    def __init__(self, descriptors: Sequence[int], *, imports_torch: bool) -> None:
        self._server = _current_server()
        if imports_torch:
            self._server.import_torch()
        self.pid = self._server.ask(fork_server.START, descriptors)
        self._code: int | None = None

    def exit_code(self) -> int | None:
        if self._code is None:
            try:
                code = self._server.ask(self.pid)
            except WorkerError:
                # The server is gone, and it does not go without its workers.
                code = -signal.SIGKILL
            self._code = None if code == fork_server.RUNNING else code
        return self._code


class _SpawnedProcess:
    """A new interpreter."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        arguments = ", ".join(map(str, descriptors))
        self._process = _python(
            f"from energon.loader.worker_main import main; raise SystemExit(main({arguments}))",
            descriptors,
        )
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()


class _ForkedProcess:
    """A fork of this process."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._code: int | None = None
        self.pid = fork_server.fork_worker(descriptors)

    def exit_code(self) -> int | None:
        if self._code is None:
            code = fork_server.exit_code(self.pid)
            self._code = None if code == fork_server.RUNNING else code
        return self._code


class _Server:
    """The fork server of this process, seen from here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        here, there = socket.socketpair()
        self._has_torch = False
        with there:
            self._process = _python(
                "from energon.loader.fork_server import main; "
                f"main({there.fileno()}, {os.getpid()})",
                [there.fileno()],
            )
        self._channel = here

    def ask(self, number: int, descriptors: Sequence[int] = ()) -> int:
        """Return the answer to a request, see `fork_server`."""
        try:
            with self._lock:
                return fork_server.request(self._channel, number, descriptors)
        except OSError as error:
            raise WorkerError(
                f"the process that starts workers has ended ({error}); see its last words on "
                "stderr, or use start_method='spawn'"
            ) from error

    def import_torch(self) -> None:
        """Import torch into the server, once."""
        if not self._has_torch:
            self.ask(fork_server.IMPORT_TORCH)
            self._has_torch = True

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def forget(self) -> None:
        """Close the channel in a forked child, where the server is not its own."""
        self._channel.close()
        self._process.returncode = 0

    def stop(self) -> None:
        """End the server and wait for it."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2 * GRACE_SECONDS)


_server: _Server | None = None
_server_lock = threading.Lock()


def stop_fork_server() -> None:
    """End the fork server of this process; the next worker starts another one."""
    global _server
    with _server_lock:
        if _server is not None:
            _server.stop()
        _server = None


def _current_server() -> _Server:
    global _server
    with _server_lock:
        if _server is not None and not _server.is_running:
            _server.stop()
            _server = None
        if _server is None:
            _server = _Server()
        return _server


def _forget_server() -> None:
    """Leave the fork server to the parent, in a process that the user has forked."""
    global _server, _server_lock
    _server_lock = threading.Lock()
    if _server is not None:
        _server.forget()
        _server = None


def _python(code: str, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start an interpreter that finds the modules that this one finds."""
    path = [entry or os.getcwd() for entry in sys.path]
    return subprocess.Popen(
        [
            sys.executable,
            *_interpreter_flags(),
            "-c",
            f"import sys; sys.path[:] = {path!r}; {code}",
        ],
        stdin=subprocess.DEVNULL,
        pass_fds=list(descriptors),
    )


def _interpreter_flags() -> list[str]:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


os.register_at_fork(after_in_child=_forget_server)
