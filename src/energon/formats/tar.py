"""Find the members of tar archives and group them into samples.

Reads ustar, GNU (long names, base-256 sizes) and PAX archives (POSIX.1-2001). Only headers are
looked at: small members are parsed out of large blocks, content of large ones is skipped.
Links, folders, devices and sparse files are no parts of samples and are passed over.
Archives that were joined with `cat` are read through to the end of the last.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.errors import FormatError, TruncatedError

BLOCK = 512
READ_BYTES = 4 << 20
SKIP_BYTES = 256 << 10
"""Content from here on is skipped instead of being read along."""
MAX_EXTENSION_BYTES = 16 << 20
"""Largest extended header that is believed."""

ReadAt = Callable[[int, int], bytes]
"""`read(offset, size)` returns `size` bytes, or fewer at the end of the file."""

_ZEROS = bytes(BLOCK)
_REGULAR = b"0\x007"
_HIDDEN = re.compile(r"__[^/]*__(?:$|/)")


class Member(NamedTuple):
    """A regular file in a tar archive."""

    name: str
    header_offset: int
    """Where its first header begins, extended ones included."""
    offset: int
    """Where its content begins."""
    size: int
    """Bytes of content."""


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
    window, base, pos, first = b"", 0, 0, -1
    long_name: str | None = None
    long_size: int | None = None
    ended = False
    while True:
        at = pos - base
        if at < 0 or at + BLOCK > len(window):
            wanted = (
                READ_BYTES if pos == base + len(window) or at < len(window) + SKIP_BYTES else BLOCK
            )
            window, base, at = read(pos, max(BLOCK, min(wanted, size - pos))), pos, 0
            if not window:
                break
            if len(window) < BLOCK:
                raise TruncatedError(
                    f"{origin}: ends at byte {size} within a header; the archive is cut off, "
                    "restore or write it again"
                )
        header = window[at : at + BLOCK]
        if header[0] == 0 and header == _ZEROS:
            ended = True
            pos += BLOCK
            continue
        if first < 0:
            first = pos
        kind = header[156:157]
        length = member_size(header, origin, pos)
        if header[257:262] != b"ustar" or ended:
            verify_checksum(header, origin, pos)
        ended = False
        pos += BLOCK
        if kind in _REGULAR:
            name = long_name if long_name is not None else member_name(header)
            content = length if long_size is None else long_size
            if pos + content > size:
                raise TruncatedError(
                    f"{origin}: {name!r} at byte {first} has {content} bytes, but the archive ends "
                    f"{pos + content - size} bytes too early; restore or write it again"
                )
            yield Member(name, first, pos, content)
            pos += (content + BLOCK - 1) // BLOCK * BLOCK
            long_name, long_size, first = None, None, -1
        elif kind in b"xXL":
            payload = _extension(read, pos, length, size, origin)
            pos += (length + BLOCK - 1) // BLOCK * BLOCK
            if kind == b"L":
                long_name = payload.rstrip(b"\0").decode("utf-8", "surrogateescape")
            else:
                records = pax_records(payload, origin, pos)
                long_name = records.get("path", long_name)
                if "size" in records:
                    long_size = int(records["size"])
                if any(key.startswith("GNU.sparse") for key in records):
                    pos = _skip_sparse(read, pos, size, long_size, origin)
                    long_name, long_size, first = None, None, -1
        else:
            if kind == b"S":
                pos = _skip_sparse_headers(read, header, pos, size, origin)
            if kind not in b"123456":
                content = length if long_size is None or kind in b"KgS" else long_size
                pos += (content + BLOCK - 1) // BLOCK * BLOCK
            if pos > size:
                raise TruncatedError(f"{origin}: ends at byte {size} within a special member")
            if kind not in b"Kg":
                long_name, long_size, first = None, None, -1
    if strict and not ended:
        raise TruncatedError(
            f"{origin}: ends at byte {size} without the end marker of a tar archive; members may "
            "be missing, restore or write it again"
        )


@dataclass(frozen=True, eq=False)
class TarScan:
    """What a shard holds: its samples, their parts, and where those lie. N samples, P parts."""

    size: int
    """Bytes of the shard."""
    keys: list[str]
    part_names: tuple[str, ...]
    """The different names of parts."""
    sample_offset: NDArray[np.uint64]
    """(N + 1,) where each sample begins, headers included, and where the last one ends."""
    first_part: NDArray[np.uint32]
    """(N + 1,) number of the first part of each sample, and P."""
    part_name: NDArray[np.uint16]
    """(P,) index into `part_names`."""
    part_offset: NDArray[np.uint64]
    """(P,) where the content begins."""
    part_size: NDArray[np.uint64]
    """(P,) bytes of content."""


def scan_tar(path: str | os.PathLike[str], *, strict: bool = True) -> TarScan:
    """Return what a shard on local disk holds, in one pass over its headers.

    Args:
        path: The shard.
        strict: Whether an archive without an end marker is an error.

    Raises:
        TruncatedError: If the archive is cut off.
        FormatError: If it is no tar archive.
        FileNotFoundError: If it does not exist.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size

        def read(offset: int, count: int) -> bytes:
            return os.pread(descriptor, count, offset)

        return _group(iter_members(read, size, origin=os.fspath(path), strict=strict), size)
    finally:
        os.close(descriptor)


