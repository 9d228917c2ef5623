"""The contract of the stages of a pipeline.

A stage is an immutable, picklable description. `open` returns an iterator, which is the position:
it can save how far it is as plain data, and return there.

    stage = Shuffle(size=1000)
    iterator = stage.open(samples, context)
    iterator.state_dict()

A function from iterator to iterator is also a stage. Its position is on its own call stack, so
saving a pipeline that contains one raises an error.

A stage that holds items back (a shuffle buffer, a batch being split) does not save them, since
they can be anything, of any size. It saves the position of its source before the oldest of them,
and which of the items since then it still holds. Restoring reads these from the source again.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, islice
from operator import or_
from typing import Any, Literal

from energon.errors import StateError
from energon.plan.randomness import derive_seed
from energon.webdataset.running.worker_info import WorkerInfo, current_worker_info

State = dict[str, Any]
"""What `state_dict` returns: dicts, lists, strings, numbers, booleans and None only."""


NOTHING: Iterator[Any] = iter(())
"""The source of the first stage."""

SplitAxis = Literal["rank", "worker"]
"""Among what a stage divides its items: the ranks of the job, or the workers of a rank."""

ALL_SPLITS: frozenset[SplitAxis] = frozenset(("rank", "worker"))


@dataclass(frozen=True)
class Context:
    """State that the stages share during one pass over the data."""

    worker: WorkerInfo
    seed: int = 0
    epoch: int = 0
    address: tuple[int | str, ...] = ()
    """The position of a stage in the pipeline, which distinguishes its random numbers."""
    later_splits: frozenset[SplitAxis] = frozenset()
    """The splits after the stage. All who divide its items afterwards must draw the same ones."""
    divides: bool = True
    """Whether ranks and workers divide the shards; not if their caller has divided its data."""

    def seed_of(self, *purpose: int | str, shared: bool | None = None) -> int:
        """Return a seed for this stage and epoch.

        Args:
            purpose: Distinguishes several seeds of one stage.
            shared: Whether all workers of the job get the same seed; None: only those among which
                a later stage divides the items.
        """
        splits = self.later_splits
        if shared is not None:
            splits = ALL_SPLITS if shared else frozenset()
        rank = "any" if "rank" in splits else self.worker.rank
        worker = "any" if "worker" in splits else self.worker.number
        worker_numbers = () if splits == ALL_SPLITS else (rank, worker)
        return derive_seed(self.seed, *self.address, self.epoch, *worker_numbers, *purpose)

    def at(self, *address: int | str) -> Context:
        """Return the context of a stage within this one."""
        return replace(self, address=(*self.address, *address))


class StageIterator(Iterator[Any]):
    """The position of a stage. Used by one thread at a time.

    Subclasses define `_run`, a generator that keeps whatever `state_dict` needs in attributes,
    up to date at every `yield`. Iterating with `for` goes straight to the generator.

    Args:
        source: What the stage reads; empty for the first stage.
    """

    def __init__(self, source: Iterator[Any] = NOTHING) -> None:
        self._source = source
        self._items = self._run()

    def _run(self) -> Iterator[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self._items

    def __next__(self) -> Any:
        return next(self._items)

    def state_dict(self) -> State:
        """Return the state in which the next item is the one `__next__` would return.

        The default is the state of the source, which suffices for stages that hold no items back.

        Raises:
            StateError: If this stage, or one before it, cannot be saved.
        """
        return state_of(self._source)

    def load_state_dict(self, state: State) -> None:
        """Move to a saved position. Only called before the first item is taken."""
        load_state(self._source, state)

    def close(self) -> None:
        """Release files, processes and connections."""
        close(self._items)
        close(self._source)


class Positioned(StageIterator):
    """The items of a generator function whose position, besides that of its source, is a dict.

    Args:
        run: Called with the source and the dict, which it keeps up to date at every `yield`.
        source: What the stage reads.
        position: The position at the beginning, as plain values.
    """

    def __init__(
        self, run: Callable[..., Iterator[Any]], source: Iterator[Any] = NOTHING, **position: Any
    ) -> None:
        self._function = run
        self._position = position
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        return self._function(self._source, self._position)

    def state_dict(self) -> State:
        before = {} if self._source is NOTHING else {"source": state_of(self._source)}
        return {**before, **self._position}

    def load_state_dict(self, state: State) -> None:
        names = list(self._position)
        if self._source is not NOTHING:
            source, *values = unpack(state, "source", *names)
            load_state(self._source, source)
        else:
            values = list(unpack(state, *names))
        self._position.update(zip(names, values, strict=True))


class Stage:
    """A step of a pipeline. Subclasses are frozen dataclasses that define `open`.

    A stage can be called with an iterable to run it on its own: `shuffle(100)(samples)`.
    """

    @property
    def is_random(self) -> bool:
        """Whether the items, or their order, differ from epoch to epoch."""
        return False

    @property
    def generators(self) -> Sequence[random.Random]:
        """The generators of the program that it draws from, which continue from pass to pass."""
        return ()

    @property
    def splits(self) -> frozenset[SplitAxis]:
        """Among what the stage divides its items."""
        return frozenset()

    @property
    def may_split(self) -> bool:
        """Whether the stage is a function of the program, which may divide its items as well."""
        return False

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        """Return the iterator of this stage over `source`, which is empty for the first stage."""
        raise NotImplementedError

    def __call__(self, source: Iterable[Any] = ()) -> Iterator[Any]:
        """Run on its own on any iterable. What comes after it is unknown, and may be a split."""
        items = source if isinstance(source, StageIterator) else iter(source)
        return self.open(items, Context(current_worker_info(), later_splits=ALL_SPLITS))

    def run(self, src: Iterable[Any] = ()) -> Iterator[Any]:
        """Run on its own on any iterable."""
        return self(src)

    invoke = run

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.describe().items())
        return f"<_{type(self).__name__.lower()} {settings}>"

    def describe(self) -> dict[str, Any]:
        """Return a description as JSON, which a saved state must match."""
        names: list[str] = [field.name for field in fields(self)] if is_dataclass(self) else []
        settings = {name: describe(getattr(self, name)) for name in names}
        return {"stage": type(self).__name__, **settings}


def contexts(stages: Sequence[Stage], context: Context) -> Iterator[Context]:
    """Yield the context of each stage of a pipeline, which may be a part of another one.

    A function of the program may be a split, unless the items are divided already.
    """
    nothing: frozenset[SplitAxis] = frozenset()
    before = list(accumulate((stage.splits for stage in stages), or_, initial=nothing))
    later = [context.later_splits]
    for stage, done in zip(reversed(stages), reversed(before[:-1]), strict=True):
        unknown = ALL_SPLITS - done if stage.may_split else nothing
        later.append(later[-1] | stage.splits | unknown)
    for number, splits in enumerate(reversed(later[:-1])):
        yield replace(context.at(number), later_splits=splits)


def open_source(function: Callable[..., Iterable[Any]], *args: Any) -> Iterator[Any]:
    """Return the iterator of a source of the program's own, see `runs_within_stage`."""
    return iter(function(*args))


