"""A web server that misbehaves, in any of the ways of `MISBEHAVIOURS`.

It serves one content at any path. Each misbehaviour answers one request by writing raw bytes to
the connection; the table says of each whether a client can still get the right data out of it.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

ETAG = '"the-version"'
DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


@dataclass
class Ask:
    """One request, and the connection that it came by."""

    method: str
    path: str
    start: int
    stop: int
    has_range: bool
    content: bytes
    number: int
    socket: socket.socket
    stopping: threading.Event
    host: str

    @property
    def part(self) -> bytes:
        return self.content[self.start : self.stop]

    def send(self, *parts: bytes | str) -> None:
        self.socket.sendall(b"".join(p.encode() if isinstance(p, str) else p for p in parts))

    def answer(
        self,
        status: str,
        body: bytes = b"",
        *,
        length: object = None,
        tag: str | None = ETAG,
        date: str | None = DATE,
        **headers: object,
    ) -> None:
        """Send a well-formed answer but for what the arguments say. False leaves a header out."""
        lines = [f"HTTP/1.1 {status}"]
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if length is not False:
            named["Content-Length"] = len(body) if length is None else length
        if tag:
            named["ETag"] = tag
        if date:
            named["Last-Modified"] = date
        # The connection is closed, as not all that is sent can be told apart.
        named["Connection"] = "close"
        lines += [f"{name}: {value}" for name, value in named.items() if value is not False]
        self.send("\r\n".join(lines), "\r\n\r\n", b"" if self.method == "HEAD" else body)

    def behave(self, **headers: object) -> None:
        """Answer as a good server does."""
        if self.method == "HEAD":
            self.answer("200 OK", **{"length": len(self.content), **headers})
        elif not self.has_range:
            self.answer("200 OK", self.content, **headers)
        elif self.start >= len(self.content):
            self.answer("416 no", Content_Range=f"bytes */{len(self.content)}")
        else:
            headers = {"Content_Range": self.content_range(), **headers}
            self.answer("206 Partial Content", self.part, **headers)

    def content_range(self, shift: int = 0, cut: int = 0, total: object = None) -> str:
        size = len(self.content) if total is None else total
        return f"bytes {self.start + shift}-{self.stop - 1 - cut}/{size}"

    def wait(self, seconds: float) -> bool:
        """Wait; return False if the server is to end."""
        return not self.stopping.wait(seconds)


Misbehaviour = Callable[[Ask], None]
MISBEHAVIOURS: dict[str, Misbehaviour] = {}
HARMLESS: set[str] = set()
"""Names of misbehaviours in spite of which all data can be had."""
UNKNOWABLE = {"Content-Length is too small", "always 204 No Content", "more chunks than bytes"}
"""Names of those after which a client that asks only once cannot know the right length."""
SLOW = {"a flood of 100 Continue", "is silent", "is silent after the head", "drips"}
"""Names of those that end with the patience of the client."""


def _named(name: str, *, harmless: bool = False) -> Callable[[Misbehaviour], Misbehaviour]:
    def add(function: Misbehaviour) -> Misbehaviour:
        MISBEHAVIOURS[name] = function
        if harmless:
            HARMLESS.add(name)
        return function

    return add


def _to_ranges(name: str, answer: Misbehaviour, *, harmless: bool = False) -> None:
    """Add a misbehaviour that shows with ranges only."""

    def misbehave(ask: Ask) -> None:
        answer(ask) if ask.has_range and ask.method == "GET" else ask.behave()

    _named(name, harmless=harmless)(misbehave)


def _partial(**headers: object) -> Misbehaviour:
    return lambda ask: ask.answer("206 Partial Content", ask.part, **headers)


_named("none", harmless=True)(lambda ask: ask.behave())

# Ranges

_to_ranges("no Content-Range", _partial())
_to_ranges("Content-Range of garbage", _partial(Content_Range="bytes all of it"))
_to_ranges("Content-Range in other units", _partial(Content_Range="lines 1-2/3"))
_to_ranges(
    "Content-Range that is shifted", lambda ask: ask.behave(Content_Range=ask.content_range(1, -1))
)
_to_ranges(
    "Content-Range that ends too early",
    lambda ask: ask.behave(Content_Range=ask.content_range(0, 1)),
)
_to_ranges(
    "Content-Range of another size",
    lambda ask: ask.behave(Content_Range=ask.content_range(total=len(ask.content) // 2)),
)
_to_ranges(
    "Content-Range of unknown size",
    lambda ask: ask.behave(Content_Range=ask.content_range(total="*")),
)
_to_ranges(
    "Content-Range that runs backwards",
    lambda ask: ask.behave(Content_Range=f"bytes {ask.stop}-{ask.start}/{len(ask.content)}"),
)
_to_ranges(
    "Content-Range beyond all numbers",
    lambda ask: ask.behave(Content_Range=f"bytes {ask.start}-{1 << 70}/{1 << 71}"),
)
_to_ranges("ranges are ignored", lambda ask: ask.answer("200 OK", ask.content), harmless=True)
_to_ranges("parts are called the whole", lambda ask: ask.answer("200 OK", ask.part))


@_named("ranges are refused")
def _refuse_ranges(ask: Ask) -> None:
    if ask.has_range:
        ask.answer("416 Range Not Satisfiable", Content_Range=f"bytes */{len(ask.content)}")
    else:
        ask.behave()


def _short(ask: Ask) -> None:
    stop = ask.start + max(1, (ask.stop - ask.start) // 2)
    ask.answer(
        "206 Partial Content",
        ask.content[ask.start : stop],
        Content_Range=f"bytes {ask.start}-{stop - 1}/{len(ask.content)}",
    )


_to_ranges("ranges are short", _short)
_to_ranges(
    "every other range is short",
    lambda ask: (_short if ask.number % 2 else Ask.behave)(ask),
    harmless=True,
)


def _long(ask: Ask) -> None:
    stop = min(len(ask.content), ask.stop + 100)
    ask.answer(
        "206 Partial Content",
        ask.content[ask.start : stop],
        Content_Range=f"bytes {ask.start}-{stop - 1}/{len(ask.content)}",
    )


_to_ranges("ranges are long", _long)


def _multipart(ask: Ask) -> None:
    head = f"--x\r\nContent-Range: {ask.content_range()}\r\n\r\n".encode()
    kind = "multipart/byteranges; boundary=x"
    ask.answer("206 Partial Content", head + ask.part + b"\r\n--x--\r\n", Content_Type=kind)


_to_ranges("ranges come as several parts", _multipart)

# Lengths


@_named("Content-Length is too large")
def _too_large(ask: Ask) -> None:
    if ask.method == "HEAD":
        ask.behave()
    else:
        headers = {"Content_Range": ask.content_range()} if ask.has_range else {}
        status = "206 Partial" if ask.has_range else "200 OK"
        ask.answer(status, ask.part, length=len(ask.part) + 100, **headers)


@_named("Content-Length is too small")
def _too_small(ask: Ask) -> None:
    if ask.method == "HEAD":
        ask.behave()
    else:
        headers = {"Content_Range": ask.content_range()} if ask.has_range else {}
        status = "206 Partial" if ask.has_range else "200 OK"
        ask.answer(status, ask.part, length=max(0, len(ask.part) - 100), **headers)


_named("Content-Length of garbage")(lambda ask: ask.behave(length="much"))
_named("Content-Length below zero")(lambda ask: ask.behave(length=-1))
_named("Content-Length beyond all numbers")(lambda ask: ask.behave(length=1 << 70))
_named("two Content-Lengths")(lambda ask: ask.behave(length="5\r\nContent-Length: 7"))
_named("HEAD has no length", harmless=True)(
    lambda ask: ask.answer("200 OK", length=False) if ask.method == "HEAD" else ask.behave()
)
_named("HEAD says less")(
    lambda ask: (
        ask.answer("200 OK", length=len(ask.content) // 2) if ask.method == "HEAD" else ask.behave()
    )
)
_named("HEAD says more")(
    lambda ask: (
        ask.answer("200 OK", length=2 * len(ask.content)) if ask.method == "HEAD" else ask.behave()
    )
)
_named("HEAD says an exabyte")(
    lambda ask: ask.answer("200 OK", length=1 << 60) if ask.method == "HEAD" else ask.behave()
)
_named("HEAD is refused", harmless=True)(
    lambda ask: ask.answer("405 no") if ask.method == "HEAD" else ask.behave()
)

# Chunks


def _chunked(encode: Callable[[bytes], bytes]) -> Misbehaviour:
    def misbehave(ask: Ask) -> None:
        if ask.method == "HEAD":
            ask.behave()
            return
        headers = {"Content_Range": ask.content_range()} if ask.has_range else {}
        status = "206 Partial" if ask.has_range else "200 OK"
        body = encode(ask.part)
        ask.answer(status, body, length=False, Transfer_Encoding="chunked", **headers)

    return misbehave


def _chunks(data: bytes) -> bytes:
    pieces = (data[at : at + 1000] for at in range(0, len(data), 1000))
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


_named("chunks")(_chunked(lambda data: _chunks(data) + b"0\r\n\r\n"))
_named("chunks without an end")(_chunked(_chunks))
_named("chunks that are truncated")(_chunked(lambda data: _chunks(data)[:-50]))
_named("chunks of garbage")(_chunked(lambda data: b"many\r\n" + data))
_named("chunks below zero")(_chunked(lambda data: b"-5\r\n" + data))
_named("chunks beyond all numbers")(_chunked(lambda data: b"%x\r\n" % (1 << 66) + data))
_named("more chunks than bytes")(_chunked(lambda data: _chunks(data + bytes(100)) + b"0\r\n\r\n"))


@_named("chunks that never end")
def _endless(ask: Ask) -> None:
    if ask.method == "HEAD":
        ask.behave()
        return
    _chunked(_chunks)(ask)
    while ask.wait(0.001):
        ask.send(_chunks(bytes(1000)))


@_named("answers of unknown length, in chunks", harmless=True)
def _streams(ask: Ask) -> None:
    ask.answer("200 OK", _whole_in_chunks(ask), length=False, Transfer_Encoding="chunked")


def _whole_in_chunks(ask: Ask) -> bytes:
    return b"" if ask.method == "HEAD" else _chunks(ask.content) + b"0\r\n\r\n"


# Redirects


def _redirect(location: Callable[[Ask], object], status: str = "302 Found") -> Misbehaviour:
    return lambda ask: ask.answer(status, Location=location(ask))


_named("redirects to itself")(_redirect(lambda ask: f"http://{ask.host}{ask.path}"))
_named("redirects without end")(_redirect(lambda ask: f"http://{ask.host}/{ask.number}"))
_named("redirects to a file")(_redirect(lambda ask: "file:///etc/hostname"))
_named("redirects to another scheme")(_redirect(lambda ask: "gopher://localhost/"))
_named("redirects to nowhere")(_redirect(lambda ask: False))
_named("redirects to garbage")(_redirect(lambda ask: "http://[::1/%"))
_named("redirects to a closed port")(_redirect(lambda ask: "http://127.0.0.1:1/x"))
_named("redirects once", harmless=True)(
    lambda ask: (
        ask.behave()
        if ask.path == "/elsewhere"
        else _redirect(lambda ask: "/elsewhere", "307 Temporary Redirect")(ask)
    )
)

# Heads

_named("no status")(lambda ask: ask.send("hello\r\n\r\n"))
_named("status of garbage")(lambda ask: ask.send("HTTP/1.1 fine\r\nContent-Length: 0\r\n\r\n"))
_named("only a body")(lambda ask: ask.send(ask.part))
_named("headers of garbage")(lambda ask: ask.send("HTTP/1.1 200 OK\r\n\0: \r\nno colon\r\n\r\n"))
_named("a header of megabytes")(lambda ask: ask.behave(Comment="x" * (4 << 20)))


@_named("headers that never end")
def _endless_headers(ask: Ask) -> None:
    ask.send("HTTP/1.1 200 OK\r\n")
    while ask.wait(0.001):
        ask.send("Comment: more\r\n" * 100)


@_named("a flood of 100 Continue")
def _continue(ask: Ask) -> None:
    while ask.wait(0.001):
        ask.send("HTTP/1.1 100 Continue\r\n\r\n" * 10)


_named("a date of garbage")(lambda ask: ask.behave(date="tomorrow"))
_named("a date in the future", harmless=True)(
    lambda ask: ask.behave(date="Sat, 21 Oct 2215 07:28:00 GMT")
)
_named("neither date nor tag", harmless=True)(lambda ask: ask.behave(date=None, tag=None))
_named("another tag each time")(lambda ask: ask.behave(tag=f'"{ask.number}"'))
_named("a tag of garbage")(lambda ask: ask.behave(tag='"\x01\xff'))
_named("Content-Encoding that is not asked for")(
    lambda ask: (
        ask.behave()
        if ask.method == "HEAD"
        else ask.answer(
            "206 Partial" if ask.has_range else "200 OK",
            gzip.compress(ask.part),
            Content_Encoding="gzip",
            **({"Content_Range": ask.content_range()} if ask.has_range else {}),
        )
    )
)

# Statuses

for _status in ("204 No Content", "304 Not Modified", "400 Bad Request", "500 Oops", "999 What"):
    _named(f"always {_status}")(lambda ask, status=_status: ask.answer(status))
_named("always busy")(lambda ask: ask.answer("429 Too Many Requests", Retry_After="100000"))
_named("busy half of the time", harmless=True)(
    lambda ask: ask.answer("503 Busy") if ask.number % 2 else ask.behave()
)

# Connections


@_named("closes at once")
def _close(ask: Ask) -> None:
    raise ConnectionAbortedError


@_named("resets at once")
def _reset(ask: Ask) -> None:
    ask.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise ConnectionAbortedError


@_named("closes in the middle")
def _close_in_the_middle(ask: Ask) -> None:
    if ask.method == "HEAD":
        ask.behave()
        return
    headers = {"Content_Range": ask.content_range()} if ask.has_range else {}
    status = "206 Partial" if ask.has_range else "200 OK"
    ask.answer(status, ask.part[: len(ask.part) // 2], length=len(ask.part), **headers)
    raise ConnectionAbortedError


@_named("is silent")
def _silent(ask: Ask) -> None:
    while ask.wait(1.0):
        pass


@_named("is silent after the head")
def _silent_after_head(ask: Ask) -> None:
    if ask.method == "HEAD":
        ask.behave()
        return
    ask.answer("206 Partial", b"", length=len(ask.part), Content_Range=ask.content_range())
    _silent(ask)


@_named("drips")
def _drip(ask: Ask) -> None:
    if ask.method == "HEAD":
        ask.behave()
        return
    headers = {"Content_Range": ask.content_range()} if ask.has_range else {}
    status = "206 Partial" if ask.has_range else "200 OK"
    ask.answer(status, b"", length=len(ask.part), **headers)
    for byte in ask.part:
        if not ask.wait(0.2):
            return
        ask.send(bytes([byte]))


@dataclass
class BadWebServer:
    """A server of one content; use it as a context manager.

    Args:
        content: What is at every path.
        misbehaviour: How it misbehaves: a name of `MISBEHAVIOURS`, or what answers requests.
    """

    content: bytes
    misbehaviour: str | Misbehaviour = "none"
    requests: int = 0
    _stopping: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> BadWebServer:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"http://{self.host}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError), client:
            if head := _read_head(client):
                self._answer(head, client)
            # What the client still sends is waited for, or it would be told of a reset.
            client.settimeout(1.0)
            while client.recv(65536):
                pass

    def _answer(self, head: str, client: socket.socket) -> None:
        method, path, *_ = head.split()
        found = re.search(r"(?i)^range: bytes=(\d*)-(\d*)", head, re.MULTILINE)
        start = int(found[1] or 0) if found else 0
        size = len(self.content)
        stop = min(size, int(found[2]) + 1) if found and found[2] else size
        self.requests += 1
        ask = Ask(
            method,
            path,
            start,
            stop,
            found is not None,
            self.content,
            self.requests,
            client,
            self._stopping,
            self.host,
        )
        misbehave = self.misbehaviour
        (MISBEHAVIOURS[misbehave] if isinstance(misbehave, str) else misbehave)(ask)
        client.shutdown(socket.SHUT_WR)


def _read_head(client: socket.socket) -> str:
    data = b""
    while b"\r\n\r\n" not in data:
        more = client.recv(65536)
        if not more:
            return ""
        data += more
    return data.decode("latin-1")
