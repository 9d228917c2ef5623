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
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from energon.errors import FormatError, TruncatedError
from energon.formats.tar_bulk import have_checksums
from energon.formats.tar_window import BLOCK as BLOCK
from energon.formats.tar_window import ReadInto, TarWindow
from energon.limits import TAR_HEADER_BYTES, TAR_NAME_BYTES, TAR_RECORDS

MIN_TOGETHER = 64
"""Fewer checksums are compared one by one."""

ReadAt = Callable[[int, int], bytes]
"""`read(offset, size)` returns `size` bytes, or fewer at the end of the file."""

_ZEROS = bytes(BLOCK)
_REGULAR = b"0\x007"
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_HIDDEN = re.compile(r"__[^/]*__(?:$|/)")
_ADLER = 65521
_RECORD = re.compile(rb"([1-9][0-9]{0,8}) ([^=\n]*+)=")
_DECIMAL = re.compile(rb"[0-9]{1,18}")


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
                    name = long_name(payload, self.origin, self.position)
                    continue
                overrides = pax_overrides(payload, self.origin, self.position)
                name = name if overrides.path is None else overrides.path
                length = length if overrides.size is None else overrides.size
                if not overrides.is_sparse:
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
        check_extension(length, self.origin, self.position)
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
    field = header[124:136]
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    found = _OCTAL.fullmatch(field)
    if found is not None:
        return int(found[1] or b"0", 8)
    raise FormatError(
        f"{origin}: no tar header at byte {pos} (its size field is {field!r}); the file is damaged "
        "or no plain tar archive"
    )


def verify_checksum(header: bytes, origin: str, pos: int) -> None:
    """Check that the checksum of the header at byte `pos` fits, as a whole header has one.

    Raises:
        FormatError: If it does not.
    """
    stated, total = _stated_sum(header[148:156]), _sum(header)
    # Some old programs added up signed bytes.
    if stated != total and (
        stated is None
        or stated != (total - 256 * sum(b > 127 for b in header[:148] + header[156:])) % _ADLER
    ):
        raise FormatError(
            f"{origin}: no tar header at byte {pos} (its checksum does not fit); the file is "
            "damaged or no plain tar archive"
        )


def verify_checksums(window: bytes, headers: list[int], origin: str, pos: int) -> None:
    """Check headers that begin at multiples of 512 in a window, itself at byte `pos`.

    Raises:
        FormatError: If the checksum of one does not fit.
    """
    if len(headers) < MIN_TOGETHER:
        for at in headers:
            if _stated_sum(window[at + 148 : at + 156]) != _sum(window[at : at + BLOCK]):
                verify_checksum(window[at : at + BLOCK], origin, pos + at)
        return
    blocks = np.frombuffer(window, np.uint8, len(window) // BLOCK * BLOCK).reshape(-1, BLOCK)
    places = np.array(headers)
    for at in places[~have_checksums(blocks[places // BLOCK])].tolist():
        verify_checksum(window[at : at + BLOCK], origin, pos + at)


def _sum(header: bytes) -> int:
    """Return the sum of all bytes: Adler-32, modulo a prime, is much faster than a loop."""
    return zlib.adler32(header, 0) & 0xFFFF


@lru_cache(maxsize=4096)
def _stated_sum(field: bytes) -> int | None:
    """Return the sum of a header that has this checksum field; None if that is no number."""
    found = _OCTAL.fullmatch(field)
    # The checksum is made with eight spaces in the place of the field.
    return None if found is None else (int(found[1] or b"0", 8) - 8 * 32 + sum(field)) % _ADLER


class Overrides(NamedTuple):
    """What extended headers say of the next member; None leaves what its own header says."""

    path: str | None = None
    size: int | None = None
    is_sparse: bool = False


def check_extension(length: int, origin: str, pos: int) -> None:
    """Raise FormatError if an extended header with content at byte `pos` claims too much."""
    if length > TAR_HEADER_BYTES.value:
        raise FormatError(
            f"{origin}: an extended header of {length} bytes before byte {pos}, "
            f"{TAR_HEADER_BYTES.value} are allowed; the file is damaged or no plain tar archive; "
            f"{TAR_HEADER_BYTES.hint}"
        )


def long_name(payload: bytes, origin: str, pos: int) -> str:
    """Return the name in an extended header of GNU tar, which ends before byte `pos`.

    Raises:
        FormatError: If it is longer than the limits allow.
    """
    return _name(payload.partition(b"\0")[0], origin, pos)


def _name(name: bytes, origin: str, pos: int) -> str:
    if len(name) > TAR_NAME_BYTES.value:
        raise FormatError(
            f"{origin}: a name of {len(name)} bytes before byte {pos}, {TAR_NAME_BYTES.value} are "
            f"allowed; the file is damaged; {TAR_NAME_BYTES.hint}"
        )
    return name.decode("utf-8", "surrogateescape")


def pax_overrides(payload: bytes, origin: str, pos: int) -> Overrides:
    """Return what the records of an extended header say, which ends before byte `pos`.

    Raises:
        FormatError: If they are malformed.
    """
    if not any(key in payload for key in (b"path=", b"size=", b"GNU.sparse")):
        return Overrides()
    path, size, is_sparse = None, None, False
    at, count, end, most = 0, 0, len(payload), TAR_RECORDS.value
    while at < end and payload[at]:
        found = _RECORD.match(payload, at)
        stop = at + int(found[1]) if found is not None else 0
        count += 1
        if found is None or not found.end() < stop <= end or payload[stop - 1] != 0x0A:
            raise _malformed(
                origin, pos, f"{payload[at : at + 20]!r} is no record; the file is damaged"
            )
        if count > most:
            raise _malformed(origin, pos, f"more than {most} records; {TAR_RECORDS.hint}")
        key = found[2]
        if key == b"path":
            path = payload[found.end() : stop - 1]
        elif key == b"size":
            size = payload[found.end() : stop - 1]
        elif key.startswith(b"GNU.sparse"):
            is_sparse = True
        at = stop
    if path is not None and b"\0" in path:
        raise _malformed(origin, pos, "a name has a zero byte; the file is damaged")
    if size is not None and _DECIMAL.fullmatch(size) is None:
        raise _malformed(origin, pos, f"{size[:40]!r} is no size; the file is damaged")
    return Overrides(
        None if path is None else _name(path, origin, pos),
        None if size is None else int(size),
        is_sparse,
    )


def _malformed(origin: str, pos: int, what: str) -> FormatError:
    return FormatError(f"{origin}: malformed PAX header before byte {pos}: {what}")
