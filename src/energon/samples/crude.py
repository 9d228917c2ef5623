"""Samples as they are in the shards: dicts with an entry per part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon.samples.source_info import SourceInfo


class CrudeSample(dict[str, Any]):
    """The parts of a sample by name, beside `__key__`, `__shard__` and other names like that."""

    __slots__ = ()


def basic_sample_keys(
    crude_sample: dict[str, Any], additional_source_info: Sequence[SourceInfo] = ()
) -> dict[str, Any]:
    """Return what a cooked sample has to take over from the crude one it is made of.

    Args:
        crude_sample: The crude sample.
        additional_source_info: What else went into the cooked one.

    Example:
        >>> basic_sample_keys({"__key__": "a", "txt": b"text"})["__key__"]
        'a'
    """
    sources = crude_sample.get("__sources__")
    if additional_source_info:
        sources = (*(sources or ()), *additional_source_info)
    return {
        "__key__": crude_sample["__key__"],
        "__restore_key__": crude_sample.get("__restore_key__", ()),
        "__subflavors__": crude_sample.get("__subflavors__"),
        "__sources__": sources,
    }
