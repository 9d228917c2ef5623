"""Apply user hooks to a stream: to each item, or to lists of items.

The position is that of the stream below, and for a hook that yields several outputs for one
input, the number of outputs already given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from energon.errors import ConfigError
from energon.stages.base import Dataset, DatasetIterator, State, unpack
from energon.stages.hook import SKIPPED, Hook, HookRunner
from energon.stages.lane import Lane

logger = logging.getLogger("energon")


@dataclass(frozen=True)
class MapDataset(Dataset[Any]):
    """Apply hooks to each item, one after the other; any may skip, fail or yield several.

    Args:
        dataset: The items.
        hooks: Returns the hooks for an item; they are known by identity, so it always returns
            the same ones.
    """

    dataset: Dataset[Any]
    hooks: Callable[[Any], tuple[Hook, ...]]

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _MapIterator(self.dataset, self.hooks, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self.dataset.num_items(lane, lanes)


@dataclass(frozen=True)
class BatchDataset(Dataset[Any]):
    """Make batches of consecutive items.

    Args:
        dataset: The items.
        batch_size: How many make a batch.
        hooks: Turn a list of items into a batch; without any the list is the batch.
        drop_last: Whether a last, smaller batch is left out.
    """

    dataset: Dataset[Any]
    batch_size: int
    hooks: tuple[Hook, ...] = ()
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}")

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _BatchIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        items = self.dataset.num_items(lane, lanes)
        if items is None:
            return None
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)


class _ApplyIterator(DatasetIterator[Any]):
    """Draws inputs, runs hooks on them, gives the outputs."""

    def __init__(self, dataset: Dataset[Any], lane: Lane) -> None:
        self.inner = dataset.open(lane)
        self.lane = lane
        self.runners: dict[int, HookRunner] = {}
        self.outputs: Iterator[Any] | None = None
        self.before: State = {}
        self.given = 0

    @property
    def row(self) -> int:
        return self.inner.row

    def __next__(self) -> Any:
        while True:
            if self.outputs is not None:
                for output in self.outputs:
                    self.given += 1
                    return output
                self.outputs = None
                self.given = 0
            self.before = self.inner.state_dict()
            output = self._produce()
            if output is not SKIPPED:
                return output

    def state_dict(self) -> State:
        if self.outputs is not None:
            return {"inner": self.before, "given": self.given}
        return {"inner": self.inner.state_dict(), "given": 0}

    def load_state_dict(self, state: State) -> None:
        inner, given = unpack(state, "inner", "given")
        self.inner.load_state_dict(inner)
        if given:
            self.before = inner
            output = self._produce()
            if self.outputs is None and output is not SKIPPED:
                # The hook no longer yields; what it gave then is what it gives now.
                return
            for _ in range(given - 1):
                next(self.outputs or iter(()), None)
            self.given = given

    def _produce(self) -> Any:
        """Draw one input and return its first output, leaving the others in `outputs`."""
        raise NotImplementedError

    def _apply(self, argument: Any, hooks: tuple[Hook, ...], address: tuple[Any, ...]) -> Any:
        for done, hook in enumerate(hooks, start=1):
            argument = self._runner(hook)(argument, address)
            if argument is SKIPPED:
                return SKIPPED
            if type(argument) is _GENERATOR:
                self.outputs = self._expand(argument, hooks[done:], address)
                self.given = 1
                return next(self.outputs, SKIPPED)
        return argument

    def _expand(
        self, items: Iterator[Any], hooks: tuple[Hook, ...], address: tuple[Any, ...]
    ) -> Iterator[Any]:
        for sub, item in enumerate(items):
            outputs: Iterator[Any] = iter((item,))
            for done, hook in enumerate(hooks, start=1):
                item = self._runner(hook)(item, (*address, sub))
                outputs = iter((item,))
                if type(item) is _GENERATOR:
                    outputs = self._expand(item, hooks[done:], (*address, sub))
                    break
                if item is SKIPPED:
                    break
            yield from (output for output in outputs if output is not SKIPPED)

    def _runner(self, hook: Hook) -> HookRunner:
        runner = self.runners.get(id(hook))
        if runner is None:
            runner = self.runners[id(hook)] = HookRunner(hook, self.lane)
        return runner


_GENERATOR = type(_ for _ in ())


class _MapIterator(_ApplyIterator):
    def __init__(
        self, dataset: Dataset[Any], hooks: Callable[[Any], tuple[Hook, ...]], lane: Lane
    ) -> None:
        super().__init__(dataset, lane)
        self.hooks = hooks

    def _produce(self) -> Any:
        row = self.inner.row
        item = next(self.inner)
        lane = self.lane
        if lane.progress is not None:
            lane.progress(row)
        if row in lane.skip_rows:
            lane.counts["skipped after killing workers"] += 1
            logger.error(
                "left out row %d of lane %d, sample %s: it killed workers again and again",
                row,
                lane.number,
                item_address(item, lane, row),
            )
            return SKIPPED
        return self._apply(item, self.hooks(item), item_address(item, lane, row))


class _BatchIterator(_ApplyIterator):
    def __init__(self, stage: BatchDataset, lane: Lane) -> None:
        super().__init__(stage.dataset, lane)
        self.stage = stage

    def _produce(self) -> Any:
        stage, lane = self.stage, self.lane
        row = self.inner.row
        items = self.inner.take(stage.batch_size)
        if not items or (stage.drop_last and len(items) < stage.batch_size):
            raise StopIteration
        lane.counts["samples"] += len(items)
        if lane.progress is not None:
            lane.progress(row)
        return self._apply(items, stage.hooks, ("lane", lane.number, row))


def item_address(item: Any, lane: Lane, row: int) -> tuple[Any, ...]:
    """Return what seeds the hooks of an item: its place in the data, or else in the lane."""
    if isinstance(item, dict):
        key = item.get("__restore_key__")
    else:
        key = getattr(item, "__restore_key__", None)
    return key or ("lane", lane.number, row)
