"""Object stores and web servers, through obstore: S3, Google Cloud Storage, Azure, HTTP.

Every request is made once: retries are made in `store.py`, alike for every kind of storage, and
counted. Connections are kept open and shared by all threads.

The messages of the errors of obstore contain whole URLs with signatures, and answers of servers
with key ids. Only the status, the store's code and the kind of failure are passed on.
"""

from __future__ import annotations

import errno
import math
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EnergonError,
    ObjectChangedError,
    RangesNotSupportedError,
    StorageAccessError,
    StorageError,
    needs_extra,
)
from energon.io.backends.base import ObjectInfo, seconds_left
from energon.io.threads import check_process
from energon.limits import DOCUMENT_BYTES
from energon.version import __version__

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ObjectStore

_STATUS = re.compile(r"status code: (\d{3})([^:\n]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_METADATA = re.compile(r"//(169\.254\.\d+\.\d+|metadata\.google\.internal)[:/]")
"""Where cloud machines obtain the credentials of their role."""
_CONNECTING = re.compile(r"::Error\(\s*Connect,")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
REFUSED = "connection refused"
UNKNOWN_HOST = "the host name cannot be resolved"
NO_ROUTE = "there is no route to the host"
NO_CONNECTION = "the host accepted no connection in time"
UNREACHABLE = (REFUSED, UNKNOWN_HOST, NO_ROUTE, NO_CONNECTION)
"""Causes that an address is more likely to have than a server."""
_HOST = re.compile(r"https?://(?:[^/\s@]*@)?([^/\s?()]+)")
_BAD_LISTING = "InvalidListResponse"
_CAUSES = {
    _BAD_LISTING: "the listing is truncated or damaged",
    "TooManyRedirects": "the server redirects again and again",
    "ContentLengthInvalid": "the Content-Length of the answer is not a number",
    "Parse(": "the answer is not HTTP",
    "dns error": UNKNOWN_HOST,
    "ConnectionRefused": REFUSED,
    "HostUnreachable": NO_ROUTE,
    "NetworkUnreachable": NO_ROUTE,
    "ConnectionReset": "connection reset",
    "IncompleteBody": "the answer ended early",
    "IncompleteMessage": "the connection was closed before an answer",
    "InvalidCertificate": "the certificate of the server is not trusted",
    "UnexpectedEof": "connection closed",
    "TimedOut": "no answer in time",
}


class ConnectTimeoutError(TimeoutError):
    """A host did not accept a connection in time."""


_OS_CAUSES: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, UNKNOWN_HOST),
    (ConnectionRefusedError, REFUSED),
    (ConnectTimeoutError, NO_CONNECTION),
    (ConnectionError, "connection reset"),
    (TimeoutError, "no answer in time"),
)
_NO_ROUTE_CODES = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH})
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
"""Statuses that may differ the next time."""
_TRANSIENT_CODES = frozenset({"RequestTimeout", "SlowDown", "InternalError", "ServerBusy"})
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_ACCESS_CODES = frozenset(
    {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestTimeTooSkewed"}
)

_AZURE = (
    "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with "
    "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"
)
_CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for public buckets, "
    "AWS_NO_SIGN_REQUEST=1",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the path of a key file, or log in with "
    "`gcloud auth application-default login`",
    **dict.fromkeys(("az", "azure", "abfs", "abfss", "adl"), _AZURE),
    "hf": "set HF_TOKEN, or log in with `hf auth login`",
    "ais": "set AIS_AUTHN_TOKEN",
}
"""How to provide credentials, by scheme."""


_RANGES = re.compile(r"Requested \d+\.\.\d+, got \d+\.\.\d+")
_BAD_ANSWERS: tuple[tuple[str, type[StorageError], str, bool], ...] = (
    (
        "MissingContentLength",
        RangesNotSupportedError,
        "the answer has no Content-Length, as servers send what they compress or make on "
        "the fly; it can only be streamed: have the file served as it is",
        False,
    ),
    ("InvalidContentLength", StorageError, _CAUSES["ContentLengthInvalid"], False),
    ("InvalidLastModified", StorageError, "the Last-Modified of the answer is not a date", False),
    ("NoContentRange", RangesNotSupportedError, "the answer lacks the range it holds", False),
    (
        "ParseContentRange",
        RangesNotSupportedError,
        "the answer has an unknown form of range",
        False,
    ),
    ("UnexpectedRange", StorageError, "the server has sent a different range than requested", True),
    ("BareRedirect", StorageError, "the server redirects without an address", False),
    (
        "BadScheme",
        StorageError,
        "the server redirects to another scheme than http and https, which is refused",
        False,
    ),
    ("NotModified {", StorageError, "the server answered 304 Not Modified, unasked", True),
)
"""Answers that the library rejects: what it says, and what that means."""


