"""Translate the errors of the object-store library.

Its messages contain whole URLs with signatures, and answers of servers with key ids. Only the
status, the store's code and the kind of failure are passed on.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EnergonError,
    ObjectChangedError,
    RangesNotSupportedError,
    StorageAccessError,
    StorageError,
)

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
_DENIED = frozenset({"PermissionDeniedError", "UnauthenticatedError"})
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
    (
        "InvalidContentLength",
        StorageError,
        "the Content-Length of the answer is not a number",
        False,
    ),
    ("InvalidLastModified", StorageError, "the Last-Modified of the answer is not a date", False),
    (
        "NoContentRange",
        RangesNotSupportedError,
        "the server does not say which range it has sent",
        False,
    ),
    (
        "ParseContentRange",
        RangesNotSupportedError,
        "the server declares the range that it has sent in an unknown form",
        False,
    ),
    ("UnexpectedRange", StorageError, "the server has sent a different range than requested", True),
    ("BareRedirect", StorageError, "the server redirects without saying where to", False),
    (
        "BadScheme",
        StorageError,
        "the server redirects to an address of another scheme than http and https, which is "
        "refused",
        False,
    ),
    ("NotModified {", StorageError, "the server answered 304 Not Modified, unasked", True),
)
"""Answers that the library rejects: what it says, and what that means."""


def changed(place: str) -> ObjectChangedError:
    """Return the error for an object that was replaced after it was opened."""
    return ObjectChangedError(
        f"{place}: is no longer the version that was opened; it was replaced in the meantime"
    )


class _Fault(NamedTuple):
    """What is known of an error of the library."""

    place: str
    text: str
    name: str
    """Its class."""
    status: str
    """Status of the answer with its reason, or nothing."""
    code: str
    """What the store calls it, or nothing."""
    error: Exception

    @classmethod
    def of(cls, error: Exception, place: str) -> _Fault:
        text = str(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        answered = (status[1] + status[2]).strip() if status else ""
        return cls(place, text, type(error).__name__, answered, code[1] if code else "", error)

    @property
    def is_transient(self) -> bool:
        status = self.status[:3]
        return bool(status) and (int(status) in TRANSIENT_STATUS or self.code in _TRANSIENT_CODES)

    @property
    def answer(self) -> str:
        """Status and code."""
        return " ".join(filter(None, (self.status, self.code and f"({self.code})")))

    @property
    def credentials(self) -> str:
        """How to provide credentials."""
        return _CREDENTIALS.get(self.place.partition(":")[0], "set those of your store")


def _bad_answer(seen: _Fault) -> EnergonError | None:
    for sign, kind, words, transient in _BAD_ANSWERS:
        if sign in seen.text:
            numbers = _RANGES.search(seen.text)
            found = f" ({numbers[0]})" if numbers else ""
            return kind(f"{seen.place}: {words}{found}", transient=transient)
    return None


def _connection_error(seen: _Fault) -> StorageError:
    kind = _KIND.search(seen.text)
    causes = [words for sign, words in _CAUSES.items() if sign in seen.text]
    cause = causes[0] if causes else (kind[1] if kind else seen.name)
    if _CONNECTING.search(seen.text) and "TimedOut" in seen.text:
        cause = NO_CONNECTION
    transient = kind is not None and "InvalidCertificate" not in seen.text
    transient = transient or _BAD_LISTING in seen.text
    host = _HOST.search(seen.text)
    at = f" ({host[1]})" if host and host[1] not in seen.place else ""
    return StorageError(
        f"{seen.place}: {cause}{at}", transient=transient, unreachable=cause in UNREACHABLE
    )


_MEANINGS: tuple[tuple[Callable[[_Fault], Any], Callable[[_Fault], EnergonError | None]], ...] = (
    (
        lambda seen: seen.status.startswith("405"),
        lambda seen: StorageError(f"{seen.place}: the server answered {seen.status}"),
    ),
    (
        lambda seen: seen.code in _NO_BUCKET,
        lambda seen: DatasetNotFoundError(f"{seen.place}: there is no such bucket; check its name"),
    ),
    (
        lambda seen: isinstance(seen.error, FileNotFoundError) or seen.name == "NotFoundError",
        lambda seen: DatasetNotFoundError(f"{seen.place}: there is no such object"),
    ),
    (lambda seen: seen.name == "PreconditionError", lambda seen: changed(seen.place)),
    (lambda seen: True, _bad_answer),
    (
        lambda seen: seen.name == "NotSupportedError" and "RangeNotSupported" in seen.text,
        lambda seen: RangesNotSupportedError(
            f"{seen.place}: the server returns whole files only, no ranges"
        ),
    ),
    (
        lambda seen: isinstance(seen.error, ValueError),
        lambda seen: ConfigError(
            f"{seen.place}: not a valid name of an object; {seen.text.partition(chr(10))[0]}"
        ),
    ),
    (
        lambda seen: (
            _METADATA.search(seen.text) and int(seen.status[:3] or 0) not in TRANSIENT_STATUS
        ),
        lambda seen: StorageAccessError(
            f"{seen.place}: no credentials in the environment or a profile, and this machine has "
            f"no role that provides any; {seen.credentials}"
        ),
    ),
    (
        lambda seen: (
            seen.name in _DENIED or seen.code in _ACCESS_CODES or seen.status[:3] in ("401", "403")
        ),
        lambda seen: StorageAccessError(
            f"{seen.place}: access denied, {seen.answer or seen.name}; check the credentials and "
            f"their rights: {seen.credentials}"
        ),
    ),
    (
        lambda seen: seen.status.startswith("3"),
        lambda seen: StorageError(
            f"{seen.place}: the server answered {seen.status}; redirects are followed, but not "
            "for names with [ or ]: rename the file"
        ),
    ),
    (
        lambda seen: seen.status,
        lambda seen: StorageError(
            f"{seen.place}: the server answered {seen.answer}", transient=seen.is_transient
        ),
    ),
    (lambda seen: True, _connection_error),
)
"""Conditions and the errors they become. The first that applies and is not None counts."""


def translate(error: Exception, place: str) -> EnergonError:
    """Return our error for one of the library's.

    Args:
        error: What was raised.
        place: The address for the message, without secrets.
    """
    if isinstance(error, EnergonError):
        return error
    seen = _Fault.of(error, place)
    meanings = (means(seen) for fits, means in _MEANINGS if fits(seen))
    return next(found for found in meanings if found is not None)


def cause_of(error: BaseException) -> str:
    """Return why a connection failed, without quoting the error; by default, the error's name.

    Errors of libraries carry the operating system's as their reason or cause.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _NO_ROUTE_CODES:
            return NO_ROUTE
        for kind, words in _OS_CAUSES:
            if isinstance(seen, kind):
                return words
        reason = getattr(seen, "reason", None)
        seen = reason if isinstance(reason, BaseException) else seen.__cause__ or seen.__context__
    return type(error).__name__