def _group(members: Iterator[Member], size: int) -> TarScan:
    keys: list[str] = []
    names: dict[str, int] = {}
    sample_offset, part_offset, part_size = array("Q"), array("Q"), array("Q")
    first_part, part_name = array("I"), array("H")
    last_key: str | None = None
    stop = 0
    for name, header_offset, offset, length in members:
        stop = offset + (length + BLOCK - 1) // BLOCK * BLOCK
        base = name.rfind("/") + 1
        dot = name.find(".", base)
        if dot <= base or (name[0] == "_" and split_name(name) is None):
            continue
        key = name[:dot]
        if key != last_key:
            keys.append(key)
            sample_offset.append(header_offset)
            first_part.append(len(part_name))
            last_key = key
        part = name[dot + 1 :]
        number = names.get(part)
        if number is None:
            number = names[part] = len(names)
            if number > 0xFFFF:
                raise FormatError("a shard has more than 65,536 different names of parts")
        part_name.append(number)
        part_offset.append(offset)
        part_size.append(length)
    sample_offset.append(stop)
    first_part.append(len(part_name))
    return TarScan(
        size=size,
        keys=keys,
        part_names=tuple(names),
        sample_offset=np.frombuffer(sample_offset, np.uint64),
        first_part=np.frombuffer(first_part, np.uint32),
        part_name=np.frombuffer(part_name, np.uint16) if part_name else np.empty(0, np.uint16),
        part_offset=np.frombuffer(part_offset, np.uint64) if part_name else np.empty(0, np.uint64),
        part_size=np.frombuffer(part_size, np.uint64) if part_name else np.empty(0, np.uint64),
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
    """Check a header without the ustar magic, which is believed only if its checksum fits.

    Raises:
        FormatError: If it does not.
    """
    stated = header[148:156].strip(b" \0")
    actual = sum(header) - sum(header[148:156]) + 8 * 32
    if not re.fullmatch(rb"[0-7]+", stated) or int(stated, 8) != actual:
        raise FormatError(
            f"{origin}: no tar header at byte {pos} (its checksum does not fit); the file is "
            "damaged or no plain tar archive"
        )


def _extension(read: ReadAt, pos: int, length: int, size: int, origin: str) -> bytes:
    if length > MAX_EXTENSION_BYTES:
        raise FormatError(f"{origin}: an extended header of {length} bytes at byte {pos}")
    if pos + length > size:
        raise TruncatedError(f"{origin}: ends at byte {size} within an extended header")
    return read(pos, length)


def pax_records(payload: bytes, origin: str, pos: int) -> dict[str, str]:
    """Return the records of an extended header that ends before byte `pos`.

    Raises:
        FormatError: If they are malformed.
    """
    records: dict[str, str] = {}
    while payload and payload[0]:
        digits, _, _ = payload.partition(b" ")
        if not digits.isdigit() or not len(digits) < int(digits) <= len(payload):
            raise FormatError(f"{origin}: malformed PAX record before byte {pos}")
        record, payload = payload[: int(digits)], payload[int(digits) :]
        key, _, value = record[len(digits) + 1 : -1].partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
    return records


def _skip_sparse(read: ReadAt, pos: int, size: int, long_size: int | None, origin: str) -> int:
    """Return where the member ends whose PAX header says that it is sparse."""
    header = read(pos, BLOCK)
    if len(header) < BLOCK:
        raise TruncatedError(f"{origin}: ends at byte {size} within a header")
    content = member_size(header, origin, pos) if long_size is None else long_size
    return pos + BLOCK + (content + BLOCK - 1) // BLOCK * BLOCK


def _skip_sparse_headers(read: ReadAt, header: bytes, pos: int, size: int, origin: str) -> int:
    """Return where the content of an old GNU sparse file begins."""
    more = header[482]
    while more:
        block = read(pos, BLOCK)
        if len(block) < BLOCK:
            raise TruncatedError(f"{origin}: ends at byte {size} within a sparse header")
        more = block[504]
        pos += BLOCK
    return pos
