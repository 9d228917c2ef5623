"""Wrappers over streams: blend, concatenate, repeat, limit, shuffle, apply a function to all items.

States contain numbers only. Whatever a user function remembers is on its call stack, so the
position of `IterMapDataset` is where the function started, and how many outputs it has yielded
since: resuming runs it again from there. A function whose outputs depend only on the last input
that it took starts over with every input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from energon.compat.megatron.wrappers.base import WrapperDataset
from energon.errors import ConfigError, StateError
from energon.plan.randomness import derive_seed
from energon.samples.crude import RestoreKey
from energon.stages.base import (
    Dataset,
    DatasetIterator,
    ItemState,
    State,
    StateKind,
    ThroughIterator,
    unpack,
)
from energon.stages.hooks.hook import SKIPPED, replay
from energon.stages.lane import Lane, LaneReading
from energon.worker import WorkerConfig


class StreamIterator(DatasetIterator[Any]):
    """A position that consists of the attributes in `saves`: plain data, and inner positions."""

    def state_dict(self) -> State:
        return {name: _saved(getattr(self, name)) for name in self.saves}

    def load_state_dict(self, state: State) -> None:
        for name, value in zip(self.saves, unpack(state, self.saves), strict=True):
            present = getattr(self, name)
            several = isinstance(present, list)
            inner = present if several else [present]
            if not inner or not isinstance(inner[0], DatasetIterator):
                setattr(self, name, _saved(value))
                continue
            for each, saved in zip(inner, value if several else [value], strict=True):
                each.load_state_dict(saved)


def _saved(value: Any) -> Any:
    if isinstance(value, DatasetIterator):
        return value.state_dict()
    return [_saved(each) for each in value] if isinstance(value, list) else value


class MergedDataset(WrapperDataset):
    """A wrapper each item of which comes from one of several streams, known by their numbers."""

    def _stream(self, lane: Lane, number: int) -> tuple[Dataset[Any], Lane]:
        """Return the dataset that has the items of a stream, and the lane in which it is read.

        Raises:
            StateError: If there is no such stream.
        """
        if number >= len(self.datasets):
            raise StateError(
                f"saved state is in dataset {number}, there are {len(self.datasets)}; was it "
                "saved by another pipeline?"
            )
        return self.datasets[number], lane.branch(number, len(self.datasets))

    def read_again(self, lane: Lane, item_states: Sequence[ItemState]) -> list[Any]:
        for item_state in item_states:
            is_pair = isinstance(item_state, list | tuple) and len(item_state) == 2
            if not is_pair or not isinstance(item_state[0], int) or item_state[0] < 0:
                raise StateError(
                    f"saved state has the item {item_state!r:.100}, which no stage writes; it is "
                    "damaged or was edited"
                )
        items: list[Any] = [None] * len(item_states)
        for number in dict.fromkeys(number for number, _ in item_states):
            own = [index for index, item_state in enumerate(item_states) if item_state[0] == number]
            dataset, branch = self._stream(lane, number)
            samples = dataset.read_again(branch, [item_states[index][1] for index in own])
            for index, item in zip(own, samples, strict=True):
                items[index] = item
        return items

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        # Keys name the leaf, so at most one dataset has it.
        reasons = []
        for number in range(len(self.datasets)):
            dataset, branch = MergedDataset._stream(self, lane, number)
            try:
                return dataset.restore(branch, key)
            except StateError as error:
                reasons.append(str(error))
        raise StateError(f"no dataset has {key}: {'; '.join(dict.fromkeys(reasons))}")


class SuccessiveDataset(MergedDataset):
    """A wrapper that yields the items of its streams one after another."""

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _SuccessiveIterator(self, lane)

    def _due(self, lane: Lane, number: int) -> float:
        """Return the maximum number of items of a stream."""
        return float("inf")

    def _is_last(self, number: int) -> bool:
        """Return whether a stream is the last one."""
        return number + 1 >= len(self.datasets)


class _SuccessiveIterator(StreamIterator):
    saves: ClassVar[Mapping[str, StateKind]] = {"number": int, "given": int, "inner": dict}

    def __init__(self, stage: SuccessiveDataset, lane: Lane) -> None:
        self.stage = stage
        self.lane = lane
        # With fewer samples than lanes, a lane has no samples in most passes.
        self.empty = 0
        self._begin(0)

    def _begin(self, number: int) -> None:
        dataset, self.branch = self.stage._stream(self.lane, number)
        self.number, self.given = number, 0
        self.due = self.stage._due(self.lane, number)
        self.inner = dataset.open(self.branch)

    @property
    def row(self) -> int:
        return self.lane.inner_row(self.branch.outer_row(self.inner.row))

    @property
    def row_key(self) -> tuple[int, ...]:
        return (self.number, *self.inner.row_key)

    @property
    def item_state(self) -> ItemState:
        return [self.number, self.inner.item_state]

    def __next__(self) -> Any:
        while True:
            item = next(self.inner, SKIPPED) if self.given < self.due else SKIPPED
            if item is not SKIPPED:
                self.given += 1
                self.empty = 0
                return item
            self.empty += not self.given
            if self.stage._is_last(self.number) or self.empty > self.lane.lanes:
                raise StopIteration
            self._begin(self.number + 1)

    def load_state_dict(self, state: State) -> None:
        self._begin(unpack(state, self.saves)[0])
        super().load_state_dict(state)


class ConcatDataset(SuccessiveDataset):
    """Yield the items of several datasets, one dataset after the other.

    Args:
        datasets: The datasets.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> [sample.__key__ for sample in ConcatDataset(photos, photos, worker_config=config)]
        ['8', '9', '8', '9']
    """

    def __init__(self, *datasets: Dataset[Any], worker_config: WorkerConfig) -> None:
        super().__init__(datasets, worker_config=worker_config)
        if not datasets:
            raise ConfigError("a concatenation needs at least one dataset, got none")

    def num_items(self, lane: int, lanes: int) -> int | None:
        return total_items(self.datasets, lane, lanes)


def total_items(datasets: Iterable[Dataset[Any]], lane: int, lanes: int) -> int | None:
    """Return the number of items of all `datasets` in a lane; None if one is endless."""
    total = 0
    for dataset in datasets:
        items = dataset.num_items(lane, lanes)
        if items is None:
            return None
        total += items
    return total


class RepeatDataset(SuccessiveDataset):
    """Repeat a finite dataset, each time in another order.

    Args:
        dataset: The items.
        repeats: Number of passes, possibly fractional; None for no limit.
        restart: Whether another pass follows when one ends. False makes a single pass.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> repeated = RepeatDataset(photos, repeats=1.5, worker_config=config)
        >>> [sample.__key__ for sample in repeated]
        ['8', '9', '8']
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        repeats: float | None = None,
        restart: bool = True,
        worker_config: WorkerConfig,
    ) -> None:
        passes = repeats if restart else min(1, 1 if repeats is None else repeats)
        if passes is not None and not 0 < passes < float("inf"):
            raise ConfigError(f"repeats must be above 0, or None for no end, got {passes}")
        super().__init__([dataset], worker_config=worker_config, repeats=passes)
        self.repeats = passes

    def num_items(self, lane: int, lanes: int) -> int | None:
        items = self.dataset.num_items(lane, lanes)
        return None if items is None or self.repeats is None else int(items * self.repeats)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        return self.dataset.restore(lane, key)

    def _stream(self, lane: Lane, number: int) -> tuple[Dataset[Any], Lane]:
        before = 0 if self.repeats is None else lane.pass_number * -int(-self.repeats // 1)
        return self.dataset, replace(lane, pass_number=before + number, reading=LaneReading())

    def _due(self, lane: Lane, number: int) -> float:
        items = self.dataset.num_items(lane.number, lane.lanes)
        if items is None or self.repeats is None or number + 1 <= self.repeats:
            return float("inf")
        return int(items * (self.repeats - number))

    def _is_last(self, number: int) -> bool:
        return self.repeats is not None and number + 1 >= self.repeats


class BlendDataset(MergedDataset):
    """Draw items from several datasets by weight, until all of them have ended.

    At any time, shares are exact to within an item or two.

    Args:
        datasets: Pairs of a dataset and its weight.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import MapDataset, WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> endless = RepeatDataset(photos, worker_config=config)
        >>> captions = MapDataset(endless, lambda sample: sample.caption, worker_config=config)
        >>> blend = BlendDataset((endless, 0.75), (captions, 0.25), worker_config=config)
        >>> [type(item).__name__ for item, _ in zip(blend, range(4))]
        ['CaptioningSample', 'CaptioningSample', 'str', 'CaptioningSample']
    """

    def __init__(self, *datasets: tuple[Dataset[Any], float], worker_config: WorkerConfig) -> None:
        self.weights = [float(weight) for _, weight in datasets]
        super().__init__(
            [dataset for dataset, _ in datasets], worker_config=worker_config, weights=self.weights
        )
        if not all(0 <= weight < float("inf") for weight in self.weights) or not any(self.weights):
            raise ConfigError(
                f"weights are numbers of at least 0, and not all 0: {list(self.weights)}"
            )

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _BlendIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        drawn = (each for each, weight in zip(self.datasets, self.weights, strict=True) if weight)
        return total_items(drawn, lane, lanes)


class _BlendIterator(StreamIterator):
    saves: ClassVar[Mapping[str, StateKind]] = {
        "counts": list,
        "ended": list,
        "drawn": int,
        "inner": list,
    }

    def __init__(self, stage: BlendDataset, lane: Lane) -> None:
        streams = (stage._stream(lane, number) for number in range(len(stage.datasets)))
        self.inner = [dataset.open(branch) for dataset, branch in streams]
        self.weights = stage.weights
        # How far each dataset is ahead of its share at the beginning.
        self.phases = [
            derive_seed(lane.seed, "blend", lane.number, branch) / 2**64
            for branch in range(len(self.inner))
        ]
        # Draws since the last change of shares.
        self.counts = [0] * len(self.inner)
        self.ended: list[int] = []
        self.drawn = 0
        self.last = 0

    @property
    def row(self) -> int:
        chosen = self._choose()
        return self.inner[chosen].row * len(self.inner) + chosen if chosen >= 0 else self.drawn

    @property
    def row_key(self) -> tuple[int, ...]:
        return (self.drawn,)

    @property
    def item_state(self) -> ItemState:
        return [self.last, self.inner[self.last].item_state]

    def __next__(self) -> Any:
        while (chosen := self._choose()) >= 0:
            try:
                item = next(self.inner[chosen])
            except StopIteration:
                self.ended.append(chosen)
                self.counts = [0] * len(self.inner)
                continue
            self.counts[chosen] += 1
            self.drawn += 1
            self.last = chosen
            return item
        raise StopIteration

    def _choose(self) -> int:
        """Return the dataset that is furthest behind its share; -1 if all have ended."""
        alive = [
            (weight if number not in self.ended else 0.0)
            for number, weight in enumerate(self.weights)
        ]
        total = sum(alive)
        if not total:
            return -1
        turns = sum(self.counts) + 1
        behind = [
            turns * weight / total + phase - count if weight else float("-inf")
            for weight, phase, count in zip(alive, self.phases, self.counts, strict=True)
        ]
        return behind.index(max(behind))

    def load_state_dict(self, state: State) -> None:
        counts, *_, inner = unpack(state, self.saves)
        if {len(counts), len(inner)} != {len(self.inner)}:
            raise StateError(
                f"saved state is of a blend of {len(counts)} datasets, this one has "
                f"{len(self.inner)}; was it saved by another pipeline?"
            )
        super().load_state_dict(state)


class LimitDataset(WrapperDataset):
    """Yield only the first items.

    Args:
        dataset: The items.
        length: Number of items of each rank.
        reset_after_epoch: Whether a loop of a loader starts over even if the previous one was
            left early.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> [sample.__key__ for sample in LimitDataset(photos, 1, worker_config=config)]
        ['8']
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        length: int,
        *,
        reset_after_epoch: bool = False,
        worker_config: WorkerConfig,
    ) -> None:
        if length < 0:
            raise ConfigError(f"limit must be 0 or more, got {length}")
        super().__init__([dataset], worker_config=worker_config, length=length)
        self.total = length * worker_config.world_size
        self.restart = reset_after_epoch

    @property
    def is_drawn_again(self) -> bool:
        """False: each loop has the same first items."""
        return False

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _LimitIterator(self, lane)

    def _share(self, lane: int, lanes: int) -> int:
        """Return how many items lane `lane` of `lanes` may yield."""
        return max(0, -(-(self.total - lane) // lanes))

    def num_items(self, lane: int, lanes: int) -> int | None:
        items = self.dataset.num_items(lane, lanes)
        share = self._share(lane, lanes)
        return share if items is None else min(items, share)


class _LimitIterator(StreamIterator, ThroughIterator):
    saves: ClassVar[Mapping[str, StateKind]] = {"given": int, "inner": dict}

    def __init__(self, stage: LimitDataset, lane: Lane) -> None:
        self.inner = stage.dataset.open(lane)
        self.share = stage._share(lane.number, lane.lanes)
        self.given = 0

    @property
    def row_key(self) -> tuple[int, ...]:
        return self.inner.row_key

    def __next__(self) -> Any:
        if self.given >= self.share:
            raise StopIteration
        item = next(self.inner)
        self.given += 1
        return item


class EpochizeDataset(WrapperDataset):
    """End the loops of a loader after a number of items; the next loop continues from there.

    Only wrappers that watch the items may be put around it.

    Args:
        dataset: The items.
        length: Number of items of each rank in a loop.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_loader, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> endless = RepeatDataset(photos, worker_config=config)
        >>> loader = get_loader(EpochizeDataset(endless, 3, config))
        >>> [len([sample for sample in loader]) for epoch in range(2)]
        [3, 3]
    """

    def __init__(self, dataset: Dataset[Any], length: int, worker_config: WorkerConfig) -> None:
        if length < 1:
            raise ConfigError(f"an epoch must have 1 or more items, got {length}")
        super().__init__([dataset], worker_config=worker_config, length=length)
        self.virtual_epoch_length = length


class ShuffleBufferDataset(WrapperDataset):
    """Yield each item once, drawn at random from the next `size`.

    The dataset getters do not use it: they shuffle row numbers before anything is read.

    Args:
        dataset: The items.
        size: Capacity of the buffer, whose items are read again when resuming.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> shuffled = ShuffleBufferDataset(photos, 2, worker_config=config)
        >>> sorted(sample.__key__ for sample in shuffled)
        ['8', '9']
    """

    def __init__(self, dataset: Dataset[Any], size: int, *, worker_config: WorkerConfig) -> None:
        if size < 1:
            raise ConfigError(f"the size of a shuffle buffer must be at least 1, got {size}")
        super().__init__([dataset], worker_config=worker_config, size=size)
        self.size = size

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _ShuffleBufferIterator(self, lane)


class _ShuffleBufferIterator(StreamIterator, ThroughIterator):
    saves: ClassVar[Mapping[str, StateKind]] = {"drawn": int, "waiting": list, "inner": dict}

    def __init__(self, stage: ShuffleBufferDataset, lane: Lane) -> None:
        self.stage = stage
        self.lane = lane
        self.inner = stage.dataset.open(lane)
        self.items: list[Any] | None = []
        self.waiting: list[ItemState] = []
        self.drawn = 0
        self.last: ItemState = None

    @property
    def row_key(self) -> tuple[int, ...]:
        return (self.drawn,)

    @property
    def item_state(self) -> ItemState:
        return self.last

    def __next__(self) -> Any:
        items, item_states = self._buffer(), self.waiting
        while len(items) < self.stage.size:
            item = next(self.inner, SKIPPED)
            if item is SKIPPED:
                break
            items.append(item)
            item_states.append(self.inner.item_state)
        if not items:
            raise StopIteration
        lane = self.lane
        seed_key = (lane.pass_number, lane.number, self.drawn)
        chosen = derive_seed(lane.seed, "shuffle buffer", *seed_key) % len(items)
        self.drawn += 1
        # Swapped with the last one, so that the cost of removal does not depend on the position.
        items[chosen], items[-1] = items[-1], items[chosen]
        item_states[chosen], item_states[-1] = item_states[-1], item_states[chosen]
        self.last = item_states.pop()
        return items.pop()

    def _buffer(self) -> list[Any]:
        """Return the waiting items; after a restore, they are read again."""
        if self.items is None:
            samples = self.stage.dataset.read_again(self.lane, self.waiting)
            kept = [index for index, item in enumerate(samples) if item is not SKIPPED]
            self.items = [samples[index] for index in kept]
            self.waiting = [self.waiting[index] for index in kept]
        return self.items

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.items = None


class IterMapDataset(WrapperDataset):
    """Apply a function to the iterator of all items.

    Resuming runs the function again: from the last input that it took if outputs depend only on
    that (`stateless_iter_fn=True`), otherwise from the beginning of the run, which takes longer
    the further the run was.

    Args:
        dataset: The items.
        iter_map_fn: Takes an iterator, and returns an iterator. Its errors end the run.
        len_map_fn: Returns the number of outputs for a number of items.
        stateless_iter_fn: Whether an output depends only on the last item that was taken.
        iter_map_fn_config: Describes the function's behavior, see `MapDataset`.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> def with_numbers(samples):
        ...     for number, sample in enumerate(samples):
        ...         yield number, sample.caption
        >>> list(IterMapDataset(photos, with_numbers, worker_config=config))
        [(0, 'grey number 8'), (1, 'grey number 9')]
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        iter_map_fn: Callable[[Iterator[Any]], Iterable[Any]],
        *,
        len_map_fn: Callable[[int], int] = int,
        stateless_iter_fn: bool = False,
        iter_map_fn_config: Any = None,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(
            [dataset],
            worker_config=worker_config,
            iter_map_fn_config=iter_map_fn_config,
        )
        self.iter_map_fn = iter_map_fn
        self.len_map_fn = len_map_fn
        self.remembers = not stateless_iter_fn

    read_again = Dataset.read_again

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _IterMapIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        items = self.dataset.num_items(lane, lanes)
        return None if items is None else self.len_map_fn(items)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        if self.remembers:
            raise ConfigError(
                f"what {self.iter_map_fn} yields may depend on all previous samples, so single "
                "samples cannot be recreated; if each output depends only on the last input, pass "
                "stateless_iter_fn=True"
            )
        item, rest = self.dataset.restore(lane, key)
        outputs = list(self.iter_map_fn(iter([item])))
        if len(outputs) != 1:
            raise StateError(
                f"{self.iter_map_fn} yields {len(outputs)} outputs for the sample {key}, whose key "
                "selects none"
            )
        return outputs[0], rest


class _IterMapIterator(StreamIterator):
    saves: ClassVar[Mapping[str, StateKind]] = {"start": dict, "given": int}

    def __init__(self, stage: IterMapDataset, lane: Lane) -> None:
        self.stage = stage
        self.inner = stage.dataset.open(lane)
        self.outputs: Iterator[Any] | None = None
        self.start = self.inner.state_dict()
        self.given = 0
        self.last: State | None = None

    @property
    def row(self) -> int:
        return self.inner.row

    @property
    def row_key(self) -> tuple[int, ...]:
        return (*self.inner.row_key, self.given)

    @property
    def item_state(self) -> ItemState:
        return self.last

    def __next__(self) -> Any:
        if self.outputs is None:
            self.outputs = iter(self.stage.iter_map_fn(self._inputs()))
            # Called only now: a restore may have moved the stream before.
            given, self.given = self.given, 0
            for _ in replay(self.outputs, given):
                self.given += 1
        self.last = self.state_dict()
        output = next(self.outputs)
        self.given += 1
        return output

    def _inputs(self) -> Iterator[Any]:
        while True:
            if not self.stage.remembers:
                self.start, self.given = self.inner.state_dict(), 0
            item = next(self.inner, SKIPPED)
            if item is SKIPPED:
                return
            yield item

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.inner.load_state_dict(self.start)
