"""Wrappers that watch a stream: log its items, collect garbage, report items that take too long."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from energon.compat.megatron.worker import note_ignored
from energon.compat.megatron.wrappers.base import WrapperDataset
from energon.errors import WorkerTimeoutError
from energon.loader.hosting import Watchdog
from energon.stages.base import Dataset, DatasetIterator, ThroughIterator
from energon.stages.lane import Lane
from energon.stages.log_samples import LogSamplesDataset, keys_of
from energon.worker import WorkerConfig


class WatchingDataset(WrapperDataset):
    """Passes on the items of a dataset, and the loops of a loader."""

    _passes_epochs = True

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        worker_config: WorkerConfig,
        stage: Dataset[Any] | None = None,
    ) -> None:
        super().__init__([dataset], worker_config=worker_config, stage=stage)
        self.virtual_epoch_length = getattr(dataset, "virtual_epoch_length", 0)
        self.restart = getattr(dataset, "restart", False)

    def config(self) -> dict[str, Any]:
        # Watching does not affect the order, so states can be loaded with or without it.
        inner: dict[str, Any] = super().config()["datasets"][0]
        return inner

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        inner = super()._open(lane)
        return inner if self.stage is not None else _WatchedIterator(inner, lane, self._next)

    def _next(self, inner: DatasetIterator[Any], lane: Lane) -> Any:
        """Return the next item of `inner`."""
        raise NotImplementedError


class _WatchedIterator(ThroughIterator):
    def __init__(
        self,
        inner: DatasetIterator[Any],
        lane: Lane,
        watch: Callable[[DatasetIterator[Any], Lane], Any],
    ) -> None:
        self.inner = inner
        self.lane = lane
        self.watch = watch

    @property
    def address(self) -> tuple[int, ...]:
        return self.inner.address

    def __next__(self) -> Any:
        return self.watch(self.inner, self.lane)


class LogSampleDataset(WatchingDataset):
    """Log the keys of every item.

    A line of JSON for each item is written to the file `WorkerConfig.worker_debug_path` (with
    {worker_id} and {pid} replaced) or, without a path, to the logger "energon" at level DEBUG.

    Args:
        dataset: The items.
        mode: Purpose of the data in the lines, "train" or "val".
        worker_config: Rank and workers.
        get_keys_fn: Returns the keys of an item.

    Example:
        >>> from pathlib import Path
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(
        ...     rank=0, world_size=1, num_workers=0, worker_debug_path="seen.jsonl"
        ... )
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> logged = LogSampleDataset(photos, "val", config)
        >>> [sample.__key__ for sample in logged]
        ['8', '9']
        >>> print(Path("seen.jsonl").read_text().splitlines()[0])
        {"t": "yield_batch", "r": 0, "w": 0, "m": "val", "idx": 0, "keys": ["8"]}
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        mode: str,
        worker_config: WorkerConfig,
        get_keys_fn: Callable[[Any], list[str] | None] = keys_of,
    ) -> None:
        super().__init__(
            dataset,
            worker_config=worker_config,
            stage=LogSamplesDataset(dataset, mode, worker_config, get_keys_fn),
        )


class GcDataset(WatchingDataset):
    """Collect garbage after every few items.

    Args:
        dataset: The items.
        worker_config: Rank and workers.
        every_n_iter: Number of items between two collections.
        freeze: Has no effect, as is logged once: the loader excludes objects that exist when a
            worker starts.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> [sample.__key__ for sample in GcDataset(photos, worker_config=config)]
        ['8', '9']
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        worker_config: WorkerConfig,
        every_n_iter: int = 10,
        freeze: bool = True,
    ) -> None:
        note_ignored("objects that exist when a worker starts are excluded", freeze=not freeze)
        super().__init__(dataset, worker_config=worker_config)
        self.every_n_iter = every_n_iter

    def _next(self, inner: DatasetIterator[Any], lane: Lane) -> Any:
        item = next(inner)
        if self.every_n_iter and ((lane.current.batch or 0) + 1) % self.every_n_iter == 0:
            gc.collect()
        return item


class WatchdogDataset(WatchingDataset):
    """Log the stacks of all threads when an item takes too long.

    Loaders watch their workers themselves, see their `watchdog_timeout_seconds`: they replace
    processes that hang.

    Args:
        dataset: The items.
        worker_config: Rank and workers.
        timeout_seconds: How long an item may take; None for no limit.
        initial_timeout_seconds: The same for the first item of a lane; None for the same value.
        fail_on_timeout: Whether to raise an error on a timeout.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> watched = WatchdogDataset(photos, config, timeout_seconds=30, fail_on_timeout=True)
        >>> [sample.__key__ for sample in watched]
        ['8', '9']
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
        """Handle an item that takes too long: raise an error if requested."""
        if self.fail_on_timeout:
            raise WorkerTimeoutError(f"an item takes longer than {self.timeout_seconds} s")

    def _next(self, inner: DatasetIterator[Any], lane: Lane) -> Any:
        self._watchdog.seconds = self.timeout_seconds
        if not lane.current.batch and self.initial_timeout_seconds is not None:
            self._watchdog.seconds = self.initial_timeout_seconds
        with self._watchdog:
            return next(inner)
