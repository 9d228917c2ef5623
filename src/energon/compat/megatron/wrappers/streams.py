"""Wrappers over streams: blend, concatenate, repeat, limit, shuffle, map, filter and watch.

Those that watch a stream log its items, collect garbage, or report items that take too long.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from energon.compat.megatron.stages.limit import LimitStage
from energon.compat.megatron.stages.streams import (
    BlendStage,
    ConcatStage,
    IterMap,
    Repeat,
    ShuffleBuffer,
)
from energon.compat.megatron.worker import note_ignored
from energon.compat.megatron.wrappers.base import WrapperDataset, describe, item_hooks, make_hook
from energon.errors import ConfigError, SkipSample, WorkerTimeoutError
from energon.loader.workers import Watchdog
from energon.stages.base import Dataset, DatasetIterator, ThroughDataset, ThroughIterator
from energon.stages.hooks.failures import DEFAULT_TOLERANCE
from energon.stages.hooks.hook import ErrorHandler, Hook
from energon.stages.lane import Lane
from energon.stages.log_samples import LogSamplesDataset, keys_of
from energon.stages.map import MapDataset as MapStage
from energon.worker import WorkerConfig


class BlendDataset(WrapperDataset):
    """Draw items from several datasets by weight, until all of them have ended.

    At any time, shares are exact to within an item or two.

    Args:
        datasets: Pairs of a dataset and its weight.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> endless = RepeatDataset(photos, worker_config=config)
        >>> captions = MapDataset(endless, lambda sample: sample.caption, worker_config=config)
        >>> blend = BlendDataset((endless, 0.75), (captions, 0.25), worker_config=config)
        >>> [type(item).__name__ for item, _ in zip(blend, range(4))]
        ['CaptioningSample', 'CaptioningSample', 'str', 'CaptioningSample']
    """

    def __init__(self, *datasets: tuple[Dataset[Any], float], worker_config: WorkerConfig) -> None:
        inner = tuple(dataset for dataset, _ in datasets)
        weights = tuple(float(weight) for _, weight in datasets)
        super().__init__(
            BlendStage(inner, weights), inner, worker_config=worker_config, weights=list(weights)
        )


class ConcatDataset(WrapperDataset):
    """Yield the items of several datasets, one dataset after the other.

    Args:
        datasets: The datasets.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> [sample.__key__ for sample in ConcatDataset(photos, photos, worker_config=config)]
        ['8', '9', '8', '9']
    """

    def __init__(self, *datasets: Dataset[Any], worker_config: WorkerConfig) -> None:
        super().__init__(ConcatStage(tuple(datasets)), datasets, worker_config=worker_config)


class RepeatDataset(WrapperDataset):
    """Repeat a finite dataset, each time in another order.

    Args:
        dataset: The items.
        repeats: Number of passes, possibly fractional; None for no limit.
        restart: Whether another pass follows when one ends. False makes a single pass.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> repeated = RepeatDataset(photos, repeats=1.5, worker_config=config)
        >>> [sample.__key__ for sample in repeated]
        ['8', '9', '8']
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        repeats: float | None = None,
        restart: bool = True,
        worker_config: WorkerConfig,
    ) -> None:
        passes = repeats if restart else min(1, 1 if repeats is None else repeats)
        super().__init__(
            Repeat(dataset, passes), [dataset], worker_config=worker_config, repeats=passes
        )


class EpochizeDataset(WrapperDataset):
    """End the loops of a loader after a number of items; the next loop continues from there.

    Only wrappers that watch the items may be put around it.

    Args:
        dataset: The items.
        length: Number of items of each rank in a loop.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_loader, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> endless = RepeatDataset(photos, worker_config=config)
        >>> loader = get_loader(EpochizeDataset(endless, 3, config))
        >>> [len([sample for sample in loader]) for epoch in range(2)]
        [3, 3]
    """

    def __init__(self, dataset: Dataset[Any], length: int, worker_config: WorkerConfig) -> None:
        if length < 1:
            raise ConfigError(f"an epoch must have 1 or more items, got {length}")
        super().__init__(dataset, [dataset], worker_config=worker_config, length=length)
        self.virtual_epoch_length = length


