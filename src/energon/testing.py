"""Checks that every stage has to pass; for the tests of this package and of extensions."""

from __future__ import annotations

import json
from typing import Any

from energon.stages.base import Dataset
from energon.stages.lane import Lane


def check_resume(
    dataset: Dataset[Any], *, limit: int = 50, lanes: int = 2, ahead: int | None = None
) -> list[Any]:
    """Save before every item, resume at each position, and compare what follows.

    The states pass through JSON. Each lane is checked; items are compared with `==`.

    Args:
        dataset: What to check.
        limit: Most items to look at in each lane.
        lanes: How many lanes the run has.
        ahead: Most items to compare after each position; None for all that follow.

    Returns:
        The items of lane 0.

    Raises:
        AssertionError: If a resumed lane does not continue as the first run did.
    """
    first: list[Any] = []
    for number in range(lanes):
        iterator = dataset.open(Lane(number, lanes))
        states, items = [], []
        for _ in range(limit):
            states.append(json.dumps(iterator.state_dict()))
            item = next(iterator, _END)
            if item is _END:
                break
            items.append(item)
        for position, state in enumerate(states):
            resumed = dataset.open(Lane(number, lanes), json.loads(state))
            again = json.dumps(resumed.state_dict())
            if again != state:
                raise AssertionError(f"saved again before the first item: {again}, was {state}")
            expected = items[position:][:ahead]
            rest = [item for item, _ in zip(resumed, expected, strict=False)]
            if rest != expected:
                raise AssertionError(f"lane {number} resumed at {position}: {rest}")
        if number == 0:
            first = items
    return first


_END = object()
