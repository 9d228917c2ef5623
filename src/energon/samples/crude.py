"""Crude samples: dicts with an entry per part, as in the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from energon.errors import SampleError
from energon.samples.provenance import SourceInfo

_NOTHING = object()

PART_FILES = "__part_files__"
"""Entry of a crude sample for parts whose names lack an extension: maps the name of a part to a
file name that has one."""
JOINED = "__joined__"
"""Part of a joined sample: a tuple of the samples it consists of, with None for missing ones."""
META_NAMES = ("__key__", "__shard__", "__restore_key__", "__subflavors__")
"""The entries that every crude sample has besides its parts."""
_RESERVED_NAMES = frozenset({*META_NAMES, "__sources__", PART_FILES, JOINED})
RESERVED = "a name that energon reserves; rename it in the shard, or leave it out with a field_map"
"""The end of messages about such a part."""


def reserved_names(parts: Iterable[str]) -> list[str]:
    """Return the names that no part can have, because crude samples have entries of these names.

    Example:
        >>> reserved_names(["jpg", "__key__"])
        ['__key__']
    """
    return sorted(_RESERVED_NAMES.intersection(parts))


def find_part(names: Iterable[str], requested: str) -> str | None:
    """Return the first part name that equals `requested`, ignoring case.

    Example:
        >>> find_part(["txt", "JPG"], "jpg")
        'JPG'
    """
    lowered = requested.lower()
    same = (name for name in names if name.lower() == lowered)
    return next((name for name in same if not name.startswith("__")), None)


class CrudeSample(dict[str, Any]):
    """The parts of a sample by name, together with `__key__`, `__shard__` and the like.

    Parts keep their names from the shard; look-ups ignore case.

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

    def _repr_html_(self) -> str:
        """Return the sample as a table, for notebooks."""
        from energon.samples.notebook import sample_html

        return sample_html(type(self).__name__, self)

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


class UnreadableSample(CrudeSample):
    """A sample with parts that cannot be read. It has none: looking one up raises the error.

    Its source cannot raise it, because other samples are read with it. The first hook does.

    Args:
        entries: Its key and origin.
        error: Says which part cannot be read, and why.
    """

    __slots__ = ("error",)

    def __init__(self, entries: Mapping[str, Any], error: SampleError) -> None:
        super().__init__(entries)
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return UnreadableSample, (dict(self), self.error)

    def __missing__(self, name: str) -> Any:
        raise self.error


def check_readable(sample: CrudeSample) -> CrudeSample:
    """Return a sample that was just read.

    Raises:
        SampleError: If it, or one of the samples that are joined in it, cannot be read.
    """
    for each in (sample, *dict.get(sample, JOINED, ())):
        if type(each) is UnreadableSample:
            raise each.error
    return sample


def basic_sample_keys(
    crude_sample: dict[str, Any], additional_source_info: Sequence[SourceInfo] = ()
) -> dict[str, Any]:
    """Return the fields that a cooked sample takes over from its crude one.

    Args:
        crude_sample: The crude sample.
        additional_source_info: Further sources of the cooked sample.

    Example:
        >>> basic_sample_keys({"__key__": "a", "txt": b"text"})["__key__"]
        'a'
    """
    # These names have a single spelling.
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
