"""Apply user hooks to the items that a stage draws, one by one or in lists.

The position is that of the stage below and, if a hook yields several outputs for one input, the
number of those already returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import GeneratorType
from typing import Any, ClassVar

from energon.errors import StateError
from energon.limits import RESUMED_OUTPUTS
from energon.samples.crude import RestoreKey, stamp
from energon.stages.base import DatasetIterator, ItemPlace, State, StateKind, unpack, unpack_some
from energon.stages.hooks.clock import HookClock, leaf_of
from energon.stages.hooks.failures import Tolerance, reraise_exception
from energon.stages.hooks.hook import SKIPPED, Hook, HookRunner
from energon.stages.lane import Lane, RowAddress

_OUTPUTS = {"given": int, "batch": int | None}


class ApplyIterator(DatasetIterator[Any]):
    """Draws inputs from `inner`, runs hooks on them, yields the outputs. Subclasses draw."""

    saves: ClassVar[Mapping[str, StateKind]] = {"inner": dict}
    """What `_position` returns; the number of outputs already returned is added to it."""
    yields_batches = False
    """Whether each output is a batch, rather than an item of one."""

    def __init__(self, inner: DatasetIterator[Any], lane: Lane) -> None:
        self.inner = inner
        self.lane = lane
        self.outputs: Iterator[Any] | None = None
        self.before: State = {}
        # The position of the next input, right after it was loaded from a state.
        self.saved: State | None = None
        self.given = 0
        # The batches for which the current and the next input were drawn, if they differ from the
        # one that the lane is working on.
        self.batch: int | None = None
        self.entered: tuple[int | None, RestoreKey] = (None, ())
        self.next_batch: int | None = None

    def __next__(self) -> Any:
        while True:
            if self.outputs is not None:
                output = self._next_output()
                if output is not SKIPPED:
                    return output
                self.outputs = None
                self.given = 0
            self.before, self.saved = self.saved or self._position(), None
            if self.next_batch is None:
                self.batch = self.lane.current.batch
                output = self._produce()
            else:
                output = self._begin()
            if output is not SKIPPED:
                return output

    def _begin(self) -> Any:
        """Draw an input on behalf of the batch for which it was first drawn."""
        self.batch, self.next_batch = self.next_batch, None
        if self.batch is None:
            self.batch = self.lane.current.batch
            return self._produce()
        with self.lane.current.working_for(self.batch):
            return self._produce()

    def _next_output(self) -> Any:
        """Return the next of several outputs, or SKIPPED after the last one."""
        row, address = self.entered
        if row is not None:
            self.lane.enter_known(row, address, several=self.yields_batches)
        batch = None if self.yields_batches else self.batch
        with self.lane.current.working_for(batch):
            output = next(self.outputs or iter(()), SKIPPED)
        self.given += output is not SKIPPED
        return output

    @property
    def row(self) -> int:
        return self.inner.row

    @property
    def address(self) -> tuple[int, ...]:
        return (self.row, self.given) if self.outputs is not None else (self.row,)

    @property
    def place(self) -> ItemPlace:
        return {**self.before, "given": max(0, self.given - 1), "batch": self.batch}

    def state_dict(self) -> State:
        if self.outputs is not None:
            return {**self.before, "given": self.given, "batch": self.batch}
        self.saved = self._position()
        return {**self.saved, "given": 0, "batch": self.next_batch}

    def load_state_dict(self, state: State) -> None:
        if isinstance(state, Mapping) and "batch" not in state:
            state = {**state, "batch": None}  # saved by a version that did not record it
        (given, self.next_batch), position = unpack_some(state, _OUTPUTS)
        self.saved = None
        self._go_to(position)
        if given:
            self._repeat_outputs(given)

    def _repeat_outputs(self, given: int) -> None:
        """Reproduce the outputs of the next input that were already returned."""
        current, batch = self.lane.current, self.next_batch
        self.before = self._position()
        output = self._begin()
        if self.outputs is None and output is not SKIPPED:
            # The hook is no longer a generator: its single output was already returned.
            return
        for number in replay(iter(range(1, given)), given - 1):
            with current.working_for(None if batch is None else batch + number):
                self._next_output()

    def _position(self) -> State:
        """Return the position of the next input."""
        return {"inner": self.inner.state_dict()}

    def _go_to(self, position: State) -> None:
        """Return to the position of an input."""
        (inner,) = unpack(position, self.saves)
        self.inner.load_state_dict(inner)

    def _produce(self) -> Any:
        """Draw one input and return its first output, leaving the others in `outputs`."""
        raise NotImplementedError

    def _apply(
        self,
        argument: Any,
        runners: tuple[HookRunner, ...],
        address: RowAddress,
        key: Callable[[], RestoreKey | None],
    ) -> Any:
        """Return the first output of the hooks for `argument`, or SKIPPED.

        Args:
            argument: Argument of the first hook.
            runners: The runners of the hooks, applied one after another.
            address: Seeds their random numbers.
            key: Returns the restore key of `argument`. Called if a hook is a generator: its
                outputs carry that key with a number appended.
        """
        for done, runner in enumerate(runners, start=1):
            argument = runner(argument, address)
            if argument is SKIPPED:
                return SKIPPED
            if type(argument) is GeneratorType:
                return self._begin_outputs(argument, runners[done:], address, key())
        return argument

    def _begin_outputs(
        self,
        items: Iterator[Any],
        runners: tuple[HookRunner, ...],
        address: RowAddress,
        key: RestoreKey | None,
    ) -> Any:
        """Return the first output of the remaining hooks for a generator's items, or SKIPPED.

        Args:
            items: The outputs of the generator.
            runners: The runners of the hooks after it.
            address: The address of its argument.
            key: The restore key of its argument.
        """
        current = self.lane.current
        self.entered = current.row, current.address
        self.outputs = _expand(items, runners, address, key)
        self.given = 1
        return next(self.outputs, SKIPPED)


def _expand(
    items: Iterator[Any],
    runners: tuple[HookRunner, ...],
    address: RowAddress,
    key: RestoreKey | None,
) -> Iterator[Any]:
    for sub, item in enumerate(items):
        sub_key = None if key is None else (*key, sub)
        if sub_key is not None:
            stamp(item, sub_key)
        outputs: Iterator[Any] = iter((item,))
        for done, runner in enumerate(runners, start=1):
            item = runner(item, (*address, sub))
            outputs = iter((item,))
            if type(item) is GeneratorType:
                outputs = _expand(item, runners[done:], (*address, sub), sub_key)
                break
            if item is SKIPPED:
                break
        yield from (output for output in outputs if output is not SKIPPED)


def replay(outputs: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield the outputs that were returned before a state was saved; fewer if it ends early.

    Raises:
        StateError: If this many cannot have been waiting.
    """
    if count > RESUMED_OUTPUTS.value:
        raise StateError(
            f"the state says that {count:,} outputs of a generator were given, all of which would "
            f"have to be made again; expected at most {RESUMED_OUTPUTS.value:,}. It is damaged or "
            f"was edited; {RESUMED_OUTPUTS.hint}"
        )
    return islice(outputs, max(0, count))


