"""Write tar archives in the ustar format: the same names and contents give the same bytes.

Unless a program asks for others, owner, mode and date are always the same, so that a shard is a
function of its samples. Names of more than 100 bytes go into the prefix field where they can be cut
at a slash; only what does not fit, and sizes from 8 GiB on, get an extended header (PAX,
POSIX.1-2001).
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Protocol

from energon.errors import ConfigError
from energon.formats.tar.headers import BLOCK, END_MARKER_BYTES
from energon.local_file import open_binary

COPY_BYTES = 4 << 20

END = bytes(END_MARKER_BYTES)
"""What ends an archive."""
MAX_USTAR_SIZE = 8**11 - 1

_OWNER = b"0000644\0" + b"0000000\0" * 2
_AFTER_SIZE = b"00000000000\0"
_MAGIC = b"ustar\x0000"
_DEVICES = b"0000000\0" * 2
_REST = bytes(100) + _MAGIC + bytes(64) + _DEVICES
_NO_PREFIX = bytes(155 + 12)
# The checksum field itself counts as eight spaces.
_FIXED_SUM = sum(_OWNER) + sum(_AFTER_SIZE) + 8 * 32 + sum(_REST)
_EXTENDED_NAME = b"PaxHeader"
_MODE, _MTIME = slice(100, 108), slice(136, 148)
_CHECKSUM = slice(148, 156)
_USER, _GROUP = slice(265, 297), slice(297, 329)


def encode_header(name: str, size: int) -> bytes:
    """Return the header, or headers, of a regular file, a multiple of 512 bytes.

    Names are UTF-8; bytes that are not may be given as surrogates.
    """
    encoded = name.encode("utf-8", "surrogateescape")
    if len(encoded) <= 100 and size <= MAX_USTAR_SIZE:
        return _ustar(encoded, b"", size, b"0")
    prefix, short = _cut(encoded)
    records = b""
    if short is None:
        records += _record(b"path", encoded)
        prefix, short = b"", encoded[:100]
    if size > MAX_USTAR_SIZE:
        records += _record(b"size", b"%d" % size)
    extended = b""
    if records:
        extended = _ustar(_EXTENDED_NAME, b"", len(records), b"x") + padded(records)
    return extended + _ustar(short, prefix, min(size, MAX_USTAR_SIZE), b"0")


def padded(content: bytes) -> bytes:
    """Return `content`, padded to whole blocks."""
    return content + bytes(-len(content) % BLOCK)


def _ustar(name: bytes, prefix: bytes, size: int, kind: bytes) -> bytes:
    digits = b"%011o\0" % size
    checksum = _FIXED_SUM + sum(name) + sum(prefix) + sum(digits) + kind[0]
    rest = prefix.ljust(155 + 12, b"\0") if prefix else _NO_PREFIX
    return b"".join(
        (
            name.ljust(100, b"\0"),
            _OWNER,
            digits,
            _AFTER_SIZE,
            b"%06o\0 " % checksum,
            kind,
            _REST,
            rest,
        )
    )


def _cut(name: bytes) -> tuple[bytes, bytes | None]:
    """Return the prefix and the rest of a name; None as the rest if it cannot be cut."""
    if len(name) <= 100:
        return b"", name
    # The rest has at most 100 bytes and the prefix 155, without the slash between them.
    slash = name.find(b"/", len(name) - 101, 156)
    if slash < 1 or slash == len(name) - 1:
        return b"", None
    return name[:slash], name[slash + 1 :]


def _record(key: bytes, value: bytes) -> bytes:
    """Return a PAX record, which begins with its own length."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + len(str(len(rest)))
    if len(str(length)) != len(str(len(rest))):
        length = len(rest) + len(str(length))
    return b"%d" % length + rest


class MemberAttributes:
    """The attributes that all members share.

    Args:
        user: Name of the owner.
        group: Name of the group.
        mode: Permissions.
        mtime: Seconds since 1970.

    Raises:
        ConfigError: If a name is too long, or a number too large.
    """

    def __init__(self, user: str, group: str, mode: int, mtime: int) -> None:
        names = [name.encode() for name in (user, group)]
        if max(map(len, names)) > 31 or not 0 <= mode < 8**7 or not 0 <= mtime < 8**11:
            raise ConfigError(
                f"{user=}, {group=}, {mode=:o}, {mtime=}: names have at most 31 bytes, and numbers "
                "are positive"
            )
        self._values = (
            (_MODE, b"%07o\0" % mode),
            (_MTIME, b"%011o\0" % mtime),
            (_USER, names[0].ljust(32, b"\0")),
            (_GROUP, names[1].ljust(32, b"\0")),
        )

    def applied_to(self, header: bytes) -> bytes:
        """Return a header, the last one if there are extended ones before it, with these values."""
        start = len(header) - BLOCK
        block = bytearray(header[start:])
        change = 0
        for field, value in self._values:
            change += sum(value) - sum(block[field])
            block[field] = value
        checksum = int(block[_CHECKSUM].strip(b"\0 "), 8) + change
        block[_CHECKSUM] = b"%06o\0 " % checksum
        return header[:start] + bytes(block)


class ByteSink(Protocol):
    """A target of archives: any binary file that is open for writing."""

    def write(self, data: bytes, /) -> Any:
        """Write all bytes."""


class ArchiveWriter:
    """Writes the members of one archive, one after another.

    Args:
        sink: Takes the bytes.
        attributes: Owner, mode and date of the members; None keeps those of `encode_header`.
        checksum: Whether `add` returns the CRC-32 of contents.
    """

    def __init__(
        self,
        sink: ByteSink,
        *,
        attributes: MemberAttributes | None = None,
        checksum: bool = False,
    ) -> None:
        self.num_bytes = 0
        """What the archive has so far."""
        self._sink = sink
        self._attributes = attributes
        self._checksum = checksum

    def add(self, header: bytes, content: bytes | Path, size: int) -> int:
        """Append a member; return the CRC-32 of its content, or 0.

        Args:
            header: What `encode_header` returned for it.
            content: Its bytes, or the file that has them, which is copied piece by piece.
            size: How many bytes the content has.

        Raises:
            ConfigError: If the size of a file has changed.
        """
        write = self._sink.write
        write(header if self._attributes is None else self._attributes.applied_to(header))
        if isinstance(content, bytes):
            write(content)
            crc32 = zlib.crc32(content) if self._checksum else 0
        else:
            crc32 = self._copy(content, size)
        write(bytes(-size % BLOCK))
        self.num_bytes += len(header) + size + -size % BLOCK
        return crc32

    def end(self, *, record_bytes: int = BLOCK) -> None:
        """Append the end marker, and zeros up to a multiple of `record_bytes`."""
        self._sink.write(END + bytes(-(self.num_bytes + len(END)) % record_bytes))

    def _copy(self, source: Path, size: int) -> int:
        crc32, left = 0, size
        with open_binary(source) as file:
            while left and (data := file.read(min(left, COPY_BYTES))):
                self._sink.write(data)
                crc32 = zlib.crc32(data, crc32) if self._checksum else 0
                left -= len(data)
            if left or file.read(1):
                raise ConfigError(f"{source}: had {size} bytes, and changed while it was copied")
        return crc32
