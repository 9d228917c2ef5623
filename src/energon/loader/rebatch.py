"""Change the batch size of a saved run, and keep the samples of each global batch together.

Each batch becomes several *parts*, which are consecutive batches of the run from then on. A trainer
that takes as many more batches for each step therefore gets the same samples in it. Each part is a
batch of a lane of its own, and parts can be divided again, or joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from energon.errors import StateError
from energon.loader.relane import StateAt, rows_read, with_lanes
from energon.loader.state import MAX_LANES, LanePosition, read_positions
from energon.plan.dealt import Deal
from energon.plan.recipe import PlanRecipe
from energon.stages.base import State


class IndivisibleError(StateError):
    """The batches of a saved run cannot be converted to another size."""


def rebatch(state: State, batch_size: int, state_at: StateAt) -> State:
    """Return a merged state of all lanes, converted to another batch size.

    Args:
        state: The merged state.
        batch_size: The new size.
        state_at: Returns the state of a lane in which no sample waits for others.

    Raises:
        IndivisibleError: If batches of this size are not parts of those of the run, or the samples
            of its next batches do not follow from their number. All ranks of a run find the same.
        StateError: If lanes are missing.
    """
    about = state["fingerprint"]
    if "balance" in about:
        raise IndivisibleError("lanes exchange the samples of whole batches")
    recipe, before = PlanRecipe.from_json(about), about["batch_size"]
    whole = before * recipe.parts
    if whole % batch_size or recipe.stripe != whole:
        raise IndivisibleError(f"batches of {batch_size} are not equal parts of those of {whole}")
    if state["lanes"] * before > MAX_LANES * batch_size:
        raise IndivisibleError(f"batches of {batch_size} would take too many lanes")
    lanes = [
        _LaneRows.of(position) for position in read_positions(state, range(state["lanes"])).values()
    ]
    common = lcm(before, batch_size)
    join, divide = Deal(common // before, 1, before), Deal(common // batch_size, 1, batch_size)
    plan = replace(recipe, parts=whole // common)(len(lanes) // join.lanes)
    joined = [
        _joined(lanes[lane * join.lanes :][: join.lanes], join, plan.num_rows(lane))
        for lane in range(plan.lanes)
    ]
    divided = [part for lane in joined for part in _divided(lane, divide)]
    positions = {str(v): each.position(state_at).to_json() for v, each in enumerate(divided)}
    changed = with_lanes(state, recipe, replace(recipe, parts=whole // batch_size), positions)
    changed["fingerprint"]["batch_size"] = batch_size
    return changed


class _LaneRows(NamedTuple):
    """How far a lane has come: `row` is the next one that it reads."""

    row: int
    batches: int
    epoch_batches: int
    changes: tuple[int, ...]
    skip_rows: tuple[int, ...]
    ended: bool

    @classmethod
    def of(cls, position: LanePosition) -> _LaneRows:
        """Return it from a saved position, in which no sample may wait for others."""
        saved = position.saved_state()
        row, changes = rows_read(saved)
        if not is_at_row(saved, row):
            raise IndivisibleError("samples wait for others, or a hook is half way through one")
        return cls(
            row,
            position.batches,
            position.epoch_batches,
            changes,
            position.skip_rows,
            position.ended,
        )

    def position(self, state_at: StateAt) -> LanePosition:
        """Return the position to be saved."""
        return LanePosition(
            batches=self.batches,
            epoch_batches=self.epoch_batches,
            state=state_at(self.row, self.changes) if self.row or self.changes else None,
            skip_rows=self.skip_rows,
            ended=self.ended,
        )


def is_at_row(saved: Any, row: int) -> bool:
    """Return whether the state of a stage says that it continues at a row, and nothing else."""
    if not isinstance(saved, Mapping):
        return saved in (0, None, [])
    return all(
        value == row if name in ("row", "read") else is_at_row(value, row)
        for name, value in saved.items()
        if name != "changes"
    )


def _divided(lane: _LaneRows, deal: Deal) -> Iterator[_LaneRows]:
    """Yield the lanes of the parts of each batch of a lane."""
    skipped = [deal.lane_of(0, row) for row in lane.skip_rows]
    for part in range(deal.lanes):
        row = deal.rows_before(part, lane.row)
        # The last batch of data that ends may be too small to have all parts.
        missing = max(0, lane.batches - -(-row // deal.stripe))
        yield lane._replace(
            row=row,
            batches=lane.batches - missing,
            epoch_batches=max(0, lane.epoch_batches - missing),
            skip_rows=tuple(row for owner, row in skipped if owner == part),
        )


def _joined(lanes: Sequence[_LaneRows], deal: Deal, end: int | None) -> _LaneRows:
    """Return the lane whose batches are those of some lanes, joined; `end` is where it ends."""
    row = sum(lane.row for lane in lanes)
    skipped: list[Any] = []
    for part, lane in enumerate(lanes):
        is_behind = lane.batches != lanes[0].batches and row != end
        if is_behind or lane.row != deal.rows_before(part, row):
            raise IndivisibleError(
                "some of the batches that would be joined were delivered already"
            )
        skipped += deal.stream_rows(part, np.array(lane.skip_rows, np.int64)).tolist()
    return lanes[0]._replace(row=row, skip_rows=tuple(sorted(skipped)))
