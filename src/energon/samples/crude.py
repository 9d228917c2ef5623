"""Samples as they are in the shards: dicts with an entry per part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon.samples.source_info import SourceInfo


class CrudeSample(dict[str, Any]):
    """The parts of a sample by name, beside `__key__`, `__shard__` and other names like that."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        parts = ", ".join(part for part in self if not part.startswith("__"))
        raise AttributeError(
            f"a crude sample is a dict and has no attribute {name!r}; its parts are {parts}: take "
            "them as sample[part], or give the dataset a sample type or the task encoder a cooker"
        )


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
