"""Write YAML in block style."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from energon.formats.yaml_scalars import scalar_text


def dump(data: Any) -> str:
    """Return `data` as YAML that this reader, Energon's and every YAML 1.1 reader agree on.

    Block style, keys in their order, no anchors. `data` is made of mappings, lists, tuples,
    text, numbers, booleans and None.

    Raises:
        TypeError: If it holds anything else.
        FormatError: If it holds text that UTF-8 cannot express.
    """
    return "\n".join(_lines(data)) + "\n"


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
