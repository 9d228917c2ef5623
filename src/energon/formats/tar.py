"""Find the members of tar archives by their headers.

Reads ustar, GNU (long names, base-256 sizes) and PAX archives (POSIX.1-2001). Only headers are
looked at: small members are parsed out of large blocks, content of large ones is skipped.
Links, folders, devices and sparse files are no parts of samples and are passed over.
Archives that were joined with `cat` are read through to the end of the last.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from energon.errors import FormatError, TruncatedError
from energon.formats.tar_window import BLOCK as BLOCK
from energon.formats.tar_window import ReadInto, TarWindow

MAX_EXTENSION_BYTES = 16 << 20
"""Largest extended header that is believed."""

ReadAt = Callable[[int, int], bytes]
"""`read(offset, size)` returns `size` bytes, or fewer at the end of the file."""

_ZEROS = bytes(BLOCK)
_REGULAR = b"0\x007"
_HIDDEN = re.compile(r"__[^/]*__(?:$|/)")
_ADLER = 65521


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
        return self.offset + (self.size + BLOCK - 1) // BLOCK * BLOCK


def split_name(name: str) -> tuple[str, str] | None:
    """Return the key and the part that a member's name stands for, or None for no part.

    The key is the path up to the first dot of the base name. Names without one, with an empty
    base name before it, and below a folder like `__this__` belong to no sample.

    Example:
        >>> split_name("a.b/0001.left.jpg")
        ('a.b/0001', 'left.jpg')
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot <= base or (name.startswith("__") and _HIDDEN.match(name)):
        return None
    return name[:dot], name[dot + 1 :]


def iter_members(read: ReadAt, size: int, *, origin: str, strict: bool = True) -> Iterator[Member]:
    """Yield the regular files of an archive.

    Args:
        read: Gives bytes of the archive.
        size: Bytes of the archive.
        origin: What messages call it.
        strict: Whether an archive without an end marker is an error; it may have lost members.

    Raises:
        TruncatedError: If a member or a header is cut off, or the end marker is missing.
        FormatError: If there is something else where a header should be.
    """

    def read_into(offset: int, buffer: memoryview) -> int:
        data = read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    walk = TarWalk(read_into, size, origin=origin)
    while (member := walk.next()) is not None:
        yield member
    if strict:
        walk.check_end()


class TarWalk:
    """A place in an archive that moves from member to member.

    Args:
        read_into: Fills a buffer with the bytes from an offset on, and returns how many.
        size: Bytes of the archive.
        origin: What messages call it.
    """

    def __init__(self, read_into: ReadInto, size: int, *, origin: str) -> None:
        self.window = TarWindow(read_into, size, origin=origin)
        self.size = size
        self.origin = origin
        self.position = 0
        """Where the next header is expected. May be moved to any other header."""
        self._ended = False

    def next(self) -> Member | None:
        """Return the next regular file, or None at the end of the archive.

        Raises:
            TruncatedError: If a member or a header is cut off.
            FormatError: If there is something else where a header should be.
        """
        name: str | None = None
        length: int | None = None
        first = -1
        while (header := self._header()) is not None:
            at = self.position - BLOCK
            first = at if first < 0 else first
            kind = header[156:157]
            stated = member_size(header, self.origin, at)
            if kind in _REGULAR:
                name = member_name(header) if name is None else name
                member = Member(name, first, self.position, stated if length is None else length)
                self._move_past(member)
                return member
            if kind in b"xXL":
                payload = self._extension(stated)
                if kind == b"L":
                    name = payload.rstrip(b"\0").decode("utf-8", "surrogateescape")
                    continue
                records = pax_records(payload, self.origin, self.position)
                name = records.get("path", name)
                length = int(records["size"]) if "size" in records else length
                if not any(key.startswith("GNU.sparse") for key in records):
                    continue
                # The file that follows is sparse: its content is not what it seems to be.
                self._skip_special(self._header() or _ZEROS, length)
            elif kind in b"Kg":
                self._skip_content(stated)
                continue
            else:
                self._skip_special(header, length)
            name, length, first = None, None, -1
        return None

    def check_end(self) -> None:
        """Check that the archive ends with its end marker, after `next` returned None.

        Raises:
            TruncatedError: If it does not.
        """
        if not self._ended:
            raise TruncatedError(
                f"{self.origin}: ends at byte {self.size} without the end marker of a tar archive; "
                "members may be missing, restore or write it again"
            )

    def _header(self) -> bytes | None:
        """Return the next header that is not empty and move behind it; None at the end."""
        while True:
            header = self.window.block(self.position)
            if header is None:
                return None
            if header[0] or header != _ZEROS:
                break
            self._ended = True
            self.position += BLOCK
        verify_checksum(header, self.origin, self.position)
        self._ended = False
        self.position += BLOCK
        return header

    def _move_past(self, member: Member) -> None:
        missing = member.offset + member.size - self.size
        if missing > 0:
            raise TruncatedError(
                f"{self.origin}: {member.name!r} at byte {member.header_offset} has {member.size} "
                f"bytes, but the archive ends {missing} bytes too early; restore or write it again"
            )
        self.position = member.end

    def _extension(self, length: int) -> bytes:
        if length > MAX_EXTENSION_BYTES:
            raise FormatError(
                f"{self.origin}: an extended header of {length} bytes before byte "
                f"{self.position}, where names take {MAX_EXTENSION_BYTES} at most; the file is "
                "damaged or no plain tar archive"
            )
        payload = self.window.read(self.position, length)
        self._skip_content(length)
        return payload

    def _skip_special(self, header: bytes, length: int | None) -> None:
        """Move past what follows the header of something that is no plain file."""
        kind = header[156:157]
        more = kind == b"S" and header[482]
        while more:
            block = self.window.block(self.position)
            more = block is not None and block[504]
            self.position += BLOCK
        if kind not in b"123456":
            self._skip_content(
                member_size(header, self.origin, self.position) if length is None else length
            )

    def _skip_content(self, length: int) -> None:
        self.position += (length + BLOCK - 1) // BLOCK * BLOCK
        if self.position > self.size:
            raise TruncatedError(
                f"{self.origin}: ends at byte {self.size} within an extended header or a special "
                "member; restore or write it again"
            )


