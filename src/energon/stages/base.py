"""The contract of every pipeline stage.

A stage is two small classes. The *dataset* says what to do: it is immutable, can be pickled
to any worker, and has no position. The *iterator* is the position: it lives in one lane, and
all it knows can be saved as plain data.

    dataset = BatchDataset(samples, batch_size=8)
    batches = dataset.open(lane)
    first = next(batches)
    state = batches.state_dict()             # json.dumps(state) always works

    batches = dataset.open(lane, state)      # continues with the second batch

Stages are iterators, never generators: a generator keeps its position on the call stack,
where nobody can save it. Positions are addresses (rows of the plan and sub-numbers), never
contents, so a state is small and restoring reads only what comes next.

There are two ways to get a single item again. Its *place* says where it is in the lane; a
stage that holds items back saves the places of these. Its *restore key* says where it came
from in the data, and does not depend on lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from energon.errors import ConfigError, StateError
from energon.samples.restore_key import RestoreKey
from energon.stages.lane import Lane

T_co = TypeVar("T_co", covariant=True)

State = dict[str, Any]
"""What `state_dict` returns: dicts, lists, strings, numbers, booleans and None only."""

Place = Any
"""Where an item is in its lane, as JSON; only the stage that gave it understands it."""


_NUMBERS = frozenset(("drawn", "given", "group", "pass", "present", "read", "row"))
_LISTS = frozenset(("carried", "changes", "counts", "ended", "waiting"))
"""Names of what are numbers and lists in the states of stages; else there are states and None."""


@dataclass(frozen=True)
class Dataset(Generic[T_co]):
    """What a stage does. Subclasses add their parameters and the dataset they read."""

    def open(self, lane: Lane, state: State | None = None) -> DatasetIterator[T_co]:
        """Start reading in `lane`, at the beginning or where `state` was saved.

        Raises:
            StateError: If `state` was saved by a different pipeline.
        """
        iterator = self._open(lane)
        if state is not None:
            iterator.load_state_dict(state)
        return iterator

    def _open(self, lane: Lane) -> DatasetIterator[T_co]:
        raise NotImplementedError

    def num_items(self, lane: int, lanes: int) -> int | None:
        """Return how many items lane `lane` of `lanes` yields at most; None means no end."""
        raise NotImplementedError

    def read_again(self, lane: Lane, places: Sequence[Place]) -> list[Any]:
        """Return the items at some places of `lane`, or SKIPPED for what now fails."""
        return [next(self.open(lane, place)) for place in places]

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        """Make the item with this restore key again, wherever it was.

        Args:
            lane: What hooks are run in.
            key: A key, of which later stages may have appended numbers of their own.

        Returns:
            The item, and what is left of the key.

        Raises:
            StateError: If no item of this stage has such a key.
        """
        raise ConfigError(f"{type(self).__name__} cannot restore single samples")


class DatasetIterator(Iterator[T_co]):
    """Where a stage is. Created by `Dataset.open`, used by one thread at a time."""

    def __next__(self) -> T_co:
        raise NotImplementedError

    @property
    def row(self) -> int:
        """The row of the lane that the next item comes from, or begins with."""
        raise NotImplementedError

    @property
    def address(self) -> tuple[int, ...]:
        """Numbers that tell this position from the others of the lane; they seed what comes."""
        return (self.row,)

    @property
    def place(self) -> Place:
        """Where the item is that was returned last."""
        raise NotImplementedError

    def take(self, count: int) -> list[T_co]:
        """Return the next `count` items; fewer only at the end."""
        return list(islice(self, count))

    def state_dict(self) -> State:
        """Return the state in which the next item is the one `__next__` would return."""
        raise NotImplementedError

    def load_state_dict(self, state: State) -> None:
        """Go to a saved position. Only called before the first item is read."""
        raise NotImplementedError


def unpack(state: State, *names: str) -> tuple[Any, ...]:
    """Return the values of exactly these `names`, or say what does not fit."""
    if not isinstance(state, Mapping) or set(state) != set(names):
        found = sorted(state) if isinstance(state, Mapping) else repr(state)
        raise StateError(
            f"saved state has {found}, this stage needs {sorted(names)}; "
            "was it saved by another pipeline?"
        )
    for name in names:
        value = state[name]
        if name in _NUMBERS:
            fits = isinstance(value, int)
        elif name in _LISTS:
            fits = isinstance(value, list)
        else:
            fits = isinstance(value, Mapping | list | None)
        if not fits:
            raise StateError(
                f"saved state has {name}: {value!r}, which no stage writes; it is damaged "
                "or was edited"
            )
    return tuple(state[name] for name in names)


def unpack_one(state: State, name: str) -> tuple[Any, State]:
    """Return the value of `name` and the rest of a state, or say what does not fit."""
    rest = dict(state) if isinstance(state, Mapping) else {}
    (value,) = unpack({name: rest.pop(name)} if name in rest else state, name)
    return value, rest
