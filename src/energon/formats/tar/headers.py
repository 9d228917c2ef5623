"""Tar headers: their fields, and names split into the keys of samples and the names of parts.

Reads ustar, GNU (long names, base-256 sizes) and PAX headers (POSIX.1-2001). Bytes in, values
out: what a header means for those that follow it is `energon.formats.tar.parser`'s to say.
"""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Bytes, Ints
from energon.errors import FormatError
from energon.limits import TAR_HEADER_BYTES, TAR_NAME_BYTES, TAR_RECORDS

BLOCK = 512
"""Archives are made of blocks of this many bytes."""
END_MARKER_BYTES = 2 * BLOCK
RECORD_BYTES = 10_240
"""Archives are written in records; the last one is filled with zeros after the end marker."""

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
    digits = _OCTAL.fullmatch(field)
    if digits is not None:
        return int(digits[1] or b"0", 8)
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
        # Opening a dataset needs no decompressor.
        from energon.formats.compressed import compression_of

        compression = compression_of(header) if pos == 0 else None
        if compression is not None:
            raise FormatError(
                f"{origin}: is compressed ({compression}), expected a plain tar archive, whose "
                "samples can be read one by one; unpack it, or write it again with `energon pack`"
            )
        raise FormatError(
            f"{origin}: no tar header at byte {pos} (its checksum does not match); the file is "
            "damaged or not a plain tar archive"
        )


def nonzero_bytes(headers: Bytes) -> NDArray[np.bool_]:
    """Return which of the 512 bytes are not 0 in at least one of (M, 512) contiguous headers."""
    words = np.bitwise_or.reduce(headers.view(np.uint64), axis=0)
    nonzero: NDArray[np.bool_] = words.view(np.uint8) != 0
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
    for digit in digits[1:]:
        stated = stated * np.uint16(8) + digit
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
    field = header[148:156]
    digits = _OCTAL.fullmatch(field)
    if digits is None:
        return False
    # Adler-32, modulo a prime, adds up bytes much faster than a loop. The checksum is made with
    # eight spaces in the place of the field.
    total = (zlib.adler32(header, 0) & 0xFFFF) - sum(field) + 8 * 32
    missing = total - int(digits[1] or b"0", 8)
    # Some old programs added up signed bytes.
    return (
        missing % _ADLER == 0
        or (missing - 256 * sum(byte > 127 for byte in header[:148] + header[156:])) % _ADLER == 0
    )


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


def decode_name(name: bytes, origin: str, pos: int) -> str:
    """Return the name in an extended header, which ends before byte `pos`.

    Raises:
        FormatError: If it is longer than the limits allow.
    """
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
        record = _RECORD.match(payload, at)
        stop = at + int(record[1]) if record is not None else 0
        count += 1
        if record is None or not record.end() < stop <= end or payload[stop - 1] != 0x0A:
            raise _malformed(
                origin, pos, f"{payload[at : at + 20]!r} is not a record; the file is damaged"
            )
        if count > most:
            raise _malformed(origin, pos, f"more than {most} records; {TAR_RECORDS.hint}")
        key = record[2]
        if key == b"path":
            path = payload[record.end() : stop - 1]
        elif key == b"size":
            size = payload[record.end() : stop - 1]
        elif key.startswith(b"GNU.sparse"):
            is_sparse = True
        at = stop
    if path is not None and b"\0" in path:
        raise _malformed(origin, pos, "a name has a zero byte; the file is damaged")
    if size is not None and _DECIMAL.fullmatch(size) is None:
        raise _malformed(origin, pos, f"{size[:40]!r} is not a size; the file is damaged")
    return Overrides(
        None if path is None else decode_name(path, origin, pos),
        None if size is None else int(size),
        is_sparse,
    )


def _malformed(origin: str, pos: int, problem: str) -> FormatError:
    return FormatError(f"{origin}: malformed PAX header before byte {pos}: {problem}")


