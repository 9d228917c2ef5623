"""What every stage that counts has to hold to."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from energon.stages.base import Dataset
from energon.stages.lane import Lane


def check_counts(dataset: Dataset[Any]) -> None:
    """Check that counts are the same without a restore and with one after any item."""
    expected = Lane(0, 1)
    items = list(dataset.open(expected))
    for number in range(len(items) + 1):
        lane = Lane(0, 1)
        iterator = dataset.open(lane)
        for _ in range(number):
            next(iterator)
        state = json.loads(json.dumps(iterator.state_dict()))
        resumed = Lane(0, 1, counts=Counter(lane.counts))
        assert list(dataset.open(resumed, state)) == items[number:]
        assert resumed.counts == expected.counts
