"""Numbers that change over a run: constant between points, or rising and falling in ramps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from energon.errors import ConfigError

CurveUnit = Literal["samples", "batches", "rows"]

RAMP_STEPS = 64
"""Stages that a ramp is made of: each is off by a 128th of its height at most, none on average."""
MIN_STEP_ROWS = 16
"""Rows of a lane that such a stage has at least; in fewer, shares cannot be held."""


class Point(NamedTuple):
    """A value that applies from some position of the run on."""

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
    """A number as a function of the position in a run.

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
                raise ConfigError(
                    f"{point.value} at {point.position}: expected a number of 0 or more"
                )

    @classmethod
    def constant(cls, value: float) -> Curve:
        """Return a constant curve."""
        return cls((Point(0, float(value)),))

    @property
    def is_constant(self) -> bool:
        """Whether it never changes."""
        return len({point.value for point in self.points}) == 1

    def knots(self, clock: Clock) -> Iterator[int]:
        """Yield the rows at which stages begin, including the steps of ramps."""
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
        """Return the value over rows without a knot: in a ramp, the value at their middle.

        Args:
            start: First row.
            stop: Row after the last; None for no end.
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
