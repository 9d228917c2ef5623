"""A proxy that makes a local server behave like a distant one on a bad day.

It forwards HTTP/1.1 to one upstream server as it is (the Host header too, so that signatures
stay valid), adds latency and a limit of bandwidth, and does what a plan says to chosen requests.
It notes every request, so that a test can tell how a client recovered.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

CHUNK = 256 << 10


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    status: answer with this status instead of asking upstream. reset: close the connection
    with RST, before the answer or `after` bytes of its body. cut: the same with FIN. stall: keep
    silent for `seconds` after `after` bytes of the body, then close. delay: answer `seconds`
    later. drip: send the body in hundreds of bytes, `seconds` apart. short: claim `after` bytes
    less than were asked for, and send so many.
    """

    kind: Literal["status", "reset", "cut", "stall", "delay", "drip", "short"]
    after: int = -1
    seconds: float = 0.0
    status: int = 503
    code: str = "SlowDown"


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    fault: Fault | None

    @property
    def is_data(self) -> bool:
        return self.method == "GET" and self.range is not None


class Throttle:
    """Lets through so many bytes a second, all connections together."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size: int) -> None:
        if not self.bytes_per_second:
            return
        with self._lock:
            now = time.monotonic()
            # What the last 5 ms left unused may be used now: sleeping is not exact.
            self._free_at = max(self._free_at, now - 0.005) + size / self.bytes_per_second
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


class FaultProxy:
    """The proxy; use it as a context manager.

    Args:
        upstream: Port of the server on this machine.
        latency: Seconds that each request takes longer, and each new connection.
        bytes_per_second: Bandwidth of all answers together; None for no limit.
        added_headers: Appended to the head of each answer.
    """

    def __init__(
        self,
        upstream: int,
        *,
        latency: float = 0.0,
        bytes_per_second: float | None = None,
        added_headers: bytes = b"",
    ) -> None:
        self.upstream = upstream
        self.latency = latency
        self.added_headers = added_headers
        self.requests: list[Request] = []
        self.connections = 0
        self.under_way = 0
        self._throttle = Throttle(bytes_per_second)
        self._plan: deque[Fault | None] = deque()
        self._chooses: Callable[[Request], bool] = lambda request: True
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(
        self,
        faults: Iterable[Fault | None],
        chooses: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        """Do this to the next requests that `chooses` takes, one each; forget the ones noted."""
        with self._lock:
            self._plan = deque(faults)
            self._chooses = chooses
            self.requests.clear()

    @property
    def faults_left(self) -> int:
        return len(self._plan)

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server: socket.socket | None = None
        self._open.add(client)
        time.sleep(self.latency)  # the round trip by which a connection is made
        try:
            server = socket.create_connection(("127.0.0.1", self.upstream))
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.add(server)
            while self._exchange(client, server):
                pass
        except (OSError, _Gone):
            pass
        finally:
            for each in (client, server):
                if each is not None:
                    self._open.discard(each)
                    each.close()

    def _exchange(self, client: socket.socket, server: socket.socket) -> bool:
        head, body = _read_head(client)
        if _header(head, b"expect") is not None:
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = _without(head, b"expect")
        request = self._note(head)
        try:
            return self._respond(client, server, request, head, body)
        finally:
            with self._lock:
                self.under_way -= 1

    def _respond(
        self,
        client: socket.socket,
        server: socket.socket,
        request: Request,
        head: bytes,
        body: bytes,
    ) -> bool:
        fault = request.fault
        time.sleep(self.latency + (fault.seconds if fault and fault.kind == "delay" else 0.0))
        if fault is not None and fault.kind == "status":
            for _ in _body(client, body, _length(head)):
                pass
            client.sendall(_answer(fault))
            return True
        if fault is not None and fault.kind == "reset" and fault.after < 0:
            return _abort(client)
        server.sendall(head)
        for chunk in _body(client, body, _length(head)):
            server.sendall(chunk)
        answer, rest = _read_head(server)
        length = 0 if request.method == "HEAD" else _length(answer)
        if fault is not None and fault.kind == "short" and length:
            answer = _shorten(answer, fault.after)
            client.sendall(answer + next(_body(server, rest, length))[: length - fault.after])
            return False
        client.sendall(answer[:-2] + self.added_headers + b"\r\n")
        return self._copy_body(client, _body(server, rest, length), fault)

    def _copy_body(self, client: socket.socket, body: Iterator[bytes], fault: Fault | None) -> bool:
        sent = 0
        limited = fault is not None and fault.kind in ("reset", "cut", "stall")
        for chunk in body:
            self._throttle.wait(len(chunk))
            if fault is not None and fault.kind == "drip":
                for start in range(0, len(chunk), 100):
                    client.sendall(chunk[start : start + 100])
                    time.sleep(fault.seconds)
                continue
            if limited and fault is not None and sent + len(chunk) >= fault.after:
                client.sendall(chunk[: fault.after - sent])
                if fault.kind == "reset":
                    # Otherwise RST would overtake what was just sent.
                    time.sleep(0.05)
                    return _abort(client)
                time.sleep(fault.seconds)
                return False
            client.sendall(chunk)
            sent += len(chunk)
        return True

    def _note(self, head: bytes) -> Request:
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        request = Request(method, path, _header(head, b"range"), None)
        with self._lock:
            if self._plan and self._chooses(request):
                request = Request(method, path, request.range, self._plan.popleft())
            self.requests.append(request)
            self.under_way += 1
        return request


class _Gone(Exception):
    pass


def _read_head(source: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        more = source.recv(CHUNK)
        if not more:
            raise _Gone
        data += more
    at = data.index(b"\r\n\r\n") + 4
    return data[:at], data[at:]


def _header(head: bytes, name: bytes) -> str | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip().decode("latin-1")
    return None


def _without(head: bytes, name: bytes) -> bytes:
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(name + b":"))


def _length(head: bytes) -> int:
    """Return the bytes of the body that follows; -1 if it comes in chunks."""
    if (_header(head, b"transfer-encoding") or "").lower() == "chunked":
        return -1
    if head.startswith((b"HTTP/1.1 204", b"HTTP/1.1 304")):
        return 0
    return int(_header(head, b"content-length") or 0)


def _body(source: socket.socket, begin: bytes, length: int) -> Iterator[bytes]:
    if length < 0:
        yield from _chunks(source, begin)
        return
    left = length
    while left > 0:
        chunk = begin or source.recv(min(CHUNK, left))
        begin = b""
        if not chunk:
            raise _Gone
        left -= len(chunk)
        yield chunk


def _chunks(source: socket.socket, data: bytes) -> Iterator[bytes]:
    """Yield a chunked body as it is on the wire."""
    while True:
        while b"\r\n" not in data:
            data += source.recv(CHUNK) or _raise()
        size = int(data[: data.index(b"\r\n")].split(b";")[0], 16)
        total = data.index(b"\r\n") + 2 + size + 2
        while len(data) < total:
            data += source.recv(CHUNK) or _raise()
        yield data[:total]
        data = data[total:]
        if not size:
            return


def _raise() -> bytes:
    raise _Gone


def _answer(fault: Fault) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code></Error>".encode()
    head = (
        f"HTTP/1.1 {fault.status} Planned\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: application/xml\r\n\r\n"
    )
    return head.encode() + body


def _shorten(head: bytes, missing: int) -> bytes:
    length = _length(head)
    return head.replace(f"{length}".encode(), f"{length - missing}".encode())


def _abort(client: socket.socket) -> bool:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def main() -> None:
    """Run a proxy in a process of its own until its input ends: `upstream latency bandwidth`."""
    upstream, latency, bandwidth = sys.argv[1:4]
    limit = float(bandwidth) or None
    with FaultProxy(int(upstream), latency=float(latency), bytes_per_second=limit) as proxy:
        sys.stdout.write(f"{proxy.port}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
