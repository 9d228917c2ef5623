"""Wrappers that hand items on and do something besides."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from energon.compat.megatron.wrappers.base import WrapperDataset
from energon.errors import WorkerTimeoutError
from energon.loader.local_workers import Watchdog
from energon.stages.base import Dataset, DatasetIterator, ThroughDataset, ThroughIterator
from energon.stages.lane import Lane
from energon.stages.log_samples import LogSamplesDataset, keys_of
from energon.worker import WorkerConfig


class _WatchingDataset(WrapperDataset):
    """Hands on the items of a dataset, and the loops of a loader."""

    _passes_epochs = True

    def __init__(self, dataset: Dataset[Any], *, worker_config: WorkerConfig) -> None:
        super().__init__(dataset, [dataset], worker_config=worker_config)
        self.virtual_epoch_length = getattr(dataset, "virtual_epoch_length", 0)
        self.restart = getattr(dataset, "restart", False)
        self.stage = _Watched(dataset, self)

    def config(self) -> dict[str, Any]:
        # Who watches has no say in the order: states fit with and without.
        inner: dict[str, Any] = super().config()["datasets"][0]
        return inner

    def _next(self, inner: DatasetIterator[Any], lane: Lane) -> Any:
        """Return the next item of `inner`."""
        raise NotImplementedError


class _Watched(ThroughDataset):
    def __init__(self, dataset: Dataset[Any], watcher: _WatchingDataset) -> None:
        self.dataset = dataset
        self.watcher = watcher

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _WatchedIterator(self.dataset.open(lane), lane, self.watcher)


class _WatchedIterator(ThroughIterator):
    def __init__(self, inner: DatasetIterator[Any], lane: Lane, watcher: _WatchingDataset) -> None:
        self.inner = inner
        self.lane = lane
        self.watcher = watcher

    @property
    def address(self) -> tuple[int, ...]:
        return self.inner.address

    def __next__(self) -> Any:
        return self.watcher._next(self.inner, self.lane)


class LogSampleDataset(_WatchingDataset):
    """Log the keys of every item.

    A line of JSON for each goes to the file that `WorkerConfig.worker_debug_path` names (with
    {worker_id} and {pid} in it replaced), or without one to the logger "energon", level DEBUG.

    Args:
        dataset: The items.
        mode: What the lines say the data are for, "train" or "val".
        worker_config: Who loads it.
        get_keys_fn: Returns the keys of an item.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        mode: str,
        worker_config: WorkerConfig,
        get_keys_fn: Callable[[Any], list[str] | None] = keys_of,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.stage = LogSamplesDataset(
            dataset, mode, worker_config.rank, worker_config.worker_debug_path, get_keys_fn
        )


class GcDataset(_WatchingDataset):
    """Collect garbage after every so many items.

    Args:
        dataset: The items.
        worker_config: Who loads it.
        every_n_iter: How many.
        freeze: Accepted; the loader keeps what exists when a worker starts out of collections.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        worker_config: WorkerConfig,
        every_n_iter: int = 10,
        freeze: bool = True,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.every_n_iter = every_n_iter

    def _next(self, inner: DatasetIterator[Any], lane: Lane) -> Any:
        item = next(inner)
        if self.every_n_iter and ((lane.present.batch or 0) + 1) % self.every_n_iter == 0:
            gc.collect()
        return item


class WatchdogDataset(_WatchingDataset):
    """Log the stacks of all threads when an item takes too long.

    Loaders watch their workers by themselves, see `watchdog_timeout_seconds` there: they replace
    processes that hang.

    Args:
        dataset: The items.
        worker_config: Who loads it.
        timeout_seconds: How long an item may take; None for ever.
        initial_timeout_seconds: The same for the first item of a lane; None for the same.
        fail_on_timeout: Whether to raise an error then.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        worker_config: WorkerConfig,
        timeout_seconds: float | None = 60,
        initial_timeout_seconds: float | None = None,
        fail_on_timeout: bool = False,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.timeout_seconds = timeout_seconds
        self.initial_timeout_seconds = initial_timeout_seconds
        self.fail_on_timeout = fail_on_timeout
        self._watchdog = Watchdog("an item", self._watchdog_trigger)

    def _watchdog_trigger(self) -> None:
        """Do what is to be done when an item takes too long: here, raise if that was asked for."""
        if self.fail_on_timeout:
            raise WorkerTimeoutError(f"an item takes longer than {self.timeout_seconds} s")

    def _next(self, inner: DatasetIterator[Any], lane: Lane) -> Any:
        timeout = self.timeout_seconds
        if not lane.present.batch and self.initial_timeout_seconds is not None:
            timeout = self.initial_timeout_seconds
        with self._watchdog.watching(timeout):
            return next(inner)
