"""Names of members, split into the keys of samples and the names of their parts.

One by one, or many at once in arrays.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Bytes, Ints

_HIDDEN = re.compile(r"__[^/]*__(?:$|/)")
_SLASH, _DOT, _UNDERSCORE = b"/._"
_MAX_DIFFERENT = 32


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
        width = self._common_length()
        same: NDArray[np.bool_]
        if width:
            keys = np.ascontiguousarray(self.names[:, :width]).view(f"S{width}")[:, 0]
            same = keys[1:] == keys[:-1]
            return same
        length = self.key_length[1:]
        behind = np.arange(self.names.shape[1]) >= length[:, None]
        equal = (self.names[1:] == self.names[:-1]) | behind
        same = equal.all(axis=1) & (length == self.key_length[:-1])
        return same

    def key_texts(self, chosen: Ints) -> list[str]:
        """Return the keys of some members."""
        names, lengths = self.names[chosen], self.key_length[chosen]
        width = self._common_length()
        if width:
            names = names[:, : width + 1]
            names[:, width] = 0
        else:
            columns = np.arange(names.shape[1])
            names[columns == lengths[:, None]] = 0
            names = names[columns <= lengths[:, None]]
        # No name contains a zero, and no character continues after one.
        return names.tobytes().decode("utf-8", "surrogateescape").split("\0")[:-1]

    def keys(self, chosen: NDArray[np.bool_]) -> tuple[bytes, Ints]:
        """Return the keys of some members, concatenated, and the length of each."""
        names, lengths = self.names[chosen], self.key_length[chosen]
        width = self._common_length()
        if width:
            return names[:, :width].tobytes(), lengths
        inside = np.arange(names.shape[1]) < lengths[:, None]
        return names[inside].tobytes(), lengths

    def _common_length(self) -> int:
        """Return how long all keys are, or 0 if they differ; most archives number them so."""
        lengths = self.key_length
        return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 0

    def parts(self) -> tuple[list[bytes], Ints]:
        """Return the distinct part names, and the index of each member's."""
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
        return _number(letters)


def split_name_fields(fields: Bytes) -> SplitNames:
    """Split name fields of tar headers, (M, W) bytes with zeros behind each name."""
    width = fields.shape[1]
    if width and len(fields) and (alike := _split_alike(fields)) is not None:
        return alike
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


def _split_alike(names: Bytes) -> SplitNames | None:
    """Split names that have dots and slashes where the first has them, as most archives number.

    Returns:
        None if they differ, or may be hidden.
    """
    first = names[0].tobytes()
    base = first.rfind(b"/") + 1
    dot = first.find(b".", base)
    if dot <= base or (names[:, 0] == _UNDERSCORE).any():
        return None
    for mark in (_DOT, _SLASH):
        places = [place for place, letter in enumerate(first) if letter == mark]
        # They are nowhere else if there are no more.
        if np.count_nonzero(names == mark) != len(places) * len(names):
            return None
        if not all((names[:, place] == mark).all() for place in places):
            return None
    empty = np.ascontiguousarray(names[:, dot:].T) == 0
    num_empty = np.count_nonzero(empty)
    if num_empty != np.count_nonzero(names == 0) or (empty[:-1] & ~empty[1:]).any():
        return None
    length = names.shape[1] - empty.sum(axis=0)
    count = len(names)
    return SplitNames(names, np.full(count, dot), length, np.ones(count, np.bool_))


def _number(letters: Bytes) -> tuple[list[bytes], Ints]:
    """Return the distinct texts of (M, W) letters in order of appearance, and the index of each."""
    count, width = letters.shape
    if width <= 8:
        # Compared as numbers, they take an eighth of the time.
        size = 1 << (width - 1).bit_length()
        padded = np.zeros((count, size), np.uint8)
        padded[:, :width] = letters
        texts: NDArray[Any] = padded.view(f"u{size}")[:, 0]
    else:
        texts = letters.view(f"S{width}")[:, 0]
    found: list[bytes] = []
    numbers = np.full(count, -1, np.int64)
    row = 0
    while len(found) < _MAX_DIFFERENT:
        numbers[texts == texts[row]] = len(found)
        found.append(letters[row].tobytes().rstrip(b"\0"))
        row = int((numbers < 0).argmax())
        if numbers[row] >= 0:
            return found, numbers
    left = np.flatnonzero(numbers < 0)
    different, inverse = np.unique(letters[left].view(f"S{width}")[:, 0], return_inverse=True)
    numbers[left] = len(found) + inverse
    return found + different.tolist(), numbers
