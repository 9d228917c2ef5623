"""Seed the global random generators for each item, by its position in the lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from energon.plan.randomness import derive_seed
from energon.samples.crude import RestoreKey, flat
from energon.stages.base import Dataset, DatasetIterator, ThroughDataset, ThroughIterator
from energon.stages.hooks.random_state import seeded
from energon.stages.lane import Lane


@dataclass(frozen=True)
class SeedDataset(ThroughDataset):
    """Yield the items of `dataset`, each made with seeded global generators.

    Outermost in a pipeline with user hooks: whatever they draw is then the same on every
    topology and after every restore, although they know nothing of it.
    """

    dataset: Dataset[Any]

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _SeedIterator(self.dataset.open(lane), lane)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        with seeded(derive_seed(lane.seed, "restore", *flat(key))):
            return self.dataset.restore(lane, key)


class _SeedIterator(ThroughIterator):
    def __init__(self, inner: DatasetIterator[Any], lane: Lane) -> None:
        self.inner = inner
        self.lane = lane

    def __next__(self) -> Any:
        lane = self.lane
        with seeded(derive_seed(lane.seed, "lane", lane.number, *self.inner.row_key)):
            return next(self.inner)
