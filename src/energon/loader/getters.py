"""Build loaders, with the arguments that Megatron-Energon programs pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from energon.cache.pool import CachePool, activated
from energon.errors import ConfigError
from energon.loader.loader import BasicDataLoader
from energon.loader.options import LoaderOptions, StartMethod, WorkerKind
from energon.loader.pipeline import Continues, CountsRows, DescribesRows, Pipeline, Reports
from energon.loader.savable import SavableDataLoader
from energon.stages.base import DatasetIterator, State
from energon.stages.lane import Lane
from energon.worker import WorkerConfig


@dataclass(frozen=True)
class CachedPipeline:
    """`pipeline`, with `pool` active whenever its hooks run; otherwise identical to it."""

    pipeline: Pipeline
    pool: CachePool

    def open_lane(self, lane: Lane, state: State | None) -> DatasetIterator[Any]:
        """Return the batches of `lane` from where `state` was saved; None is the beginning."""
        with activated(self.pool):
            return _ActivatedIterator(self.pipeline.open_lane(lane, state), self.pool, lane.counts)

    def restore_sample(
        self,
        key: Any,
        *,
        lanes: int | None = None,
        states: Mapping[int, State | None] | None = None,
    ) -> Any:
        """Recreate the batch or sample with this restore key."""
        with activated(self.pool):
            return self.pipeline.restore_sample(  # type: ignore[attr-defined]
                key, lanes=lanes, states=states
            )

    def describe_row(self, lane: int, lanes: int, row: int, state: State | None = None) -> str:
        """Return key, shard and offset of the sample at `row` of a lane, if that is known."""
        if not isinstance(self.pipeline, DescribesRows):
            return "a sample of unknown origin"
        return self.pipeline.describe_row(lane, lanes, row, state)

    def continuing(self, fingerprint: Mapping[str, Any]) -> Pipeline:
        """Return the pipeline for a run that was saved with `fingerprint`."""
        if not isinstance(self.pipeline, Continues):
            return self
        return CachedPipeline(self.pipeline.continuing(fingerprint), self.pool)

    def begin_mix(
        self, fingerprint: Mapping[str, Any], states: Mapping[int, State | None], lanes: int
    ) -> Mapping[int, State | None]:
        """Return saved states of lanes, in which the mix of this pipeline has begun."""
        if not isinstance(self.pipeline, Continues):
            return states
        return self.pipeline.begin_mix(fingerprint, states, lanes)

    def restarted(self) -> Pipeline:
        """Return this pipeline for another pass over the data, from the beginning."""
        if not isinstance(self.pipeline, Continues):
            return self
        restarted = self.pipeline.restarted()
        return self if restarted is self.pipeline else CachedPipeline(restarted, self.pool)

    @property
    def default_streams(self) -> int | None:
        """How many streams the lanes of a new run share; None for as many as there are."""
        return self.pipeline.default_streams if isinstance(self.pipeline, Continues) else None

    def state_after(self, batches: int) -> State | None:
        """Return the state of a lane after this many batches; None if that is not known."""
        if not isinstance(self.pipeline, CountsRows):
            return None
        return self.pipeline.state_after(batches)

    def report(
        self, *, lanes: int, states: Mapping[int, State | None], counts: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return what was drawn from which dataset, as JSON.

        Raises:
            ConfigError: If `pipeline` does not know.
        """
        if not isinstance(self.pipeline, Reports):
            raise ConfigError(f"{type(self.pipeline).__name__} does not know what it has drawn")
        return self.pipeline.report(lanes=lanes, states=states, counts=counts)

    def __len__(self) -> int:
        return len(self.pipeline)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "pipeline":  # while a copy is being unpickled
            raise AttributeError(name)
        return getattr(self.pipeline, name)


class _ActivatedIterator(DatasetIterator[Any]):
    def __init__(self, inner: DatasetIterator[Any], pool: CachePool, counts: Counter[str]) -> None:
        self.inner = inner
        self.pool = pool
        self.counts = counts

    def __next__(self) -> Any:
        with activated(self.pool):
            batch = next(self.inner)
        for name, count in self.pool.take_counts().items():
            self.counts[f"cache {name}"] += count
        return batch

    @property
    def row(self) -> int:
        return self.inner.row

    def state_dict(self) -> State:
        return self.inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        with activated(self.pool):
            self.inner.load_state_dict(state)


def with_cache_pool(pipeline: Pipeline, pool: CachePool | None) -> Pipeline:
    """Return `pipeline` with `pool`, or unchanged without one."""
    return pipeline if pool is None else CachedPipeline(pipeline, pool)