def runners_of(hooks: Sequence[Hook], lane: Lane) -> tuple[HookRunner, ...]:
    """Return the runners of `hooks` in a lane."""
    return tuple(HookRunner(hook, lane) for hook in hooks)


class LeafRunners(dict[int, tuple[HookRunner, ...]]):
    """The hook runners of each leaf in a lane, created with its first item."""

    def __init__(self, hooks: tuple[tuple[Hook, ...], ...], lane: Lane) -> None:
        super().__init__()
        self._hooks = hooks
        self._lane = lane
        # Leaves that share a hook share its failures. Keyed by identity: the equality of user
        # functions is unpredictable.
        self._known: dict[int, HookRunner] = {}
        self._timed: dict[tuple[int, int], tuple[HookRunner, ...]] = {}

    def timed(self, leaf: int, key: RestoreKey | None, clock: HookClock) -> tuple[HookRunner, ...]:
        """Return the runners of a leaf, whose calls are timed, for the sample with this key."""
        number = leaf_of(key)
        found = self._timed.get((leaf, number))
        if found is None:
            found = tuple(runner.timed(clock, number) for runner in self[leaf])
            self._timed[leaf, number] = found
        return found

    def __missing__(self, leaf: int) -> tuple[HookRunner, ...]:
        for hook in self._hooks[leaf]:
            if id(hook) not in self._known:
                self._known[id(hook)] = HookRunner(hook, self._lane)
        runners = self[leaf] = tuple(self._known[id(hook)] for hook in self._hooks[leaf])
        return runners


def reapply(
    argument: Any,
    hooks: tuple[Hook, ...],
    lane: Lane,
    *,
    address: RowAddress,
    key: RestoreKey,
    subs: RestoreKey,
    yields_batches: bool = False,
) -> tuple[Any, RestoreKey]:
    """Return one output of `hooks` for `argument`, and the remaining numbers.

    Args:
        argument: Argument of the first hook.
        hooks: Applied one after another.
        lane: The lane to run them in.
        address: Seeds their random numbers, as it did the first time.
        key: The restore key of `argument`.
        subs: For each hook that yields several outputs the number of the requested one, followed
            by whatever later stages appended.
        yields_batches: Whether each of several outputs is a batch.

    Raises:
        FatalSampleError: If a hook fails.
        StateError: If a hook no longer yields this output.
    """
    for hook in hooks:
        # A request for a certain sample should show why it fails.
        strict = replace(hook, tolerance=Tolerance(0), handler=reraise_exception)
        output = HookRunner(strict, lane)(argument, address)
        if type(output) is GeneratorType:
            if not subs:
                raise StateError(f"{hook.name} yields several outputs, {key} does not say which")
            sub, *rest = subs
            for _ in range(sub):
                next(output, SKIPPED)
                if yields_batches:
                    lane.current.count_batch()
            output = next(output, SKIPPED)
            key, subs, address = (*key, sub), tuple(rest), (*address, sub)
            stamp(output, key)
        if output is SKIPPED:
            raise StateError(
                f"{hook.name} skips {key}, or does not yield this many, so it cannot be restored"
            )
        argument = output
    return argument, subs
