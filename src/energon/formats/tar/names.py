"""Split the names of members into keys and parts, one by one or many at once."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Bytes, Ints

_HIDDEN = re.compile(r"__[^/]*__(?:$|/)")
_SLASH, _DOT, _UNDERSCORE = b"/._"
_MAX_DIFFERENT = 32


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
        """Return for each member but the first whether the one before has the same key."""
        length = self.key_length[1:]
        behind = np.arange(self.names.shape[1]) >= length[:, None]
        equal = (self.names[1:] == self.names[:-1]) | behind
        same: NDArray[np.bool_] = equal.all(axis=1) & (length == self.key_length[:-1])
        return same

    def keys(self, chosen: NDArray[np.bool_]) -> tuple[bytes, Ints]:
        """Return the keys of some members, one behind the other, and how long each is."""
        names, lengths = self.names[chosen], self.key_length[chosen]
        inside = np.arange(names.shape[1]) < lengths[:, None]
        return names[inside].tobytes(), lengths

    def parts(self) -> tuple[list[bytes], Ints]:
        """Return the different names of parts, and which of them each member has."""
        start = self.key_length + 1
        width = int((self.length - start).max(initial=0))
        if not width:
            return [b""], np.zeros(len(start), np.int64)
        if (start == start[0]).all():
            letters = np.ascontiguousarray(self.names[:, start[0] : start[0] + width])
        else:
            padded = np.pad(self.names, ((0, 0), (0, width)))
            columns = start[:, None] + np.arange(width)
            letters = np.take_along_axis(padded, columns, axis=1)
        return _number(letters.view(f"S{width}")[:, 0])


def split_names(fields: Bytes) -> SplitNames:
    """Split name fields of tar headers, (M, 100) bytes with zeros behind each name."""
    used = np.flatnonzero(np.bitwise_or.reduce(fields, axis=0))
    width = int(used[-1]) + 1 if len(used) else 1
    names = np.ascontiguousarray(fields[:, :width])
    rows, columns = np.arange(len(names)), np.arange(width)
    empty = names == 0
    length = np.where(empty.any(axis=1), empty.argmax(axis=1), width)
    behind = columns >= length[:, None]
    if (behind & ~empty).any():
        names = np.where(behind, np.uint8(0), names)
    is_slash = names == _SLASH
    base = np.where(is_slash.any(axis=1), width - is_slash[:, ::-1].argmax(axis=1), 0)
    is_dot = names == _DOT
    if base.any():
        is_dot &= columns >= base[:, None]
    dot = is_dot.argmax(axis=1)
    valid = is_dot[rows, dot] & (dot > base)
    for row in np.flatnonzero(valid & (names[:, 0] == _UNDERSCORE)).tolist():
        name = names[row, : length[row]].tobytes()
        valid[row] = split_name(name.decode("utf-8", "surrogateescape")) is not None
    return SplitNames(names, dot, length, valid)


def _number(texts: NDArray[np.bytes_]) -> tuple[list[bytes], Ints]:
    """Return the different texts, in the order in which they come, and the number of each."""
    found: list[bytes] = []
    numbers = np.full(len(texts), -1, np.int64)
    left = np.arange(len(texts))
    while len(left) and len(found) < _MAX_DIFFERENT:
        same = texts[left] == texts[left[0]]
        numbers[left[same]] = len(found)
        found.append(bytes(texts[left[0]]))
        left = left[~same]
    if len(left):
        different, inverse = np.unique(texts[left], return_inverse=True)
        numbers[left] = len(found) + inverse
        found += different.tolist()
    return found, numbers
