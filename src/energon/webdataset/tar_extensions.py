"""What tar archives say in headers beside the plain ones: PAX records, and maps of sparse files."""

from __future__ import annotations

import re
from typing import NamedTuple

from energon.errors import FormatError
from energon.formats.tar import BLOCK, MAX_EXTENSION_BYTES, pax_records

_OVERRIDES = re.compile(rb"(?:path|size|GNU\.sparse[^=]*)=")


def check_extension(size: int, origin: str, position: int) -> None:
    """Raise FormatError if an extended header at `position` has more bytes than any would."""
    if size > MAX_EXTENSION_BYTES:
        raise FormatError(
            f"{origin}: an extended header of {size} bytes at byte {position}; the file is "
            "damaged or no plain tar archive"
        )


class Overrides(NamedTuple):
    """What PAX records say of the next member; None leaves what its header says."""

    path: str | None = None
    size: int | None = None
    is_sparse: bool = False


_NOTHING = Overrides()


def pax_overrides(payload: bytes, origin: str, end: int) -> Overrides:
    """Return what PAX records say of the next member.

    Args:
        payload: The records.
        origin: What messages call the archive.
        end: Where in it the records end.

    Raises:
        FormatError: If they are malformed.
    """
    if _OVERRIDES.search(payload) is None:
        return _NOTHING
    records = pax_records(payload, origin, end)
    size = records.get("size")
    return Overrides(
        records.get("path"),
        None if size is None else int(size),
        any(name.startswith("GNU.sparse") for name in records),
    )


def sparse_bytes(window: bytes, at: int, header: bytes, size: int) -> tuple[int, int]:
    """Return how many bytes an old GNU sparse file takes, and how many its headers take.

    Its map goes on in further headers. If `window` ends before the last of them, the second
    number is that of bytes up to the first that is missing, and the first means nothing.

    Args:
        window: Bytes of the archive.
        at: Where in them the file begins.
        header: Its first header.
        size: Bytes of its content.
    """
    more, headers = header[482], BLOCK
    while more:
        headers += BLOCK
        if at + headers > len(window):
            break
        more = window[at + headers - BLOCK + 504]
    return headers + size + -size % BLOCK, headers
