"""Datasets written by a program: a class with `__iter__`, around other datasets or on its own.

Each lane runs a copy of the object, whose inner datasets yield the items of that lane. The state of
such an object is unknown, so its position is the number of items that it has yielded: resuming runs
it again from the beginning of the run, which takes longer the further the run was.

The states, random numbers and buffers that such classes are built of are here, too.
"""

from __future__ import annotations

import copy
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from energon.compat.megatron.worker import WorkerConfig
from energon.compat.megatron.wrappers.base import Described, WrapperDataset
from energon.compat.megatron.wrappers.streams import StreamIterator
from energon.errors import ConfigError
from energon.samples.crude import RestoreKey, key_of
from energon.stages.base import Dataset, DatasetIterator, ItemState, StateKind, T_co
from energon.stages.hooks.hook import replay
from energon.stages.lane import Lane, LaneReading
from energon.task_encoder import dataset as core

T = TypeVar("T")


class FlexState(dict[str, Any]):
    """The state of a program's object."""


class Savable(ABC):
    """Has a state that can be saved and restored."""

    @abstractmethod
    def save_state(self) -> FlexState:
        """Return the state."""

    @abstractmethod
    def restore_state(self, state: FlexState) -> None:
        """Restore a state."""


class WorkerRng(Savable):
    """Random numbers from the seed of the lane in which it is first used.

    Hooks do not need it: `random`, numpy and torch are seeded for them.

    Args:
        worker_config: Provides the seed, `worker_seed`.
    """

    def __init__(self, worker_config: WorkerConfig) -> None:
        self.worker_config = worker_config
        self._rng: Any = None

    @property
    def rng(self) -> Any:
        """The `torch.Generator`."""
        if self._rng is None:
            import torch

            self._rng = torch.Generator().manual_seed(self.worker_config.worker_seed())
        return self._rng

    def randbelow(self, n: int) -> int:
        """Return a number from 0 to n - 1."""
        import torch

        return int(torch.randint(n, (), generator=self.rng))

    def choice_idx(self, probs: Any) -> int:
        """Return an index, drawn with these probabilities."""
        import torch

        if len(probs) == 1:
            return 0
        edges = torch.as_tensor(probs).cumsum(0)
        drawn = torch.rand(1, generator=self.rng) * edges[-1]
        return int(torch.searchsorted(edges, drawn, right=True))

    def choice(self, l: list[T], probs: Any = None) -> T:  # noqa: E741 - its name in programs
        """Return an element, drawn with these probabilities; with equal ones by default."""
        return l[self.randbelow(len(l)) if probs is None else self.choice_idx(probs)]

    def shuffle(self, l: list[T]) -> list[T]:  # noqa: E741 - its name in programs
        """Return a shuffled copy."""
        import torch

        return [l[index] for index in torch.randperm(len(l), generator=self.rng).tolist()]

    def rand_pop(self, l: list[T]) -> T:  # noqa: E741 - its name in programs
        """Remove and return an element."""
        return l.pop(self.randbelow(len(l)))

    def save_state(self) -> FlexState:
        return FlexState(rng=bytes(self.rng.get_state().tolist()))

    def restore_state(self, state: FlexState) -> None:
        import torch

        saved = state["rng"]
        self._rng = None
        if saved is not None:
            content = torch.frombuffer(bytearray(saved), dtype=torch.uint8).clone()
            self._rng = torch.Generator()
            self._rng.set_state(content)


@dataclass(frozen=True, repr=False)
class SystemRngState:
    """The states of the random generators of torch, numpy and Python."""

    torch: Any
    numpy: Any
    random: Any


