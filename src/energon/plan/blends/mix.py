"""Shares of sources: a tree of weights that may change over a run, and patterns that realise them.

The shares of a level are divided among the entries that are left, so whatever happens to one
entry changes nothing outside of its blend:

- An entry whose source is used up (`max_epochs`) gives its share to its siblings. What becomes
  of the blend itself is its stopping strategy: it is used up with the first of its entries, or
  with the last.
- A blend in which no entry has a weight at the time is passed over.

A pattern realises weights almost exactly in every interval. The weights become whole numbers t_d
with sum T, and a pattern of T entries in which the j-th entry of number d lies near (j + u)/t_d
of the way. It is read over and over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, fsum, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import ConfigError, StateError
from energon.plan.blends.curve import Clock, Curve, CurveUnit
from energon.plan.randomness import combine, derive_seed


@dataclass(frozen=True)
class MixEntry:
    """A source or a blend in a blend.

    Args:
        node: Number of a source, or a blend.
        weight: Share among its siblings; None derives it from the size.
        max_epochs: How many epochs of each source below may be drawn; None for no limit.
        size: What the weight is derived from, e.g. tokens; None for the number of samples.
    """

    node: int | Mix
    weight: Curve | None
    max_epochs: float | None = None
    size: float | None = None


@dataclass(frozen=True)
class Mix:
    """A blend.

    Args:
        entries: At least one.
        stop_at_first: Whether it is used up with the first of its entries.
        exponent: Derived weights are sizes to the power of this: 1 is proportional, 0 even.
    """

    entries: tuple[MixEntry, ...]
    stop_at_first: bool = False
    exponent: float = 1.0

    @classmethod
    def flat(cls, weights: Sequence[float]) -> Mix:
        """Return the mix of sources 0, 1, … with constant weights."""
        return cls(tuple(MixEntry(i, Curve.constant(weight)) for i, weight in enumerate(weights)))

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The sources, in the order of their entries."""
        return tuple(number for number, _ in self._leaves(None))

    @cached_property
    def limits(self) -> dict[int, float]:
        """The maximum number of epochs of each source that has a limit."""
        return {number: limit for number, limit in self._leaves(None) if limit is not None}

    @property
    def units(self) -> set[CurveUnit]:
        """The units in which changes of weights are counted."""
        return {curve.unit for curve in self.curves() if not curve.is_constant}

    @property
    def is_derived(self) -> bool:
        """Whether any weight is to be derived from sizes."""
        return any(
            entry.weight is None or (isinstance(entry.node, Mix) and entry.node.is_derived)
            for entry in self.entries
        )

    def is_used_up(self, used: Collection[int]) -> bool:
        """Return whether nothing is left to draw, with these sources used up."""
        gone = [_is_used_up(entry.node, used) for entry in self.entries]
        return any(gone) if self.stop_at_first else all(gone)

    def settle(self, sizes: Sequence[int]) -> Mix:
        """Return the mix with derived weights in numbers.

        Args:
            sizes: Number of samples of each source.
        """
        derived = [
            (_size(entry, sizes) ** self.exponent) if entry.weight is None else 0.0
            for entry in self.entries
        ]
        entries = tuple(
            replace(
                entry,
                node=entry.node.settle(sizes) if isinstance(entry.node, Mix) else entry.node,
                weight=Curve.constant(number) if entry.weight is None else entry.weight,
                size=None,
            )
            for entry, number in zip(self.entries, derived, strict=True)
        )
        return replace(self, entries=entries, exponent=1.0)

    def knots(self, clock: Clock) -> list[int]:
        """Return the rows at which weights change, ascending."""
        return sorted({row for curve in self.curves() for row in curve.knots(clock)})

    def shares(
        self, start: int, stop: int | None, clock: Clock, used: Collection[int]
    ) -> tuple[float, ...] | None:
        """Return the shares of `sources` over rows without a knot; None if all are 0.

        Args:
            start: First row.
            stop: Row after the last; None for no end.
            clock: Tells the rows of positions.
            used: Sources that are used up.
        """
        shares: dict[int, float] = {}
        if not self._divide(1.0, shares, start, stop, clock, used):
            return None
        return tuple(shares.get(number, 0.0) for number in self.sources)

    def _divide(
        self,
        whole: float,
        shares: dict[int, float],
        start: int,
        stop: int | None,
        clock: Clock,
        used: Collection[int],
    ) -> bool:
        """Divide `whole` among the sources below; return False if every source is exhausted."""
        if self.is_used_up(used):
            return False
        weights = [
            0.0 if _is_used_up(entry.node, used) else _settled(entry).mean(start, stop, clock)
            for entry in self.entries
        ]
        while total := fsum(weights):
            parts: dict[int, float] = {}
            idle = len(weights)
            for at, (entry, weight) in enumerate(zip(self.entries, weights, strict=True)):
                share = whole * weight / total
                if not isinstance(entry.node, Mix):
                    parts[entry.node] = share
                elif weight and not entry.node._divide(share, parts, start, stop, clock, used):
                    idle = at
                    break
            if idle == len(weights):
                shares |= parts
                return True
            weights[idle] = 0.0
        return False

    def _leaves(self, limit: float | None) -> Iterator[tuple[int, float | None]]:
        for entry in self.entries:
            both = [each for each in (limit, entry.max_epochs) if each is not None]
            below = min(both, default=None)
            if isinstance(entry.node, Mix):
                yield from entry.node._leaves(below)
            else:
                yield entry.node, below

    def curves(self) -> Iterator[Curve]:
        """Yield the weight of each entry, and of those of the blends in it."""
        for entry in self.entries:
            yield _settled(entry)
            if isinstance(entry.node, Mix):
                yield from entry.node.curves()

    def to_json(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the mix as plain data that names sources by `names`."""
        entries: dict[str, Any] = {}
        for number, entry in enumerate(self.entries):
            weight = _settled(entry).to_json()
            limit = {} if entry.max_epochs is None else {"max_epochs": entry.max_epochs}
            if isinstance(entry.node, Mix):
                below = {"of": entry.node.to_json(names), "weight": weight, **limit}
                entries[f"{_BLEND}{number}"] = below
            else:
                entries[names[entry.node]] = {"weight": weight, **limit}
        return {"blend": entries, **({"stop_at_first": True} if self.stop_at_first else {})}

    @classmethod
    def from_json(cls, saved: Any, numbers: Mapping[str, int]) -> Mix:
        """Return the mix that `to_json` described, with sources numbered by `numbers`.

        Raises:
            StateError: If it is no such description.
        """
        try:
            entries = tuple(
                MixEntry(
                    cls.from_json(entry["of"], numbers) if "of" in entry else numbers[name],
                    Curve.from_json(entry["weight"]),
                    entry.get("max_epochs"),
                )
                for name, entry in saved["blend"].items()
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"a saved mix is damaged or was edited: {error!r} in {saved!r:.200}"
            ) from error
        return cls(entries, bool(saved.get("stop_at_first", False)))

    @classmethod
    def names_in(cls, saved: Any) -> Iterator[str]:
        """Yield the names of the sources in what `to_json` returned.

        Raises:
            StateError: If it returned no such thing.
        """
        match saved:
            case {"blend": dict(entries)} if all(isinstance(e, dict) for e in entries.values()):
                for name, entry in entries.items():
                    if "of" in entry:
                        yield from cls.names_in(entry["of"])
                    else:
                        yield name
            case _:
                raise StateError(f"a saved mix is damaged or was edited: {saved!r:.200}")


_BLEND = "blend "


def _settled(entry: MixEntry) -> Curve:
    if entry.weight is None:
        raise ConfigError("weights that depend on sizes were not settled; call `settle` first")
    return entry.weight


def _is_used_up(node: int | Mix, used: Collection[int]) -> bool:
    return node.is_used_up(used) if isinstance(node, Mix) else node in used


def _size(entry: MixEntry, sizes: Sequence[int]) -> float:
    if entry.size is not None:
        return entry.size
    if isinstance(entry.node, Mix):
        return fsum(_size(below, sizes) for below in entry.node.entries)
    return float(sizes[entry.node])


MIN_PATTERN, MAX_PATTERN = 4096, 65536


@dataclass(frozen=True, eq=False)
class Pattern:
    """A repeated pattern of numbers, such as those of sources."""

    number: NDArray[np.int32]
    """What comes, for each entry."""
    rank: Ints
    """How many entries of the same number come before, for each entry."""
    counts: Ints
    """How many entries each number has."""

    @property
    def size(self) -> int:
        """The number of entries."""
        return len(self.number)

    def index_of(self, number: int, turn: int) -> int:
        """Return the entry of the repeated pattern with the `turn`-th occurrence of `number`."""
        rounds, rank = divmod(turn, int(self.counts[number]))
        return rounds * self.size + int(self._indices[self._starts[number] + rank])

    @cached_property
    def _indices(self) -> Ints:
        return np.argsort(self.number, kind="stable")

    @cached_property
    def _starts(self) -> Ints:
        return np.cumsum(self.counts) - self.counts

    def count_until(self, entries: int) -> Ints:
        """Return how often each number occurs in the first `entries` of the repeated pattern."""
        rounds, at = divmod(entries, self.size)
        counts: Ints = np.bincount(self.number[:at], minlength=len(self.counts))
        counts += rounds * self.counts
        return counts


@lru_cache(maxsize=1024)
def make_pattern(weights: tuple[float, ...], seed: int) -> Pattern:
    """Return a pattern that realises `weights`."""
    counts = apportion(weights, _pattern_size(weights))
    number = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    start = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.arange(len(number)) - start
    key = np.array([derive_seed(seed, "pattern")], np.uint64)
    noise = combine(key, number.astype(np.int64), rank)
    jitter = (noise >> np.uint64(11)).astype(np.float64) / (1 << 53)
    order = np.argsort((rank + jitter) / counts[number], kind="stable")
    return Pattern(number[order], rank[order], counts)


def apportion(weights: Sequence[float], total: int) -> Ints:
    """Return whole numbers with sum `total` in proportion to `weights` (largest remainder).

    A weight above 0 gets at least 1.
    """
    shares = np.asarray(weights, np.float64)
    shares = shares / shares.max()
    exact = shares / shares.sum() * total
    counts: Ints = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    starved = (counts == 0) & (shares > 0)
    counts[starved] = 1
    counts[np.argmax(counts)] -= int(starved.sum())
    return counts


def _pattern_size(weights: Sequence[float]) -> int:
    """Return T, a power of 2 large enough for the smallest share to be within a hundredth."""
    smallest = min(weight for weight in weights if weight) / fsum(weights)
    precise = 64 * max(len(weights), min(MAX_PATTERN, 1 / smallest))
    return min(MAX_PATTERN, max(MIN_PATTERN, 1 << ceil(log2(precise))))


Mixture = tuple[Pattern, NDArray[np.int32]]
"""A pattern, and the source that each of its numbers stands for."""


class Mixtures:
    """Patterns by rows, each made once, because thousands of lanes of a run may need the same.

    Args:
        name: Returns the name of a source.
        clock: Tells the rows of positions.
        seed: Seed of the run.
    """

    def __init__(self, name: Callable[[int], str], clock: Clock, seed: int) -> None:
        self._name = name
        self._clock = clock
        self._seed = seed
        self._known: dict[tuple[object, ...], Mixture | None] = {}

    def of(self, mix: Mix, row: int, stop: int | None, used: Sequence[int]) -> Mixture | None:
        """Return the pattern over rows without a change; None if nothing is left to draw.

        Args:
            mix: Shares; kept by the caller for as long as this lives.
            row: First row.
            stop: Row after the last; None for no end.
            used: Sources that are used up.
        """
        key = (id(mix), row, stop, tuple(used))
        if key not in self._known:
            shares = mix.shares(row, stop, self._clock, used)
            self._known[key] = None if shares is None else self._make(mix, shares)
        return self._known[key]

    def _make(self, mix: Mix, shares: Sequence[float]) -> Mixture:
        # By name, so that the order of entries in a document does not matter.
        named = sorted(zip(map(self._name, mix.sources), mix.sources, shares, strict=True))
        pattern = make_pattern(tuple(share for *_, share in named), self._seed)
        return pattern, np.array([source for _, source, _ in named], np.int32)