class UnsavableIterator(StageIterator):
    """The items of a generator or another iterable without a known position."""

    def __init__(self, items: Iterable[Any], name: str, source: Iterator[Any] = NOTHING) -> None:
        self._name = name
        self._iterable = items
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        return iter(self._iterable)

    def state_dict(self) -> State:
        raise StateError(
            f"the pipeline cannot be saved, because {self._name} is a plain iterable or generator "
            "function, whose position is unknown; use named stages (map, select, flatmap, ...) in "
            "its place, or iterators with state_dict and load_state_dict"
        )

    def load_state_dict(self, state: State) -> None:
        self.state_dict()


class UnsavableSource(UnsavableIterator):
    """The items of a source of the program's own, see `runs_within_stage`."""

    def _run(self) -> Iterator[Any]:
        yield from self._iterable


def state_of(iterator: Iterator[Any]) -> State:
    """Return the state of any iterator.

    Raises:
        StateError: If it cannot be saved.
    """
    if hasattr(iterator, "state_dict"):
        state: State = iterator.state_dict()
        return state
    return UnsavableIterator(iterator, describe(iterator)).state_dict()


def load_state(iterator: Iterator[Any], state: State) -> None:
    """Move any iterator to a saved position.

    Raises:
        StateError: If it cannot be restored, or the state belongs to another iterator.
    """
    if not hasattr(iterator, "load_state_dict"):
        UnsavableIterator(iterator, describe(iterator)).state_dict()
    iterator.load_state_dict(state)  # type: ignore[attr-defined]


