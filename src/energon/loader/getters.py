"""Build loaders, with the arguments that programs for Megatron-Energon pass."""

from __future__ import annotations

from energon.cache.pool import CachePool
from energon.loader.cached import with_cache_pool
from energon.loader.loader import BasicDataLoader
from energon.loader.options import LoaderOptions, StartMethod, WorkerKind
from energon.loader.pipeline import Pipeline
from energon.loader.savable import SavableDataLoader
from energon.worker import WorkerConfig


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
) -> SavableDataLoader:
    """Return a loader over `dataset` whose position can be saved.

    Args:
        dataset: What `get_train_dataset` and its like return.
        worker_config: Only accepted if it is that of `dataset`.
        checkpoint_every_sec: Has no effect: every batch carries the state after it.
        checkpoint_every_min_n_samples: Has no effect, see `checkpoint_every_sec`.
        n_checkpoints: Has no effect, see `checkpoint_every_sec`.
        gc_collect_every_n_steps: Has no effect: garbage is collected when Python sees fit.
        prefetch_factor: See `LoaderOptions`, as all arguments below.
        cache_pool: What cookers that ask for a cache get, see `FileStoreCachePool`; None caches
            nothing.
        watchdog_timeout_seconds: How long a worker may be silent before it is replaced.
        watchdog_initial_timeout_seconds: The same until its first sample.
        fail_on_timeout: Raise instead of replacing a worker that hangs.
        restart_patience_seconds: How long a worker that is killed again and again is replaced.
        start_method: How worker processes start.
        workers: Whether workers are processes or threads.
        pin_memory: Copy tensors into page-locked memory; None does so if CUDA is in use.
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
) -> BasicDataLoader:
    """Return a loader over `dataset` without a state; arguments as of `get_savable_loader`."""
    options = LoaderOptions(
        workers=workers,
        start_method=start_method,
        prefetch_factor=prefetch_factor,
        watchdog_timeout_seconds=watchdog_timeout_seconds,
        watchdog_initial_timeout_seconds=watchdog_initial_timeout_seconds,
        fail_on_timeout=fail_on_timeout,
        restart_patience_seconds=restart_patience_seconds,
        pin_memory=pin_memory,
    )
    pipeline = with_cache_pool(dataset, cache_pool)
    return BasicDataLoader(pipeline, worker_config=worker_config, options=options)
