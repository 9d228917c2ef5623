"""Values that were written down: JSON, msgpack and CBOR, up to a size and a depth."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from energon.errors import needs_extra
from energon.limits import DOCUMENT_BYTES, PART_DEPTH, check_depth, check_limit, too_deep

_scan_value: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def decode_json(data: bytes) -> Any:
    """Return the value that a JSON text describes.

    Raises:
        ValueError: If it is not valid.
        DecodeError: If it is larger than `DOCUMENT_BYTES` or deeper than `PART_DEPTH`.
    """
    size, depth = len(data), PART_DEPTH.value
    if size > DOCUMENT_BYTES.value:
        _check_size(data)
    # A level takes a byte, and most texts have few brackets: only in others is it worth finding out
    # how deep they are.
    if size > depth and data.count(b"[") + data.count(b"{") > depth < _json_depth(data):
        raise too_deep()
    return json_parser()(data)


@cache
def json_parser() -> Callable[[bytes], Any]:
    """Return the fastest function that does what `json.loads` does."""
    quick = quick_json_parser()
    return quick if quick is _parse_json else first_of(quick, _parse_json)


@cache
def quick_json_parser() -> Callable[[bytes], Any]:
    """Return the fastest function that returns what `json.loads` does, or refuses."""
    try:
        import msgspec
    except ImportError:
        return _parse_json
    quick: Callable[[bytes], Any] = msgspec.json.Decoder().decode
    return quick


def first_of(
    quick: Callable[[bytes], Any], exact: Callable[[bytes], Any]
) -> Callable[[bytes], Any]:
    """Return a function that gives data to the exact parser if the quick one refuses them.

    msgspec takes a third of the time. It gives the same values, or refuses: infinite numbers and
    NaN, halves of surrogate pairs, other encodings than UTF-8, and what is not JSON.
    """

    def parse(data: bytes) -> Any:
        try:
            return quick(data)
        except Exception:
            return exact(data)

    return parse


def _parse_json(data: bytes) -> Any:
    # Nearly all texts are UTF-8 without a mark. Everything else is left to `loads`, which detects
    # the encoding, and explains errors.
    try:
        text = data.decode("utf-8", "surrogatepass")
        value, end = _scan_value(text, 0)
    except (ValueError, StopIteration):
        return json.loads(data)
    return value if end == len(text) or not text[end:].strip(" \t\n\r") else json.loads(data)


def decode_msgpack(data: bytes) -> Any:
    """Return a value from its bytes in msgpack, see `decode_json`."""
    with needs_extra("formats", "msgpack parts need msgpack"):
        import msgpack
    _check_size(data)
    value = msgpack.unpackb(data)
    # Each level takes a byte.
    if len(data) > PART_DEPTH.value and isinstance(value, list | dict):
        check_depth(value)
    return value


def decode_cbor(data: bytes) -> Any:
    """Return a value from its bytes in CBOR, see `decode_json`."""
    with needs_extra("formats", "cbor parts need cbor2"):
        import cbor2
    _check_size(data)
    try:
        return cbor2.loads(data, max_depth=PART_DEPTH.value)
    except cbor2.CBORDecodeError as error:
        if "nesting depth" in str(error):
            raise too_deep() from error
        raise


def _check_size(data: bytes) -> None:
    if len(data) > DOCUMENT_BYTES.value:
        check_limit(len(data), DOCUMENT_BYTES, f"the part has {len(data)} bytes")


def _json_depth(data: bytes) -> int:
    """Return how deep a JSON text is nested, at most: damaged ones have no depth."""
    if _deepest(data) <= PART_DEPTH.value:
        return 0
    # Brackets in strings do not count. They are looked for now only, as that takes time.
    text = data.decode(json.detect_encoding(data), "surrogatepass").encode("utf-8", "surrogatepass")
    return _deepest(_STRING.sub(b"", text))


def _deepest(text: bytes) -> int:
    codes = np.frombuffer(text, np.uint8)
    steps = np.isin(codes, np.frombuffer(b"[{", np.uint8)).view(np.int8) - np.isin(
        codes, np.frombuffer(b"]}", np.uint8)
    ).view(np.int8)
    steps = steps[steps != 0]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))
