"""A process that forks workers and nothing else.

Where workers are not to be forks of the training process, starting a new interpreter for each of
them would repeat every import. So one clean process imports once, and workers are forked from it.
It belongs to one training process and talks to it through an unnamed
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
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from energon.loader.processes.signals import GRACE_SECONDS, leave_signals_to_parent
from energon.loader.transport.slots import read_shared
from energon.loader.transport.wire import is_readable

if TYPE_CHECKING:
    from energon.loader.processes.main import InheritedPipeline

START = 0
IMPORT = -1
RUNNING = -(1 << 30)

_end_process = os._exit  # the worker replaces it for user code
_MESSAGE = struct.Struct("qq")
_MAX_DESCRIPTORS = 2
_POLL_SECONDS = 1.0


def main(descriptor: int, parent: int, modules: Sequence[str] = ()) -> None:
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
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        # Someone else has waited for it, or the system keeps no exit codes.
        return RUNNING if _exists(pid) else 0
    return os.waitstatus_to_exitcode(status) if found else RUNNING


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
        pid = os.fork()
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
