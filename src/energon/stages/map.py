"""Apply user hooks to each item.

Items are taken many at a time, and one flat loop runs their hooks. Whatever follows from the row
(seed keys, positions) is computed only on demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import itemgetter
from types import GeneratorType
from typing import Any

from energon.errors import StateError
from energon.samples.crude import CrudeSample, RestoreKey, flat, key_of
from energon.stages.base import Dataset, DatasetIterator, ItemState
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

    def read_again(self, lane: Lane, item_states: Sequence[ItemState]) -> list[Any]:
        for item_state in item_states:
            match item_state:
                case [_, int(), int() | None]:
                    continue
            raise StateError(
                f"saved state has {item_state!r:.200} as the state of a sample; it is damaged or "
                "was edited"
            )
        items = self.dataset.read_again(lane, [inner for inner, *_ in item_states])
        iterator = _MapIterator(self, lane, _NOTHING)
        return [
            item if item is SKIPPED else iterator.output(item, item_state)
            for item, item_state in zip(items, item_states, strict=True)
        ]

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        item, subs = self.dataset.restore(lane, key)
        own = key_of(item) or key
        hooks = self.hooks[own[0] if len(self.hooks) > 1 else 0]
        return reapply(item, hooks, lane, seed_key=flat(own), key=own, subs=subs)


_key_of_crude = itemgetter("__restore_key__")

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
        self.loop = HookLoop(lane)
        # The states of the inputs of the loop, and those of its outputs.
        self.input_states: Sequence[ItemState] = ()
        self.output_states: list[ItemState] = []
        self.next_row = lane.next_row
        if self.next_row is None and lane.progress is not None:
            self.next_row = partial(lane.progress, several=False)

    @property
    def item_state(self) -> ItemState:
        return [self.inner.item_state, max(0, self.given - 1), self.batch]

    def take(self, count: int, *, as_columns: bool = False) -> tuple[Any, Sequence[ItemState]]:
        outputs: list[Any] = []
        while not outputs:
            if self.outputs is not None or self.next_batch is not None:
                return super().take(1)
            self.saved, self.batch = None, self.lane.current.batch
            inputs, item_states, rows = self._draw(
                count, as_columns and self.of_columns is not None
            )
            if not item_states:
                return [], []
            if not isinstance(inputs, list):
                return self._apply_to_columns(inputs), item_states
            self._run(inputs, item_states, rows, outputs)
        return outputs, self.output_states

    def output(self, item: Any, item_state: ItemState) -> Any:
        """Return the output for the `item` with a state, or SKIPPED."""
        inner, sub, batch = item_state
        self.outputs = None
        with self.lane.current.working_for(batch):
            outputs: list[Any] = []
            self._run([item], [inner], [row_of(inner)], outputs)
            if self.outputs is None or sub == 0:
                return outputs[0] if outputs else SKIPPED
            for _ in replay(self.outputs, sub - 1):
                pass
            return next(self.outputs, SKIPPED)

    def _produce(self) -> Any:
        inputs, item_states, rows = self._draw(1)
        if not item_states:
            raise StopIteration
        outputs: list[Any] = []
        self._run(inputs, item_states, rows, outputs)
        return outputs[0] if outputs else SKIPPED

    def _draw(
        self, count: int, as_columns: bool = False
    ) -> tuple[Any, Sequence[ItemState], Sequence[int]]:
        """Return the next inputs, their states and rows; a single one if it cannot be put back."""
        inner = self.inner
        if inner.puts_back:
            inputs, item_states = inner.take(count, as_columns=as_columns)
            return inputs, item_states, item_states
        self.before, row = self._position(), inner.row
        return *inner.take(1), [row]

    def _apply_to_columns(self, columns: Any) -> Any:
        """Return the output of the hooks for columns of inputs."""
        counts = Counter(key[0] if self.is_by_leaf else 0 for key in columns["__restore_key__"])
        for leaf, number in counts.items():
            self.runners[leaf][0].succeed(number)
        return None if self.of_columns is None else self.of_columns(columns)

    def _run(
        self,
        inputs: list[Any],
        item_states: Sequence[ItemState],
        rows: Sequence[int],
        outputs: list[Any],
    ) -> None:
        """Append the outputs for inputs, up to the first output of a generator.

        The inputs after that are put back.
        """
        inner, loop = self.inner, self.loop
        steps = self._steps(inputs, rows)
        self.input_states, self.output_states = item_states, []
        try:
            with loop:
                while self._run_hooks(steps, outputs):
                    pass
        finally:
            done = loop.finished
            if inner.puts_back and self.outputs is not None:
                inner.put_back(inputs[done - 1 :], item_states[done - 1 :])
                self.before = self._position()
                inner.take(1)
            elif inner.puts_back and done < len(inputs):
                inner.put_back(inputs[done:], item_states[done:])

    def _steps(
        self, items: list[Any], rows: Sequence[int]
    ) -> Iterator[tuple[Any, tuple[HookRunner, ...], object]]:
        """Return the steps of a loop over the items of some rows, for `_run_hooks`."""
        loop, by_leaf, lane = self.loop, self.runners, self.lane
        are_crude = {CrudeSample}.issuperset(map(type, items))
        keys: list[Any] = list(map(_key_of_crude if are_crude else key_of, items))
        loop.keys, loop.rows, loop.recorded = keys, rows, ()
        loop.taken = loop.finished = 0
        chains: Iterable[tuple[HookRunner, ...]] = (
            [by_leaf[key[0]] for key in keys] if self.is_by_leaf else repeat(by_leaf[0])
        )
        if (clock := lane.host.clock) is not None:
            leaves: Iterable[int] = [key[0] for key in keys] if self.is_by_leaf else repeat(0)
            chains = map(by_leaf.timed, leaves, keys, repeat(clock))
        noted: Iterable[object] = repeat(None)
        if self.next_row is not None:
            # Each row is reported as its item is drawn, at the cost of one call from C.
            noted = map(self.next_row, rows if lane.stride == 1 else map(lane.outer_row, rows))
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
        loop, current = self.loop, self.lane.current
        runner: Any = None
        try:
            for output, runners, _ in steps:
                loop.taken += 1
                for runner in runners:
                    loop.name = runner.name
                    argument = output
                    if runner.seeds_calls:
                        output = runner.call(argument, current.seed_key)
                    else:
                        output = runner.function(argument)
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
        several = last.settle(output, argument, current.seed_key)
        key = loop.keys[loop.taken - 1]
        output = self._begin_outputs(several, tuple(rest), flat(current.seed_key), key)
        if output is not SKIPPED:
            outputs.append(output)
            self.output_states.append([self.input_states[loop.taken - 1], 0, self.batch])

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
        item_states = zip(
            self.input_states[finished:stop], repeat(0), repeat(self.batch), strict=False
        )
        self.output_states += map(list, item_states)
        leaves: dict[int, int] = {0: stop - finished}
        if self.is_by_leaf:
            keys: list[Any] = loop.keys[finished:stop]
            leaves = Counter([key[0] for key in keys])
        for leaf, number in leaves.items():
            for runner in self.runners[leaf]:
                runner.tally.succeeded += number
                runner.record.succeeded |= number > 0


def batch_of(item_state: ItemState) -> int | None:
    """Return the batch for which user code processed the item with a state; None if none did."""
    if isinstance(item_state, list) and len(item_state) == 3:
        batch = item_state[2]
    else:
        batch = item_state.get("batch") if isinstance(item_state, dict) else None
    return batch if isinstance(batch, int) else None


def row_of(item_state: ItemState) -> int:
    """Return the row that an item came from; -1 if its state does not contain it."""
    while isinstance(item_state, list) and item_state:
        item_state = item_state[0]
    return item_state if isinstance(item_state, int) else -1
