"""What stages have in common that hand on the items of another one, and its places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon.samples.restore_key import RestoreKey
from energon.stages.base import Dataset, DatasetIterator, Place, State
from energon.stages.lane import Lane


class ThroughDataset(Dataset[Any]):
    """Has the items of `dataset`, whatever happens on the way."""

    dataset: Dataset[Any]

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self.dataset.num_items(lane, lanes)

    def read_again(self, lane: Lane, places: Sequence[Place]) -> list[Any]:
        return self.dataset.read_again(lane, places)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        return self.dataset.restore(lane, key)


class ThroughIterator(DatasetIterator[Any]):
    """Is where `inner` is."""

    inner: DatasetIterator[Any]

    @property
    def row(self) -> int:
        return self.inner.row

    @property
    def place(self) -> Place:
        return self.inner.place

    def state_dict(self) -> State:
        return self.inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.inner.load_state_dict(state)
