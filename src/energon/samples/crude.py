"""Samples as they are in the shards: dicts with an entry per part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from energon.samples.source_info import SourceInfo

_NOTHING = object()

PART_FILES = "__part_files__"
"""Entry of a crude sample that says which files its parts are, where their names do not: by the
name of the part, one with the extension of what it holds."""


def find_part(names: Iterable[str], wanted: str) -> str | None:
    """Return the first of the names of parts that is `wanted`, except perhaps for its case.

    Example:
        >>> find_part(["txt", "JPG"], "jpg")
        'JPG'
    """
    lowered = wanted.lower()
    same = (name for name in names if name.lower() == lowered)
    return next((name for name in same if not name.startswith("__")), None)


class CrudeSample(dict[str, Any]):
    """The parts of a sample by name, beside `__key__`, `__shard__` and other names like that.

    Parts have the names that they have in the shard, and are found whatever the case is.

    Example:
        >>> sample = CrudeSample({"__key__": "a", "JPG": b""})
        >>> sample["jpg"], "jpg" in sample, list(sample)
        (b'', True, ['__key__', 'JPG'])
    """

    __slots__ = ()

    def __missing__(self, name: str) -> Any:
        part = find_part(self, name) if isinstance(name, str) else None
        if part is None:
            raise KeyError(name)
        return self[part]

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        return isinstance(name, str) and find_part(self, name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """Return a part, or `default` if there is none of that name."""
        try:
            return self[name]
        except KeyError:
            return default

    def pop(self, name: str, default: Any = _NOTHING) -> Any:
        """Remove a part, and return it, or `default` if there is none of that name."""
        if not super().__contains__(name):
            name = find_part(self, name) or name
        return super().pop(name) if default is _NOTHING else super().pop(name, default)

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
    # Names of this kind have no other case.
    is_crude = type(crude_sample) is CrudeSample
    get: Callable[..., Any] = partial(dict.get, crude_sample) if is_crude else crude_sample.get
    sources = get("__sources__")
    if additional_source_info:
        sources = (*(sources or ()), *additional_source_info)
    return {
        "__key__": crude_sample["__key__"],
        "__restore_key__": get("__restore_key__", ()),
        "__subflavors__": get("__subflavors__"),
        "__sources__": sources,
    }