class SystemRng:
    """The random generators of torch, numpy and Python, seeded together."""

    @staticmethod
    def seed(seed: int) -> None:
        """Seed all of them."""
        import torch

        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    @staticmethod
    def save_state() -> SystemRngState:
        """Return the states of all of them."""
        import torch

        return SystemRngState(torch.get_rng_state(), np.random.get_state(), random.getstate())

    @staticmethod
    def restore_state(state: SystemRngState) -> None:
        """Restore a state."""
        import torch

        torch.set_rng_state(state.torch)
        np.random.set_state(state.numpy)
        random.setstate(state.random)

    @staticmethod
    def get_seed_from_args(*args: Any) -> int:
        """Return a 32-bit seed derived from the text of these values."""
        digest = hashlib.sha1("|".join(map(str, args)).encode()).digest()
        return int.from_bytes(digest[:4], "big")

    @staticmethod
    def seed_args(*args: Any) -> None:
        """Seed all of them with a seed derived from these values."""
        SystemRng.seed(SystemRng.get_seed_from_args(*args))


class SampleIndex(Savable):
    """Counts the calls of a program's function.

    Args:
        worker_config: Provides the number to hooks while it is in use.
        src: The owner of the function.
    """

    def __init__(self, worker_config: WorkerConfig, *, src: Any) -> None:
        self.worker_config = worker_config
        self.src = src
        self.current_idx = 0

    def get_next(self) -> int:
        """Return the next number."""
        self.current_idx += 1
        return self.current_idx - 1

    @contextmanager
    def ctx(self, sample_idx: int | None = None) -> Iterator[int]:
        """Use a number in the block: the next one, or the given one."""
        index = self.get_next() if sample_idx is None else sample_idx
        self.worker_config.worker_push_sample_index(index)
        try:
            yield index
        finally:
            self.worker_config.worker_pop_sample_index()

    def iter_ctx(self, it: Iterable[T], sample_idx: int | None = None) -> Iterator[tuple[int, T]]:
        """Yield each item with the number that was in use while it was produced."""
        items = iter(it)
        while True:
            with self.ctx(sample_idx) as index:
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield index, item

    def save_state(self) -> Any:
        return self.current_idx

    def restore_state(self, state: Any) -> None:
        self.current_idx = state or 0


class SavableSampleBuffer(list[Any], Savable):
    """The items that a program's dataset holds back.

    Args:
        dataset: The source of the items.
        worker_config: Rank and workers.
    """

    def __init__(self, dataset: Any, worker_config: WorkerConfig) -> None:
        super().__init__()
        self.dataset = dataset
        self.worker_config = worker_config

    @property
    def buffer(self) -> list[Any]:
        """The items."""
        return self

    def worker_start(self) -> None:
        """Begin to fill it. Items are recreated with the pipeline, so nothing is read here."""

    def append(self, sample: T) -> T:
        """Add an item, and return it."""
        super().append(sample)
        return sample

    def append_iter(self) -> Iterator[Any]:
        """Yield the items of the dataset, each after it was added."""
        return map(self.append, self.dataset)

    def extend(self, samples: Iterable[Any], restore_keys: Any = None) -> None:
        """Add items."""
        super().extend(samples)

    def flush(self) -> tuple[list[Any], tuple[Any, ...]]:
        """Remove all items; return them and their restore keys."""
        flushed = list(self)
        self.clear()
        return flushed, tuple(map(key_of, flushed))

    def save_state(self) -> FlexState:
        return FlexState(count=len(self))

    def restore_state(self, state: FlexState) -> None:
        self.clear()


class _PlainState(type):
    """Makes states of loaders, which are plain data, count as instances."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dict) and {"positions", "lanes"} <= instance.keys()


class SavableDataLoaderState(metaclass=_PlainState):
    """What `save_state_rank` and `save_state_global` return: a dict of JSON.

    Args:
        fields: Attributes of an instance that a program creates, which no loader restores.
    """

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class _AnyPipeline(type):
    """Makes all pipelines count as instances, not only those written by programs."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls is SavableDataset:
            return isinstance(instance, WrapperDataset | core.SavableDataset)
        if type.__instancecheck__(cls, instance) or cls is not BaseWrapperDataset:
            return type.__instancecheck__(cls, instance)
        return isinstance(instance, WrapperDataset) and bool(instance.datasets)


