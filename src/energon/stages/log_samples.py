"""Log the samples of every batch, for `energon analyze-debug`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon.stages.base import Dataset, DatasetIterator, ThroughDataset, ThroughIterator
from energon.stages.lane import Lane
from energon.worker import WorkerConfig

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
        worker_config: The rank that the lines name, and their file; without one, they go to the
            logger "energon", level DEBUG.
        get_keys: Returns the keys of an item.
    """

    dataset: Dataset[Any]
    mode: str
    worker_config: WorkerConfig
    get_keys: Callable[[Any], list[str] | None] = keys_of

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _LogSamplesIterator(self, lane)

    def write(self, item: Any, lane: Lane) -> None:
        """Log one item."""
        line: dict[str, Any] = {
            "t": "yield_batch",
            "r": self.worker_config.rank,
            "w": lane.number,
            "m": self.mode,
            "idx": lane.current.batch,
        }
        keys = self.get_keys(item)
        if keys is not None:
            line["keys"] = keys
        path = self.worker_config.worker_debug_path
        if path is None:
            logger.debug("%s", json.dumps(line))
        else:
            append_line(path, self.worker_config.log_number(lane.number, lane.lanes), line)


def append_line(path: str, number: int, line: Mapping[str, Any]) -> None:
    """Append a line of JSON to a debug log.

    Args:
        path: The file, with {worker_id} and {pid} in it.
        number: See `WorkerConfig.log_number`.
        line: What to write.
    """
    file = Path(path.format(worker_id=number, pid=os.getpid()))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as log:
        log.write(json.dumps(line) + "\n")


class _LogSamplesIterator(ThroughIterator):
    def __init__(self, stage: LogSamplesDataset, lane: Lane) -> None:
        self.stage = stage
        self.lane = lane
        self.inner = stage.dataset.open(lane)

    @property
    def row_key(self) -> tuple[int, ...]:
        return self.inner.row_key

    def __next__(self) -> Any:
        item = next(self.inner)
        self.stage.write(item, self.lane)
        return item
