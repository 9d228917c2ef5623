"""A web server for a folder, which can do ranges or not, and redirects."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

Server = TypeVar("Server", bound=ThreadingHTTPServer)


class Answering(BaseHTTPRequestHandler):
    """What the handlers of all servers have."""

    protocol_version = "HTTP/1.1"
    # Head and body of an answer go out in one packet each, without waiting for one another.
    disable_nagle_algorithm = True

    def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class WebServer(ThreadingHTTPServer):
    """Serves the files below `folder`.

    Args:
        folder: What to serve. PUT and DELETE change it.
        ranges: Whether it answers Range with parts of files.
        tags: Whether answers have an ETag.
        token: What requests must carry, in `Authorization: Bearer` or as the query `sig`; None
            for nothing.
        heeds_conditions: Whether it answers If-Match and the like, as not every server does.
        refuses_tokens: Whether a request with `Authorization` is refused, as by servers that
            want a signature instead.
    """

    daemon_threads = True

    def __init__(
        self,
        folder: Path,
        *,
        ranges: bool = True,
        tags: bool = True,
        token: str | None = None,
        heeds_conditions: bool = True,
        refuses_tokens: bool = False,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.ranges = ranges
        self.tags = tags
        self.token = token
        self.heeds_conditions = heeds_conditions
        self.refuses_tokens = refuses_tokens
        self.paths: list[str] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """Answer requests until the end of the block."""
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def web_server(folder: Path, **settings: Any) -> contextlib.AbstractContextManager[WebServer]:
    """Run a `WebServer` until the end of the block."""
    return running(WebServer(folder, **settings))


class _Handler(Answering):
    server: WebServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.server.paths.append(parts.path)
        token = self.server.token
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token is not None and token != given and f"sig={token}" not in parts.query:
            self.answer(403, b"")
            return
        if self.server.refuses_tokens and "Authorization" in self.headers:
            self.answer(400, b"")
            return
        path = self.server.folder / unquote(parts.path).lstrip("/")
        try:
            file = path.open("rb")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            self.answer(404, b"")
            return
        with file:
            self._answer_from(file)

    def _answer_from(self, file: BinaryIO) -> None:
        about = os.fstat(file.fileno())
        tag = f'"{about.st_ino}-{about.st_mtime_ns}"'
        headers = {"Last-Modified": formatdate(about.st_mtime, usegmt=True)}
        if self.server.tags:
            headers["ETag"] = tag
            required = self.headers.get("If-Match") if self.server.heeds_conditions else None
            if required not in (None, tag):
                self.answer(412, b"")
                return
        wanted = self.headers.get("Range")
        if wanted is None or not self.server.ranges:
            self.answer(200, file.read(), headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(about.st_size, int(last or about.st_size - 1) + 1)
        if start >= about.st_size:
            self.answer(416, b"", {"Content-Range": f"bytes */{about.st_size}"})
            return
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{about.st_size}"
        file.seek(start)
        self.answer(206, file.read(stop - start), headers)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        path = self.server.folder / unquote(urlsplit(self.path).path).lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        data = self.rfile.read(int(self.headers["Content-Length"]))
        temporary = path.with_name(path.name + ".part")
        temporary.write_bytes(data)
        os.replace(temporary, path)
        self.answer(201, b"")

    def do_DELETE(self) -> None:
        path = self.server.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.exists():
            self.answer(404, b"")
            return
        path.unlink()
        self.answer(204, b"")
