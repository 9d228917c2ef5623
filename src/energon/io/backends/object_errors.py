"""Translate the errors of the object-store library.

Its messages contain whole URLs with signatures, and answers of servers with key ids. Only the
status, the store's code and the kind of failure are passed on.
"""

from __future__ import annotations

import errno
import re
import socket
from typing import NamedTuple

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


def changed(place: str) -> ObjectChangedError:
    """Return the error for an object that was replaced after it was opened."""
    return ObjectChangedError(
        f"{place}: is no longer the version that was opened; it was replaced in the meantime"
    )


class _Fault(NamedTuple):
    """The properties of an error of the library."""

    place: str
    text: str
    name: str
    """Its class."""
    status: str
    """Status of the answer with its reason, or nothing."""
    code: str
    """The code of the store, or nothing."""
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


def _bad_answer(fault: _Fault) -> EnergonError | None:
    for sign, kind, words, transient in _BAD_ANSWERS:
        if sign in fault.text:
            numbers = _RANGES.search(fault.text)
            ranges = f" ({numbers[0]})" if numbers else ""
            return kind(f"{fault.place}: {words}{ranges}", transient=transient)
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
    at = f" ({host[1]})" if host and host[1] not in fault.place else ""
    return StorageError(
        f"{fault.place}: {cause}{at}", transient=transient, unreachable=cause in UNREACHABLE
    )


def translate(error: Exception, place: str) -> EnergonError:
    """Return our error for one of the library's.

    Args:
        error: The error raised by the library.
        place: The address for the message, without secrets.
    """
    if isinstance(error, EnergonError):
        return error
    fault = _Fault.of(error, place)
    if fault.status.startswith("405"):
        return StorageError(f"{place}: the server answered {fault.status}")
    if fault.code in _NO_BUCKET:
        return DatasetNotFoundError(f"{place}: there is no such bucket; check its name")
    if isinstance(error, FileNotFoundError) or fault.name == "NotFoundError":
        return DatasetNotFoundError(f"{place}: there is no such object")
    if fault.name == "PreconditionError":
        return changed(place)
    return _bad_answer(fault) or _refusal(fault) or _connection_error(fault)


def _refusal(fault: _Fault) -> EnergonError | None:
    """Return the error for a request that was refused, by the library or the server."""
    place, status = fault.place, fault.status
    if fault.name == "NotSupportedError" and "RangeNotSupported" in fault.text:
        return RangesNotSupportedError(f"{place}: the server returns whole files only, no ranges")
    if isinstance(fault.error, ValueError):
        reason = fault.text.partition("\n")[0]
        return ConfigError(f"{place}: not a valid name of an object; {reason}")
    if _METADATA.search(fault.text) and int(status[:3] or 0) not in TRANSIENT_STATUS:
        return StorageAccessError(
            f"{place}: no credentials in the environment or a profile, and this machine has no "
            f"role that provides any; {fault.credentials}"
        )
    if fault.name in _DENIED or fault.code in _ACCESS_CODES or status[:3] in ("401", "403"):
        return StorageAccessError(
            f"{place}: access denied, {fault.answer or fault.name}; check the credentials and "
            f"their rights: {fault.credentials}"
        )
    if status.startswith("3"):
        return StorageError(
            f"{place}: the server answered {status}; redirects are followed, but not for names "
            "with [ or ]: rename the file"
        )
    if status:
        return StorageError(
            f"{place}: the server answered {fault.answer}", transient=fault.is_transient
        )
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
