"""What a row of tar headers means. No I/O in here.

The parser is given blocks and says where the next ones begin: a header, the content of an
extended header, or the rest of the map of a sparse file. Whatever comes before the header of a
regular file belongs to that file. Links, folders, devices and sparse files are no parts of
samples and are passed over. Archives that were joined with `cat` are read through to the end of
the last.

    parser = TarParser("000.tar")
    member = parser.take(data[parser.position : parser.position + parser.wanted])

`energon.formats.tar.scan` and `energon.formats.tar.stream` drive it. Both take most plain
headers, of which a whole window can be understood at once, past it.
"""

from __future__ import annotations

from typing import NamedTuple

from energon.errors import TruncatedError
from energon.formats.tar.headers import (
    BLOCK,
    check_extension,
    long_name,
    member_name,
    member_size,
    padded_size,
    pax_overrides,
    verify_checksum,
)

_ZEROS = bytes(BLOCK)
_REGULAR = b"0\x007"
_NO_CONTENT = b"123456"
_CUT_OFF = "the archive is cut off, restore or write it again"


class Member(NamedTuple):
    """A regular file in a tar archive."""

    name: str
    header_offset: int
    """Where its first header begins, extended ones included."""
    offset: int
    """Where its content begins."""
    size: int
    """Bytes of content."""

    @property
    def end(self) -> int:
        """Where its last block ends."""
        return self.offset + padded_size(self.size)


class TarParser:
    """A place in an archive that moves from header to header.

    Args:
        origin: What messages call the archive.
        position: Where the first header begins.
    """

    def __init__(self, origin: str, *, position: int = 0) -> None:
        self.origin = origin
        self.position = position
        """Where the next bytes begin. May be moved to any other header after a member."""
        self.wanted = BLOCK
        """How many bytes are needed there."""
        self.ended = False
        """Whether the end marker has come, and nothing after it."""
        self.num_passed_over = 0
        """How many links, devices and sparse files were left out."""
        self._first = -1
        self._extension = b""
        self._map_before = -1
        self._begin()

    @property
    def is_within(self) -> bool:
        """Whether headers have come whose file is still to come."""
        return self._extended >= 0 or bool(self._extension) or self._map_before >= 0

    def take(self, data: bytes) -> Member | None:
        """Take the `wanted` bytes at `position`; return the file if they complete its headers.

        The position is behind the content of the file then.

        Raises:
            FormatError: If this is not what an archive goes on with.
        """
        if self._extension:
            self._take_extension(data)
        elif self._map_before >= 0:
            self._take_map(data)
        elif data[0] or data != _ZEROS:
            return self._take_header(data)
        else:
            self._take_end_marker()
        return None

    def finish(self, end: int) -> None:
        """Check that an archive may stop at byte `end`, with or without an end marker.

        Raises:
            TruncatedError: If it may not.
        """
        missing = self.position - end
        if missing > 0:
            raise TruncatedError(
                f"{self.origin}: ends at byte {end}, {missing} bytes too early; {_CUT_OFF}"
            )
        if missing < 0 or self.is_within:
            raise TruncatedError(f"{self.origin}: ends at byte {end} within a member; {_CUT_OFF}")

    def check_end(self, end: int) -> None:
        """Check that the end marker was the last thing before byte `end`.

        Raises:
            TruncatedError: If it was not.
        """
        if not self.ended:
            raise TruncatedError(
                f"{self.origin}: ends at byte {end} without the end marker of a tar archive, so "
                f"members may be missing; {_CUT_OFF}"
            )

    def _begin(self) -> None:
        """Forget what extended headers said."""
        self._name: str | None = None
        self._size: int | None = None
        self._is_sparse = False
        self._extended = -1
        self._first = -1

    def _take_header(self, header: bytes) -> Member | None:
        at = self.position
        verify_checksum(header, self.origin, at)
        size = member_size(header, self.origin, at)
        self.ended = False
        self.position = at + BLOCK
        kind = header[156:157]
        if kind in b"xXLgK":
            self._first = at if self._first < 0 else self._first
            if kind in b"gK":
                # Of no meaning for names and sizes. The second is about the next member, though.
                self._extended = max(self._extended, at if kind == b"K" else -1)
                self.position += padded_size(size)
                return None
            check_extension(size, self.origin, self.position)
            self._extended = max(self._extended, at)
            self._extension, self.wanted = kind, size
            if not size:
                self._take_extension(b"")
            return None
        size = size if self._size is None else self._size
        if kind in _REGULAR and not self._is_sparse:
            name = member_name(header) if self._name is None else self._name
            first = at if self._first < 0 else self._first
            self._begin()
            member = Member(name, first, self.position, size)
            self.position = member.end
            return member
        self.num_passed_over += kind != b"5"
        if kind == b"S" and header[482]:
            self._map_before = size
            return None
        self._begin()
        self.position += 0 if kind in _NO_CONTENT else padded_size(size)
        return None

    def _take_extension(self, payload: bytes) -> None:
        """Note what an extended header says of the file after it."""
        end = self.position + len(payload)
        if self._extension == b"L":
            self._name = long_name(payload, self.origin, end)
        else:
            overrides = pax_overrides(payload, self.origin, end)
            self._name = self._name if overrides.path is None else overrides.path
            self._size = self._size if overrides.size is None else overrides.size
            self._is_sparse |= overrides.is_sparse
        self.position += padded_size(len(payload))
        self._extension, self.wanted = b"", BLOCK

    def _take_map(self, block: bytes) -> None:
        """Take one more block of the map of a sparse file, which says whether there are more."""
        self.position += BLOCK
        if not block[504]:
            self.position += padded_size(self._map_before)
            self._map_before = -1
            self._begin()

    def _take_end_marker(self) -> None:
        if self._extended >= 0:
            raise TruncatedError(
                f"{self.origin}: the extended header at byte {self._extended} is followed by the "
                f"end marker, expected the member that it describes; {_CUT_OFF}"
            )
        self._begin()
        self.ended = True
        self.position += BLOCK
