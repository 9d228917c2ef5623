"""In which shares sources are mixed: a tree of weights that may change over a run.

A weight is a curve: constant between points, or rising and falling in ramps.

The shares of a level are divided among the entries that are left, so whatever happens to one
entry changes nothing outside of its blend:

- An entry whose source is used up (`max_epochs`) gives its share to its siblings. What becomes
  of the blend itself is its stopping strategy: it is used up with the first of its entries, or
  with the last.
- A blend in which no entry has a weight at the time is passed over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import fsum
from typing import Any, Literal, NamedTuple

from energon.errors import ConfigError, StateError

CurveUnit = Literal["samples", "batches", "rows"]

RAMP_STEPS = 64
"""Stages that a ramp is made of: each is off by a 128th of its height at most, none on average."""
MIN_STEP_ROWS = 16
"""Rows of a lane that such a stage has at least; in fewer, shares cannot be held."""


class Point(NamedTuple):
    """A value from some position of the run on."""

    position: int
    value: float
    ramp: bool = False
    """Whether the value is reached evenly from the point before, instead of at once."""


class Clock(NamedTuple):
    """Converts positions of a run into rows of a lane.

    All lanes advance together, so the first `n` samples of a run are the first `n / lanes`
    rows of each. Positions that fall between rows or batches are rounded up.

    Where a run continues with another number of lanes, rows count from there, and positions
    before it have negative rows.
    """

    lanes: int
    batch_size: int
    start: int = 0
    """How many samples the run had drawn when it got these lanes."""
    first_lanes: int | None = None
    """How many lanes the run had at first, if those were others; `rows` are rows of those."""

    def row(self, position: int, unit: CurveUnit) -> int:
        """Return the first row of a lane at or after a position."""
        if unit == "rows":
            if self.first_lanes is None:
                return position
            return -((self.start - position * self.first_lanes) // self.lanes)
        if unit == "batches":
            return -((self.start // self.batch_size - position) // self.lanes) * self.batch_size
        return -((self.start - position) // self.lanes)


@dataclass(frozen=True)
class Curve:
    """A number as a function of how far a run is.

    Args:
        points: In ascending order, the first at 0.
        unit: What positions count: samples or batches of the whole run, or rows of a lane.

    Raises:
        ConfigError: If points do not ascend from 0, or values are not numbers from 0.
    """

    points: tuple[Point, ...]
    unit: CurveUnit = "samples"

    def __post_init__(self) -> None:
        positions = [point.position for point in self.points]
        if not positions or positions[0] != 0 or positions != sorted(set(positions)):
            raise ConfigError(f"a schedule starts at 0 and ascends, got positions {positions}")
        if self.points[0].ramp:
            raise ConfigError("a schedule cannot start with a ramp: nothing comes before it")
        for point in self.points:
            if not 0 <= point.value < float("inf"):
                raise ConfigError(f"{point.value} at {point.position}: expected a number from 0 on")

    @classmethod
    def constant(cls, value: float) -> Curve:
        """Return the curve that always has one value."""
        return cls((Point(0, float(value)),))

    @property
    def is_constant(self) -> bool:
        """Whether it never changes."""
        return len({point.value for point in self.points}) == 1

    def knots(self, clock: Clock) -> Iterator[int]:
        """Yield the rows at which a stage begins, the steps of ramps included."""
        for before, after in pairwise(self.points):
            start, stop = (
                clock.row(before.position, self.unit),
                clock.row(after.position, self.unit),
            )
            if after.ramp and after.value != before.value:
                steps = min(RAMP_STEPS, max(1, (stop - start) // MIN_STEP_ROWS))
                yield from (start + (stop - start) * i // steps for i in range(steps))
            yield stop

    def mean(self, start: int, stop: int | None, clock: Clock) -> float:
        """Return the value over rows in which no knot lies: in a ramp, that of its middle.

        Args:
            start: First row.
            stop: Row behind the last; None for no end.
            clock: Tells the rows of the points.
        """
        rows = [clock.row(point.position, self.unit) for point in self.points]
        at = bisect_right(rows, start) - 1
        before = self.points[at]
        if at + 1 == len(self.points) or not self.points[at + 1].ramp:
            return before.value
        after, first, last = self.points[at + 1], rows[at], rows[at + 1]
        middle = (start + (last if stop is None else min(stop, last))) / 2
        return before.value + (after.value - before.value) * (middle - first) / (last - first)

    def to_json(self) -> Any:
        """Return the curve as plain data: a number, if it is constant."""
        if self.is_constant:
            return self.points[0].value
        return {"unit": self.unit, "points": [list(point) for point in self.points]}

    @classmethod
    def from_json(cls, saved: Any) -> Curve:
        """Return the curve that `to_json` described."""
        if isinstance(saved, dict):
            points = tuple(Point(int(p), float(v), bool(r)) for p, v, r in saved["points"])
            return cls(points, saved["unit"])
        return cls.constant(saved)


@dataclass(frozen=True)
class MixEntry:
    """Something in a blend.

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
        """How many epochs may be drawn of the sources that have a limit."""
        return {number: limit for number, limit in self._leaves(None) if limit is not None}

    @property
    def units(self) -> set[CurveUnit]:
        """In what the changes of weights are counted."""
        return {curve.unit for curve in self._curves() if not curve.is_constant}

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
        return sorted({row for curve in self._curves() for row in curve.knots(clock)})

    def shares(
        self, start: int, stop: int | None, clock: Clock, used: Collection[int]
    ) -> tuple[float, ...] | None:
        """Return the share of each of `sources` over rows without a knot; None if all are 0.

        Args:
            start: First row.
            stop: Row behind the last; None for no end.
            clock: Tells the rows of positions.
            used: Sources that are used up.
        """
        found: dict[int, float] = {}
        if not self._divide(1.0, found, start, stop, clock, used):
            return None
        return tuple(found.get(number, 0.0) for number in self.sources)

    def _divide(
        self,
        whole: float,
        found: dict[int, float],
        start: int,
        stop: int | None,
        clock: Clock,
        used: Collection[int],
    ) -> bool:
        """Divide `whole` among the sources below; return whether there was anyone to take it."""
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
                found |= parts
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

    def _curves(self) -> Iterator[Curve]:
        for entry in self.entries:
            yield _settled(entry)
            if isinstance(entry.node, Mix):
                yield from entry.node._curves()

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
