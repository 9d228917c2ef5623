"""Patterns like `shard_{000..127}.tar`: many names in one."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence

from energon.errors import ConfigError
from energon.limits import BRACE_NAMES

_NUMBERS = re.compile(r"\d+")
_MEANS_SOMETHING = re.compile(r"\{|\\[{}\\]")
_ESCAPED = re.compile(r"[{}\\]")
_PLAIN = re.compile(r"[^{},\\]+")
_RANGE = re.compile(r"\{(?:(-?\d+)\.\.(-?\d+)|([a-zA-Z])\.\.([a-zA-Z]))(?:\.\.-?(\d+))?\}")
MEAN_CHARACTERS = 256
"""How long names may be on average, where there are as many as the limit allows."""
MAX_DIGITS = 100
_LETTERS = string.ascii_uppercase + string.ascii_lowercase


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern stands for; a name without braces stands for itself.

    Braces work as in a shell: `{a,b}` lists alternatives, `{08..12}` numbers with as many digits,
    `{a..e..2}` every second letter, and all of it nests. `{a}` stands for itself. A backslash
    escapes the next character.

    Raises:
        ConfigError: If braces do not pair, or expand to more names than `BRACE_NAMES` allows.

    Example:
        >>> expand_braces("{train,val}_{8..10}.tar")[:4]
        ['train_8.tar', 'train_9.tar', 'train_10.tar', 'val_8.tar']
    """
    return expand_all((pattern,))


def expand_all(patterns: Iterable[str]) -> list[str]:
    """Return the names that patterns stand for, which together are within the limit.

    Raises:
        ConfigError: As `expand_braces`.
    """
    expansion: _Expansion | None = None
    names: list[str] = []
    for pattern in patterns:
        if not _MEANS_SOMETHING.search(pattern):
            names.append(pattern)
            continue
        expansion = expansion or _Expansion()
        names += expansion.expand(pattern)
        expansion.count(len(names))
    return names


class _Expansion:
    """The names that the patterns of a document stand for, and how many more they may be."""

    def __init__(self) -> None:
        self.names = BRACE_NAMES.value
        self.characters = self.names * MEAN_CHARACTERS

    def count(self, names: int, characters: int = 0) -> None:
        """Raise ConfigError if this many names, or more characters, exceed the limit."""
        self.characters -= characters
        if names > self.names or self.characters < 0:
            raise self.error(
                f"expands to more than {self.names:,} names, or very long ones; {BRACE_NAMES.hint}"
            )

    def error(self, problem: str) -> ConfigError:
        shown = self.pattern if len(self.pattern) <= 80 else f"{self.pattern[:79]}…"
        return ConfigError(f"pattern {shown!r}: {problem}")

    def expand(self, pattern: str) -> list[str]:
        self.pattern = pattern
        try:
            return self.run(0, nested=False)[0]
        except RecursionError:
            raise self.error("braces are nested too deeply") from None

    def run(self, at: int, *, nested: bool) -> tuple[list[str], int]:
        """Expand up to the end, or up to the comma or brace that ends an alternative."""
        pattern = self.pattern
        names, length = [""], 0
        while at < len(pattern) and not (nested and pattern[at] in ",}"):
            pieces, at = self.piece(at)
            length = length * len(pieces) + len(names) * sum(map(len, pieces))
            self.count(len(names) * len(pieces), length)
            names = [name + piece for name in names for piece in pieces]
        return names, at

    def piece(self, at: int) -> tuple[list[str], int]:
        pattern = self.pattern
        if plain := _PLAIN.match(pattern, at):
            return [plain[0]], plain.end()
        if pattern[at] == "\\":
            return [pattern[at + 1 : at + 2] or "\\"], at + 2
        if pattern[at] == "}":
            raise self.error(f"the '}}' at {at} is unmatched")
        if pattern[at] != "{":
            return [pattern[at]], at + 1
        if bounds := _RANGE.match(pattern, at):
            return self.range(bounds), bounds.end()
        return self.alternatives(at)

    def alternatives(self, at: int) -> tuple[list[str], int]:
        pattern = self.pattern
        names, end = self.run(at + 1, nested=True)
        if pattern[end : end + 1] == "}":
            return [f"{{{name}}}" for name in names], end + 1
        while pattern[end : end + 1] == ",":
            more, end = self.run(end + 1, nested=True)
            names += more
            self.count(len(names))
        if end == len(pattern):
            raise self.error(f"the '{{' at {at} is never closed")
        return names, end + 1

    def range(self, bounds: re.Match[str]) -> list[str]:
        first, last, first_letter, last_letter, step_text = bounds.groups()
        if max(map(len, (first or "", last or "", step_text or ""))) > MAX_DIGITS:
            raise self.error(f"a number in braces has more than {MAX_DIGITS} digits")
        step = int(step_text or 1) or 1
        if first_letter:
            start, stop = _LETTERS.index(first_letter), _LETTERS.index(last_letter)
            return [_LETTERS[index] for index in _steps(start, stop, step)]
        padded = any(
            text.lstrip("-").startswith("0") and text.strip("-") != "0" for text in (first, last)
        )
        width = max(len(first), len(last)) if padded else 0
        start, stop = int(first), int(last)
        self.count(abs(stop - start) // step + 1)
        return [f"{number:0{width}}" for number in _steps(start, stop, step)]


def _steps(first: int, last: int, step: int) -> range:
    return range(first, last + 1, step) if first <= last else range(first, last - 1, -step)


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
    index = _counting_index(run[-1], name)
    return index is not None and (len(run) < 2 or index == _counting_index(run[-2], run[-1]))


def _counting_index(first: str, second: str) -> int | None:
    """Return the index of the only number that differs between names, if it grows by one."""
    if _ESCAPED.search(first) or _ESCAPED.search(second):
        return None
    if _NUMBERS.split(first) != _NUMBERS.split(second):
        return None
    pairs = list(zip(_NUMBERS.findall(first), _NUMBERS.findall(second), strict=True))
    changed = [index for index, (a, b) in enumerate(pairs) if a != b]
    if len(changed) != 1:
        return None
    a, b = pairs[changed[0]]
    padded = len(a) == len(b) or not (a.startswith("0") or b.startswith("0"))
    return changed[0] if padded and int(b) == int(a) + 1 else None


def _collapse(run: list[str]) -> str:
    if len(run) == 1:
        return run[0]
    index = _counting_index(run[0], run[1])
    first = list(_NUMBERS.finditer(run[0]))[index or 0]
    last = list(_NUMBERS.finditer(run[-1]))[index or 0]
    pattern = f"{run[0][: first.start()]}{{{first[0]}..{last[0]}}}{run[0][first.end() :]}"
    return pattern if expand_braces(pattern) == run else ",".join(run).join("{}")