def get_savable_loader(
    dataset: Pipeline,
    *,
    worker_config: WorkerConfig | None = None,
    checkpoint_every_sec: float = 60,
    checkpoint_every_min_n_samples: int | None = None,
    n_checkpoints: int | None = None,
    gc_collect_every_n_steps: int | None = None,
    prefetch_factor: int = 2,
    cache_pool: CachePool | None = None,
    watchdog_timeout_seconds: float | None = 60,
    watchdog_initial_timeout_seconds: float | None = None,
    fail_on_timeout: bool = False,
    restart_patience_seconds: float = 120,
    start_method: StartMethod = "forkserver",
    workers: WorkerKind = "process",
    pin_memory: bool | None = None,
    verdict_seconds: float | None = 60,
    trace: str | PathLike[str] | None = None,
    trace_batches: int | tuple[int, int] = 100,
) -> SavableDataLoader:
    """Return a loader over `dataset` whose position can be saved.

    Args:
        dataset: The result of `get_train_dataset` or another dataset getter.
        worker_config: Must be the one `dataset` was built with, if given.
        checkpoint_every_sec: Has no effect: every batch carries the state after it.
        checkpoint_every_min_n_samples: Has no effect, see `checkpoint_every_sec`.
        n_checkpoints: Has no effect, see `checkpoint_every_sec`.
        gc_collect_every_n_steps: Has no effect: Python decides when to collect garbage.
        prefetch_factor: See `LoaderOptions`, as for all arguments below.
        cache_pool: The cache for cookers that request one, see `FileStoreCachePool`; None caches
            nothing.
        watchdog_timeout_seconds: How long a worker may make no progress before it is replaced.
        watchdog_initial_timeout_seconds: The same until its first sample.
        fail_on_timeout: Raise instead of replacing a worker that hangs.
        restart_patience_seconds: How long to keep replacing workers that die before making a batch.
        start_method: How worker processes start.
        workers: Whether workers are processes or threads.
        pin_memory: Copy tensors into page-locked memory; None does so if CUDA is in use.
        verdict_seconds: Minimum time between log messages about what the trainer waits for.
        trace: A file for Perfetto, such as "trace.json", showing what workers and trainer do.
        trace_batches: How many batches to trace, or a range of batches such as (100, 200).

    Example:
        >>> from energon import WorkerConfig, get_savable_loader, get_train_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_train_dataset("photos", worker_config=config, batch_size=4)
        >>> with get_savable_loader(dataset) as loader:
        ...     batches = iter(loader)
        ...     first = next(batches)
        ...     state = loader.state_dict()
        ...     expected = next(batches).__key__
        >>> resumed = get_savable_loader(dataset)
        >>> resumed.load_state_dict(state)
        >>> next(iter(resumed)).__key__ == expected
        True
    """
    options = LoaderOptions(
        workers=workers,
        start_method=start_method,
        prefetch_factor=prefetch_factor,
        watchdog_timeout_seconds=watchdog_timeout_seconds,
        watchdog_initial_timeout_seconds=watchdog_initial_timeout_seconds,
        fail_on_timeout=fail_on_timeout,
        restart_patience_seconds=restart_patience_seconds,
        pin_memory=pin_memory,
        verdict_seconds=verdict_seconds,
        trace=trace,
        trace_batches=trace_batches,
    )
    pipeline = with_cache_pool(dataset, cache_pool)
    return SavableDataLoader(pipeline, worker_config=worker_config, options=options)


def get_loader(
    dataset: Pipeline,
    *,
    worker_config: WorkerConfig | None = None,
    prefetch_factor: int = 2,
    cache_pool: CachePool | None = None,
    watchdog_timeout_seconds: float | None = 60,
    watchdog_initial_timeout_seconds: float | None = None,
    fail_on_timeout: bool = False,
    restart_patience_seconds: float = 120,
    start_method: StartMethod = "forkserver",
    workers: WorkerKind = "process",
    pin_memory: bool | None = None,
    verdict_seconds: float | None = 60,
    trace: str | PathLike[str] | None = None,
    trace_batches: int | tuple[int, int] = 100,
) -> BasicDataLoader:
    """Return a loader over `dataset` without saved state; see `get_savable_loader` for arguments.

    Example:
        >>> from energon import WorkerConfig, get_loader, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_val_dataset("photos", worker_config=config, batch_size=1)
        >>> len(list(get_loader(dataset)))
        2
    """
    options = LoaderOptions(
        workers=workers,
        start_method=start_method,
        prefetch_factor=prefetch_factor,
        watchdog_timeout_seconds=watchdog_timeout_seconds,
        watchdog_initial_timeout_seconds=watchdog_initial_timeout_seconds,
        fail_on_timeout=fail_on_timeout,
        restart_patience_seconds=restart_patience_seconds,
        pin_memory=pin_memory,
        verdict_seconds=verdict_seconds,
        trace=trace,
        trace_batches=trace_batches,
    )
    pipeline = with_cache_pool(dataset, cache_pool)
    return BasicDataLoader(pipeline, worker_config=worker_config, options=options)
