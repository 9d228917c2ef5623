"""Change the mix in the saved states of a run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from energon.errors import StateError
from energon.plan.recipe import PlanRecipe
from energon.stages.base import State, unpack
from energon.stages.read import ChangesIterator, rows_of_changes


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
            lane: unpack(state, ChangesIterator.saves)
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
