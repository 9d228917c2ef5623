"""Iterate over a pipeline without a loader of ours, and be a dataset to the loaders of torch."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Generic, Protocol

from energon.errors import ConfigError
from energon.messages import counted
from energon.samples.display import shown_in_notebooks
from energon.stages.base import DatasetIterator, T_co
from energon.stages.lane import Host, Lane
from energon.worker import WorkerConfig

Lanes = deque[tuple[Lane, DatasetIterator[Any]]]


class IterableLanes(Generic[T_co]):
    """Makes a pipeline iterable: an `IterableDataset` to torch.

    Each iteration starts at the beginning, yields what a loader of this rank delivers, in the
    same order, and keeps no position: for states, worker processes and everything else use
    `get_savable_loader`. Each worker of a torch DataLoader yields the batches of its share of the
    lanes, so pass that `batch_size=None`, and a `WorkerConfig` with enough lanes for all workers.
    """

    worker_config: WorkerConfig
    virtual_epoch_length: int

    @property
    def default_lanes(self) -> int:
        """The number of lanes of a new run."""
        return self.worker_config.lanes or self.worker_config.total_workers

    @property
    def yields_batches(self) -> bool:
        """Whether an item is a batch, for which torch's DataLoader needs `batch_size=None`."""
        return False

    def num_items(self, lane: int, lanes: int) -> int | None:
        """Return the maximum number of items of lane `lane` of `lanes`; None means no end."""
        raise NotImplementedError

    def num_batches(self, lane: int, lanes: int) -> int | None:
        """Return the maximum number of batches of a lane, which are the items it yields."""
        return self.num_items(lane, lanes)

    def __iter__(self) -> Iterator[T_co]:
        if self.yields_batches:
            _refuse_batches_of_batches()
        lanes = self.default_lanes
        mine = list(self.worker_config.rank_lanes(lanes))
        number, workers = _torch_worker()
        if workers > len(mine):
            raise ConfigError(
                f"{workers} workers of a torch DataLoader for {counted(len(mine), 'lane')} of this "
                f"rank; use at most {len(mine)}, or WorkerConfig(lanes=...) with more lanes"
            )
        share = mine[number::workers]
        host = Host()
        batches = self._round_robin([Lane(lane, lanes, host=host) for lane in share])
        length = self.virtual_epoch_length
        count = len(range(number, length, workers)) if length else None
        items = islice(batches, count)
        return shown_in_notebooks(items) if "IPython" in sys.modules else items

    def _round_robin(self, lanes: list[Lane]) -> Iterator[Any]:
        opened: Lanes = deque((lane, self.open_lane(lane)) for lane in lanes)
        while opened:
            lane, batches = opened.popleft()
            for batch in batches:
                lane.current.count_batch()
                yield batch
                opened.append((lane, batches))
                break

    def open_lane(self, lane: Lane, state: Any = None) -> DatasetIterator[T_co]:
        """Start or resume one lane."""
        raise NotImplementedError

    def __getitem__(self, index: object) -> Any:
        raise TypeError(
            f"{type(self).__name__} is iterable, but cannot be indexed: iterate over it, or "
            "pass it to get_savable_loader"
        )


class _Loops(Protocol):
    """A pipeline as seen by `loop_length`."""

    @property
    def virtual_epoch_length(self) -> int: ...

    def num_batches(self, lane: int, lanes: int) -> int | None: ...


def loop_length(pipeline: _Loops, lanes: Iterable[int], num_lanes: int) -> int | None:
    """Return how many batches a loop over some lanes of a run has; None if it does not end.

    Args:
        pipeline: The pipeline.
        lanes: The lanes, such as those of a rank.
        num_lanes: How many lanes the run has.
    """
    length = pipeline.virtual_epoch_length
    total = 0
    for lane in lanes:
        batches = pipeline.num_batches(lane, num_lanes)
        if batches is None:
            return length or None
        total += batches
    return min(total, length or total)


def register_with_torch(kind: type) -> None:
    """Make `isinstance(…, torch.utils.data.IterableDataset)` true, where torch is loaded."""
    dataset = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
    if dataset is not None and hasattr(dataset, "register") and not issubclass(kind, dataset):
        dataset.register(kind)


def _refuse_batches_of_batches() -> None:
    """Raise ConfigError if a torch DataLoader, which calls `__iter__`, is going to stack batches.

    Datasets are not told of its arguments, but the object that calls has them. A `collate_fn` of
    the user may do with batches what it likes.
    """
    data = sys.modules.get("torch.utils.data")
    caller = sys._getframe(2).f_locals.get("self")
    collate = getattr(caller, "collate_fn", None)
    stacks = data is not None and collate is data.default_collate
    if stacks and getattr(caller, "auto_collation", False):
        raise ConfigError(
            "torch's DataLoader would batch these batches again; pass it batch_size=None, or use "
            "energon.get_loader(dataset) instead, which has workers too"
        )


def _torch_worker() -> tuple[int, int]:
    """Return the number of this worker of a torch DataLoader, and how many there are."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return (0, 1) if info is None else (info.id, info.num_workers)