def changed(address: str) -> ObjectChangedError:
    """Return the error for an object that was replaced after it was opened."""
    return ObjectChangedError(
        f"{address}: is no longer the version that was opened; it was replaced in the meantime"
    )


class _Fault(NamedTuple):
    """The properties of an error of the library."""

    address: str
    text: str
    name: str
    """Its class."""
    status: str
    """Status of the answer with its reason, or nothing."""
    code: str
    """The code of the store, or nothing."""
    error: Exception

    @classmethod
    def of(cls, error: Exception, address: str) -> _Fault:
        text = str(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        answered = (status[1] + status[2]).strip() if status else ""
        return cls(address, text, type(error).__name__, answered, code[1] if code else "", error)

    @property
    def answer(self) -> str:
        """Status and code."""
        return " ".join(filter(None, (self.status, self.code and f"({self.code})")))

    @property
    def credentials(self) -> str:
        """How to provide credentials."""
        return _CREDENTIALS.get(self.address.partition(":")[0], "set those of your store")


def _bad_answer(fault: _Fault) -> EnergonError | None:
    for sign, kind, words, transient in _BAD_ANSWERS:
        if sign in fault.text:
            numbers = _RANGES.search(fault.text)
            ranges = f" ({numbers[0]})" if numbers else ""
            return kind(f"{fault.address}: {words}{ranges}", transient=transient)
    return None


def _connection_error(fault: _Fault) -> StorageError:
    kind = _KIND.search(fault.text)
    causes = [words for sign, words in _CAUSES.items() if sign in fault.text]
    cause = causes[0] if causes else (kind[1] if kind else fault.name)
    if _CONNECTING.search(fault.text) and "TimedOut" in fault.text:
        cause = NO_CONNECTION
    transient = kind is not None and "InvalidCertificate" not in fault.text
    transient = transient or _BAD_LISTING in fault.text
    host = _HOST.search(fault.text)
    at = f" ({host[1]})" if host and host[1] not in fault.address else ""
    return StorageError(
        f"{fault.address}: {cause}{at}", transient=transient, unreachable=cause in UNREACHABLE
    )


def translate(error: Exception, address: str) -> EnergonError:
    """Return our error for one of the library's.

    Args:
        error: The error raised by the library.
        address: The address for the message, without secrets.
    """
    if isinstance(error, EnergonError):
        return error
    fault = _Fault.of(error, address)
    if fault.status.startswith("405"):
        return StorageError(f"{address}: the server answered {fault.status}")
    if fault.code in _NO_BUCKET:
        return DatasetNotFoundError(f"{address}: there is no such bucket; check its name")
    if isinstance(error, FileNotFoundError) or fault.name == "NotFoundError":
        return DatasetNotFoundError(f"{address}: there is no such object")
    if fault.name == "PreconditionError":
        return changed(address)
    return _bad_answer(fault) or _refusal(fault) or _connection_error(fault)


def _refusal(fault: _Fault) -> EnergonError | None:
    """Return the error for a request that was refused, by the library or the server."""
    address, status = fault.address, fault.status
    if fault.name == "NotSupportedError" and "RangeNotSupported" in fault.text:
        return RangesNotSupportedError(f"{address}: the server returns whole files only, no ranges")
    if isinstance(fault.error, ValueError):
        reason = fault.text.partition("\n")[0]
        return ConfigError(f"{address}: not a valid name of an object; {reason}")
    if _METADATA.search(fault.text) and int(status[:3] or 0) not in TRANSIENT_STATUS:
        return StorageAccessError(
            f"{address}: no credentials in the environment or a profile, and this machine has no "
            f"role that provides any; {fault.credentials}"
        )
    if fault.code in _ACCESS_CODES or status[:3] in ("401", "403"):
        return StorageAccessError(
            f"{address}: access denied, {fault.answer}; check the credentials and their rights: "
            f"{fault.credentials}"
        )
    if status.startswith("3"):
        return StorageError(
            f"{address}: the server answered {status}; redirects are followed, but not for names "
            "with [ or ]: rename the file"
        )
    if status:
        transient = int(status[:3]) in TRANSIENT_STATUS or fault.code in _TRANSIENT_CODES
        return StorageError(f"{address}: the server answered {fault.answer}", transient=transient)
    return None


def cause_of(error: BaseException) -> str:
    """Return why a connection failed, without quoting the error; by default, the error's name.

    Errors of libraries carry the operating system's as their reason or cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _NO_ROUTE_CODES:
            return NO_ROUTE
        for kind, words in _OS_CAUSES:
            if isinstance(cause, kind):
                return words
        reason = getattr(cause, "reason", None)
        cause = (
            reason if isinstance(reason, BaseException) else cause.__cause__ or cause.__context__
        )
    return type(error).__name__


CONNECT_SECONDS = 5
"""How long a host may take to accept a connection; twice that is a store's default patience."""
READ_SECONDS = 30
"""How long a connection may stay silent."""
ANSWER_SECONDS = 120
"""How long an answer may take that is at most a range."""
BODY_SECONDS = 24 * 3600
"""How long an answer may take that is a whole object."""
RESPONSE_CHUNK_BYTES = 1 << 20


class StoreArguments(NamedTuple):
    """The arguments for a store of obstore."""

    kind: str
    """Its class."""
    root: str
    """The bucket, container or address that keys are appended to."""
    endpoint: str
    """The server's address; "" for the default."""
    options: Mapping[str, Any] = MappingProxyType({})
    headers: Mapping[str, str] = MappingProxyType({})
    """Sent with every request."""


class ObjectBackend:
    """Objects of a bucket.

    Args:
        origin: The root for messages, without secrets.
        arguments: Returns the arguments for the library's store. Called on first use, and again
            after credentials were refused, since they may have been renewed in the meantime.
        can_list: Whether it supports listing.
        multipart: Whether large objects may be uploaded in parts.
    """

    can_range = True

    def __init__(
        self,
        origin: str,
        arguments: Callable[[], StoreArguments],
        *,
        can_list: bool = True,
        multipart: bool = True,
    ) -> None:
        self.origin = origin
        self.can_list = can_list
        self._arguments = arguments
        self._multipart = None if multipart else False
        self._stores: dict[float, ObjectStore] = {}

    def get(self, key: str, start: int, stop: int, version: str | None) -> bytes:
        if stop <= start:
            return b""
        options: GetOptions = {"range": (start, stop), **_only(version)}
        with self._errors(key, may_begin_behind_end=True):
            answer = self._library().get(self._open(), key, options=options)
            self._check(answer, version, key)
            return bytes(answer.bytes())
        return b""

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        options: GetOptions = _only(version)
        if start:
            options["range"] = {"offset": start}
        with self._errors(key, may_begin_behind_end=start > 0):
            answer = self._library().get(self._open(is_long=True), key, options=options)
            self._check(answer, version, key)
            for chunk in answer.stream(RESPONSE_CHUNK_BYTES):
                yield bytes(chunk)

    def head(self, key: str) -> ObjectInfo:
        with self._errors(key):
            return info_of(self._library().head(self._open(), key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._errors(prefix):
            for page in self._library().list(self._open(), prefix or None):
                for meta in page:
                    if meta["path"]:
                        yield info_of(meta)

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        source = content if isinstance(content, bytes) else Path(content)
        with self._errors(key):
            store = self._open(is_long=True)
            self._library().put(store, key, source, use_multipart=self._multipart)

    def delete(self, key: str) -> None:
        with self._errors(key), suppress(FileNotFoundError):
            self._library().delete(self._open(), key)

    def renew(self) -> None:
        """Connect again, with the credentials that are valid now."""
        self._stores = {}

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"{self.origin}: a store holds connections; pickle its address instead")

    @contextmanager
    def _errors(self, key: str, *, may_begin_behind_end: bool = False) -> Iterator[None]:
        """Translate the library's errors, apart from that of a range behind the end."""
        try:
            yield
        except Exception as error:
            if not (may_begin_behind_end and "status code: 416" in str(error)):
                raise self._translate(error, key) from None

    def _translate(self, error: Exception, key: str) -> EnergonError:
        """Return our error for one of the library's."""
        return translate(error, f"{self.origin}/{key}")

    def _check(self, answer: GetResult, version: str | None, key: str) -> None:
        """Reject an answer of another version: not every server honors the condition."""
        got = info_of(answer.meta).version
        if version is not None and got is not None and got != version:
            raise changed(f"{self.origin}/{key}")

    def _open(self, *, is_long: bool = False) -> ObjectStore:
        """Return the library's store for answers of a range, or of a whole object."""
        check_process(self.origin)
        longest = BODY_SECONDS if is_long else ANSWER_SECONDS
        remaining = seconds_left(longest)
        # Each time limit needs connections of its own, so there are only a few.
        seconds = (
            longest if remaining == longest else 2.0 ** math.floor(math.log2(max(1.0, remaining)))
        )
        stores = self._stores
        if seconds not in stores:
            kind, root, endpoint, options, headers = self._arguments()
            settings = connection_settings(seconds, endpoint, headers)
            make = getattr(self._library().store, kind)
            stores[seconds] = make(root, **options, **settings)
        return stores[seconds]

    def _library(self) -> Any:
        """Return obstore.

        Raises:
            MissingExtraError: If it is not installed.
        """
        origin = self.origin
        with needs_extra("remote", f"{origin}: object stores and web servers need obstore"):
            import obstore.store
        return obstore


def connection_settings(
    seconds: float, endpoint: str, headers: Mapping[str, str]
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


def refused_redirect(url: str, headers: Mapping[str, str], address: str) -> StorageError | None:
    """Return the error for an address that redirects to one that must not be followed, if it does.

    Args:
        url: The address.
        headers: Sent with the request.
        address: The address for messages.
    """
    try:
        with ask(urllib.request.Request(url, headers=dict(headers)), address, access=""):
            return None
    except EnergonError as error:
        is_refused = isinstance(error.__cause__ or error.__context__, _RefusedRedirectError)
        return error if is_refused and isinstance(error, StorageError) else None


def read_all(answer: Any, address: str) -> bytes:
    """Return the content of an answer, within the time limit and up to `DOCUMENT_BYTES`.

    Raises:
        StorageError: If either limit is exceeded.
    """
    data = bytearray()
    while part := answer.read1(_PIECE_BYTES):
        data += part
        if len(data) > DOCUMENT_BYTES.value:
            raise StorageError(
                f"{address}: the answer has more than {DOCUMENT_BYTES.value} bytes; "
                f"{DOCUMENT_BYTES.hint}"
            )
        if not seconds_left(READ_SECONDS):
            raise StorageError(f"{address}: no answer in time", transient=True)
    return bytes(data)


@contextmanager
def ask(request: urllib.request.Request, address: str, *, access: str) -> Iterator[Any]:
    """Make a request once, and yield the answer.

    GET follows redirects; for PUT, a redirect is the answer.

    Args:
        request: The request.
        address: The address for messages, without secrets.
        access: What to do if access is denied, for messages.

    Raises:
        DatasetNotFoundError: For the status 404.
        StorageAccessError: For 401 and 403.
        StorageError: For everything else.
    """
    try:
        with _open(request, address, access) as answer:
            yield answer
    except EnergonError:
        raise
    except OSError as error:
        cause = cause_of(error)
        raise StorageError(
            f"{address}: {cause}", transient=True, unreachable=cause in UNREACHABLE
        ) from None
    except (HTTPException, ValueError) as error:
        raise StorageError(
            f"{address}: the answer is not HTTP ({type(error).__name__})", transient=True
        ) from None


def _open(request: urllib.request.Request, address: str, access: str) -> Any:
    try:
        return _opener.open(request, timeout=max(1.0, seconds_left(READ_SECONDS)))
    except _RefusedRedirectError as error:
        raise StorageError(
            f"{address}: the server redirects to {error}, which is refused; only http and https "
            "are followed"
        ) from None
    except urllib.error.HTTPError as error:
        if error.code in (307, 308):
            return error
        error.close()
        if error.code == 404:
            raise DatasetNotFoundError(f"{address}: there is no such object") from None
        if error.code in (401, 403):
            raise StorageAccessError(f"{address}: access denied, {error.code}; {access}") from None
        raise StorageError(
            f"{address}: the server answered {error.code}", transient=error.code in TRANSIENT_STATUS
        ) from None
