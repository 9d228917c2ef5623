"""Object stores and web servers, through obstore: S3, Google Cloud Storage, Azure, HTTP.

Every request is made once: retries are made in `store.py`, alike for every kind of storage, and
counted. Connections are kept open and shared by all threads.
"""

from __future__ import annotations

import math
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from energon.errors import (
    DatasetNotFoundError,
    EnergonError,
    StorageAccessError,
    StorageError,
    needs_extra,
)
from energon.io.backends.base import ObjectInfo, seconds_left
from energon.io.backends.object_errors import (
    TRANSIENT_STATUS,
    UNREACHABLE,
    ConnectTimeoutError,
    cause_of,
    changed,
    translate,
)
from energon.io.threads import check_process
from energon.limits import DOCUMENT_BYTES
from energon.version import __version__

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ObjectStore

CONNECT_SECONDS = 5
"""How long a host may take to accept a connection; twice that is a store's default patience."""
READ_SECONDS = 30
"""How long a connection may stay silent."""
ANSWER_SECONDS = 120
"""How long an answer may take that is at most a range."""
BODY_SECONDS = 24 * 3600
"""How long an answer may take that is a whole object."""
RESPONSE_CHUNK_BYTES = 1 << 20

Connect = Callable[[float], "ObjectStore"]


class ObjectBackend:
    """Objects of a bucket.

    Args:
        origin: The root for messages, without secrets.
        connect: Makes the library's store with a time limit in seconds for each answer. Called on
            first use, and again after credentials were refused, since they may have been renewed
            in the meantime.
        can_list: Whether it supports listing.
        multipart: Whether large objects may be uploaded in parts.
    """

    can_range = True

    def __init__(
        self,
        origin: str,
        connect: Connect,
        *,
        can_list: bool = True,
        multipart: bool = True,
    ) -> None:
        self.origin = origin
        self.can_list = can_list
        self._connect = connect
        self._multipart = None if multipart else False
        self._stores: dict[float, ObjectStore] = {}

    def get(self, key: str, start: int, stop: int, version: str | None) -> bytes:
        if stop <= start:
            return b""
        options: GetOptions = {"range": (start, stop), **_only(version)}
        try:
            found = self._library().get(self._open(), key, options=options)
            self._check(found, version, key)
            return bytes(found.bytes())
        except Exception as error:
            if "status code: 416" in str(error):
                return b""
            raise self._translate(error, key) from None

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        options: GetOptions = _only(version)
        if start:
            options["range"] = {"offset": start}
        try:
            found = self._library().get(self._open_long(), key, options=options)
            self._check(found, version, key)
            for chunk in found.stream(RESPONSE_CHUNK_BYTES):
                yield bytes(chunk)
        except Exception as error:
            if start and "status code: 416" in str(error):
                return
            raise self._translate(error, key) from None

    def head(self, key: str) -> ObjectInfo:
        try:
            return info_of(self._library().head(self._open(), key))
        except Exception as error:
            raise self._translate(error, key) from None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        try:
            for page in self._library().list(self._open(), prefix or None):
                for meta in page:
                    if meta["path"]:
                        yield info_of(meta)
        except Exception as error:
            raise self._translate(error, prefix) from None

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        source = content if isinstance(content, bytes) else Path(content)
        try:
            self._library().put(self._open_long(), key, source, use_multipart=self._multipart)
        except Exception as error:
            raise self._translate(error, key) from None

    def delete(self, key: str) -> None:
        try:
            self._library().delete(self._open(), key)
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._translate(error, key) from None

    def renew(self) -> None:
        """Connect again, with the credentials that are valid now."""
        self._stores = {}

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"{self.origin}: a store holds connections; pickle its address instead")

    def _translate(self, error: Exception, key: str) -> EnergonError:
        """Return our error for one of the library's."""
        return translate(error, f"{self.origin}/{key}")

    def _check(self, answer: GetResult, version: str | None, key: str) -> None:
        """Reject an answer of another version: not every server honors the condition."""
        got = info_of(answer.meta).version
        if version is not None and got is not None and got != version:
            raise changed(f"{self.origin}/{key}")

    def _open(self) -> ObjectStore:
        return self._open_for(ANSWER_SECONDS)

    def _open_long(self) -> ObjectStore:
        return self._open_for(BODY_SECONDS)

    def _open_for(self, longest: float) -> ObjectStore:
        check_process(self.origin)
        left = seconds_left(longest)
        # Each time limit needs connections of its own, so there are only a few.
        seconds = longest if left == longest else 2.0 ** math.floor(math.log2(max(1.0, left)))
        stores = self._stores
        if seconds not in stores:
            stores[seconds] = self._connect(seconds)
        return stores[seconds]

    def _library(self) -> Any:
        return object_library(self.origin)


def object_library(origin: str) -> Any:
    """Return obstore.

    Raises:
        MissingExtraError: If it is not installed.
    """
    with needs_extra("remote", f"{origin}: object stores and web servers need obstore"):
        import obstore
    return obstore


