"""What stages over several streams have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from energon.errors import StateError
from energon.samples.restore_key import RestoreKey
from energon.stages.base import Dataset, DatasetIterator, Place, check_places
from energon.stages.lane import Lane


@dataclass(frozen=True)
class Branches(Dataset[Any]):
    """A stage each item of which comes from one of `datasets`."""

    datasets: tuple[Dataset[Any], ...]

    def num_items(self, lane: int, lanes: int) -> int | None:
        return total_items(self.datasets, lane, lanes)

    def read_again(self, lane: Lane, places: Sequence[Place]) -> list[Any]:
        check_places(places, number_at=0, stop=len(self.datasets))
        items: list[Any] = [None] * len(places)
        for number, dataset in enumerate(self.datasets):
            wanted = [index for index, (branch, _) in enumerate(places) if branch == number]
            found = dataset.read_again(
                lane.branch(number, len(self.datasets)), [places[index][1] for index in wanted]
            )
            for index, item in zip(wanted, found, strict=True):
                items[index] = item
        return items

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        # Keys name the leaf, so at most one dataset has it.
        reasons = []
        for number, dataset in enumerate(self.datasets):
            try:
                return dataset.restore(lane.branch(number, len(self.datasets)), key)
            except StateError as error:
                reasons.append(str(error))
        raise StateError(f"no dataset has {key}: {'; '.join(dict.fromkeys(reasons))}")


def open_branches(datasets: Sequence[Dataset[Any]], lane: Lane) -> list[DatasetIterator[Any]]:
    """Open each of `datasets` in a branch of `lane`."""
    count = len(datasets)
    return [dataset.open(lane.branch(number, count)) for number, dataset in enumerate(datasets)]


def total_items(datasets: Iterable[Dataset[Any]], lane: int, lanes: int) -> int | None:
    """Return how many items all of `datasets` have in a lane; None if one has no end."""
    total = 0
    for dataset in datasets:
        items = dataset.num_items(lane, lanes)
        if items is None:
            return None
        total += items
    return total
