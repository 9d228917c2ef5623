"""Restore keys: where in the data a sample, a pack or a batch came from.

A sample that was read has the key (leaf, epoch, ordinal). What is made of several has the key
(kind, (key, key, …)), a batch with the number that it has in the run, and each hook that yields
several outputs appends the number of the output. Keys are independent of ranks and workers.

    (0, 3, 4711)                                 a sample
    (0, 3, 4711, 1)                              the second output of a generator
    ("pack", ((0, 3, 4711), (0, 3, 12)))         a pack of two samples
    ("batch", ((0, 3, 4711), (0, 3, 12)), 170)   a batch
    ((0, 3, 4711), (0, 3, 12))                   the same, by hand: the keys of its samples
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

RestoreKey = tuple[Any, ...]


def key_of(item: Any) -> RestoreKey | None:
    """Return the restore key of a sample or a batch; None if it carries none.

    Hooks may put there what they like: only what looks like a key is one.
    """
    if isinstance(item, dict):
        key = item.get("__restore_key__")
    else:
        key = getattr(item, "__restore_key__", None)
    return key if key and isinstance(key, tuple | list) else None  # type: ignore[return-value]


def carries_key(item: Any) -> bool:
    """Return whether `item` is of a kind that carries keys."""
    if isinstance(item, dict):
        return "__restore_key__" in item
    return hasattr(item, "__restore_key__")


def stamp(item: Any, key: RestoreKey) -> None:
    """Let `item` carry `key`, if it is of a kind that carries keys."""
    if not carries_key(item):
        return
    if isinstance(item, dict):
        item["__restore_key__"] = key
    else:
        with contextlib.suppress(AttributeError):  # a frozen type of the user
            item.__restore_key__ = key


def joint_key(kind: str, items: Iterable[Any]) -> RestoreKey | None:
    """Return the key of what is made of `items`; None unless all of them carry keys."""
    keys = tuple(map(key_of, items))
    return None if None in keys or not keys else (kind, keys)


def flat(key: Iterable[Any]) -> tuple[int | str, ...]:
    """Return the numbers and words of a key, one after the other."""
    parts: list[int | str] = []
    for part in key:
        if isinstance(part, tuple | list):
            parts += flat(part)
        else:
            parts.append(part)
    return tuple(parts)


def split_key(key: Iterable[Any], kind: str) -> tuple[list[RestoreKey], RestoreKey] | None:
    """Return the keys that a joint key is made of, and the numbers appended to it.

    Takes (kind, keys, *numbers) and the short form of a list of keys; None for other keys.
    Lists stand for tuples, since a key may have passed through JSON.
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
    """Yield (leaf, epoch, ordinal) of every sample that went into what has this key."""
    parts = tuple(key)
    if len(parts) >= 3 and all(isinstance(part, int) for part in parts[:3]):
        yield parts[:3]
        return
    for part in parts:
        if isinstance(part, tuple | list):
            yield from sample_keys(part)
