"""What stands for the Hugging Face Hub: it lists repositories and redirects to where files are."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.servers.web import Answering, running, web_server

CONVERTED = "refs%2Fconvert%2Fparquet"
PAGE = 3
"""Files on a page of a listing."""


class Hub(ThreadingHTTPServer):
    """One repository of datasets.

    Args:
        folder: Its files.
        repository: Its name, as `user/name`.
        files: URL of the server that has the files. It wants a signature, and no token.
        token: What requests must carry; None for a public repository.
    """

    daemon_threads = True

    def __init__(self, folder: Path, repository: str, files: str, token: str | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.repository = repository
        self.files = files
        self.token = token
        self.num_pages = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def hub(folder: Path, repository: str, *, token: str | None = None) -> Iterator[Hub]:
    """Run the hub, and the server that it redirects to, until the end of the block."""
    with (
        web_server(folder, token="signed", refuses_tokens=True) as files,
        running(Hub(folder, repository, files.url, token)) as server,
    ):
        yield server


class _Handler(Answering):
    server: Hub

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        name = self.server.repository
        token = self.server.token
        revision = CONVERTED if CONVERTED in parts.path else "main"
        if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
            self.answer(401, b"")
        elif parts.path.startswith(listed := f"/api/datasets/{name}/tree/{revision}"):
            folder = unquote(parts.path.removeprefix(listed)).strip("/")
            self._list(folder, int(parse_qs(parts.query).get("cursor", ["0"])[0]))
        elif parts.path.startswith(found := f"/datasets/{name}/resolve/{revision}/"):
            path = parts.path.removeprefix(found)
            self.answer(302, b"", {"Location": f"{self.server.files}/{path}?sig=signed"})
        else:
            self.answer(404, b"")

    do_HEAD = do_GET

    def _list(self, folder: str, start: int) -> None:
        self.server.num_pages += 1
        root = self.server.folder
        below = sorted((root / folder).rglob("*"))
        if not below:
            self.answer(404, b"")
            return
        entries = [
            {
                "type": "directory" if path.is_dir() else "file",
                "path": str(path.relative_to(root)),
                "size": path.stat().st_size,
                "oid": "0123456789",
            }
            for path in below[start : start + PAGE]
        ]
        headers = {"Content-Type": "application/json"}
        if start + PAGE < len(below):
            here = self.path.partition("?")[0]
            more = f"{self.server.url}{here}?recursive=true&cursor={start + PAGE}"
            headers["Link"] = f'<{more}>; rel="next"'
        self.answer(200, json.dumps(entries).encode(), headers)
