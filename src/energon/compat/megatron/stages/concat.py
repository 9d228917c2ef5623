"""Yield the items of several datasets, one dataset after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from energon.compat.megatron.stages.branch import Branches, open_branches
from energon.errors import ConfigError, StateError
from energon.stages.base import DatasetIterator, Kind, Place, State, unpack
from energon.stages.lane import Lane


@dataclass(frozen=True)
class Concat(Branches):
    """Yield the items of `datasets` in their order; the next one where the one before ends."""

    def __post_init__(self) -> None:
        if not self.datasets:
            raise ConfigError("there is no dataset to concatenate; name at least one")

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _ConcatIterator(self, lane)


class _ConcatIterator(DatasetIterator[Any]):
    saves: ClassVar[Mapping[str, Kind]] = {"present": int, "inner": dict}

    def __init__(self, stage: Concat, lane: Lane) -> None:
        self.branches = open_branches(stage.datasets, lane)
        self.present = 0

    @property
    def row(self) -> int:
        return self.branches[self.present].row * len(self.branches) + self.present

    @property
    def address(self) -> tuple[int, ...]:
        return (self.present, *self.branches[self.present].address)

    @property
    def place(self) -> Place:
        return [self.present, self.branches[self.present].place]

    def __next__(self) -> Any:
        while True:
            try:
                return next(self.branches[self.present])
            except StopIteration:
                if self.present + 1 == len(self.branches):
                    raise
                self.present += 1

    def state_dict(self) -> State:
        return {"present": self.present, "inner": self.branches[self.present].state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.present, inner = unpack(state, self.saves)
        if self.present >= len(self.branches):
            raise StateError(
                f"saved state is in dataset {self.present}, there are {len(self.branches)}; was it "
                "saved by another pipeline?"
            )
        self.branches[self.present].load_state_dict(inner)