_HIDDEN = re.compile(r"__[^/]*__(?:$|/)")
_SLASH, _DOT, _UNDERSCORE = b"/._"


def split_name(name: str) -> tuple[str, str] | None:
    """Return the key and the part in the name of a member; None if it is not a part.

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


class SplitNames(NamedTuple):
    """The names of M members, those of W bytes at most."""

    names: Bytes
    """(M, W) the names, zeros behind each."""
    key_length: Ints
    """(M,) how long the key of each is."""
    length: Ints
    """(M,) how long each name is."""
    valid: NDArray[np.bool_]
    """(M,) whether it is the part of a sample."""

    def take(self, chosen: NDArray[np.bool_]) -> SplitNames:
        """Return some of the names."""
        return SplitNames(
            self.names[chosen], self.key_length[chosen], self.length[chosen], self.valid[chosen]
        )

    def key(self, index: int) -> bytes:
        """Return the key of one member."""
        return self.names[index, : self.key_length[index]].tobytes()

    def same_key_as_before(self) -> NDArray[np.bool_]:
        """Return for each member after the first whether it has the key of the one before."""
        length = self.key_length[1:]
        behind = np.arange(self.names.shape[1]) >= length[:, None]
        equal = (self.names[1:] == self.names[:-1]) | behind
        same: NDArray[np.bool_] = equal.all(axis=1) & (length == self.key_length[:-1])
        return same

    def key_texts(self, chosen: Ints) -> list[str]:
        """Return the keys of some members."""
        names, lengths = self.names[chosen], self.key_length[chosen]
        columns = np.arange(names.shape[1])
        names[columns == lengths[:, None]] = 0
        names = names[columns <= lengths[:, None]]
        # No name contains a zero, and no character continues after one.
        return names.tobytes().decode("utf-8", "surrogateescape").split("\0")[:-1]

    def keys(self, chosen: NDArray[np.bool_]) -> tuple[bytes, Ints]:
        """Return the keys of some members, concatenated, and the length of each."""
        names, lengths = self.names[chosen], self.key_length[chosen]
        return names[np.arange(names.shape[1]) < lengths[:, None]].tobytes(), lengths

    def parts(self) -> tuple[list[bytes], Ints]:
        """Return the distinct part names in order of appearance, and the index of each member's."""
        start = self.key_length + 1
        width = max(1, int((self.length - start).max(initial=0)))
        letters = np.pad(self.names, ((0, 0), (0, width)))
        if len(start) and (start == start[0]).all():
            letters = np.ascontiguousarray(letters[:, start[0] : start[0] + width])
        else:
            letters = np.take_along_axis(letters, start[:, None] + np.arange(width), axis=1)
        distinct, first, numbers = np.unique(
            letters.view(f"S{width}")[:, 0], return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        return distinct[order].tolist(), np.argsort(order)[numbers]


def split_name_fields(fields: Bytes) -> SplitNames:
    """Split name fields of tar headers, (M, W) bytes with zeros behind each name."""
    width = fields.shape[1]
    rows, columns = np.arange(len(fields)), np.arange(width)
    empty = fields == 0
    length = np.where(empty.any(axis=1), empty.argmax(axis=1), width)
    behind = columns >= length[:, None]
    names = np.where(behind, np.uint8(0), fields)
    is_slash = names == _SLASH
    is_dot = names == _DOT
    base = np.zeros(len(names), np.int64)
    if is_slash.any():
        base = np.where(is_slash.any(axis=1), width - is_slash[:, ::-1].argmax(axis=1), 0)
        is_dot &= columns >= base[:, None]
    dot = is_dot.argmax(axis=1)
    valid = is_dot[rows, dot] & (dot > base)
    for row in np.flatnonzero(valid & (names[:, 0] == _UNDERSCORE)).tolist():
        name = names[row, : length[row]].tobytes()
        valid[row] = split_name(name.decode("utf-8", "surrogateescape")) is not None
    return SplitNames(names, dot, length, valid)
