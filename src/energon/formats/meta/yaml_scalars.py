"""What scalars of YAML mean, and how values are written so that every reader agrees.

The dialect is that of Energon's own reader plus what YAML 1.2 adds without contradicting it.
Plain scalars mean:

    null ~ (nothing)          None          true yes / false no      booleans (any case)
    12  -3  1_000  010        1000, 10      1.5  1e5  .5  .inf       floats
    0x10  on  off  2024-01-01 text          everything quoted        text
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any

from energon.errors import FormatError

_NUMBER = re.compile(r"[-+.0-9][-+._0-9eE]*")  # which of them are numbers, Python knows
_FRACTIONAL = frozenset(".eE")
_WORDS = {
    **dict.fromkeys(("", "~", "null")),
    **dict.fromkeys(("true", "yes"), True),
    **dict.fromkeys(("false", "no"), False),
    **{".nan": math.nan, ".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf},
}
_LONGEST_WORD = 5
_PLAIN = re.compile(
    r"(?:[A-Za-z_/]|\.(?=[A-Za-z./]))(?:[A-Za-z0-9_./{}@+=%,()-]|[ :](?=[A-Za-z0-9_./]))*"
)
_RESERVED = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "..."))
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_UNSAFE = re.compile(r'["\\\x00-\x1f\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]')


def scalar(text: str) -> Any:
    """Return what a plain (unquoted) scalar means."""
    if len(text) <= _LONGEST_WORD and (word := text.lower()) in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(text):
        with suppress(ValueError):
            return int(text) if _FRACTIONAL.isdisjoint(text) else float(text)
    return text


def scalar_text(value: Any) -> str:
    """Return how `value` is written, in quotes where any dialect would take it for another.

    Raises:
        TypeError: If it is not a scalar.
        FormatError: If it is text that UTF-8 cannot express.
    """
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float_text(value)
    raise TypeError(f"cannot write {value!r} ({type(value).__name__}) as YAML")


def _float_text(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    mantissa, exponent, power = repr(value).partition("e")
    return mantissa + (".0" if exponent and "." not in mantissa else "") + exponent + power


def _text(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise FormatError(f"{value!r} cannot be written as UTF-8")
    if (
        _PLAIN.fullmatch(value)
        and isinstance(scalar(value), str)
        and value.lower() not in _RESERVED
    ):
        return value
    return f'"{_UNSAFE.sub(_escape, value)}"'


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return _ESCAPES.get(character) or f"\\u{ord(character):04x}"
