"""Measure how long calls of hooks take, in batches that a host chooses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from energon.samples.crude import RestoreKey

SLOW_SECONDS = 0.1
"""A call that takes longer than this is slow."""


class HookSpan(NamedTuple):
    """A call of a hook, or the reading of a block, by `time.perf_counter`.

    Args:
        name: The hook.
        leaf: The number of the dataset, -1 if there are several.
        start: When it began.
        stop: When it ended.
    """

    name: str
    leaf: int
    start: float
    stop: float


class HookClock:
    """How long calls of hooks have taken.

    Attributes:
        seconds: By the name of the hook and the number of the dataset, -1 if there are several.
        slow: The times of slow calls, by the same.
        calls: How many calls there were.
        spans: Takes each call, unless it is None.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.slow: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        self.calls = 0
        self.spans: list[HookSpan] | None = None

    def clear(self) -> None:
        """Begin again."""
        self.seconds.clear()
        self.slow.clear()
        self.calls = 0

    def add(self, name: str, key: RestoreKey, began: float) -> None:
        """Record that a call ends now.

        Args:
            name: The hook.
            key: The seed key of its argument.
            began: When it began.
        """
        self._record(name, leaf_of(key), began)

    def _record(self, name: str, leaf: int, began: float) -> None:
        now, of = perf_counter(), (name, leaf)
        seconds = now - began
        self.seconds[of] += seconds
        self.calls += 1
        if seconds > SLOW_SECONDS:
            self.slow[of].append(seconds)
        if self.spans is not None:
            self.spans.append(HookSpan(name, leaf, began, now))

    def timed(self, function: Callable[[Any], Any], name: str, leaf: int) -> Callable[[Any], Any]:
        """Return a function that does the same and records how long it takes.

        Args:
            function: The function of a hook.
            name: The hook.
            leaf: The number of the dataset.
        """

        def call(argument: Any) -> Any:
            began = perf_counter()
            try:
                return function(argument)
            finally:
                self._record(name, leaf, began)

        return call


def leaf_of(key: RestoreKey | None) -> int:
    """Return the number of the dataset that a seed key belongs to; -1 if to several."""
    first: Any = key
    while isinstance(first, tuple | list) and first:
        first = first[0]
    return first if isinstance(first, int) else -1
