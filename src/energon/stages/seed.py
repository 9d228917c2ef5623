"""Seed the global random generators for each item, by its place in the lane."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from energon.plan.randomness import derive_seed
from energon.samples.crude import RestoreKey, flat
from energon.stages.base import Dataset, DatasetIterator, State, ThroughDataset, ThroughIterator
from energon.stages.hooks.random_state import DrawWatch, numpy_hides_a_number, seeded
from energon.stages.lane import Lane, RowAddress


@dataclass(frozen=True)
class SeedDataset(ThroughDataset):
    """Yield the items of `dataset`, each made with seeded global generators.

    Outermost in a pipeline with user hooks: whatever they draw is then the same on every
    topology and after every restore, although they know nothing of it.

    The first item shows whether they draw anything. If not, the next ones are made without
    seeding, and should one draw after all, it is made again. A pipeline that wraps another holds
    two of these stages; the watch of the outer one is back when the inner one has its item.
    """

    dataset: Dataset[Any]

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _SeedIterator(self, lane)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        with seeded(derive_seed(lane.seed, "restore", *flat(key))):
            return self.dataset.restore(lane, key)


class _SeedIterator(ThroughIterator):
    def __init__(self, stage: SeedDataset, lane: Lane) -> None:
        self.dataset = stage.dataset
        self.inner = self.dataset.open(lane)
        self.lane = lane
        self.saved: State | None = None

    def __next__(self) -> Any:
        if self.lane.host.draws is False and not numpy_hides_a_number():
            return self._next_watched()
        return self._next_seeded()

    def state_dict(self) -> State:
        self.saved = self.inner.state_dict()
        return self.saved

    def load_state_dict(self, state: State) -> None:
        self.saved = None
        self.inner.load_state_dict(state)

    def _next_seeded(self) -> Any:
        """Return the next item, made with seeded generators; record whether any was used."""
        host = self.lane.host
        around = host.watch
        self.saved = None
        with seeded(self._seed(self.inner.address), around):
            if host.draws:
                return next(self.inner)
            watch = host.watch = DrawWatch()
            try:
                item = next(self.inner)
                host.draws = watch.check()
            finally:
                host.watch = around
        return item

    def _next_watched(self) -> Any:
        """Return the next item, made without seeding unless something turns out to draw."""
        lane, before = self.lane, self.saved or self.inner.state_dict()
        counts, around = dict(lane.counts), lane.host.watch
        self.saved = None
        watch = lane.host.watch = DrawWatch(partial(self._seed, self.inner.address))
        try:
            item = next(self.inner)
            if not watch.check():
                return item
        except Exception:
            if not watch.check():
                raise
        finally:
            lane.host.watch = around
            watch.put_back()
        lane.counts.clear()
        lane.counts.update(counts)
        self.inner = self.dataset.open(lane, before)
        lane.host.draws = None
        return self._next_seeded()

    def _seed(self, address: RowAddress) -> int:
        return derive_seed(self.lane.seed, "lane", self.lane.number, *address)
