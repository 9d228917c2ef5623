"""What stages over several streams have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon.errors import StateError
from energon.samples.restore_key import RestoreKey
from energon.stages.base import Dataset, DatasetIterator, Place
from energon.stages.lane import Lane


def open_branches(datasets: Sequence[Dataset[Any]], lane: Lane) -> list[DatasetIterator[Any]]:
    """Open each of `datasets` in a branch of `lane`."""
    count = len(datasets)
    return [dataset.open(lane.branch(number, count)) for number, dataset in enumerate(datasets)]


def read_branches_again(
    datasets: Sequence[Dataset[Any]], lane: Lane, places: Sequence[Place]
) -> list[Any]:
    """Return the items at some places, each a branch and a place in it."""
    items: list[Any] = [None] * len(places)
    for number, dataset in enumerate(datasets):
        wanted = [index for index, (branch, _) in enumerate(places) if branch == number]
        found = dataset.read_again(
            lane.branch(number, len(datasets)), [places[index][1] for index in wanted]
        )
        for index, item in zip(wanted, found, strict=True):
            items[index] = item
    return items


def restore_from_any(
    datasets: Sequence[Dataset[Any]], lane: Lane, key: RestoreKey
) -> tuple[Any, RestoreKey]:
    """Make an item again that one of `datasets` yielded: keys name the leaf."""
    reasons = []
    for number, dataset in enumerate(datasets):
        try:
            return dataset.restore(lane.branch(number, len(datasets)), key)
        except StateError as error:
            reasons.append(str(error))
    raise StateError(f"no dataset has {key}: {'; '.join(dict.fromkeys(reasons))}")