class SavableDataset(WrapperDataset[T_co], metaclass=_AnyPipeline):
    """Base of a program's own dataset: derive from it, and yield items in `__iter__`.

    Args:
        worker_config: Rank and workers.
    """

    _savable_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, worker_config: WorkerConfig) -> None:
        super().__init__((), worker_config=worker_config)

    read_again = Dataset.read_again

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _OwnIterator(self, lane)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        inner = [value for value in vars(self).values() if isinstance(value, Dataset)]
        inner += self.datasets
        if len({id(each) for each in inner}) != 1:
            raise ConfigError(
                f"{type(self).__name__} cannot restore single samples, because it does "
                "not wrap exactly one dataset; restore them from the datasets that it wraps"
            )
        restored: tuple[Any, RestoreKey] = inner[0].restore(lane, key)
        return restored

    def num_items(self, lane: int, lanes: int) -> int | None:
        if type(self).len_worker is WrapperDataset.len_worker:
            return None
        workers = max(1, self.worker_config.num_workers)
        return self.len_worker(lane // self.worker_config.world_size % workers)

    def config(self) -> Described:
        described = super().config()
        return {**described, "type": type(self).__qualname__}

    def save_state(self) -> FlexState:
        """Return the fields of a state; states of loaders do not use it."""
        return FlexState({name: getattr(self, name) for name in self._savable_fields})

    def restore_state(self, state: FlexState) -> None:
        """Restore a state of `save_state`."""
        for name in self._savable_fields:
            setattr(self, name, state[name])


class BaseWrapperDataset(SavableDataset):
    """Base of a program's own wrapper: derive from it, and iterate over the inner datasets.

    Args:
        datasets: The inner dataset, or several.
        worker_config: Rank and workers.
    """

    def __init__(
        self, datasets: Dataset[Any] | Iterable[Dataset[Any]], *, worker_config: WorkerConfig
    ) -> None:
        super().__init__(worker_config)
        self.datasets = (datasets,) if isinstance(datasets, Dataset) else tuple(datasets)


class _OwnIterator(StreamIterator):
    saves: ClassVar[Mapping[str, StateKind]] = {"given": int}

    def __init__(self, owner: SavableDataset, lane: Lane) -> None:
        self.mine = self._in_lane(owner, lane)
        self.outputs: Iterator[Any] | None = None
        self.given = 0

    @property
    def row(self) -> int:
        return self.given

    @property
    def item_state(self) -> ItemState:
        return {"given": self.given - 1}

    def __next__(self) -> Any:
        if self.outputs is None:
            self.outputs = iter(type(self.mine).__iter__(self.mine))
            for _ in replay(self.outputs, self.given):
                pass
        output = next(self.outputs)
        self.given += 1
        return output

    def _in_lane(self, owner: SavableDataset, lane: Lane) -> SavableDataset:
        """Return a copy of a dataset whose inner datasets yield the items of a lane."""
        mine = copy.copy(owner)
        datasets: dict[int, Dataset[Any]] = {}
        for value in vars(owner).values():
            for each in value if isinstance(value, Sequence) else (value,):
                if isinstance(each, Dataset):
                    datasets[id(each)] = each
        views = {
            number: _LaneView(
                dataset, lane if len(datasets) == 1 else lane.branch(position, len(datasets))
            )
            for position, (number, dataset) in enumerate(datasets.items())
        }
        for name, value in vars(owner).items():
            if isinstance(value, tuple | list):
                vars(mine)[name] = type(value)(views.get(id(each), each) for each in value)
            else:
                vars(mine)[name] = views.get(id(value), value)
        return mine


class _LaneView:
    """An inner dataset as the program sees it in a lane: each iteration is a new pass."""

    def __init__(self, dataset: Dataset[Any], lane: Lane) -> None:
        self._dataset = dataset
        self._lane = lane
        self._passes = 0

    def __iter__(self) -> Iterator[Any]:
        lane = self._lane
        if self._passes:
            number = lane.pass_number + self._passes
            lane = replace(lane, pass_number=number, reading=LaneReading())
        self._passes += 1
        return self._dataset.open(lane)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)
