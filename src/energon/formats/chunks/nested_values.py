r"""Lists and dicts of plain values, as LitData stores them in one field.

A value begins with a byte that says what it is. Numbers are little-endian, lengths and counts
32-bit; texts follow their length in bytes:

| byte | value |
|---|---|
| 0 | JSON |
| 1, 2, 3, 4 | a list of str, int64, float64 or bool (a byte each), after their number |
| 5 | a dict: the number of its entries, then keys, as text, and values in turn |
| 6 | dicts with the same keys: their number, that of the keys, the keys, then all values, each \
after a byte that says what it is: 16 to 20 for None, str, int64, float64, bool |
| 7, 8, 9, 10, 11 | str, int64, float64, bool, None |

Early versions wrote JSON alone, which begins with a larger byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from energon.formats.json_text import parse_json

_FIRST_OF_JSON = 0x21


def nested_value(content: bytes) -> Any:
    """Return the value that a field holds.

    Raises:
        ValueError: If it is invalid.
        FormatError: If JSON in it is invalid.
    """
    if not content or content[0] >= _FIRST_OF_JSON:
        return parse_json(content, origin="json")
    reader = _Reader(content)
    try:
        value = reader.value()
    except RecursionError:
        raise ValueError("values are nested too deep") from None
    if reader.position != len(content):
        raise ValueError(f"a value of {reader.position} bytes is in a field of {len(content)}")
    return value


class _Reader:
    """Reads values one after the other."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 0

    def take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self.content):
            raise ValueError(f"a value of {self.position} bytes is in {len(self.content)}")
        return self.content[start : self.position]

    def size(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def text(self) -> str:
        return self.take(self.size()).decode()

    def numbers(self, letter: str, count: int) -> list[Any]:
        size = struct.calcsize(f"<{letter}")
        return list(struct.unpack(f"<{count}{letter}", self.take(size * count)))

    def value(self) -> Any:
        kind = self.take(1)[0]
        if kind not in _READ:
            raise ValueError(f"a value begins with the unknown byte {kind}")
        return _READ[kind](self)

    def entries(self) -> dict[str, Any]:
        return {self.text(): self.value() for _ in range(self.size())}

    def rows(self) -> list[dict[str, Any]]:
        count = self.size()
        keys = [self.text() for _ in range(self.size())]
        if count and not keys:
            raise ValueError(f"{count} dicts have no keys")
        return [{key: _READ_CELL[self.take(1)[0]](self) for key in keys} for _ in range(count)]


_SCALARS: tuple[Callable[[_Reader], Any], ...] = (
    _Reader.text,
    lambda reader: reader.numbers("q", 1)[0],
    lambda reader: reader.numbers("d", 1)[0],
    lambda reader: reader.numbers("?", 1)[0],
)
_READ: dict[int, Callable[[_Reader], Any]] = {
    0: lambda reader: parse_json(reader.take(reader.size()), origin="json"),
    1: lambda reader: [reader.text() for _ in range(reader.size())],
    2: lambda reader: reader.numbers("q", reader.size()),
    3: lambda reader: reader.numbers("d", reader.size()),
    4: lambda reader: reader.numbers("?", reader.size()),
    5: _Reader.entries,
    6: _Reader.rows,
    **dict(enumerate(_SCALARS, 7)),
    11: lambda reader: None,
}
_READ_CELL: dict[int, Callable[[_Reader], Any]] = {
    0x10: lambda reader: None,
    **dict(enumerate(_SCALARS, 0x11)),
}
