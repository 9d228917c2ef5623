"""Single requests that the object-store library does not make, with our errors."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from energon.errors import DatasetNotFoundError, EnergonError, StorageAccessError, StorageError
from energon.io.object_backend import READ_SECONDS
from energon.io.object_errors import TRANSIENT_STATUS, cause_of


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
        raise StorageError(f"{place}: {cause_of(error)}", transient=True) from None


def _open(request: urllib.request.Request, place: str, access: str) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=READ_SECONDS)
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
