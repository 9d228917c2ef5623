"""Fields of tar headers: name, size, checksum, and the records of extended headers.

Reads ustar, GNU (long names, base-256 sizes) and PAX headers (POSIX.1-2001). Bytes in, values
out: what a header means for those that follow it is `energon.formats.tar.parser`'s to say.
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Bytes
from energon.errors import FormatError
from energon.limits import TAR_HEADER_BYTES, TAR_NAME_BYTES, TAR_RECORDS

BLOCK = 512
"""Archives are made of blocks of this many bytes."""
END_MARKER_BYTES = 2 * BLOCK
RECORD_BYTES = 10_240
"""Archives are written in records; the last one is filled with zeros after the end marker."""

_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}

_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_ADLER = 65521
_RECORD = re.compile(rb"([1-9][0-9]{0,8}) ([^=\n]*+)=")
_DECIMAL = re.compile(rb"[0-9]{1,18}")


def padded_size(size: int) -> int:
    """Return the size of the blocks that hold `size` bytes of content."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


def member_name(header: bytes) -> str:
    """Return the name in a header, which an extended header before it may replace."""
    name = header[:100].partition(b"\0")[0]
    # GNU tar uses the place of the prefix for other things, and says so in its magic.
    if header[345] and header[257:263] == b"ustar\0":
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def member_size(header: bytes, origin: str, pos: int) -> int:
    """Return the size of the content after the header at byte `pos`.

    Raises:
        FormatError: If its size field is not a number.
    """
    field = header[124:136]
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    found = _OCTAL.fullmatch(field)
    if found is not None:
        return int(found[1] or b"0", 8)
    raise FormatError(
        f"{origin}: no tar header at byte {pos} (its size field is {field!r}); the file is damaged "
        "or not a plain tar archive"
    )


def verify_checksum(header: bytes, origin: str, pos: int) -> None:
    """Check the checksum of the header at byte `pos`, which damaged headers do not match.

    Raises:
        FormatError: If it does not.
    """
    if not _has_checksum(header):
        for magic, name in _COMPRESSIONS.items():
            if pos == 0 and header.startswith(magic):
                raise FormatError(
                    f"{origin}: is compressed with {name}, expected a plain tar archive, whose "
                    "samples can be read one by one; unpack it, or write it again with `energon "
                    "pack`"
                )
        raise FormatError(
            f"{origin}: no tar header at byte {pos} (its checksum does not match); the file is "
            "damaged or not a plain tar archive"
        )


def nonzero_bytes(headers: Bytes) -> NDArray[np.bool_]:
    """Return which of the 512 bytes are not 0 in at least one of (M, 512) contiguous headers."""
    words = headers.view(np.uint64)
    # Rows are short, so several are combined at once.
    several = words[: len(words) // 8 * 8].reshape(-1, 8 * words.shape[1])
    found = np.bitwise_or.reduce(several, axis=0).reshape(8, -1)
    found = np.bitwise_or.reduce(np.concatenate([found, words[len(several) * 8 :]]), axis=0)
    nonzero: NDArray[np.bool_] = found.view(np.uint8) != 0
    return nonzero


def have_checksums(headers: Bytes, nonzero: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which of (M, 512) headers have a correct checksum in the usual notation.

    Others may be sound, too: `verify_checksum` has the last word.

    Args:
        headers: An array without gaps.
        nonzero: What `nonzero_bytes` returns for them.
    """
    field = np.ascontiguousarray(headers[:, 148:156].T)
    digits = (field[:6] - np.uint8(48)).astype(np.uint16)
    stated = digits[0]
    for place in digits[1:]:
        stated = stated * np.uint16(8) + place
    # Three quarters of most headers are zeros.
    words = np.flatnonzero(nonzero.view(np.uint64))
    counted = headers.view(np.uint64).take(words, axis=1).view(np.uint8)
    # The field counts as eight spaces. Sums beyond 16 bits, which are rare, are left to others.
    total = np.einsum("ij->i", counted, dtype=np.uint16, casting="unsafe")
    total -= field.sum(axis=0, dtype=np.uint16)
    total += np.uint16(8 * 32)
    # Where the first digit is 0, six digits fit 16 bits.
    sound: NDArray[np.bool_] = (total == stated) & (digits.max(axis=0) < 8) & (digits[0] == 0)
    # After the digits, there are zeros and spaces.
    sound &= (field[6] | field[7]) & ~np.uint8(0x20) == 0
    return sound


def _has_checksum(header: bytes) -> bool:
    stated, total = _stated_sum(header[148:156]), _sum(header)
    # Some old programs added up signed bytes.
    return stated is not None and (
        stated == total
        or stated == (total - 256 * sum(b > 127 for b in header[:148] + header[156:])) % _ADLER
    )


def _sum(header: bytes) -> int:
    """Return the sum of all bytes: Adler-32, modulo a prime, is much faster than a loop."""
    return zlib.adler32(header, 0) & 0xFFFF


@lru_cache(maxsize=4096)
def _stated_sum(field: bytes) -> int | None:
    """Return the byte sum that a checksum field states; None if it is not a number."""
    found = _OCTAL.fullmatch(field)
    # The checksum is made with eight spaces in the place of the field.
    return None if found is None else (int(found[1] or b"0", 8) - 8 * 32 + sum(field)) % _ADLER


class Overrides(NamedTuple):
    """Values from extended headers for the next member; None keeps those of its own header."""

    path: str | None = None
    size: int | None = None
    is_sparse: bool = False


def check_extension(length: int, origin: str, pos: int) -> None:
    """Raise FormatError if an extended header with content at byte `pos` claims too much."""
    if length > TAR_HEADER_BYTES.value:
        raise FormatError(
            f"{origin}: an extended header of {length} bytes before byte {pos}, "
            f"{TAR_HEADER_BYTES.value} are allowed; the file is damaged or not a plain tar "
            f"archive; {TAR_HEADER_BYTES.hint}"
        )


def long_name(payload: bytes, origin: str, pos: int) -> str:
    """Return the name in a GNU extended header, which ends before byte `pos`.

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
    """Return the values in the records of a PAX header, which ends before byte `pos`.

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
                origin, pos, f"{payload[at : at + 20]!r} is not a record; the file is damaged"
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
        raise _malformed(origin, pos, f"{size[:40]!r} is not a size; the file is damaged")
    return Overrides(
        None if path is None else _name(path, origin, pos),
        None if size is None else int(size),
        is_sparse,
    )


def _malformed(origin: str, pos: int, what: str) -> FormatError:
    return FormatError(f"{origin}: malformed PAX header before byte {pos}: {what}")