def close(iterator: Any) -> None:
    """Close an iterator, if it can be closed."""
    if hasattr(iterator, "close"):
        iterator.close()


def unpack(state: State, *names: str) -> tuple[Any, ...]:
    """Return the values of exactly these `names`; raise StateError if there are others."""
    if not isinstance(state, dict) or set(state) != set(names):
        present = sorted(state) if isinstance(state, dict) else state
        raise StateError(
            f"saved state has {present}, this stage needs {sorted(names)}; was it saved by another "
            "pipeline?"
        )
    return tuple(state[name] for name in names)


def describe(value: Any) -> Any:
    """Return a JSON description of a value in a pipeline: functions and classes by name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Stage):
        return value.describe()
    if isinstance(value, dict):
        return {str(name): describe(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [describe(each) for each in value]
    if isinstance(value, functools.partial):
        return [describe(value.func), *map(describe, value.args), describe(value.keywords)]
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', None) or type(value).__module__}.{name}"


def skip_items(items: Iterator[Any], count: int) -> None:
    """Take this many items; raise StateError if there are fewer."""
    check_reached(count - sum(1 for _ in islice(items, count)))


def check_reached(missing: int) -> None:
    """Raise StateError if the data has ended `missing` items before a saved position."""
    if missing:
        raise StateError(
            f"the data has ended {missing} items before the saved position; has it changed since?"
        )


NOTE_ITEMS = 256
"""The number of items between two recorded positions of a source."""


class ReplayLog:
    """Recorded positions of a source, by the number of the next item.

    Args:
        source: The source.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._notes: deque[tuple[int, State]] = deque()
        self._unsavable: StateError | None = None

    def note(self, number: int, oldest: Callable[[], int]) -> None:
        """Record the position before item `number`, unless the last one is close.

        Args:
            number: Number of the next item.
            oldest: Returns the number of the first item that may be needed again.
        """
        notes = self._notes
        if self._unsavable is not None or (notes and number - notes[-1][0] < NOTE_ITEMS):
            return
        try:
            notes.append((number, state_of(self._source)))
        except StateError as error:
            # Needed only when a state is saved.
            self._unsavable = error
            return
        needed = oldest()
        while len(notes) > 1 and notes[1][0] <= needed:
            notes.popleft()

    def state_at(self, number: int) -> State:
        """Return the state from which item `number`, not before `oldest`, can be reached again.

        Raises:
            StateError: If the source cannot be saved.
        """
        if self._unsavable is not None:
            raise self._unsavable
        if not self._notes:
            return {"source": state_of(self._source), "skip": number}
        noted, state = next(note for note in reversed(self._notes) if note[0] <= number)
        return {"source": state, "skip": number - noted}

    def load_state_dict(self, state: State) -> None:
        """Move the source to a saved position, from which items are counted from 0."""
        source, skip = unpack(state, "source", "skip")
        load_state(self._source, source)
        skip_items(iter(self._source), skip)