class LimitDataset(WrapperDataset):
    """Yield only the first items.

    Args:
        dataset: The items.
        length: Number of items of each rank.
        reset_after_epoch: Whether a loop of a loader starts over even if the previous one was
            left early.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> [sample.__key__ for sample in LimitDataset(photos, 1, worker_config=config)]
        ['8']
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        length: int,
        *,
        reset_after_epoch: bool = False,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(
            LimitStage(dataset, length * worker_config.world_size),
            [dataset],
            worker_config=worker_config,
            length=length,
        )
        self.restart = reset_after_epoch

    @property
    def is_drawn_again(self) -> bool:
        """False: each loop has the same first items."""
        return False


class ShuffleBufferDataset(WrapperDataset):
    """Yield each item once, drawn at random from the next `size`.

    The dataset getters do not use it: they shuffle row numbers before anything is read.

    Args:
        dataset: The items.
        size: Capacity of the buffer, whose items are read again when resuming.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> shuffled = ShuffleBufferDataset(photos, 2, worker_config=config)
        >>> sorted(sample.__key__ for sample in shuffled)
        ['8', '9']
    """

    def __init__(self, dataset: Dataset[Any], size: int, *, worker_config: WorkerConfig) -> None:
        super().__init__(
            ShuffleBuffer(dataset, size), [dataset], worker_config=worker_config, size=size
        )


class MapDataset(WrapperDataset):
    """Apply a function to each item. It may yield several, or raise `SkipSample`.

    Args:
        dataset: The items.
        map_fn: The function.
        stateless_map_fn: Accepted; functions are expected to depend only on the item.
        map_fn_config: Describes the function's behavior as plain data, or a function that returns
            it: saved states must match it.
        failure_tolerance: Number of consecutive failures that ends the run; 0 for no limit.
        error_handler: Called for each tolerated failure, see `BatchDataset`.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> captions = MapDataset(photos, lambda sample: sample.caption, worker_config=config)
        >>> list(captions)
        ['grey number 8', 'grey number 9']
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        map_fn: Callable[[Any], Any],
        *,
        stateless_map_fn: bool = False,
        map_fn_config: Any = None,
        failure_tolerance: int = DEFAULT_TOLERANCE,
        error_handler: ErrorHandler | None = None,
        worker_config: WorkerConfig,
    ) -> None:
        hook = make_hook(
            _name(map_fn),
            map_fn,
            worker_config,
            tolerance=failure_tolerance,
            handler=error_handler,
        )
        super().__init__(
            MapStage(dataset, ((hook,),)),
            [dataset],
            worker_config=worker_config,
            map_fn_config=describe(map_fn_config),
        )
        self.item_hooks = _with_hook(dataset, hook)


class FilterDataset(WrapperDataset):
    """Drop items for which a function returns False.

    Args:
        dataset: The items.
        filter_fn: Returns whether to keep an item. Items on which it fails are skipped, logged
            and counted.
        filter_fn_config: Describes the function's behavior, see `MapDataset`.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> nines = FilterDataset(
        ...     photos, filter_fn=lambda sample: "9" in sample.caption, worker_config=config
        ... )
        >>> [sample.caption for sample in nines]
        ['grey number 9']
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        filter_fn: Callable[[Any], bool],
        filter_fn_config: Any = None,
        worker_config: WorkerConfig,
    ) -> None:
        hook = make_hook(_name(filter_fn), _Keep(filter_fn), worker_config)
        super().__init__(
            MapStage(dataset, ((hook,),)),
            [dataset],
            worker_config=worker_config,
            filter_fn_config=describe(filter_fn_config),
        )
        self.item_hooks = _with_hook(dataset, hook)


class IterMapDataset(WrapperDataset):
    """Apply a function to the iterator of all items.

    Resuming runs the function again: from the last input that it took if outputs depend only on
    that (`stateless_iter_fn=True`), otherwise from the beginning of the run, which takes longer
    the further the run was.

    Args:
        dataset: The items.
        iter_map_fn: Takes an iterator, and returns an iterator. Its errors end the run.
        len_map_fn: Returns the number of outputs for a number of items.
        stateless_iter_fn: Whether an output depends only on the last item that was taken.
        iter_map_fn_config: Describes the function's behavior, see `MapDataset`.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> def with_numbers(samples):
        ...     for number, sample in enumerate(samples):
        ...         yield number, sample.caption
        >>> list(IterMapDataset(photos, with_numbers, worker_config=config))
        [(0, 'grey number 8'), (1, 'grey number 9')]
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        iter_map_fn: Callable[[Iterator[Any]], Iterable[Any]],
        *,
        len_map_fn: Callable[[int], int] = int,
        stateless_iter_fn: bool = False,
        iter_map_fn_config: Any = None,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(
            IterMap(dataset, iter_map_fn, len_map_fn, remembers=not stateless_iter_fn),
            [dataset],
            worker_config=worker_config,
            iter_map_fn_config=describe(iter_map_fn_config),
        )


@dataclass(frozen=True)
class _Keep:
    """Turns a predicate into a hook."""

    predicate: Callable[[Any], bool]

    def __call__(self, item: Any) -> Any:
        if not self.predicate(item):
            raise SkipSample
        return item


def _with_hook(dataset: Dataset[Any], hook: Hook) -> tuple[Hook, ...] | None:
    """Return the hooks of the samples of `dataset`, and one more."""
    hooks = item_hooks(dataset)
    return None if hooks is None else (*hooks, hook)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


class _WatchingDataset(WrapperDataset):
    """Passes on the items of a dataset, and the loops of a loader."""

    _passes_epochs = True

    def __init__(self, dataset: Dataset[Any], *, worker_config: WorkerConfig) -> None:
        super().__init__(dataset, [dataset], worker_config=worker_config)
        self.virtual_epoch_length = getattr(dataset, "virtual_epoch_length", 0)
        self.restart = getattr(dataset, "restart", False)
        self.stage = _Watched(dataset, self)

    def config(self) -> dict[str, Any]:
        # Watching does not affect the order, so states can be loaded with or without it.
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
        super().__init__(dataset, worker_config=worker_config)
        self.stage = LogSamplesDataset(dataset, mode, worker_config, get_keys_fn)


class GcDataset(_WatchingDataset):
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


class WatchdogDataset(_WatchingDataset):
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
