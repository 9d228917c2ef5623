"""The contract of every pipeline stage.

A stage is two small classes. The *dataset* describes what to do: it is immutable, can be pickled
to any worker, and has no position. The *iterator* is the position: it belongs to one lane, and
all of its state can be saved as plain data.

    dataset = BatchDataset(samples, batch_size=8)
    batches = dataset.open(lane)
    first = next(batches)
    state = batches.state_dict()             # json.dumps(state) always works

    batches = dataset.open(lane, state)      # continues with the second batch

Stages are iterators, never generators: a generator keeps its position on the call stack,
where it cannot be saved. Positions are numbers (rows of the plan and sub-numbers), never
contents, so a state is small and restoring reads only what comes next.

A single item can be made again in two ways: from its *item state*, within its lane, which a stage
that holds items back saves for each of them; or from its *restore key*, independently of lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from energon.errors import ConfigError, StateError
from energon.samples.crude import RestoreKey
from energon.stages.lane import Lane

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    T_co = TypeVarWithDefault("T_co", covariant=True, default=Any)
else:
    T_co = TypeVar("T_co", covariant=True)

State = dict[str, Any]
"""What `state_dict` returns: dicts, lists, strings, numbers, booleans and None only."""

ItemState = Any
"""What an item of a lane is made from again, as JSON that only the stage that returned it reads."""


StateKind = type | UnionType
"""What a value of a state is: int, list, dict, `int | None` and the like."""


@dataclass(frozen=True)
class Dataset(Generic[T_co]):
    """The description of a stage. Subclasses add their parameters and the dataset they read."""

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
        """Return the maximum number of items of lane `lane` of `lanes`; None means no end."""
        raise NotImplementedError

    def read_again(self, lane: Lane, item_states: Sequence[ItemState]) -> list[Any]:
        """Return the items of `lane` with some states, with SKIPPED for those that now fail."""
        return [next(self.open(lane, item_state)) for item_state in item_states]

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        """Recreate the item with this restore key, wherever it is.

        Args:
            lane: The lane to run hooks in.
            key: A key, to which later stages may have appended numbers.

        Returns:
            The item, and the rest of the key.

        Raises:
            StateError: If no item of this stage has such a key.
        """
        raise ConfigError(f"{type(self).__name__} cannot restore single samples")


class DatasetIterator(Iterator[T_co]):
    """The position of a stage. Created by `Dataset.open`, used by one thread at a time.

    Attributes:
        saves: What `state_dict` returns, by name; `unpack` checks states against it.
        only_counts: Whether the last item has changed nothing but `since` in the state, a count of
            items. Such states are not sent.
        puts_back: Whether items can be put back.
    """

    saves: ClassVar[Mapping[str, StateKind]] = {}
    only_counts = False
    puts_back: ClassVar[bool] = False

    def __next__(self) -> T_co:
        raise NotImplementedError

    @property
    def row(self) -> int:
        """The row of the lane at which the next item begins."""
        raise NotImplementedError

    @property
    def row_key(self) -> tuple[int, ...]:
        """The row, and numbers of outputs, of this position in the lane; seeds the next item."""
        return (self.row,)

    @property
    def item_state(self) -> ItemState:
        """The state of the last item returned."""
        raise NotImplementedError

    def take(self, count: int, *, as_columns: bool = False) -> tuple[Any, Sequence[ItemState]]:
        """Return up to `count` items, at least one before the end, and the state of each.

        Args:
            count: Maximum number of items.
            as_columns: Whether `count` items may be returned as columns, equal to collating them,
                instead of as a list.
        """
        for item in self:
            return [item], [self.item_state]
        return [], []

    def put_back(self, items: Sequence[Any], item_states: Sequence[ItemState]) -> None:
        """Return the last items of `take`, and their states, to be taken again."""
        raise NotImplementedError

    def state_dict(self) -> State:
        """Return the state in which the next item is the one `__next__` would return."""
        raise NotImplementedError

    def load_state_dict(self, state: State) -> None:
        """Move to a saved position. Only called before the first item is read."""
        raise NotImplementedError


def unpack(state: State, saves: Mapping[str, StateKind]) -> tuple[Any, ...]:
    """Return the values of a state in the order of `saves`.

    Args:
        state: What some `state_dict` returned.
        saves: Its names, and the kinds of their values.

    Raises:
        StateError: If it has other names or values.
    """
    values, rest = unpack_some(state, saves)
    if rest:
        raise _misfit(state, saves)
    return values


def unpack_some(state: State, saves: Mapping[str, StateKind]) -> tuple[tuple[Any, ...], State]:
    """Return the values of some names in a state, as `unpack` does, and the rest of it."""
    if not isinstance(state, Mapping) or not saves.keys() <= state.keys():
        raise _misfit(state, saves)
    for name, kind in saves.items():
        value = state[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            expected = getattr(kind, "__name__", None) or str(kind)
            raise StateError(
                f"saved state has {name}: {value!r:.200}, expected {expected}; it is damaged or "
                "was edited"
            )
    rest = {name: value for name, value in state.items() if name not in saves}
    return tuple(state[name] for name in saves), rest


def _misfit(state: State, saves: Mapping[str, StateKind]) -> StateError:
    names = sorted(state) if isinstance(state, Mapping) else f"{state!r:.200}"
    return StateError(
        f"saved state has {names}, this stage needs {sorted(saves)}; was it saved by another "
        "pipeline?"
    )


class ThroughDataset(Dataset[Any]):
    """Base of stages that yield the items of `dataset` unchanged."""

    dataset: Dataset[Any]

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self.dataset.num_items(lane, lanes)

    def read_again(self, lane: Lane, item_states: Sequence[ItemState]) -> list[Any]:
        return self.dataset.read_again(lane, item_states)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        return self.dataset.restore(lane, key)


class ThroughIterator(DatasetIterator[Any]):
    """Has the position of `inner`."""

    inner: DatasetIterator[Any]

    @property
    def row(self) -> int:
        return self.inner.row

    @property
    def item_state(self) -> ItemState:
        return self.inner.item_state

    def state_dict(self) -> State:
        return self.inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.inner.load_state_dict(state)
