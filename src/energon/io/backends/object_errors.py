"""Say in our words what the object-store library reports.

Its messages hold whole URLs, with signatures, and answers of servers, with key ids. Nothing of
that is passed on but the status, the code that the store gives, and the kind of failure.
"""

from __future__ import annotations

import re
import socket

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
"""Where machines of clouds are asked for the credentials of their role."""
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_BAD_LISTING = "InvalidListResponse"
_CAUSES = {
    _BAD_LISTING: "the listing is cut off or damaged",
    "TooManyRedirects": "the server redirects again and again",
    "ContentLengthInvalid": "the Content-Length of the answer is no number",
    "Parse(": "the answer is no HTTP",
    "dns error": "the host name cannot be resolved",
    "ConnectionRefused": "connection refused",
    "ConnectionReset": "connection reset",
    "IncompleteBody": "the answer ended early",
    "IncompleteMessage": "the connection was closed before an answer",
    "InvalidCertificate": "the certificate of the server is not trusted",
    "UnexpectedEof": "connection closed",
    "TimedOut": "no answer in time",
}
_OS_CAUSES: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, "the host name cannot be resolved"),
    (ConnectionRefusedError, "connection refused"),
    (ConnectionError, "connection reset"),
    (TimeoutError, "no answer in time"),
)
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
"""What a server may answer differently the next time."""
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
"""Where stores take credentials from, by scheme."""


_RANGES = re.compile(r"Requested \d+\.\.\d+, got \d+\.\.\d+")
_BAD_ANSWERS: tuple[tuple[str, type[StorageError], str, bool], ...] = (
    (
        "MissingContentLength",
        StorageError,
        "the answer has no Content-Length, as servers send what they compress or make meanwhile; "
        "have the file served as it is",
        False,
    ),
    ("InvalidContentLength", StorageError, "the Content-Length of the answer is no number", False),
    ("InvalidLastModified", StorageError, "the Last-Modified of the answer is no date", False),
    (
        "NoContentRange",
        RangesNotSupportedError,
        "the server does not say which range it has sent",
        False,
    ),
    (
        "ParseContentRange",
        RangesNotSupportedError,
        "the server says in no known way which range it has sent",
        False,
    ),
    ("UnexpectedRange", StorageError, "the server has sent another range than was asked for", True),
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
"""What the library says of answers that it does not accept, and what that means."""


def translate(error: Exception, place: str) -> EnergonError:
    """Return our error for one of the library's.

    Args:
        error: What was raised.
        place: The address for the message, without secrets.
    """
    if isinstance(error, EnergonError):
        return error
    text = str(error)
    name = type(error).__name__
    if _status(text)[0].startswith("405"):
        return StorageError(f"{place}: the server answered {_status(text)[0]}")
    if isinstance(error, FileNotFoundError) or name == "NotFoundError":
        what = "bucket; check its name" if _status(text)[1] in _NO_BUCKET else "object"
        return DatasetNotFoundError(f"{place}: there is no such {what}")
    if name == "PreconditionError":
        return changed(place)
    for sign, kind, words, transient in _BAD_ANSWERS:
        if sign in text:
            numbers = _RANGES.search(text)
            said = f" ({numbers[0]})" if numbers else ""
            return kind(f"{place}: {words}{said}", transient=transient)
    if name == "NotSupportedError" and "RangeNotSupported" in text:
        return RangesNotSupportedError(f"{place}: the server gives whole files only, no ranges")
    if isinstance(error, ValueError):
        return ConfigError(f"{place}: not a name that object stores have; {_first_line(text)}")
    status, code = _status(text)
    if _METADATA.search(text) and not (status and int(status[:3]) in TRANSIENT_STATUS):
        return StorageAccessError(
            f"{place}: no credentials in the environment or a profile, and this machine has no "
            f"role that gives some; {_credentials(place)}"
        )
    if code in _NO_BUCKET:
        return DatasetNotFoundError(f"{place}: there is no such bucket; check its name")
    said = " ".join(filter(None, (status, code and f"({code})")))
    denied = name in ("PermissionDeniedError", "UnauthenticatedError")
    if denied or code in _ACCESS_CODES or status[:3] in ("401", "403"):
        return StorageAccessError(
            f"{place}: access denied, {said or name}; check the credentials and their rights: "
            f"{_credentials(place)}"
        )
    if status.startswith("3"):
        return StorageError(
            f"{place}: the server answered {status}; redirects are followed, but not for names "
            "with [ or ]: rename the file"
        )
    if status:
        transient = int(status[:3]) in TRANSIENT_STATUS or code in _TRANSIENT_CODES
        return StorageError(f"{place}: the server answered {said}", transient=transient)
    return _connection_error(text, name, place)


def _credentials(place: str) -> str:
    scheme = place.partition(":")[0]
    return _CREDENTIALS.get(scheme, "set those of your store")


def changed(place: str) -> ObjectChangedError:
    """Return the error for an object that is no longer the one that was opened."""
    return ObjectChangedError(
        f"{place}: is no longer the version that was opened; it was replaced meanwhile"
    )


def cause_of(error: BaseException) -> str:
    """Return in our words why a connection failed, without what the error says, or else its name.

    Errors of libraries hold the one of the operating system as their reason or cause.
    """
    seen: BaseException | None = error
    while seen is not None:
        for kind, words in _OS_CAUSES:
            if isinstance(seen, kind):
                return words
        reason = getattr(seen, "reason", None)
        seen = reason if isinstance(reason, BaseException) else seen.__cause__ or seen.__context__
    return type(error).__name__


def _status(text: str) -> tuple[str, str]:
    status, code = _STATUS.search(text), _CODE.search(text)
    return (
        (status[1] + status[2]).strip() if status else "",
        code[1] if code else "",
    )


def _connection_error(text: str, name: str, place: str) -> StorageError:
    kind = _KIND.search(text)
    causes = [words for sign, words in _CAUSES.items() if sign in text]
    cause = causes[0] if causes else (kind[1] if kind else name)
    transient = kind is not None and "InvalidCertificate" not in text
    transient = transient or _BAD_LISTING in text
    return StorageError(f"{place}: {cause}", transient=transient)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