def member_name(header: bytes) -> str:
    """Return the name that a header gives, which an extended header before it may replace."""
    name = header[:100].partition(b"\0")[0]
    # GNU tar uses the place of the prefix for other things, and says so in its magic.
    if header[345] and header[257:263] == b"ustar\0":
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def member_size(header: bytes, origin: str, pos: int) -> int:
    """Return how many bytes of content follow the header at byte `pos`.

    Raises:
        FormatError: If its size field is no number.
    """
    try:
        return int(header[124:135], 8)
    except ValueError:
        pass
    field = header[124:136]
    if field[0] in (0x80, 0xFF):
        size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
        if size >= 0:
            return size
    text = field.strip(b" \0")
    if re.fullmatch(rb"[0-7]*", text):
        return int(text or b"0", 8)
    raise FormatError(
        f"{origin}: no tar header at byte {pos} (its size field is {field!r}); the file is damaged "
        "or no plain tar archive"
    )


def verify_checksum(header: bytes, origin: str, pos: int) -> None:
    """Check that the checksum of the header at byte `pos` fits, as a whole header has one.

    Raises:
        FormatError: If it does not.
    """
    field = header[148:156]
    stated = field.strip(b" \0")
    if stated.isdigit() and b"8" not in stated and b"9" not in stated:
        number = int(stated, 8)
        # Adler-32 sums bytes modulo a prime, much faster than a loop could.
        total = (zlib.adler32(header) & 0xFFFF) - 1 - sum(field) + 8 * 32
        if (total - number) % _ADLER == 0:
            return
        # Some old programs added up signed bytes.
        signed = total - 256 * sum(byte > 127 for byte in header)
        if (signed - number) % _ADLER == 0:
            return
    raise FormatError(
        f"{origin}: no tar header at byte {pos} (its checksum does not fit); the file is "
        "damaged or no plain tar archive"
    )


def pax_records(payload: bytes, origin: str, pos: int) -> dict[str, str]:
    """Return the records of an extended header that ends before byte `pos`.

    Raises:
        FormatError: If they are malformed.
    """
    records: dict[str, str] = {}
    while payload and payload[0]:
        digits, _, _ = payload.partition(b" ")
        if not digits.isdigit() or not len(digits) < int(digits) <= len(payload):
            raise FormatError(
                f"{origin}: malformed PAX record before byte {pos}; the file is damaged"
            )
        record, payload = payload[: int(digits)], payload[int(digits) :]
        key, _, value = record[len(digits) + 1 : -1].partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
    return records
