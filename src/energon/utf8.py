"""Text of files that users have."""

from __future__ import annotations

from energon.errors import FormatError


def decode_utf8(data: bytes, *, origin: str) -> str:
    """Return the text of a file.

    Args:
        data: All that is in it.
        origin: Its name in messages.

    Raises:
        FormatError: If it is not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FormatError(
            f"{origin}:{line}: found {data[error.start : error.end]!r}, expected text in UTF-8; "
            "the file is damaged or of another encoding, restore it or save it as UTF-8"
        ) from error
