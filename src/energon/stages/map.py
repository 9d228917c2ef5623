"""Apply user hooks to each item.

Items are taken from the reader a block at a time, and one flat loop runs their hooks. Whatever
follows from the row (addresses, positions, places) is computed only on demand.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from types import GeneratorType
from typing import Any

from energon.errors import StateError
from energon.samples.crude import CrudeSample, RestoreKey, flat, key_of
from energon.stages.base import Dataset, DatasetIterator, ItemPlace
from energon.stages.hooks.hook import (
    SKIPPED,
    ApplyIterator,
    Compiled,
    Hook,
    HookRunner,
    LeafRunners,
    reapply,
    replay,
)
from energon.stages.lane import HookLoop, Lane

logger = logging.getLogger("energon")


@dataclass(frozen=True)
class MapDataset(Dataset[Any]):
    """Apply hooks to each item, one after another; any may skip, fail or yield several.

    Args:
        dataset: The items.
        hooks: The hooks for the items of each leaf, by its number in the plan. A single entry
            applies to all items, whatever their leaf.
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
        return reapply(item, hooks, lane, address=flat(own), key=own, subs=subs)


_NOTHING: DatasetIterator[Any] = DatasetIterator()
"""The source of iterators that only run hooks on given items."""


def _of_columns(hooks: tuple[tuple[Hook, ...], ...]) -> Callable[[Any], Any] | None:
    """Return the output of the hooks for columns; None if they take single items, or differ."""
    first, *others = [_columns_of_leaf(each) for each in hooks]
    return first if all(each == first for each in others) else None


def _columns_of_leaf(hooks: tuple[Hook, ...]) -> Callable[[Any], Any] | None:
    if len(hooks) != 1 or not isinstance(hooks[0].function, Compiled):
        return None
    return hooks[0].function.of_columns


