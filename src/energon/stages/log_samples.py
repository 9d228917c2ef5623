"""Log the samples of every batch, for `energon analyze-debug`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon.stages.base import Dataset, DatasetIterator, ThroughDataset, ThroughIterator
from energon.stages.lane import Lane

logger = logging.getLogger("energon")


def keys_of(batch: Any) -> list[str] | None:
    """Return the keys of a sample or batch as a list; None if it has none."""
    keys = batch.get("__key__") if isinstance(batch, dict) else getattr(batch, "__key__", None)
    return [keys] if isinstance(keys, str) else keys


@dataclass(frozen=True)
class LogSamplesDataset(ThroughDataset):
    """Yield the items of `dataset`, and log the keys of each as a line of JSON.

    Args:
        dataset: The items.
        mode: What the lines say the data are for, "train" or "val".
        rank: The rank that the lines name.
        path: The file, with {worker_id} (the lane) and {pid} in it replaced; None logs to the
            logger "energon", level DEBUG.
        get_keys: Returns the keys of an item.
    """

    dataset: Dataset[Any]
    mode: str
    rank: int
    path: str | None = None
    get_keys: Callable[[Any], list[str] | None] = keys_of

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _LogSamplesIterator(self, lane)

    def write(self, item: Any, lane: Lane) -> None:
        """Log one item."""
        line: dict[str, Any] = {
            "t": "yield_batch",
            "r": self.rank,
            "w": lane.number,
            "m": self.mode,
            "idx": lane.current.batch,
        }
        keys = self.get_keys(item)
        if keys is not None:
            line["keys"] = keys
        if self.path is None:
            logger.debug("%s", json.dumps(line))
            return
        file = Path(self.path.format(worker_id=lane.number, pid=os.getpid()))
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as log:
            log.write(json.dumps(line) + "\n")


class _LogSamplesIterator(ThroughIterator):
    def __init__(self, stage: LogSamplesDataset, lane: Lane) -> None:
        self.stage = stage
        self.lane = lane
        self.inner = stage.dataset.open(lane)

    @property
    def address(self) -> tuple[int, ...]:
        return self.inner.address

    def __next__(self) -> Any:
        item = next(self.inner)
        self.stage.write(item, self.lane)
        return item
