"""Write the headers of tar members: POSIX ustar, the same bytes for the same name and size.

Owner, mode and date are always the same, so that a shard is a function of its samples. Names
of more than 100 bytes go into the prefix field where they can be cut at a slash; only what
does not fit, and sizes from 8 GiB on, get an extended header (PAX, POSIX.1-2001).
"""

from __future__ import annotations

from energon.formats.tar.headers import BLOCK

END = bytes(2 * BLOCK)
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


def encode_header(name: str, size: int) -> bytes:
    """Return the header, or headers, of a regular file, a multiple of 512 bytes.

    Names are UTF-8; bytes of a name that are none may be given as surrogates.
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
    """Return `content` with what fills its last block."""
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
