"""What tar archives say in headers beside the plain ones: maps of sparse files."""

from __future__ import annotations

from energon.formats.tar import BLOCK


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
