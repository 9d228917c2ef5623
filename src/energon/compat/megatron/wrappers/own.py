"""Datasets written by a program: a class with `__iter__`, around other datasets or on its own.

Each lane runs a copy of the object, whose inner datasets yield the items of that lane. The state of
such an object is unknown, so its position is the number of items that it has yielded: resuming runs
it again from the beginning of the run, which takes longer the further the run was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from energon.compat.megatron.savable import FlexState
from energon.compat.megatron.wrappers.base import Described, WrapperDataset
from energon.errors import ConfigError
from energon.samples.crude import RestoreKey
from energon.stages.base import (
    Dataset,
    DatasetIterator,
    ItemPlace,
    State,
    StateKind,
    T_co,
    unpack,
)
from energon.stages.hooks.apply import replay
from energon.stages.lane import Lane
from energon.stages.reading.blocks import LaneReading
from energon.task_encoder import dataset as core
from energon.worker import WorkerConfig


class _AnyPipeline(type):
    """Makes all pipelines count as instances, not only those written by programs."""

    def __instancecheck__(cls, found: object) -> bool:
        if type.__instancecheck__(cls, found):
            return True
        if cls.__dict__.get("_stands_for") == "pipelines":
            return isinstance(found, WrapperDataset | core.SavableDataset)
        if cls.__dict__.get("_stands_for") == "wrappers":
            return isinstance(found, WrapperDataset) and bool(found.datasets)
        return False


class SavableDataset(WrapperDataset[T_co], metaclass=_AnyPipeline):
    """Base of a program's own dataset: derive from it, and yield items in `__iter__`.

    Args:
        worker_config: Rank and workers.
    """

    _stands_for = "pipelines"
    _savable_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, worker_config: WorkerConfig) -> None:
        super().__init__(_OwnStage(self), (), worker_config=worker_config)

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

    _stands_for = "wrappers"

    def __init__(
        self, datasets: Dataset[Any] | Iterable[Dataset[Any]], *, worker_config: WorkerConfig
    ) -> None:
        super().__init__(worker_config)
        self.datasets = (datasets,) if isinstance(datasets, Dataset) else tuple(datasets)


@dataclass(frozen=True, eq=False)
class _OwnStage(Dataset[Any]):
    """Runs a program's dataset in a lane."""

    owner: SavableDataset

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _OwnIterator(self.owner, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self.owner.num_items(lane, lanes)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        inner = [value for value in vars(self.owner).values() if _is_inner(value)]
        inner += self.owner.datasets
        if len({id(each) for each in inner}) != 1:
            raise ConfigError(
                f"{type(self.owner).__name__} cannot restore single samples, because it does "
                "not wrap exactly one dataset; restore them from the datasets that it wraps"
            )
        restored: tuple[Any, RestoreKey] = inner[0].restore(lane, key)
        return restored


class _OwnIterator(DatasetIterator[Any]):
    saves: ClassVar[Mapping[str, StateKind]] = {"given": int}

    def __init__(self, owner: SavableDataset, lane: Lane) -> None:
        self.mine = self._in_lane(owner, lane)
        self.outputs: Iterator[Any] | None = None
        self.given = 0

    @property
    def row(self) -> int:
        return self.given

    @property
    def place(self) -> ItemPlace:
        return {"given": self.given - 1}

    def __next__(self) -> Any:
        if self.outputs is None:
            self.outputs = iter(type(self.mine).__iter__(self.mine))
            for _ in replay(self.outputs, self.given):
                pass
        output = next(self.outputs)
        self.given += 1
        return output

    def state_dict(self) -> State:
        return {"given": self.given}

    def load_state_dict(self, state: State) -> None:
        (self.given,) = unpack(state, self.saves)

    def _in_lane(self, owner: SavableDataset, lane: Lane) -> SavableDataset:
        """Return a copy of a dataset whose inner datasets yield the items of a lane."""
        mine = copy.copy(owner)
        found: dict[int, Dataset[Any]] = {}
        for value in vars(owner).values():
            for each in value if isinstance(value, Sequence) else (value,):
                if _is_inner(each):
                    found[id(each)] = each
        views = {
            number: _LaneView(dataset, lane if len(found) == 1 else lane.branch(place, len(found)))
            for place, (number, dataset) in enumerate(found.items())
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


def _is_inner(value: Any) -> bool:
    return isinstance(value, Dataset) and not isinstance(value, _OwnStage)
