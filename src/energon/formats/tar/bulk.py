"""Parse many plain tar headers at once.

In a run of blocks the headers are those that the chain of sizes leads to: each says how far
the next one is. Blocks that look like headers are looked for first, all at once; the chain
then tells which of them are headers and which are content, and their checksums are compared.
A run ends where something rare comes: a long name, a link, the end of the archive. That is
left to `energon.formats.tar.parser`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.formats.tar.headers import BLOCK, have_checksums

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

_OCTAL = 8 ** np.arange(10, -1, -1, dtype=np.int64)
_MAGIC = np.frombuffer(b"ustar", np.uint8)
_MTIME = np.frombuffer(b" mtime=", np.uint8)
_REGULAR, _OLD_REGULAR, _CONTIGUOUS, _FOLDER, _EXTENDED = b"0\x0075x"


class Run(NamedTuple):
    """Regular files that lie one behind the other. M members."""

    names: Bytes
    """(M, 100) name fields, zeros behind each name."""
    header_offset: Numbers
    """(M,) where the first header of each begins, relative to the run."""
    offset: Numbers
    """(M,) where the content begins."""
    size: Numbers
    """(M,) bytes of content."""
    stop: int
    """Where what follows the run begins."""


def parse_run(blocks: Bytes, limit: int) -> Run:
    """Return the plain members at the beginning of some blocks, maybe none.

    Args:
        blocks: (blocks, 512) of an archive, the first of which is a header.
        limit: Where the archive ends, counted from the first block. Members that go beyond are
            not taken.
    """
    candidates = np.flatnonzero(blocks[:, 257] == _MAGIC[0])
    headers = blocks[candidates]
    size, sized = _octal(headers[:, 124:135])
    plain = sized & (headers[:, 257:262] == _MAGIC).all(axis=1)
    # A prefix of the name is rare enough to be left to others.
    plain &= headers[:, 345] == 0
    kind = headers[:, 156]
    regular = (kind == _REGULAR) | (kind == _OLD_REGULAR) | (kind == _CONTIGUOUS)
    plain &= regular | ((kind == _FOLDER) & (size == 0)) | (kind == _EXTENDED)
    following = candidates + 1 + (size + BLOCK - 1) // BLOCK
    chain = _follow(candidates, following, plain & (following * BLOCK <= limit))
    chain = chain[: _length_of_sound(headers, chain)]
    chain = chain[: _length_of_known_extensions(blocks, candidates, kind, size, chain)]
    if len(chain) and kind[chain[-1]] == _EXTENDED:
        chain = chain[:-1]  # the file that it belongs to is not in this run
    return _members(headers, candidates, following, regular, kind, size, chain)


def _members(
    headers: Bytes,
    candidates: Numbers,
    following: Numbers,
    regular: NDArray[np.bool_],
    kind: Bytes,
    size: Numbers,
    chain: Numbers,
) -> Run:
    wanted = regular[chain]
    files = chain[wanted]
    header_block = candidates[files]
    if not wanted.all() and len(files):
        places = np.flatnonzero(wanted)
        before = chain[places - 1]
        extended = (places > 0) & (kind[before] == _EXTENDED)
        header_block = np.where(extended, candidates[before], header_block)
    names = headers[files, :100]
    return Run(
        names=names,
        header_offset=header_block * BLOCK,
        offset=(candidates[files] + 1) * BLOCK,
        size=size[files],
        stop=int(following[chain[-1]]) * BLOCK if len(chain) else 0,
    )


def _octal(digits: Bytes) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the numbers in fields of 11 octal digits, and which are nothing else."""
    values = digits - np.uint8(48)
    return values @ _OCTAL, np.all(values < 8, axis=1)


def _follow(candidates: Numbers, following: Numbers, usable: NDArray[np.bool_]) -> Numbers:
    """Return the numbers of the candidates that the chain goes through, from the first block."""
    if not len(candidates) or candidates[0] != 0:
        return np.empty(0, np.int64)
    linked = np.append(following[:-1] == candidates[1:], False) & usable
    breaks = np.flatnonzero(~linked)
    pieces: list[Numbers] = []
    at, next_break = 0, 0
    while at < len(candidates):
        next_break = int(np.searchsorted(breaks, at))
        stop = int(breaks[next_break])
        pieces.append(np.arange(at, stop))
        if not usable[stop]:
            break
        pieces.append(np.array([stop]))
        # What looks like headers in between is content, as of an archive in an archive.
        at = int(np.searchsorted(candidates, following[stop]))
        if at == len(candidates) or candidates[at] != following[stop]:
            break
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _length_of_sound(headers: Bytes, chain: Numbers) -> int:
    """Return how many headers of the chain come before the first with another checksum."""
    chosen = headers[chain] if len(chain) != len(headers) else headers
    return _length_of_true(have_checksums(chosen))


def _length_of_known_extensions(
    blocks: Bytes, candidates: Numbers, kind: Bytes, size: Numbers, chain: Numbers
) -> int:
    """Return how much of the chain comes before an extended header that says more than a date.

    Python's tarfile writes such headers, only for fractions of a second, before each member.
    """
    places = np.flatnonzero(kind[chain] == _EXTENDED)
    if not len(places):
        return len(chain)
    extended = chain[places]
    known = (size[extended] >= 10) & (size[extended] < 100)
    known &= candidates[extended] + 1 < len(blocks)
    payload = blocks[np.where(known, candidates[extended] + 1, 0)]
    known &= (payload[:, 2:9] == _MTIME).all(axis=1)
    digits = payload[:, :2] - np.uint8(48)
    known &= digits @ np.array([10, 1]) == size[extended]
    # An extended header is followed by the header that it extends.
    after = np.minimum(places + 1, len(chain) - 1)
    known &= (kind[chain[after]] != _EXTENDED) | (after == places)
    stop = _length_of_true(known)
    return len(chain) if stop == len(places) else int(places[stop])


def _length_of_true(values: NDArray[Any]) -> int:
    """Return how many values come before the first that is false."""
    return len(values) if values.all() else int(values.argmin())