def connection_settings(
    seconds: float, endpoint: str, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the connection settings for obstore's stores.

    Args:
        seconds: How long an answer may take.
        endpoint: The server's address; "" for the store's default.
        headers: Sent with every request.
    """
    client = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": f"{round(min(CONNECT_SECONDS, seconds) * 1000)}ms",
        "read_timeout": f"{min(READ_SECONDS, round(seconds))}s",
        "timeout": f"{round(seconds * 1000)}ms",
        "user_agent": f"energon/{__version__}",
    }
    if headers:
        client["default_headers"] = dict(headers)
    return {"client_options": client, "retry_config": {"max_retries": 0}}


_WRITTEN_AT = "written at "


def info_of(meta: ObjectMeta) -> ObjectInfo:
    """Convert the library's description of an object."""
    seconds = int(meta["last_modified"].timestamp())
    tag = meta["e_tag"]
    if tag and not tag.startswith(('"', "W/")):
        tag = f'"{tag}"'  # as in listings of Azure
    # A weak tag is never equal to anything, so it cannot be a condition.
    version = tag if tag and not tag.startswith("W/") else f"{_WRITTEN_AT}{seconds}"
    return ObjectInfo(
        meta["path"], meta["size"], version if tag or seconds else None, seconds * 1_000_000_000
    )


def _only(version: str | None) -> GetOptions:
    """Return the options of a request that fails for any other version."""
    if version is None:
        return {}
    if version.startswith(_WRITTEN_AT):
        seconds = int(version.removeprefix(_WRITTEN_AT))
        return {"if_unmodified_since": datetime.fromtimestamp(seconds, UTC)}
    return {"if_match": version}


_PIECE_BYTES = 1 << 16


class _RefusedRedirectError(Exception):
    """An answer redirects to an address that must not be followed."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to web servers only, and sends no secrets to other hosts."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            new.remove_header("Authorization")
        return new

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        try:
            target = urljoin(req.full_url, headers.get("Location") or headers.get("URI") or "")
            scheme = urlsplit(target).scheme.lower()
        except ValueError:
            scheme = ""
        if scheme not in ("http", "https"):
            fp.close()
            raise _RefusedRedirectError(f"a {scheme}: address" if scheme else "no address at all")
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _ConnectingInTime(HTTPConnection):
    """Waits less for a connection than for an answer."""

    def connect(self) -> None:
        patience, self.timeout = self.timeout, min(self.timeout or READ_SECONDS, CONNECT_SECONDS)
        try:
            super().connect()
        except TimeoutError as error:
            raise ConnectTimeoutError from error
        self.sock.settimeout(patience)


class _SecureConnectingInTime(_ConnectingInTime, HTTPSConnection):
    pass


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Makes connections that are given up early."""

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_ConnectingInTime, req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_SecureConnectingInTime, req)


_opener = urllib.request.build_opener(_Redirects, _Connections)


def refused_redirect(url: str, headers: Mapping[str, str], place: str) -> StorageError | None:
    """Return the error for an address that redirects to one that must not be followed, if it does.

    Args:
        url: The address.
        headers: Sent with the request.
        place: The address for messages.
    """
    try:
        with ask(urllib.request.Request(url, headers=dict(headers)), place, access=""):
            return None
    except EnergonError as error:
        is_refused = isinstance(error.__cause__ or error.__context__, _RefusedRedirectError)
        return error if is_refused and isinstance(error, StorageError) else None


def read_all(answer: Any, place: str) -> bytes:
    """Return the content of an answer, within the time limit and up to `DOCUMENT_BYTES`.

    Raises:
        StorageError: If either limit is exceeded.
    """
    data = bytearray()
    while part := answer.read1(_PIECE_BYTES):
        data += part
        if len(data) > DOCUMENT_BYTES.value:
            raise StorageError(
                f"{place}: the answer has more than {DOCUMENT_BYTES.value} bytes; "
                f"{DOCUMENT_BYTES.hint}"
            )
        if not seconds_left(READ_SECONDS):
            raise StorageError(f"{place}: no answer in time", transient=True)
    return bytes(data)


@contextmanager
def ask(request: urllib.request.Request, place: str, *, access: str) -> Iterator[Any]:
    """Make a request once, and yield the answer.

    GET follows redirects; for PUT, a redirect is the answer.

    Args:
        request: The request.
        place: The address for messages, without secrets.
        access: What to do if access is denied, for messages.

    Raises:
        DatasetNotFoundError: For the status 404.
        StorageAccessError: For 401 and 403.
        StorageError: For everything else.
    """
    try:
        with _open(request, place, access) as answer:
            yield answer
    except EnergonError:
        raise
    except OSError as error:
        cause = cause_of(error)
        raise StorageError(
            f"{place}: {cause}", transient=True, unreachable=cause in UNREACHABLE
        ) from None
    except (HTTPException, ValueError) as error:
        raise StorageError(
            f"{place}: the answer is not HTTP ({type(error).__name__})", transient=True
        ) from None


def _open(request: urllib.request.Request, place: str, access: str) -> Any:
    try:
        return _opener.open(request, timeout=max(1.0, seconds_left(READ_SECONDS)))
    except _RefusedRedirectError as error:
        raise StorageError(
            f"{place}: the server redirects to {error}, which is refused; only http and https are "
            "followed"
        ) from None
    except urllib.error.HTTPError as error:
        if error.code in (307, 308):
            return error
        error.close()
        if error.code == 404:
            raise DatasetNotFoundError(f"{place}: there is no such object") from None
        if error.code in (401, 403):
            raise StorageAccessError(f"{place}: access denied, {error.code}; {access}") from None
        raise StorageError(
            f"{place}: the server answered {error.code}", transient=error.code in TRANSIENT_STATUS
        ) from None
