"""Crude samples, dicts with an entry per part as in the shards, and restore keys.

A restore key tells where in the data a sample, a pack or a batch came from. A sample that was read
has the key (leaf, epoch, ordinal). A combination of several has the key (kind, (key, key, …)); a
batch adds its number in the run, and each hook that yields several outputs appends the number of
the output. Keys are independent of ranks and workers.

    (0, 3, 4711)                                 a sample
    (0, 3, 4711, 1)                              the second output of a generator
    ("pack", ((0, 3, 4711), (0, 3, 12)))         a pack of two samples
    ("batch", ((0, 3, 4711), (0, 3, 12)), 170)   a batch
    ((0, 3, 4711), (0, 3, 12))                   the same, by hand: the keys of its samples
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        from energon.samples.display import sample_html

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

    Its source cannot raise it, because other samples are read with it. The stage that takes the
    samples one by one does.

    Args:
        entries: Its key and origin.
        error: Names the part that cannot be read, and the reason.
    """

    __slots__ = ("error",)

    def __init__(self, entries: Mapping[str, Any], error: SampleError) -> None:
        super().__init__(entries)
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return UnreadableSample, (dict(self), self.error)

    def __missing__(self, name: str) -> Any:
        raise self.error


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


RestoreKey = tuple[Any, ...]


def key_of(item: Any) -> RestoreKey | None:
    """Return the restore key of a sample or a batch; None if it carries none.

    Hooks may store anything there: only what looks like a key counts.
    """
    is_dict = isinstance(item, dict)
    key = item.get("__restore_key__") if is_dict else getattr(item, "__restore_key__", None)
    return key if key and isinstance(key, tuple | list) else None  # type: ignore[return-value]


def carries_key(item: Any) -> bool:
    """Return whether the type of `item` can carry keys."""
    if isinstance(item, dict):
        return "__restore_key__" in item
    return hasattr(item, "__restore_key__")


def stamp(item: Any, key: RestoreKey) -> None:
    """Attach `key` to `item`, if its type can carry keys."""
    if isinstance(item, dict):
        if "__restore_key__" in item:
            item["__restore_key__"] = key
    elif hasattr(item, "__restore_key__"):
        with contextlib.suppress(AttributeError):  # a frozen type of the user
            item.__restore_key__ = key


def joint_key(kind: str, items: Iterable[Any]) -> RestoreKey | None:
    """Return the key of a combination of `items`; None unless all of them carry keys."""
    keys = tuple(map(key_of, items))
    return None if None in keys or not keys else (kind, keys)


def flat(key: Iterable[Any]) -> tuple[int | str, ...]:
    """Return the numbers and words of a key, one after another."""
    parts: list[int | str] = []
    for part in key:
        if isinstance(part, tuple | list):
            parts += flat(part)
        else:
            parts.append(part)
    return tuple(parts)


def split_key(key: Iterable[Any], kind: str) -> tuple[list[RestoreKey], RestoreKey] | None:
    """Return the keys in a joint key, and the numbers appended to it.

    Accepts (kind, keys, *numbers) and the short form, a list of keys; returns None for other keys.
    Lists count as tuples, since a key may have passed through JSON.
    """
    key = tuple(key)
    if len(key) > 1 and key[0] == kind and isinstance(key[1], tuple | list) and key[1]:
        return [to_tuple(each) for each in key[1]], key[2:]
    joined = [part for part in key if isinstance(part, tuple | list)]
    if not joined or joined != list(key[: len(joined)]):
        return None
    return [to_tuple(each) for each in joined], key[len(joined) :]


def to_tuple(key: Any) -> Any:
    """Return a key that passed through JSON with tuples in place of lists."""
    return tuple(to_tuple(part) for part in key) if isinstance(key, tuple | list) else key


def sample_keys(key: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield (leaf, epoch, ordinal) of every sample that a key stands for."""
    parts = tuple(key)
    if len(parts) >= 3 and all(isinstance(part, int) for part in parts[:3]):
        yield parts[:3]
        return
    for part in parts:
        if isinstance(part, tuple | list):
            yield from sample_keys(part)