class _MapIterator(ApplyIterator):
    def __init__(self, stage: MapDataset, lane: Lane, inner: DatasetIterator[Any]) -> None:
        super().__init__(inner, lane)
        self.runners = LeafRunners(stage.hooks, lane)
        self.is_by_leaf = len(stage.hooks) > 1
        self.of_columns = _of_columns(stage.hooks)
        self.may_seed = any(hook.restore_seeds for hooks in stage.hooks for hook in hooks)
        self.loop = HookLoop(lane)
        self.places: list[ItemPlace] | None = None
        self.next_row = lane.next_row
        if self.next_row is None and lane.progress is not None:
            self.next_row = partial(lane.progress, several=False)

    def __next__(self) -> Any:
        items: list[Any] = []
        while self._take_some(items, 1):
            if items:
                return items[0]
        raise StopIteration

    def take(self, count: int) -> list[Any]:
        items: list[Any] = []
        going = True
        while going and len(items) < count:
            if self.outputs is None and self.next_batch is None:
                self.batch = self.lane.current.batch
                going = self._draw(items, count - len(items))
            else:
                going = self._take_some(items, count - len(items))
        return items

    def take_columns(self, count: int) -> Any:
        if self.of_columns is None or self.outputs is not None or self.next_batch is not None:
            return None
        columns = self.inner.take_columns(count)
        if columns is None:
            return None
        self.batch = self.lane.current.batch
        if self.is_by_leaf:
            for leaf, number in Counter(key[0] for key in columns["__restore_key__"]).items():
                self.runners[leaf][0].succeed(number)
        else:
            self.runners[0][0].succeed(count)
        return self.of_columns(columns)

    def take_placed(self, count: int) -> tuple[list[Any], list[ItemPlace]]:
        items: list[Any] = []
        places: list[ItemPlace] = []
        going = True
        while going and not items:
            if self.outputs is None and self.next_batch is None:
                self.batch = self.lane.current.batch
                going = self._draw(items, count, places)
            else:
                going = self._take_some(items, count, places)
        return items, places

    @property
    def place(self) -> ItemPlace:
        return [self.inner.place, max(0, self.given - 1), self.batch]

    def output(self, item: Any, place: ItemPlace) -> Any:
        """Return the output for the `item` at `place`, or SKIPPED."""
        inner, sub, batch = place
        self.outputs = None
        with self.lane.current.working_for(batch):
            outputs: list[Any] = []
            self._run(item, row_of(inner), outputs)
            if self.outputs is None or sub == 0:
                return outputs[0] if outputs else SKIPPED
            for _ in replay(self.outputs, sub - 1):
                pass
            return next(self.outputs, SKIPPED)

    def _take_some(
        self, items: list[Any], count: int, places: list[ItemPlace] | None = None
    ) -> bool:
        """Append at most `count` of the next outputs, possibly none; return False at the end."""
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
            self.batch = self.lane.current.batch
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
        """Append the outputs for up to `count` inputs; of a generator, only its first output.

        Returns:
            Whether there was any input.
        """
        inner, loop, skip_rows = self.inner, self.loop, self.lane.skip_rows
        row = inner.row
        items = inner.peek(count)
        if not items:
            return self._draw_unknown(row, outputs, places)
        if row in skip_rows:
            self._skip_row(row, items[0])
            inner.advance(1)
            return True
        if skip_rows:
            items = items[: next((n for n in range(len(items)) if row + n in skip_rows), None)]
        steps = self._steps(items, row, places)
        try:
            with loop:
                while self._run_hooks(steps, outputs):
                    pass
        finally:
            done = loop.finished
            if self.outputs is not None:
                inner.advance(done - 1)
                self.before, done = self._position(), 1
            inner.advance(done)
        return True

    def _draw_unknown(self, row: int, outputs: list[Any], places: list[ItemPlace] | None) -> bool:
        """Do the same for a single input that cannot be peeked at."""
        self.before = self._position()
        item = next(self.inner, SKIPPED)
        if item is SKIPPED:
            return False
        self._run(item, row, outputs)
        if places is not None and outputs:
            places.append(self.place)
        return True

    def _run(self, item: Any, row: int, outputs: list[Any]) -> None:
        """Append the output for the item of a row; of a generator, only its first output."""
        if row in self.lane.skip_rows:
            self._skip_row(row, item)
            return
        steps = self._steps([item], row, None)
        with self.loop:
            while self._run_hooks(steps, outputs):
                pass

    def _steps(
        self, items: list[Any], start: int, places: list[ItemPlace] | None
    ) -> Iterator[tuple[Any, tuple[HookRunner, ...], object]]:
        """Return the steps of a loop over items of consecutive rows, for `_run_hooks`.

        Args:
            items: The items.
            start: The row of the first.
            places: Takes the places of outputs, unless it is None.
        """
        loop, by_leaf, lane = self.loop, self.runners, self.lane
        keys: list[Any] = [
            item["__restore_key__"] if type(item) is CrudeSample else key_of(item) for item in items
        ]
        loop.keys, loop.start, loop.recorded = keys, start, ()
        loop.taken = loop.finished = 0
        self.places = places
        chains: Iterable[tuple[HookRunner, ...]] = (
            [by_leaf[key[0]] for key in keys] if self.is_by_leaf else repeat(by_leaf[0])
        )
        if (clock := lane.host.clock) is not None:
            leaves: Iterable[int] = [key[0] for key in keys] if self.is_by_leaf else repeat(0)
            chains = map(by_leaf.timed, leaves, keys, repeat(clock))
        rows = count(start * lane.stride + lane.offset, lane.stride)
        # Each row is reported as its item is drawn, at the cost of one call from C.
        noted = repeat(None) if self.next_row is None else map(self.next_row, rows)
        return zip(items, chains, noted, strict=False)

    def _run_hooks(
        self, steps: Iterator[tuple[Any, tuple[HookRunner, ...], object]], outputs: list[Any]
    ) -> bool:
        """Append the outputs of a loop, up to an item that fails or has several outputs.

        Args:
            steps: The remaining items, each with the runners of its hooks.
            outputs: Receives the outputs.

        Returns:
            Whether the loop continues.
        """
        loop, seeds = self.loop, self.may_seed and self.lane.host.seeds_calls
        runner: Any = None
        try:
            for output, runners, _ in steps:
                loop.taken += 1
                for runner in runners:
                    loop.name = runner.name
                    argument = output
                    output = runner.call_here(argument) if seeds else runner.function(argument)
                    if output is None:
                        if runner.returns_something:
                            break
                    elif type(output) is GeneratorType:
                        break
                else:
                    outputs.append(output)
                    continue
                break
            else:
                self._count_outputs(len(loop.keys))
                return False
        except Exception as error:
            if runner is None:
                raise
            self._stop(runners, runner)
            runner.fail(error, argument)
            return True
        except BaseException as error:
            if runner is None:
                raise
            self._stop(runners, runner)
            runner.exit(error, argument)
            raise
        self._stop(runners, runner)
        self._begin_several(output, argument, runners, runner, outputs)
        return False

    def _begin_several(
        self,
        output: Any,
        argument: Any,
        runners: tuple[HookRunner, ...],
        last: HookRunner,
        outputs: list[Any],
    ) -> None:
        """Append the first of several outputs for the current item of a loop.

        Args:
            output: What one of its hooks returned: a generator, or None where that is an error.
            argument: The argument of that hook.
            runners: The runners of all its hooks.
            last: The runner of that hook.
            outputs: Receives the output.
        """
        loop, current = self.loop, self.lane.current
        # A generator may outlast the batch, and with it the clock.
        last, *rest = [each.untimed or each for each in runners[runners.index(last) :]]
        several = last.settle(output, argument, current.address)
        key = loop.keys[loop.taken - 1]
        output = self._begin_outputs(several, tuple(rest), flat(current.address), key)
        if output is not SKIPPED:
            outputs.append(output)
            if self.places is not None:
                self.places.append([loop.start + loop.taken - 1, 0, self.batch])

    def _stop(self, runners: tuple[HookRunner, ...], last: HookRunner) -> None:
        """Count the outputs of a loop up to the last item, which stopped at the hook `last`."""
        taken = self.loop.taken
        self._count_outputs(taken - 1)
        for runner in runners[: runners.index(last)]:
            runner.succeed()
        self.loop.finished = taken

    def _count_outputs(self, stop: int) -> None:
        """Count an output of every hook for the items up to `stop`."""
        loop = self.loop
        finished, loop.finished = loop.finished, stop
        if self.places is not None:
            rows = range(loop.start + finished, loop.start + stop)
            self.places += [[row, 0, self.batch] for row in rows]
        leaves: dict[int, int] = {0: stop - finished}
        if self.is_by_leaf:
            keys: list[Any] = loop.keys[finished:stop]
            leaves = Counter([key[0] for key in keys])
        for leaf, number in leaves.items():
            for runner in self.runners[leaf]:
                runner.tally.succeeded += number
                runner.record.succeeded |= number > 0

    def _skip_row(self, row: int, item: Any) -> None:
        address = key_of(item) or ("lane", self.lane.number, row)
        self.lane.counts["skipped after killing workers"] += 1
        logger.error(
            "skipped row %d of lane %d, sample %s: it killed workers, or the state excludes it",
            row,
            self.lane.number,
            flat(address),
        )


def batch_of(place: ItemPlace) -> int | None:
    """Return the batch for which user code processed the item at `place`; None if none did."""
    if isinstance(place, list) and len(place) == 3:
        batch = place[2]
    else:
        batch = place.get("batch") if isinstance(place, dict) else None
    return batch if isinstance(batch, int) else None


def row_of(place: ItemPlace) -> int:
    """Return the row that an item came from; -1 if its place does not contain it."""
    while isinstance(place, list) and place:
        place = place[0]
    return place if isinstance(place, int) else -1
