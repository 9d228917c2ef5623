"""Apply user hooks to each item.

Items are taken from a reader a block at a time, and one flat loop runs their hooks. What follows
from the number of a row (addresses, positions, places) is made when someone asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import length_hint
from types import GeneratorType
from typing import Any

from energon.errors import StateError
from energon.samples.crude import CrudeSample, RestoreKey, flat, key_of
from energon.stages.apply import ApplyIterator, again, apply_again
from energon.stages.base import Dataset, DatasetIterator, ItemPlace
from energon.stages.hook import SKIPPED, Hook, HookRunner
from energon.stages.lane import Lane, active

logger = logging.getLogger("energon")


@dataclass(frozen=True)
class MapDataset(Dataset[Any]):
    """Apply hooks to each item, one after the other; any may skip, fail or yield several.

    Args:
        dataset: The items.
        hooks: The hooks for the items of each leaf of the plan, by its number. A single entry is
            for all items, wherever they come from.
    """

    dataset: Dataset[Any]
    hooks: tuple[tuple[Hook, ...], ...]

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _MapIterator(self, lane, self.dataset.open(lane))

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self.dataset.num_items(lane, lanes)

    def read_again(self, lane: Lane, places: Sequence[ItemPlace]) -> list[Any]:
        for place in places:
            match place:
                case [_, int(), int() | None]:
                    continue
            raise StateError(
                f"saved state has {place!r:.200} as the place of a sample; it is damaged or was "
                "edited"
            )
        items = self.dataset.read_again(lane, [inner for inner, *_ in places])
        iterator = _MapIterator(self, lane, _NOTHING)
        return [
            item if item is SKIPPED else iterator.output(item, place)
            for item, place in zip(items, places, strict=True)
        ]

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        item, subs = self.dataset.restore(lane, key)
        own = key_of(item) or key
        hooks = self.hooks[own[0] if len(self.hooks) > 1 else 0]
        return apply_again(item, hooks, lane, address=flat(own), key=own, subs=subs)


_NOTHING: DatasetIterator[Any] = DatasetIterator()
"""For hooks that are run on items which are there already."""


class _Runners(dict[int, tuple[HookRunner, ...]]):
    """What runs the hooks of each leaf in a lane, made when its first item comes."""

    def __init__(self, hooks: tuple[tuple[Hook, ...], ...], lane: Lane) -> None:
        super().__init__()
        self._hooks = hooks
        self._lane = lane
        # Leaves share hooks, which fail together. They are known by identity: they hold functions
        # of the user, equal to who knows what.
        self._known: dict[int, HookRunner] = {}

    def __missing__(self, leaf: int) -> tuple[HookRunner, ...]:
        for hook in self._hooks[leaf]:
            if id(hook) not in self._known:
                self._known[id(hook)] = HookRunner(hook, self._lane)
        runners = self[leaf] = tuple(self._known[id(hook)] for hook in self._hooks[leaf])
        return runners


class _MapIterator(ApplyIterator):
    def __init__(self, stage: MapDataset, lane: Lane, inner: DatasetIterator[Any]) -> None:
        super().__init__(inner, lane)
        self.runners = _Runners(stage.hooks, lane)
        self.is_by_leaf = len(stage.hooks) > 1

    def __next__(self) -> Any:
        items: list[Any] = []
        while self._take_some(items, 1):
            if items:
                return items[0]
        raise StopIteration

    def take(self, count: int) -> list[Any]:
        items: list[Any] = []
        while len(items) < count and self._take_some(items, count - len(items)):
            pass
        return items

    def take_placed(self, count: int) -> tuple[list[Any], list[ItemPlace]]:
        items: list[Any] = []
        places: list[ItemPlace] = []
        while not items and self._take_some(items, count, places):
            pass
        return items, places

    @property
    def place(self) -> ItemPlace:
        return [self.inner.place, max(0, self.given - 1), self.batch]

    def output(self, item: Any, place: ItemPlace) -> Any:
        """Return the output for `item` that was at `place`, or SKIPPED."""
        inner, sub, batch = place
        self.outputs = None
        with self.lane.present.working_for(batch):
            outputs: list[Any] = []
            self._run(iter((item,)), row_of(inner), outputs)
            if self.outputs is None or sub == 0:
                return outputs[0] if outputs else SKIPPED
            for _ in again(self.outputs, sub - 1):
                pass
            return next(self.outputs, SKIPPED)

    def _take_some(
        self, items: list[Any], count: int, places: list[ItemPlace] | None = None
    ) -> bool:
        """Append up to `count` of the next outputs, perhaps none; return False at the end."""
        if self.outputs is not None:
            output = self._next_output()
            if output is SKIPPED:
                self.outputs = None
                self.given = 0
                return True
        elif self.next_batch is not None:
            # Drawn for another batch: the one for which it was drawn the first time.
            self.before = self._position()
            try:
                output = self._begin()
            except StopIteration:
                return False
            if output is SKIPPED:
                return True
        else:
            self.batch = self.lane.present.batch
            return self._draw(items, count, places)
        items.append(output)
        if places is not None:
            places.append(self.place)
        return True

    def _produce(self) -> Any:
        outputs: list[Any] = []
        if not self._draw(outputs, 1):
            raise StopIteration
        return outputs[0] if outputs else SKIPPED

    def _draw(self, outputs: list[Any], count: int, places: list[ItemPlace] | None = None) -> bool:
        """Append the outputs for up to `count` inputs, the first only if there are several.

        Returns:
            Whether there was any input.
        """
        inner = self.inner
        row = inner.row
        items = inner.peek(count)
        if not items:
            self.before = self._position()
            item = next(inner, SKIPPED)
            if item is SKIPPED:
                return False
            self._run(iter((item,)), row, outputs)
            if places is not None and outputs:
                places.append(self.place)
            return True
        rest = iter(items)
        try:
            self._run(rest, row, outputs, places)
        finally:
            done = len(items) - length_hint(rest)
            if self.outputs is not None:
                inner.advance(done - 1)
                self.before, done = self._position(), 1
            inner.advance(done)
        return True

    def _run(
        self,
        items: Iterator[Any],
        start: int,
        outputs: list[Any],
        places: list[ItemPlace] | None = None,
    ) -> None:
        """Append the outputs for items of consecutive rows, up to the first that has several.

        Args:
            items: The items.
            start: The row of the first.
            outputs: Takes the outputs.
            places: Takes their places, unless it is None.
        """
        lane, batch, all_runners, is_by_leaf = self.lane, self.batch, self.runners, self.is_by_leaf
        present, progress, skip_rows = lane.present, lane.progress, lane.skip_rows
        number = start * lane.stride + lane.offset
        seeds = lane.host.seeds_calls
        caller, active.lane = active.lane, lane
        try:
            for row, item in enumerate(items, start):
                key: Any = item["__restore_key__"] if type(item) is CrudeSample else key_of(item)
                address = key or ("lane", lane.number, row)
                present.row, present.address = number, address
                if progress is not None:
                    progress(number, False)
                number += lane.stride
                if skip_rows and row in skip_rows:
                    self._leave_out(row, address)
                    continue
                output = item
                runners = all_runners[key[0] if is_by_leaf else 0]
                for runner in runners:
                    present.call = (runner.name, address)
                    argument = output
                    try:
                        if seeds and runner.seeds_calls:
                            output = runner.call(argument, address)
                        else:
                            output = runner.function(argument)
                    except Exception as error:
                        output, seeds = runner.fail(error, argument), lane.host.seeds_calls
                        break
                    except BaseException as error:
                        runner.exit(error, argument)
                        raise
                    if output is None or type(output) is GeneratorType:
                        output = runner.settle(output, argument, address)
                        if output is not None:
                            following = runners[runners.index(runner) + 1 :]
                            output = self._begin_outputs(output, following, flat(address), key)
                            break
                    elif runner.tally.succeeded:
                        runner.tally.succeeded += 1
                    else:
                        runner.succeed()
                if output is not SKIPPED:
                    outputs.append(output)
                    if places is not None:
                        places.append([row, 0, batch])
                if self.outputs is not None:
                    return
        finally:
            active.lane = caller

    def _leave_out(self, row: int, address: RestoreKey) -> None:
        self.lane.counts["skipped after killing workers"] += 1
        logger.error(
            "left out row %d of lane %d, sample %s: it killed workers again and again",
            row,
            self.lane.number,
            flat(address),
        )


def batch_of(place: ItemPlace) -> int | None:
    """Return the batch of the lane for which user code made the item at `place`, if any did."""
    if isinstance(place, list) and len(place) == 3:
        batch = place[2]
    else:
        batch = place.get("batch") if isinstance(place, dict) else None
    return batch if isinstance(batch, int) else None


def row_of(place: ItemPlace) -> int:
    """Return the row that an item came from; -1 if its place does not tell."""
    while isinstance(place, list) and place:
        place = place[0]
    return place if isinstance(place, int) else -1
