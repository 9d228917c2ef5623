"""What stands for AIStore, whose server is in no registry: a gateway in front of a target.

As the real one, the gateway checks the token and redirects to the target, which has the objects
and is another host; it lists buckets through its S3 interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from email.utils import formatdate
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit
from xml.sax.saxutils import escape

from tests.servers.web import Answering, running, web_server


class Gateway(ThreadingHTTPServer):
    """Redirects to the target at `target`, whose files lie below `folder`.

    Args:
        folder: Files of the target, below `v1/objects/BUCKET`.
        target: URL of the target.
        token: What requests for objects must carry.
    """

    daemon_threads = True

    def __init__(self, folder: Path, target: str, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.target = target
        self.token = token
        self.providers: set[str] = set()


@contextlib.contextmanager
def aistore(folder: Path, *, token: str, tags: bool = True) -> Iterator[Gateway]:
    """Run gateway and target until the end of the block."""
    with (
        web_server(folder, tags=tags) as target,
        running(Gateway(folder, target.url, token)) as gateway,
    ):
        yield gateway


class _Handler(Answering):
    server: Gateway

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if parts.path.startswith("/s3/"):
            self._list(parts.path.removeprefix("/s3/").strip("/"), parse_qs(parts.query))
        elif self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self.answer(401, b"")
        else:
            self.server.providers.update(parse_qs(parts.query)["provider"])
            path = quote(self.path, safe="/%?=&")
            self.answer(307, b"", {"Location": f"{self.server.target}{path}&pid=gateway"})

    do_HEAD = do_PUT = do_DELETE = do_GET

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        folder = self.server.folder / "v1/objects" / bucket
        prefix = query.get("prefix", [""])[0]
        entries = []
        for path in sorted(folder.rglob("*")):
            key = str(path.relative_to(folder))
            if path.is_file() and key.startswith(prefix):
                about = path.stat()
                written = formatdate(about.st_mtime, usegmt=True)
                entries.append(
                    f"<Contents><Key>{escape(_encoded(key, query))}</Key><Size>{about.st_size}"
                    f"</Size><LastModified>{_iso(written)}</LastModified></Contents>"
                )
        body = f"<ListBucketResult><Name>{bucket}</Name>{''.join(entries)}</ListBucketResult>"
        self.answer(200, body.encode(), {"Content-Type": "application/xml"})


def _encoded(key: str, query: dict[str, list[str]]) -> str:
    return quote(key) if query.get("encoding-type") == ["url"] else key


def _iso(http_date: str) -> str:
    from email.utils import parsedate_to_datetime

    return parsedate_to_datetime(http_date).strftime("%Y-%m-%dT%H:%M:%S.000Z")
