"""Write YAML that the reader in `yaml` and those of other programs understand in the same way."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from energon.errors import FormatError
from energon.formats.meta.yaml import scalar

_PLAIN = re.compile(
    r"(?:[A-Za-z_/]|\.(?=[A-Za-z./]))(?:[A-Za-z0-9_./{}@+=%,()-]|[ :](?=[A-Za-z0-9_./]))*"
)
_RESERVED = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "..."))
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_UNSAFE = re.compile(r'["\\\x00-\x1f\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]')


def dump_yaml(data: Any) -> str:
    """Return `data` as YAML on which our reader, Megatron-Energon's and those of YAML 1.1 agree.

    Block style, keys in their order, no anchors. `data` is made of mappings, lists, tuples,
    text, numbers, booleans and None.

    Raises:
        TypeError: If it holds anything else.
        FormatError: If it holds text that UTF-8 cannot express.
    """
    return "\n".join(_lines(data)) + "\n"


def scalar_text(value: Any) -> str:
    """Return `value` as YAML text, quoted if any dialect would read it as another value.

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


def _lines(data: Any) -> Iterator[str]:
    if not _is_block(data):
        yield _flow(data)
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _attach(f"{scalar_text(key)}:", value)
    else:
        for value in data:
            yield from _item(value)


def _attach(head: str, value: Any) -> Iterator[str]:
    if _is_block(value):
        yield head
        yield from (f"  {line}" for line in _lines(value))
    else:
        yield f"{head} {_flow(value)}"


def _item(value: Any) -> Iterator[str]:
    if _is_block(value) and isinstance(value, Mapping):
        for position, line in enumerate(_lines(value)):
            yield f"  {line}" if position else f"- {line}"
    else:
        yield from _attach("-", value)


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and len(value) > 0


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    return "[]" if isinstance(value, list | tuple) else scalar_text(value)
