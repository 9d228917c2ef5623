"""Record the rows at which the mix of a run was changed.

A blend may be restored with different weights. Rows that were already read keep their order, since
stages that hold items back read them again; the new mix begins with the first row of a stream that
none of its lanes has read. From then on, that row is part of their states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from energon.errors import StateError
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import Plan
from energon.stages.base import (
    Dataset,
    DatasetIterator,
    State,
    StateKind,
    ThroughDataset,
    ThroughIterator,
    unpack,
)
from energon.stages.lane import Lane


@dataclass(frozen=True)
class ChangesDataset(ThroughDataset):
    """Yield the items of `dataset`, read by a plan whose mixes begin at the rows in the state.

    Args:
        dataset: The items.
        plan: The order.
        changes: How many mixes the plan has besides the first.
    """

    dataset: Dataset[Any]
    plan: Plan
    changes: int = 0

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _ChangesIterator(self, lane)


class _ChangesIterator(ThroughIterator):
    saves: ClassVar[Mapping[str, StateKind]] = {
        "inner": dict | None,
        "read": int,
        "changes": list,
    }

    def __init__(self, stage: ChangesDataset, lane: Lane) -> None:
        self.stage = stage
        self.lane = lane
        self._begin(None)
        self.inner = stage.dataset.open(lane)

    def __iter__(self) -> Iterator[Any]:
        # Nothing is done to the items: who draws them from the stage below moves this along.
        return iter(self.inner)

    def __next__(self) -> Any:
        return next(self.inner)

    def take(self, count: int) -> list[Any]:
        return self.inner.take(count)

    def state_dict(self) -> State:
        return {
            "inner": self.inner.state_dict(),
            "read": self.lane.reading.row,
            "changes": list(self.changes),
        }

    def load_state_dict(self, state: State) -> None:
        inner, self.lane.reading.row, _ = unpack(state, self.saves)
        self.lane.reading.known = self.lane.reading.row
        self._begin(state)
        if inner is not None:
            self.inner.load_state_dict(inner)

    def _begin(self, state: State | None) -> None:
        self.changes = rows_of_changes(state, self.stage.changes)
        self.lane.reading.plan = self.stage.plan.with_changes(self.lane.number, self.changes)


def rows_of_changes(state: State | None, count: int) -> tuple[int, ...]:
    """Return the rows of a lane at which `count` changes took place.

    Changes that are not in the state take place now, with the next row that is read.

    Args:
        state: State of the lane; None if nothing was read.
        count: Number of changes of the run.
    """
    if state is None:
        return (0,) * count
    known = tuple(state["changes"])
    if len(known) > count or not all(isinstance(row, int) for row in known):
        raise StateError(
            f"saved state has changes at rows {known!r:.100}, expected rows of at most {count} "
            "changes of the mix; it is damaged or was edited"
        )
    return (*known, *[state["read"]] * (count - len(known)))


def begin_changes(
    states: Mapping[int, State | None], recipe: PlanRecipe, lanes: int
) -> dict[int, State | None]:
    """Return states of lanes with all changes of a run; the new ones take place now.

    Args:
        states: States of the known lanes; None if nothing was read.
        recipe: The order, with the changes.
        lanes: Number of lanes of the run.

    Raises:
        StateError: If lanes are missing that share a stream with one of these.
    """
    begun = dict(states)
    count, streams = len(recipe.past), recipe.num_streams(lanes)
    plan = recipe(lanes)
    for stream in sorted({lane % streams for lane in states}) if count else ():
        known = {lane: states.get(lane) for lane in range(stream, lanes, streams)}
        found = {
            lane: unpack(state, _ChangesIterator.saves)
            for lane, state in known.items()
            if state is not None
        }
        for lane in found:
            rows_of_changes(known[lane], count)
        if all(len(changes) == count for _, _, changes in found.values()):
            continue
        missing = sorted(known.keys() - states.keys())
        if missing:
            raise StateError(
                f"another mix begins in lanes {', '.join(map(str, known))} together, but the state "
                f"has nothing of {', '.join(map(str, missing))}; pass a global state or the states "
                "of all ranks"
            )
        read = [
            int(plan.stream_rows(lane, np.array([rows - 1]))[0]) + 1
            for lane, (_, rows, _) in found.items()
            if rows
        ]
        start = max(read, default=0)
        for lane in known:
            inner, rows, changes = found.get(lane, (None, 0, []))
            changes = [*changes, *[start] * (count - len(changes))]
            begun[lane] = {"inner": inner, "read": rows, "changes": changes}
    return begun
