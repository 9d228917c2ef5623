"""Files of the Hugging Face Hub: `hf://datasets/USER/REPO@REVISION/PATH`.

The hub redirects to the server that has the content; the token is not sent there.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from energon.errors import DatasetNotFoundError, StorageError
from energon.io.address import Address
from energon.io.backends.base import ObjectInfo
from energon.io.backends.object_backend import ObjectBackend, ask, read_all
from energon.io.backends.object_stores import WebBackend
from energon.messages import describe_error

DEFAULT_ENDPOINT = "https://huggingface.co"
REPOSITORY_KINDS = ("datasets", "spaces")
_NEXT_PAGE = re.compile(r'<([^>]+)>;\s*rel="next"')


def hugging_face(parts: Address) -> ObjectBackend:
    """Return a repository, using HF_ENDPOINT, and HF_TOKEN or the token of a log-in."""
    return _Hub(parts)


def find_token() -> str | None:
    """Return the token of the environment, or that of `hf auth login`."""
    if token := os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return token.strip()
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


class _Hub(WebBackend):
    def __init__(self, parts: Address) -> None:
        repository, _, revision = parts.root.partition("://")[2].partition("@")
        revision = quote(revision or "main", safe="")
        kind = repository.partition("/")[0]
        api = repository if kind in REPOSITORY_KINDS else f"models/{repository}"
        endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        token = find_token()
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._tree = f"{endpoint}/api/{api}/tree/{revision}"
        files = f"{endpoint}/{repository}/resolve/{revision}"
        super().__init__(parts.root, files, self._headers)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        url: str | None = f"{self._tree}/{quote(prefix)}".rstrip("/") + "?recursive=true"
        while url is not None:
            try:
                found, url = self._page(url, prefix)
            except DatasetNotFoundError:
                return
            yield from found

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        raise self._read_only(key)

    def delete(self, key: str) -> None:
        raise self._read_only(key)

    def _read_only(self, key: str) -> StorageError:
        return StorageError(
            f"{self.origin}/{key}: energon does not write to the hub; use `hf upload`"
        )

    def _page(self, url: str, prefix: str) -> tuple[Sequence[ObjectInfo], str | None]:
        """Return one page of a listing, and the address of the next."""
        place = f"{self.origin}/{prefix}"
        request = urllib.request.Request(url, headers=self._headers)
        with ask(request, place, access="set HF_TOKEN, or log in with `hf auth login`") as answer:
            link = _NEXT_PAGE.search(answer.headers.get("Link") or "")
            data = read_all(answer, place)
        following = link[1] if link else None
        try:
            if following and urlsplit(following)[:2] != urlsplit(url)[:2]:
                raise ValueError("the next page is on another server")
            # A listing lacks the tag that reading a file returns.
            files = [entry for entry in json.loads(data) if entry["type"] == "file"]
            return [ObjectInfo(str(e["path"]), int(e["size"])) for e in files], following
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StorageError(
                f"{place}: the answer of the hub is not a listing ({describe_error(error)})"
            ) from error
