"""Make a batch of each unit of rows: the rows of a lane that a blend draws from one dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from energon.stages.base import DatasetIterator, Kind, State, unpack
from energon.stages.batch import BatchDataset, BatchIterator
from energon.stages.lane import Lane
from energon.stages.map import row_of


@dataclass(frozen=True)
class UnitBatchDataset(BatchDataset):
    """Make a batch of every `batch_size` rows, be it that hooks skip some of their samples.

    So a batch never has samples of two units; it is smaller by what was skipped, and left out
    if nothing remains. `drop_last` is about the end of the data only.
    """

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _UnitBatchIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        items = self.dataset.num_items(lane, lanes)
        return None if items is None else -(-items // self.batch_size)


class _UnitBatchIterator(BatchIterator):
    saves: ClassVar[Mapping[str, Kind]] = {"inner": dict, "drawn_for": int | None}

    def __init__(self, stage: UnitBatchDataset, lane: Lane) -> None:
        super().__init__(stage.dataset.open(lane), lane, stage.hooks)
        self.stage = stage
        # The first item of the next batch, if it had to be drawn to know that it is one, where
        # it was drawn, and for which batch.
        self.held: tuple[Any, State, int | None] | None = None
        self.drawn_for: int | None = None

    def _position(self) -> State:
        if self.held is None:
            return {"inner": self.inner.state_dict(), "drawn_for": self.drawn_for}
        return {"inner": self.held[1], "drawn_for": self.held[2]}

    def _go_to(self, position: State) -> None:
        inner, self.drawn_for = unpack(position, self.saves)
        self.inner.load_state_dict(inner)
        self.held = None

    def _produce(self) -> Any:
        stage, lane = self.stage, self.lane
        items, ended = self._next_unit()
        if not items or (ended and stage.drop_last and len(items) < stage.batch_size):
            raise StopIteration
        row = row_of(self.inner.place)
        lane.counts[stage.unit] += len(items)
        lane.enter(row)
        return self._apply_to_batch(items, row)

    def _next_unit(self) -> tuple[list[Any], bool]:
        """Return the items of the next unit that has any, and whether the data end with it."""
        size, present = self.stage.batch_size, self.lane.present
        items: list[Any] = []
        unit = -1
        while True:
            if self.held is None:
                if items and self.inner.row >= (unit + 1) * size:
                    return items, False
                before, batch = self.inner.state_dict(), present.batch
                if self.drawn_for is None:
                    item = next(self.inner, _END)
                else:
                    with present.working_for(self.drawn_for):
                        item = next(self.inner, _END)
                    self.drawn_for = None
                if item is _END:
                    return items, True
            else:
                item, before, batch = self.held
                self.held = None
            own = row_of(self.inner.place) // size
            if items and own != unit:
                self.held = (item, before, batch)
                return items, False
            items.append(item)
            unit = own


_END = object()
