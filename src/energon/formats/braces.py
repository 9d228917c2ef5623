"""Patterns like `shard_{000..127}.tar`: many names in one."""

from __future__ import annotations

import re
from collections.abc import Sequence

import braceexpand

from energon.errors import ConfigError

_NUMBERS = re.compile(r"\d+")
_MEANS_SOMETHING = re.compile(r"\{|\\[{}\\]")
_ESCAPED = re.compile(r"[{}\\]")


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern stands for; a name without braces stands for itself.

    A backslash before a brace or another backslash takes its meaning away.

    Raises:
        ConfigError: If braces do not pair.
    """
    if not _MEANS_SOMETHING.search(pattern):
        return [pattern]
    try:
        return list(braceexpand.braceexpand(pattern))
    except ValueError as error:
        raise ConfigError(f"pattern {pattern!r}: {error}") from error


def escape_braces(name: str) -> str:
    """Return a pattern that stands for one name, whatever characters it has."""
    return _ESCAPED.sub(r"\\\g<0>", name)


def collapse_braces(names: Sequence[str]) -> list[str]:
    """Return patterns that expand to `names`, in that order, with runs of numbers collapsed.

    Names with braces are taken for patterns, and stay as they are, see `escape_braces`.

    Example:
        >>> collapse_braces(["a_08.tar", "a_09.tar", "a_10.tar", "b.tar"])
        ['a_{08..10}.tar', 'b.tar']
    """
    patterns: list[str] = []
    run: list[str] = []
    for name in names:
        if run and not _continues(run, name):
            patterns.append(_collapse(run))
            run = []
        run.append(name)
    return patterns + ([_collapse(run)] if run else [])


def _continues(run: list[str], name: str) -> bool:
    place = _counting_place(run[-1], name)
    return place is not None and (len(run) < 2 or place == _counting_place(run[-2], run[-1]))


def _counting_place(first: str, second: str) -> int | None:
    """Return which number in the names goes up by one while all else is equal, or None."""
    if _ESCAPED.search(first) or _ESCAPED.search(second):
        return None
    if _NUMBERS.split(first) != _NUMBERS.split(second):
        return None
    pairs = list(zip(_NUMBERS.findall(first), _NUMBERS.findall(second), strict=True))
    changed = [place for place, (a, b) in enumerate(pairs) if a != b]
    if len(changed) != 1:
        return None
    a, b = pairs[changed[0]]
    padded = len(a) == len(b) or not (a.startswith("0") or b.startswith("0"))
    return changed[0] if padded and int(b) == int(a) + 1 else None


def _collapse(run: list[str]) -> str:
    if len(run) == 1:
        return run[0]
    place = _counting_place(run[0], run[1])
    first = list(_NUMBERS.finditer(run[0]))[place or 0]
    last = list(_NUMBERS.finditer(run[-1]))[place or 0]
    pattern = f"{run[0][: first.start()]}{{{first[0]}..{last[0]}}}{run[0][first.end() :]}"
    return pattern if expand_braces(pattern) == run else ",".join(run).join("{}")
