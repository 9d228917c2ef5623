"""The base of all wrappers: a stage with a configuration, which a loader accepts.

Wrappers that only watch a stream are here, too: they log its items, collect garbage, or report
items that take too long.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import GenericAlias
from typing import Any, Self

from energon.compat.megatron.worker import note_ignored
from energon.errors import ConfigError, StateError, WorkerTimeoutError
from energon.loader.hosting import Watchdog
from energon.plan.randomness import ORDER_VERSION
from energon.samples.crude import RestoreKey, to_tuple
from energon.stages.base import Dataset, DatasetIterator, ItemState, State, T_co, ThroughIterator
from energon.stages.hooks.failures import DEFAULT_TOLERANCE, ErrorHandler, Tolerance
from energon.stages.hooks.hook import Hook
from energon.stages.iterate import IterableLanes, register_with_torch
from energon.stages.lane import CurrentItem, Lane
from energon.stages.log_samples import LogSamplesDataset, keys_of
from energon.stages.seed import SeedDataset
from energon.task_encoder.encoder import mark_of
from energon.worker import WorkerConfig

Described = dict[str, Any]


class DatasetAnswers:
    """Answers what programs ask any of their datasets."""

    def __len__(self) -> int:
        raise NotImplementedError

    def worker_has_samples(self) -> bool:
        """Return True: any lane of a pipeline has samples, or the pipeline has none."""
        return True

    def len_rank(self) -> int:
        """Return the number of items of this rank in a pass."""
        return len(self)

    def can_restore_sample(self) -> bool:
        """Return whether `restore_sample` works."""
        return True


class WrapperDataset(IterableLanes[T_co], Dataset[T_co], DatasetAnswers):
    """A stage that users put around datasets to build their own pipelines.

    Pass the outermost one to a loader, or return it from `build_train_datasets`. It can be
    saved, resumed and restored like any other pipeline.

    Args:
        datasets: The datasets that it reads.
        worker_config: Rank and workers.
        stage: The stage of the core that it is; None if its class is one, or passes items on.
        settings: What determines its order besides its datasets, as plain data or functions that
            return it.
    """

    __class_getitem__: Any = classmethod(GenericAlias)
    virtual_epoch_length: int = 0
    """Number of items of each rank after which a loop over a loader ends; 0 for no limit."""
    item_hooks: tuple[Hook, ...] | None = None
    """The hooks of each sample, if it yields the samples of a single dataset in their order.

    Such samples can be drawn in the order of a plan.
    """
    restart: bool = False
    """Whether each `for` loop starts from the beginning."""
    default_streams: int | None = None
    """How many streams the lanes of a run share: each is one of its own."""
    _pass_number = 0
    """How many passes over the data there were before, if they end."""

    def __init__(
        self,
        datasets: Sequence[Dataset[Any]],
        *,
        worker_config: WorkerConfig,
        stage: Dataset[Any] | None = None,
        **settings: Any,
    ) -> None:
        register_with_torch(type(self))
        self.stage = stage
        self.datasets = tuple(datasets)
        self.worker_config = worker_config
        self.settings = {
            name: value() if callable(value) else value for name, value in settings.items()
        }
        for dataset in self.datasets:
            if getattr(dataset, "virtual_epoch_length", 0) and not self._passes_epochs:
                raise ConfigError(
                    f"{type(dataset).__name__} ends the loops of a loader, so it has to be around "
                    f"{type(self).__name__}, not within"
                )

    _passes_epochs = False

    @cached_property
    def dataset(self) -> Dataset[Any]:
        """The dataset that it reads, if there is only one."""
        if len(self.datasets) != 1:
            raise ConfigError(
                f"{type(self).__name__} wraps {len(self.datasets)} datasets, expected one; use "
                "`datasets`"
            )
        return self.datasets[0]

    def reset_state_own(self) -> None:
        """Do nothing: the position belongs to iterators, not to this object."""

    def reset_state_deep(self) -> None:
        """Do nothing, see `reset_state_own`."""

    def assert_can_restore(self) -> None:
        """Raise ConfigError unless `restore_sample` works."""
        if not self.can_restore_sample():
            raise ConfigError(f"{type(self).__name__} cannot restore single samples")

    @property
    def _inner(self) -> Dataset[Any]:
        return self.dataset if self.stage is None else self.stage

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return self._inner.open(lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self._inner.num_items(lane, lanes)

    def read_again(self, lane: Lane, item_states: Sequence[ItemState]) -> list[Any]:
        return self._inner.read_again(lane, item_states)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        return self._inner.restore(lane, key)

    def open_lane(self, lane: Lane, state: State | None = None) -> DatasetIterator[Any]:
        """Start or resume one lane, for a loader."""
        lane.seed = self.worker_config.seed_offset
        lane.worker_config = self.worker_config
        lane.pass_number = self._pass_number
        return SeedDataset(self).open(lane, state)

    def fingerprint(self, lanes: int) -> Described:
        """Return the fingerprint that a saved state must match, as JSON."""
        return {
            "order_version": ORDER_VERSION,
            "seed": self.worker_config.seed_offset,
            "lanes": lanes,
            **({"pass": self._pass_number} if self._pass_number else {}),
            "pipeline": self.config(),
        }

    @property
    def is_drawn_again(self) -> bool:
        """Whether another pass over the data has another order."""
        return not self.restart and all(
            getattr(each, "is_drawn_again", True) and not getattr(each, "restart", False)
            for each in self.datasets
        )

    def restarted(self) -> Self:
        """Return this pipeline for another pass over the data: of training, in another order."""
        return self._at_pass(self._pass_number + 1) if self.is_drawn_again else self

    def continuing(self, fingerprint: Mapping[str, Any]) -> Self:
        """Return this pipeline for a run that was saved with `fingerprint`.

        Raises:
            StateError: If the fingerprint is damaged.
        """
        number = fingerprint.get("pass", 0)
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise StateError(f"the fingerprint of the state has pass={number!r}: it is damaged")
        return self._at_pass(number)

    def begin_mix(
        self, fingerprint: Mapping[str, Any], states: Mapping[int, State | None], lanes: int
    ) -> Mapping[int, State | None]:
        """Return `states`: the mix of wrappers does not change."""
        return states

    def _at_pass(self, number: int) -> Self:
        changed = copy.copy(self)
        changed._pass_number = number
        return changed

    def config(self) -> Described:
        """Return a description of the pipeline as plain data."""
        inner = [
            dataset.config() if hasattr(dataset, "config") else {"type": type(dataset).__name__}
            for dataset in self.datasets
        ]
        return {"type": type(self).__name__, **self.settings, "datasets": inner}

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Return the number of items in a pass of a lane: that of a worker, or lane 0."""
        return self.num_items(worker_idx or 0, self.default_lanes) or 0

    def __len__(self) -> int:
        if self.virtual_epoch_length:
            return self.virtual_epoch_length
        lanes = self.default_lanes
        counts = [self.num_items(lane, lanes) for lane in self.worker_config.rank_lanes(lanes)]
        if None in counts:
            raise TypeError(f"{type(self).__name__} has no end, so it has no length")
        return sum(count or 0 for count in counts)

    def __bool__(self) -> bool:
        return True

    def restore_sample(
        self,
        restore_key: RestoreKey,
        *,
        lanes: int | None = None,
        states: Mapping[int, State | None] | None = None,
    ) -> Any:
        """Recreate the item with a restore key, see `SavableDataset.restore_sample`."""
        if not isinstance(restore_key, tuple | list):
            raise StateError(
                f"{restore_key!r} is not a restore key; pass the __restore_key__ of a batch"
            )
        config = self.worker_config
        lane = Lane(
            number=0,
            lanes=lanes or self.default_lanes,
            seed=config.seed_offset,
            worker_config=config,
            current=CurrentItem(batch=None),
        )
        return SeedDataset(self).restore(lane, to_tuple(restore_key))[0]


