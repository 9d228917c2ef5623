"""Single requests that the object-store library does not make, with our errors."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.parse import urljoin, urlsplit

from energon.errors import DatasetNotFoundError, EnergonError, StorageAccessError, StorageError
from energon.io.backends.base import seconds_left
from energon.io.backends.object_backend import READ_SECONDS
from energon.io.backends.object_errors import REFUSED, TRANSIENT_STATUS, cause_of
from energon.limits import DOCUMENT_BYTES

_PIECE_BYTES = 1 << 16


class _RefusedRedirectError(Exception):
    """An answer redirects to where nobody should follow it."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to web servers only, and tells other hosts no secrets."""

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


_opener = urllib.request.build_opener(_Redirects)


def refused_redirect(url: str, headers: Mapping[str, str], place: str) -> StorageError | None:
    """Return the error for an address that redirects to where it cannot be followed, if it does.

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
        StorageError: If it takes longer, or there is more.
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
    """Make a request once; yields the answer.

    GET follows redirects; for PUT, a redirect is the answer.

    Args:
        request: What to ask.
        place: The address for messages, without secrets.
        access: For messages, what to do if access is denied.

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
        raise StorageError(f"{place}: {cause}", transient=True, refused=cause == REFUSED) from None
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
            raise DatasetNotFoundError(f"{place}: there is nothing of that name") from None
        if error.code in (401, 403):
            raise StorageAccessError(f"{place}: access denied, {error.code}; {access}") from None
        raise StorageError(
            f"{place}: the server answered {error.code}", transient=error.code in TRANSIENT_STATUS
        ) from None
