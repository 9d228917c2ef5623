"""Start worker processes in one of three ways, and report how they ended.

Where workers are not to be forks of the training process, starting a new interpreter for each of
them would repeat every import. So one clean process imports once, and workers are forked from it:
the fork server. It belongs to one training process and talks to it through an unnamed
socket. When that socket closes, for whatever reason, the server ends its workers, including those
stuck in foreign code. Requests and answers are single numbers, each preceded by the number of its
request, so that the answer to an interrupted request is not mistaken for the next one:

    START, with the descriptors of the new worker   -> its process id, or minus an error number
    process id                                      -> its exit code, or RUNNING
    IMPORT, with names of modules in shared memory  -> 0
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Sequence
from typing import Literal, Protocol

from energon.errors import WorkerError
from energon.io.backends.reader_process import start_python
from energon.io.threads import fork_safe_lock
from energon.loader.processes.main import (
    GRACE_SECONDS,
    InheritedPipeline,
    leave_signals_to_parent,
    undisturbed,
)
from energon.loader.transport.events import is_readable
from energon.loader.transport.slots import read_shared, share_bytes

START = 0
IMPORT = -1
RUNNING = -(1 << 30)

_end_process = os._exit  # the worker replaces it for user code
_MESSAGE = struct.Struct("qq")
_MAX_DESCRIPTORS = 2
_POLL_SECONDS = 1.0


def run_fork_server(descriptor: int, parent: int, modules: Sequence[str] = ()) -> None:
    """Serve the training process `parent` at the other end of socket `descriptor`.

    Args:
        descriptor: The socket.
        parent: The process id of the training process.
        modules: What workers will import in any case, imported here once for all of them.
    """
    _import("energon.loader.processes.main", "numpy.random", *modules)
    leave_signals_to_parent()
    # If the training process ignores it, ended workers would vanish without an exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    workers: set[int] = set()
    try:
        # If the parent leaves an answer unread, the connection is reset.
        with contextlib.suppress(ConnectionError), socket.socket(fileno=descriptor) as channel:
            _serve(channel, parent, workers)
    finally:
        _end(workers)


def _serve(channel: socket.socket, parent: int, workers: set[int]) -> None:
    """Answer requests until the parent leaves; keep the process ids of `workers`."""
    while _wait_for_request(channel, parent):
        data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE.size, _MAX_DESCRIPTORS)
        if len(data) < _MESSAGE.size:
            return
        number, request = _MESSAGE.unpack(data)
        if request == START:
            answer = _start(descriptors, channel, workers)
        elif request == IMPORT:
            answer = _import(*read_shared(descriptors[0]).decode().splitlines())
        else:
            answer = exit_code(request)
            if answer != RUNNING:
                workers.discard(request)
        channel.sendall(_MESSAGE.pack(number, answer))


def _start(descriptors: Sequence[int], channel: socket.socket, workers: set[int]) -> int:
    """Fork a worker; return its process id, or the negative error number."""
    try:
        pid = fork_worker(descriptors, unused=[channel])
    except OSError as error:
        return -(error.errno or 1)
    finally:
        for each in descriptors:
            os.close(each)
    workers.add(pid)
    return pid


def _import(*names: str) -> int:
    for name in names:
        # A worker that needs it reports why it cannot be imported.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Collecting garbage in a worker would touch, and so copy, all memory shared with this one.
    gc.collect()
    gc.freeze()
    return 0


def send_request(
    channel: socket.socket, number: int, request: int, descriptors: Sequence[int] = ()
) -> None:
    """Send a request to the server.

    Args:
        channel: Socket to the server.
        number: Number of the request.
        request: The request.
        descriptors: Descriptors to send with it.

    Raises:
        OSError: If the server is gone.
    """
    socket.send_fds(channel, [_MESSAGE.pack(number, request)], list(descriptors))


def receive_answer(channel: socket.socket) -> tuple[int, int]:
    """Wait for the next answer; return the number of its request, and the answer.

    Raises:
        OSError: If the server is gone.
    """
    data = channel.recv(_MESSAGE.size)
    if len(data) < _MESSAGE.size:
        raise ConnectionResetError("it has closed the connection")
    number, answer = _MESSAGE.unpack(data)
    return number, answer


def exit_code(pid: int) -> int:
    """Return how child `pid` ended (negative: by which signal), or RUNNING; tell it only once."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        # Someone else has waited for it, or the system keeps no exit codes.
        return RUNNING if _exists(pid) else 0
    return os.waitstatus_to_exitcode(status) if ended else RUNNING


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_for_request(channel: socket.socket, parent: int) -> bool:
    """Wait for a request; return False when the parent is gone.

    A process forked by the parent may hold the other end of the channel and outlive it, so the
    parent itself is watched, too.
    """
    while not is_readable(channel, _POLL_SECONDS):
        if os.getppid() != parent:
            return False
    return True