def make_hook(
    name: str,
    function: Callable[[Any], Any],
    worker_config: WorkerConfig,
    *,
    tolerance: int = DEFAULT_TOLERANCE,
    handler: ErrorHandler | None = None,
) -> Hook:
    """Return a user function as a hook, run according to its marks.

    Random numbers are seeded for each call, since an unknown outer stage may read single items
    again.

    Args:
        name: How messages call it.
        function: The function.
        worker_config: Rank and workers.
        tolerance: Number of consecutive failures that ends the run; 0 for no limit.
        handler: Called for each tolerated failure, with or without the sources; None for that of
            the mark or of the configuration.
    """
    if handler is not None:
        handler = _with_sources(handler)
    return Hook(
        name=name,
        function=function,
        tolerance=Tolerance(
            mark_of(function, "__failure_tolerance__", tolerance),
            rate=mark_of(function, "__failure_rate__", None),
        ),
        restore_seeds=True,
        handler=handler
        or mark_of(function, "__error_handler__", worker_config.global_error_handler),
    )


def _with_sources(handler: Callable[..., Any]) -> ErrorHandler:
    """Return an error handler that accepts the sources: those of older programs do not."""
    try:
        inspect.signature(handler).bind(None, None, None)
    except TypeError:
        return lambda error, sample, _: handler(error, sample)
    return handler


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
    def row_key(self) -> tuple[int, ...]:
        return self.inner.row_key

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
