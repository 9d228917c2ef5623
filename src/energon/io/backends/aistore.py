"""AIStore: `ais://BUCKET/KEY`, and the cloud buckets behind it.

The gateway redirects each request to the target that has the object. With USE_AIS_FOR=s3:gs,
addresses with these schemes go to AIStore too.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from urllib.parse import quote, urljoin

from energon.errors import ConfigError
from energon.io.address import Address
from energon.io.backends.base import ObjectInfo
from energon.io.backends.object_backend import ObjectBackend, ask
from energon.io.backends.object_stores import WebBackend, s3_backend

PROVIDERS = {"ais": "ais", "s3": "aws", "gs": "gcp", "az": "azure"}


def aistore(parts: Address) -> ObjectBackend:
    """Return a bucket.

    Raises:
        ConfigError: If AIS_ENDPOINT is not set.
    """
    endpoint = os.environ.get("AIS_ENDPOINT")
    if not endpoint:
        raise ConfigError(
            f"{parts.root}: set AIS_ENDPOINT to the address of AIStore, such as http://host:51080"
        )
    return _AIStore(parts, endpoint.rstrip("/"))


def goes_to_aistore(scheme: str) -> bool:
    """Return whether the environment sends a scheme to AIStore."""
    return scheme in PROVIDERS and scheme in os.environ.get("USE_AIS_FOR", "").split(":")


class _AIStore(WebBackend):
    def __init__(self, parts: Address, endpoint: str) -> None:
        bucket = parts.root.partition("://")[2]
        token = os.environ.get("AIS_AUTHN_TOKEN")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._objects = f"{endpoint}/v1/objects/{bucket}"
        self._query = f"?provider={PROVIDERS[parts.scheme]}"
        super().__init__(parts.root, self._objects + self._query, self._headers)
        # Its own way to list wants a GET with a body; that of its S3 interface does not.
        options = {"endpoint": f"{endpoint}/s3", "skip_signature": True, "region": "us-east-1"}
        self._listing = s3_backend(bucket, options, look_up=False)

    def head(self, key: str) -> ObjectInfo:
        return _unless_dated(super().head(key))

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        # The gateway takes no content: it says where to send it.
        url = f"{self._objects}/{quote(key)}{self._query}"
        with self._ask(url, None, 0, key) as answer:
            target = urljoin(url, answer.headers.get("Location") or url)
        with ExitStack() as files:
            if isinstance(content, bytes):
                files.enter_context(self._ask(target, content, len(content), key))
            else:
                file = files.enter_context(open(content, "rb"))
                files.enter_context(self._ask(target, file, os.path.getsize(content), key))

    def _ask(self, url: str, body: Any, size: int, key: str) -> AbstractContextManager[Any]:
        headers = {**self._headers, "content-length": str(size)}
        request = urllib.request.Request(url, data=body, headers=headers, method="PUT")
        return ask(request, f"{self.origin}/{key}", access="set AIS_AUTHN_TOKEN")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for found in self._listing.list(prefix):
            yield found._replace(version=None)


def _unless_dated(info: ObjectInfo) -> ObjectInfo:
    """Drop a version that is only a date, which may be that of the last access."""
    is_tag = info.version is not None and info.version.startswith('"')
    return info if is_tag else info._replace(version=None)
