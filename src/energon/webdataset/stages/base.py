"""The contract of the stages of a pipeline.

A stage says what to do: it is immutable and can be pickled. `open` returns an iterator, which is
the position: it knows how far it is, as plain data that can be saved, and can go there again.

    stage = Shuffle(size=1000)
    iterator = stage.open(samples, context)
    iterator.state_dict()

A function from iterator to iterator is a stage, too. It runs as it is, and as its position is on
its own call stack, a pipeline with one says that it cannot be saved.

A stage that holds items (a shuffle buffer, a batch that it takes apart) may not save them, as
they can be anything and of any size. It saves where its source was before the oldest of them,
and which of the items that came since it still has. Restoring takes these from the source again.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from typing import Any

from energon.errors import ConfigError, StateError
from energon.plan.seeds import derive_seed
from energon.webdataset.running.place import Place, current_place

State = dict[str, Any]
"""What `state_dict` returns: dicts, lists, strings, numbers, booleans and None only."""


NOTHING: Iterator[Any] = iter(())
"""The source of a first stage."""


@dataclass(frozen=True)
class Context:
    """What the stages of one pass over the data share."""

    place: Place
    seed: int = 0
    epoch: int = 0
    address: tuple[int | str, ...] = ()
    """Where in the pipeline a stage is; tells the random numbers of stages apart."""

    def seed_of(self, *purpose: int | str, shared: bool = False) -> int:
        """Return a seed for this stage and epoch.

        Args:
            purpose: Tells apart the seeds of one stage.
            shared: Whether all workers of the job get the same one.
        """
        where = () if shared else (self.place.rank, self.place.worker)
        return derive_seed(self.seed, *self.address, self.epoch, *where, *purpose)

    def at(self, *address: int | str) -> Context:
        """Return the context of a stage below this one."""
        return replace(self, address=(*self.address, *address))


class StageIterator(Iterator[Any]):
    """Where a stage is. Used by one thread at a time.

    Subclasses define `_run`, a generator that keeps what `state_dict` needs in attributes, up to
    date at every `yield`. Iterating with `for` goes straight to the generator.

    Args:
        source: What the stage reads, or nothing for the first one.
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

        By default that of the source: right for stages that hold nothing between two items.

        Raises:
            StateError: If this stage, or one before it, cannot be saved.
        """
        return state_of(self._source)

    def load_state_dict(self, state: State) -> None:
        """Go to a saved position. Only called before the first item is taken."""
        load_state(self._source, state)

    def close(self) -> None:
        """Give back what is held: files, processes, connections."""
        close(self._items)
        close(self._source)


class Stage:
    """A step of a pipeline. Subclasses are frozen dataclasses that define `open`.

    A stage can be called with an iterable to run it on its own: `shuffle(100)(samples)`.
    """

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        """Return what this stage makes of `source`, which is empty for the first stage."""
        raise NotImplementedError

    def __call__(self, source: Iterable[Any] = ()) -> Iterator[Any]:
        """Run on its own on any iterable."""
        return self.open(iter(source), Context(current_place()))

    def run(self, src: Iterable[Any] = ()) -> Iterator[Any]:
        """Run on its own on any iterable."""
        return self(src)

    def invoke(self, *args: Any, **kw: Any) -> Iterator[Any]:
        """Run on its own on any iterable."""
        return self(*args, **kw)

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.describe().items())
        return f"<_{type(self).__name__.lower()} {settings}>"

    def describe(self) -> dict[str, Any]:
        """Return what a saved state has to agree with, as JSON."""
        names: list[str] = [field.name for field in fields(self)] if is_dataclass(self) else []
        settings = {name: describe(getattr(self, name)) for name in names}
        return {"stage": type(self).__name__, **settings}


class UnsavableIterator(StageIterator):
    """Items of a generator or another iterable whose position nobody knows."""

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


def state_of(iterator: Iterator[Any]) -> State:
    """Return the state of any iterator.

    Raises:
        StateError: If it has none.
    """
    if hasattr(iterator, "state_dict"):
        state: State = iterator.state_dict()
        return state
    return UnsavableIterator(iterator, describe(iterator)).state_dict()


def load_state(iterator: Iterator[Any], state: State) -> None:
    """Bring any iterator to a saved position.

    Raises:
        StateError: If it has none, or the state is another one's.
    """
    if not hasattr(iterator, "load_state_dict"):
        UnsavableIterator(iterator, describe(iterator)).state_dict()
    iterator.load_state_dict(state)  # type: ignore[attr-defined]


def close(iterator: Any) -> None:
    """Close what can be closed."""
    if hasattr(iterator, "close"):
        iterator.close()


def unpack(state: State, *names: str) -> tuple[Any, ...]:
    """Return the values of exactly these `names`, or say what does not fit."""
    if not isinstance(state, dict) or set(state) != set(names):
        found = sorted(state) if isinstance(state, dict) else state
        raise StateError(
            f"saved state has {found}, this stage needs {sorted(names)}; was it saved by another "
            "pipeline?"
        )
    return tuple(state[name] for name in names)


def describe(value: Any) -> Any:
    """Return a value that is part of a pipeline as JSON: functions and classes by name."""
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


def check_positive(name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is a number of 1 or more."""
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of 1 or more, got {value!r}")


NOTE_ITEMS = 256
"""A position of the source is noted before each this many items."""


class ReplayLog:
    """Positions of a source, by the number of the item that comes next there.

    Args:
        source: Whose positions to note.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._notes: deque[tuple[int, State]] = deque()
        self._unsavable: StateError | None = None

    def note(self, number: int, oldest: Callable[[], int]) -> None:
        """Note the position before item `number`, unless the last note is not far.

        Args:
            number: Number of the item that comes next.
            oldest: Returns the number of the first item that may be needed again.
        """
        notes = self._notes
        if self._unsavable is not None or (notes and number - notes[-1][0] < NOTE_ITEMS):
            return
        try:
            notes.append((number, state_of(self._source)))
        except StateError as error:
            # Only who saves has to know.
            self._unsavable = error
            return
        needed = oldest()
        while len(notes) > 1 and notes[1][0] <= needed:
            notes.popleft()

    def state_at(self, number: int) -> State:
        """Return how to get at item `number` again, which was not taken before `oldest`.

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
        """Bring the source to a saved position; items are counted from 0 there."""
        source, skip = unpack(state, "source", "skip")
        load_state(self._source, source)
        passed = sum(1 for _ in islice(iter(self._source), skip))
        if passed < skip:
            raise StateError(
                f"the data has ended {skip - passed} items before the saved position; has it "
                "changed since?"
            )


class Replay:
    """The items of a source one by one, of which the last may be needed again.

    Args:
        source: What to iterate over.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.oldest = 0
        """Number of the oldest item that may be needed again; the user moves it on."""
        self._source = source
        self._log = ReplayLog(source)
        self._count = 0

    def __iter__(self) -> Iterator[Any]:
        self._log.note(0, int)
        for item in self._source:
            self.oldest = self._count
            self._count += 1
            yield item
            self.oldest = self._count
            if not self._count % NOTE_ITEMS:
                self._log.note(self._count, lambda: self._count)

    def state_dict(self) -> State:
        """Return how to get at item number `oldest` again.

        Raises:
            StateError: If the source cannot be saved.
        """
        return self._log.state_at(self.oldest)

    def load_state_dict(self, state: State) -> None:
        """Go to a saved position."""
        self._log.load_state_dict(state)
