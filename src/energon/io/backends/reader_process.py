"""Requests made by a process of their own, for processes that fork or are forks.

The library that reads from stores has threads, which a fork lacks: in a fork of a process that has
read, a request would wait forever. So a process that may fork workers does not use the library. Its
few requests, for documents, indexes and files by name, are made by its *reader process*, and so are
those of a fork of a process that did use the library. Processes that read samples, such as workers,
use the library themselves, see `read_here`.

The reader process belongs to one process and ends with it. Each connection carries one request at a
time: its arguments, pickled, and then what the backend returns, piece by piece, up to None or an
exception.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from energon.errors import StorageError
from energon.io.backends.base import Backend, ObjectInfo, seconds_left, time_limit
from energon.io.threads import fork_safe_lock, read_here, reads_here

_LISTED = 1000
"""Objects in one piece of a listing."""
_POLL_SECONDS = 1.0


class Request(NamedTuple):
    """A request, as it is sent.

    Args:
        store: Number of the store in the process that sends it, and of its credentials.
        root: Its address.
        environment: The variables with which it is opened.
        method: Name of the backend's method.
        arguments: Its arguments.
        seconds: How long it may take.
    """

    store: tuple[int, int]
    root: str
    environment: dict[str, str]
    method: str
    arguments: tuple[Any, ...]
    seconds: float


_numbers = count()


class ForkSafeBackend:
    """Makes requests in this process where it may use the library, else in its reader process.

    Args:
        root: The address of the root.
        own: The backend for this process.
    """

    def __init__(self, root: str, own: Backend) -> None:
        self._root = root
        self._own = own
        self._number = next(_numbers)
        self._renewed = 0
        self._environment = dict(os.environ)
        self.origin = own.origin
        self.can_range = own.can_range
        self.can_list = own.can_list
        self.may_hang = getattr(own, "may_hang", False)

    def get(self, key: str, start: int, stop: int, version: str | None) -> bytes:
        return b"".join(self._ask("get", key, start, stop, version))

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        return self._ask("stream", key, start, version)

    def head(self, key: str) -> ObjectInfo:
        (info,) = self._ask("head", key)
        return info  # type: ignore[no-any-return]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if reads_here():
            # Without pages, whose thousand objects a look for the first one would wait for.
            yield from self._own.list(prefix)
            return
        for page in self._ask("list", prefix):
            yield from page

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        list(self._ask("put", key, content))

    def delete(self, key: str) -> None:
        list(self._ask("delete", key))

    def renew(self) -> None:
        """Connect again, with the credentials that are valid now."""
        self._renewed, self._environment = self._renewed + 1, dict(os.environ)
        renew = getattr(self._own, "renew", None)
        if renew is not None:
            renew()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"{self.origin}: a store holds connections; pickle its address instead")

    def _ask(self, method: str, *arguments: Any) -> Iterator[Any]:
        """Yield the answer of the backend, piece by piece."""
        if reads_here():
            yield from _answer(self._own, method, *arguments)
            return
        # The time limit counts that holds when the first piece is taken, as in this process.
        store, seconds = (self._number, self._renewed), seconds_left(float("inf"))
        request = Request(store, self._root, self._environment, method, arguments, seconds)
        yield from _pieces(request, self.origin)


def _pieces(request: Request, origin: str) -> Iterator[Any]:
    """Yield the answer of the reader process, piece by piece.

    Raises:
        EnergonError: If the backend has raised one, or the reader process has died.
    """
    reader = _current_reader()
    connection = reader.connect()
    is_complete = False
    try:
        connection.send(request)
        while (piece := connection.recv()) is not None and not isinstance(piece, BaseException):
            yield piece
        is_complete = True
    except (EOFError, OSError) as error:
        reader.close()
        raise StorageError(
            f"{origin}: the process that reads from stores has died ({type(error).__name__})",
            transient=True,
        ) from None
    finally:
        # An answer that is not read to its end stays on its connection.
        reader.give_back(connection, reuse=is_complete)
    if piece is not None:
        raise piece


class _ReaderProcess:
    """The reader process of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._used: set[Connection] = set()
        self._control, there = socket.socketpair()
        with there:
            self._process = start_python(
                "from energon.io.backends.reader_process import main; "
                "from energon.io.files import make_backend; "
                f"main({there.fileno()}, {os.getpid()}, make_backend)",
                [there.fileno()],
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def connect(self) -> Connection:
        """Return a connection on which no request is being answered."""
        with self._lock:
            if self._idle:
                connection = self._idle.pop()
            else:
                ours, theirs = socket.socketpair()
                with theirs, contextlib.suppress(OSError):  # noticed when it is asked
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                connection = Connection(ours.detach())
            self._used.add(connection)
            return connection

    def give_back(self, connection: Connection, *, reuse: bool) -> None:
        """Keep a connection for later requests, or close it."""
        with self._lock:
            self._used.discard(connection)
            if reuse and not connection.closed:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """End the process, which answers no longer."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def outlive(self) -> None:
        """Leave the sockets to the end of this process: its threads may still wait for answers."""
        self._control.detach()
        self._process.returncode = 0

    def forget(self) -> None:
        """Close, in a fork, the sockets that belong to the parent."""
        self._lock = threading.Lock()
        self._control.close()
        for connection in (*self._idle, *self._used):
            connection.close()
        self._process.returncode = 0


_reader: _ReaderProcess | None = None
_starting = fork_safe_lock()


def _current_reader() -> _ReaderProcess:
    global _reader
    with _starting:
        if _reader is None or not _reader.is_running or _reader._control.fileno() < 0:
            _reader = _ReaderProcess()
        return _reader


def _leave_reader() -> None:
    """Leave the reader process to the parent."""
    global _reader
    reader, _reader = _reader, None
    if reader is not None:
        reader.forget()


def _end_with_process() -> None:
    if _reader is not None:
        _reader.outlive()


os.register_at_fork(after_in_child=_leave_reader)
atexit.register(_end_with_process)


def start_python(code: str, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start an interpreter with the import path of this one.

    Args:
        code: The program.
        descriptors: Those that it inherits.
    """
    path = [entry or os.getcwd() for entry in sys.path]
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return subprocess.Popen(
        [sys.executable, *flags, "-c", f"import sys; sys.path[:] = {path!r}; {code}"],
        stdin=subprocess.DEVNULL,
        pass_fds=list(descriptors),
    )


def main(descriptor: int, parent: int, make: Callable[[str], Backend]) -> None:
    """Make requests for the process `parent` at the other end of a socket, until it ends.

    Args:
        descriptor: The socket.
        parent: Process id of the parent.
        make: Returns the backend of a root.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its parent may need a few more answers
    read_here()
    stores = _Stores(make)
    control = socket.socket(fileno=descriptor)
    control.settimeout(_POLL_SECONDS)
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                break
            threading.Thread(
                target=_serve, args=(Connection(descriptors[0]), stores), daemon=True
            ).start()
    # Does not wait for the threads of the library.
    os._exit(0)


class _Stores:
    """The backends of the reader process, by the numbers that its parent has given them."""

    def __init__(self, make: Callable[[str], Backend]) -> None:
        self._make = make
        self._backends: dict[tuple[int, int], Backend] = {}
        self._lock = threading.Lock()

    def of(self, request: Request) -> Backend:
        """Return the backend that makes a request."""
        with self._lock:
            if request.store not in self._backends:
                for name in os.environ.keys() - request.environment.keys():
                    del os.environ[name]
                os.environ.update(request.environment)
                self._backends[request.store] = self._make(request.root)
            return self._backends[request.store]


def _serve(connection: Connection, stores: _Stores) -> None:
    """Answer one request after the other."""
    with connection, contextlib.suppress(EOFError, OSError):
        while True:
            request: Request = connection.recv()
            try:
                with time_limit(request.seconds):
                    for piece in _answer(stores.of(request), request.method, *request.arguments):
                        connection.send(piece)
                end: BaseException | None = None
            except ConnectionError:
                raise
            except BaseException as error:
                end = error
            connection.send(end)


def _answer(backend: Backend, method: str, *arguments: Any) -> Iterator[Any]:
    """Yield the result of a request in pieces."""
    match method:
        case "get":
            yield backend.get(*arguments)
        case "stream":
            yield from backend.stream(*arguments)
        case "head":
            yield backend.head(*arguments)
        case "list":
            listed = iter(backend.list(*arguments))
            while page := list(islice(listed, _LISTED)):
                yield page
        case "put":
            backend.put(*arguments)
        case "delete":
            backend.delete(*arguments)
