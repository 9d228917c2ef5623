"""Make one state of those of all ranks, to go on with another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from energon.errors import StateError
from energon.loader.state import merge_states
from energon.webdataset.stages.base import State


def merge_rank_states(states: Sequence[State]) -> State:
    """Return a state of a loader that any rank of any job can load.

    Args:
        states: What `state_dict` of a `WebLoader` returned, once, on every rank.

    Raises:
        StateError: If they were saved at different times, or hold more than the position of the
            workers: a stage after the loader that keeps items, or counts them.
    """
    first = states[0]
    for other in states[1:]:
        for name in ("stages", "seed", "epoch"):
            if other[name] != first[name]:
                raise StateError(
                    f"the states of the ranks do not belong together: {name} is {first[name]!r} "
                    f"in one and {other[name]!r} in another; were they saved after the same step?"
                )
    if all(state["items"] is None for state in states):
        return {**first, "place": None}
    if any(state["given"] for state in states):
        raise StateError(
            "the number of ranks has changed, and an epoch that was set after the loader counts "
            "the items of a rank; set it on the dataset: WebLoader(dataset.with_epoch(n))"
        )
    positions = [_position(state) for state in states]
    merged = {**positions[0], "loader": merge_states([each["loader"] for each in positions])}
    return {**first, "place": None, "items": {**first["items"], "pass": merged}}


def _position(state: State) -> dict[str, Any]:
    """Return where the workers of a rank are, if that is all there is to know."""
    found = None if state["items"] is None else state["items"]["pass"]
    if not isinstance(found, Mapping) or set(found) != {"epoch", "loader"}:
        raise StateError(
            "the number of ranks has changed, and stages after the loader hold items of a rank (a "
            "shuffle, a batch taken apart), or a rank has ended its epoch before the others; save "
            "at the end of an epoch, or let these stages run in the workers"
        )
    return dict(found)
