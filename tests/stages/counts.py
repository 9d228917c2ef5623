"""What every stage that counts has to hold to."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from energon.stages.base import Dataset
from energon.stages.lane import Lane


def check_counts(dataset: Dataset[Any]) -> None:
    """Check that counts are the same with and without a restore after five items."""
    lane = Lane(0, 1)
    iterator = dataset.open(lane)
    for _ in range(5):
        next(iterator)
    resumed = Lane(0, 1, counts=Counter(lane.counts))
    rest = list(dataset.open(resumed, json.loads(json.dumps(iterator.state_dict()))))
    assert rest == list(iterator)
    assert resumed.counts == lane.counts
