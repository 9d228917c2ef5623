"""A pipeline of numbered rows, for tests of the loader."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from energon.errors import SkipSample
from energon.stages.base import DatasetIterator
from energon.worker import WorkerConfig


def lane_and_row(lane, row):
    return lane, row


@dataclass(frozen=True)
class FakePipeline:
    """Batches are `make(lane, row)`; a row for which it raises SkipSample yields nothing."""

    worker_config: WorkerConfig
    make: Callable[[int, int], Any] = lane_and_row
    rows: int | Callable[[int], int] | None = None
    virtual_epoch_length: int = 0
    restart: bool = False
    print_of: dict[str, Any] = field(default_factory=lambda: {"seed": 7})

    @property
    def default_lanes(self):
        return self.worker_config.lanes or self.worker_config.total_workers

    def open_lane(self, lane, state):
        return FakeBatches(self, lane, state["row"] if state else 0)

    def num_batches(self, lane, lanes):
        return self.rows(lane) if callable(self.rows) else self.rows

    def fingerprint(self, lanes):
        return self.print_of


class FakeBatches(DatasetIterator):
    def __init__(self, pipeline, lane, row):
        self.pipeline = pipeline
        self.lane = lane
        self.next_row = row
        self.num_rows = pipeline.num_batches(lane.number, lane.lanes)

    def __next__(self):
        while self.num_rows is None or self.next_row < self.num_rows:
            row = self.next_row
            self.next_row += 1
            if row in self.lane.skip_rows:
                self.lane.counts["skipped"] += 1
                continue
            if self.lane.progress is not None:
                self.lane.progress(row, False)
            try:
                batch = self.pipeline.make(self.lane.number, row)
            except SkipSample:
                self.lane.counts["skipped"] += 1
                continue
            except BaseException:
                self.next_row = row
                raise
            self.lane.counts["samples"] += 1
            return batch
        raise StopIteration

    def state_dict(self):
        return {"row": self.next_row}


def fake(make=lane_and_row, *, workers=0, lanes=None, rank=0, world_size=1, **kwargs):
    """A fake pipeline for one rank."""
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=workers, lanes=lanes)
    return FakePipeline(config, make, **kwargs)


def in_order(lanes, rows, ranks=1, rank=0):
    """What `lane_and_row` gives in the order of delivery."""
    return [(lane, row) for row in range(rows) for lane in range(rank, lanes, ranks)]
