"""Which name was meant: for the "did you mean" of messages."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from itertools import islice

MAX_CHARACTERS = 100
"""Of a name that are compared: documents of strangers may have names of megabytes."""
MAX_COMPARED = 10_000
"""Names that are looked at."""
MAX_CANDIDATES = 10
"""Names that are compared letter by letter, which takes the cube of their length."""


def nearest(name: object, known: Iterable[object], cutoff: float = 0.6) -> str | None:
    """Return which of the known names is closest to one that is not known; None if none is close.

    Takes a second at most, whatever the names are.

    Args:
        name: What was found.
        known: What could have been meant.
        cutoff: How close it has to be, from 0 to 1, which is the same.

    Example:
        >>> nearest("wieght", ["path", "weight", "subset"]), nearest("x", ["path"])
        ('weight', None)
    """
    from difflib import SequenceMatcher

    wanted = str(name)[:MAX_CHARACTERS]
    matcher: SequenceMatcher[str] = SequenceMatcher(None, "", wanted)
    scored = []
    for each in islice(known, MAX_COMPARED):
        candidate = str(each)
        matcher.set_seq1(candidate[:MAX_CHARACTERS])
        # These two look at lengths and at how often each letter is there.
        if matcher.real_quick_ratio() >= cutoff and (score := matcher.quick_ratio()) >= cutoff:
            same = _same(wanted, candidate) + _same(wanted[::-1], candidate[::-1])
            scored.append((score, same, candidate))
    found = []
    for *_, candidate in nlargest(MAX_CANDIDATES, scored):
        matcher.set_seq1(candidate[:MAX_CHARACTERS])
        found.append((matcher.ratio(), candidate))
    ratio, closest = max(found, default=(0.0, ""))
    return closest if ratio >= cutoff else None


def _same(a: str, b: str) -> int:
    """Return how many letters two names have in common at their beginning."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
