"""Seed the global random generators for each item, by its place in the lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

from energon.plan.randomness import derive_seed
from energon.samples.crude import RestoreKey, flat
from energon.stages.base import Dataset, DatasetIterator, State, ThroughDataset, ThroughIterator
from energon.stages.hooks.random_state import DrawWatch, seeded
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
        self.watch = DrawWatch(partial(_lane_seed, lane))

    def __next__(self) -> Any:
        if self.lane.host.draws is False and self.watch.begin(self.inner.address):
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
        with seeded(_lane_seed(self.lane, self.inner.address), around):
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
        lane, watch, before = self.lane, self.watch, self.saved or self.inner.state_dict()
        counts, around = dict(lane.counts), lane.host.watch
        self.saved, lane.host.watch = None, watch
        try:
            item = next(self.inner)
            if not watch.check():
                return item
        except Exception:
            if not watch.check():
                raise
        finally:
            lane.host.watch = around
            watch.end()
        lane.counts.clear()
        lane.counts.update(counts)
        self.inner = self.dataset.open(lane, before)
        lane.host.draws = None
        return self._next_seeded()


def _lane_seed(lane: Lane, address: RowAddress) -> int:
    return derive_seed(lane.seed, "lane", lane.number, *address)


def may_draw(function: Callable[..., Any]) -> bool:
    """Return whether a function can draw random numbers: not if its code names nothing."""
    code = getattr(function, "__code__", None)
    return code is None or _names_something(code)


def _names_something(code: CodeType) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return bool(code.co_names or code.co_freevars) or any(map(_names_something, inner))
