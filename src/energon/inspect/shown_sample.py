"""What is in a sample, in words and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from energon.messages import bytes_in_words
from energon.samples.notebook import recording_in_words, sources_in_words


def sample_fields(sample: Any) -> dict[str, Any]:
    """Return the fields of a sample of any type by name, with those about its origin."""
    if isinstance(sample, dict):
        return sample
    return {each.name: getattr(sample, each.name) for each in dataclasses.fields(sample)}


def sample_lines(sample: Any) -> Iterator[str]:
    """Yield a sample as lines of text: its key, its origin, and each field."""
    fields = sample_fields(sample)
    yield f"{type(sample).__name__} {fields['__key__']!r}"
    if fields.get("__subflavors__"):
        yield f"  subflavors: {value_in_words(fields['__subflavors__'])}"
    if fields.get("__sources__"):
        yield f"  sources: {', '.join(sources_in_words(fields['__sources__']))}"
    for name, value in fields.items():
        if not name.startswith("__"):
            yield f"  {name}: {value_in_words(value)}"


def plain_sample(sample: Any) -> dict[str, Any]:
    """Return a sample as plain data, for JSON: of images, arrays and bytes, what they are."""
    fields = sample_fields(sample)
    values = {name: _plain(value) for name, value in fields.items() if not name.startswith("__")}
    return {"type": type(sample).__name__, "key": fields["__key__"], "fields": values}


def _plain(value: Any) -> Any:
    """Return text, numbers and what is made of them as it is, and of all else what it is."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)  # JSON has no NaN
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    about: dict[str, Any] = {"type": type(value).__name__}
    if hasattr(value, "shape"):
        return {**about, "shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, bytes | bytearray | memoryview):
        return {**about, "bytes": len(value)}
    return {**about, "text": value_in_words(value)}


def value_in_words(value: Any) -> str:
    """Return the value of a field in one short line."""
    recording = recording_in_words(value)
    if recording is not None:
        return recording
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} {tuple(shape)} {value.dtype}"
    if isinstance(value, bytes):
        return bytes_in_words(value)
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