def fork_worker(
    descriptors: Sequence[int],
    *,
    unused: Sequence[socket.socket] = (),
    inherited: InheritedPipeline | None = None,
) -> int:
    """Fork a process that runs `processes.main.main(*descriptors)` and return its process id.

    The child closes the sockets in `unused`. Buffered standard output is written first; otherwise
    the child would write it again.

    Args:
        descriptors: Sockets that the process works with.
        unused: Sockets that belong to this process alone.
        inherited: The pipeline, if the process is to work with that of this process.

    Raises:
        OSError: If the system refuses another process.
    """
    from energon.loader.processes.main import main as work

    _flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Newer versions of Python warn of other threads; the worker uses nothing of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        collects = gc.isenabled()
        gc.disable()
        try:
            pid = os.fork()
            if not pid:
                # Inherited garbage may hang where it is freed, as that of libraries whose threads
                # are not there. Looking for it would also copy the memory that both share.
                gc.freeze()
        finally:
            if collects:
                gc.enable()
    if pid:
        return pid
    code = 1
    try:
        for each in unused:
            each.close()
        code = work(*descriptors, parent=parent, inherited=inherited)
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        _end_process(code)


def _flush() -> None:
    """Write what is buffered, if anyone can still read it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _end(workers: set[int]) -> None:
    """Give the workers a moment to exit, then kill them."""
    deadline = time.monotonic() + GRACE_SECONDS
    while workers and time.monotonic() < deadline:
        workers = {pid for pid in workers if exit_code(pid) == RUNNING}
        time.sleep(0.01)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)


STOP_SECONDS = 30.0
"""How long a fork server may take to end; half a second on an idle machine."""


_NOT_FOR_WORKERS = ("energon.cli", "energon.inspect", "energon.prepare")
"""Packages of commands, which a program may use as well."""


class WorkerProcess(Protocol):
    """A process that was started."""

    pid: int

    def exit_code(self) -> int | None:
        """Return how it ended (negative: by which signal), or None while it runs."""


def start_process(
    method: Literal["forkserver", "spawn"],
    descriptors: Sequence[int],
    *,
    modules: Sequence[str] = (),
) -> WorkerProcess:
    """Start a process that runs `processes.main.main(*descriptors)`; they stay open here.

    Args:
        method: How to start it.
        descriptors: Sockets that the process inherits.
        modules: What the fork server should import first, so that all its workers share it.
    """
    if method == "forkserver":
        return _ServedProcess(descriptors, modules)
    return _SpawnedProcess(descriptors)


class ForkServerError(WorkerError):
    """The fork server ended before it could start a worker; `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def _refused(code: int) -> WorkerError:
    return WorkerError(
        f"the system cannot start another process ({os.strerror(code)}); use fewer workers, or "
        "raise the limits of processes and memory (`ulimit -u`, cgroups)"
    )


class _ServedProcess:
    """A child of the fork server."""

    def __init__(self, descriptors: Sequence[int], modules: Sequence[str]) -> None:
        self._server = _current_server()
        self._server.import_modules(modules)
        self._code: int | None = None
        self.pid = self._server.start(self, descriptors)

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended."""
        return self._code is not None

    def exit_code(self) -> int | None:
        if self._code is None:
            try:
                code = self._server.ask(self.pid)
            except ForkServerError:
                # The server is gone, and it never goes before its workers.
                code = -signal.SIGKILL
            self._code = None if code == RUNNING else code
        return self._code


class _SpawnedProcess:
    """A new interpreter."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        arguments = ", ".join(map(str, descriptors))
        with undisturbed():
            self._process = start_python(
                "from energon.loader.processes.main import main; "
                f"raise SystemExit(main({arguments}))",
                descriptors,
            )
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()


class ForkedProcess:
    """A fork of this process, which works with its pipeline.

    Args:
        descriptors: Sockets that the process works with, and one that closes when this one ends.
        inherited: The pipeline.

    Raises:
        WorkerError: If the system refuses another process.
    """

    def __init__(self, descriptors: Sequence[int], inherited: InheritedPipeline) -> None:
        self._code: int | None = None
        try:
            with undisturbed():
                self.pid = fork_worker(descriptors, inherited=inherited)
        except OSError as error:
            raise _refused(error.errno or 0) from None

    def exit_code(self) -> int | None:
        if self._code is None:
            code = exit_code(self.pid)
            self._code = None if code == RUNNING else code
        return self._code


class _Server:
    """The fork server of this process, as seen from here.

    If a request is interrupted, the state of the server is unknown, so it starts no more workers;
    those it has already started continue.
    """

    def __init__(self) -> None:
        # A loader may be garbage-collected, and so closed, by the thread that is within a request.
        self._lock = threading.RLock()
        self._number = 0
        self._answers: dict[int, int] = {}
        self._workers: weakref.WeakSet[_ServedProcess] = weakref.WeakSet()
        self._imported: set[str] = set()
        self._has_started = False
        self._is_sound = True
        self._channel, there = socket.socketpair()
        with there:
            self._process = start_python(
                "from energon.loader.processes.start import run_fork_server; "
                f"run_fork_server({there.fileno()}, {os.getpid()}, {_own_modules()})",
                [there.fileno()],
            )

    def ask(self, request: int, descriptors: Sequence[int] = ()) -> int:
        """Return the answer to a request, see `run_fork_server`.

        Raises:
            ForkServerError: If the server has ended.
        """
        with self._lock:
            self._number = number = self._number + 1
            try:
                send_request(self._channel, number, request, descriptors)
                while number not in self._answers:
                    answered, answer = receive_answer(self._channel)
                    self._answers[answered] = answer
                return self._answers.pop(number)
            except OSError as error:
                self._is_sound = False
                raise ForkServerError(
                    f"the process that starts workers has ended ({error}); see its last output "
                    "on stderr, or use start_method='spawn'",
                    self._exit_code(),
                ) from error
            except BaseException:
                self._is_sound = False
                raise

    def import_modules(self, names: Sequence[str]) -> None:
        """Import modules in the server, each once."""
        if missing := [name for name in names if name not in self._imported]:
            self._imported.update(missing)
            data = share_bytes("\n".join(missing).encode())
            try:
                self.ask(IMPORT, [data])
            finally:
                os.close(data)

    def start(self, worker: _ServedProcess, descriptors: Sequence[int]) -> int:
        """Start a worker with these descriptors; return its process id."""
        self._has_started = True
        pid = self.ask(START, descriptors)
        with self._lock:
            self._workers.add(worker)
        if pid < 0:
            raise _refused(-pid)
        return pid

    @property
    def is_usable(self) -> bool:
        """Whether it can start workers."""
        return self._is_sound and self._process.poll() is None

    @property
    def is_needed(self) -> bool:
        """Whether workers may be running that end when it ends."""
        with self._lock:
            return not all(worker.has_ended for worker in self._workers)

    def forget(self) -> None:
        """Close the channel in a forked child, which does not own the server."""
        self._channel.close()
        self._process.returncode = 0

    def stop(self) -> None:
        """End the server and wait for it."""
        self._is_sound = False
        self._channel.close()
        if self._has_started:
            # It kills workers that are stuck, so it is not killed itself while it can still do
            # that.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=STOP_SECONDS)
        self._process.kill()
        self._process.wait()

    def _exit_code(self) -> int:
        """Return how the server ended after closing the channel (negative: by which signal)."""
        try:
            return self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


_servers: list[_Server] = []
"""The last one starts workers; the others still have workers that they started earlier."""
_servers_lock = fork_safe_lock()


def stop_fork_server() -> None:
    """End the fork server of this process; the next worker starts a new one."""
    with _servers_lock:
        while _servers:
            _servers[-1].stop()
            _servers.pop()


def _current_server() -> _Server:
    with _servers_lock:
        for server in [each for each in _servers if not (each.is_usable or each.is_needed)]:
            server.stop()
            _servers.remove(server)
        if not (_servers and _servers[-1].is_usable):
            with undisturbed():
                _servers.append(_Server())
        return _servers[-1]


def _forget_servers() -> None:
    """Leave the fork servers to the parent, in a process forked by user code."""
    while _servers:
        _servers.pop().forget()


def _own_modules() -> list[str]:
    """Return the modules of energon that this process has imported and workers need.

    Importing them has no side effects. Modules of the user may have some: they may start
    threads, which do not survive a fork.
    """
    return sorted(
        name
        for name in sys.modules
        if name.startswith("energon.") and not name.startswith(_NOT_FOR_WORKERS)
    )


os.register_at_fork(after_in_child=_forget_servers)
