"""The contract of the stages of a pipeline.

A stage says what to do: it is immutable and can be pickled. `open` gives an iterator, which is
the position: it knows how far it is, as plain data that can be saved, and can go there again.

    stage = Shuffle(size=1000)
    iterator = stage.open(samples, context)
    iterator.state_dict()

A function from iterator to iterator is a stage, too. It runs as it is, and as its position is on
its own call stack, a pipeline with one says that it cannot be saved.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
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

    A stage can be called with an iterable to run it by itself: `shuffle(100)(samples)`.
    """

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        """Return what this stage makes of `source`, which is empty for the first stage."""
        raise NotImplementedError

    def __call__(self, source: Iterable[Any] = ()) -> Iterator[Any]:
        """Run by itself on any iterable."""
        return self.open(iter(source), Context(current_place()))

    def run(self, src: Iterable[Any] = ()) -> Iterator[Any]:
        """Run by itself on any iterable."""
        return self(src)

    def invoke(self, *args: Any, **kw: Any) -> Iterator[Any]:
        """Run by itself on any iterable."""
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
