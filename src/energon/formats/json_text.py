"""Read JSON documents: within the limits, and with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from energon.errors import FormatError
from energon.limits import DOCUMENT_DEPTH, check_document


def parse_json(text: str | bytes, *, origin: str, hint: str = "") -> Any:
    """Return the value that a JSON document describes.

    Args:
        text: The document.
        origin: Its name in messages.
        hint: Appended to messages.

    Raises:
        FormatError: If it is not JSON, or exceeds the limits.
    """
    more = f"; {hint}" if hint else ""
    check_document(len(text), origin)
    try:
        # Of bytes, Python skips the byte order mark itself.
        value = json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except RecursionError:
        raise _too_deep(origin) from None
    except ValueError as error:
        raise FormatError(f"{origin}: is not JSON: {error}{more}") from error
    marks: tuple[Any, Any] = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    # Most documents have few brackets, which need not be followed.
    if sum(map(text.count, marks)) > DOCUMENT_DEPTH.value:
        _check_depth(value, origin)
    return value


def _check_depth(value: Any, origin: str) -> None:
    ahead: list[Iterable[Any]] = [iter((value,))]
    while ahead:
        for each in ahead[-1]:
            if isinstance(each, dict | list):
                ahead.append(iter(each.values() if isinstance(each, dict) else each))
                break
        else:
            ahead.pop()
        # The outermost is not part of the document.
        if len(ahead) - 1 > DOCUMENT_DEPTH.value:
            raise _too_deep(origin)


def _too_deep(origin: str) -> FormatError:
    return FormatError(
        f"{origin}: nested deeper than {DOCUMENT_DEPTH.value} levels; {DOCUMENT_DEPTH.hint}"
    )
