"""Build loaders from the arguments of `LoaderOptions`."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Literal, TypeVar

from energon.arguments import check_arguments
from energon.cache.pool import CachePool
from energon.loader.loader import BasicDataLoader
from energon.loader.options import LoaderOptions, RayWorkers, WorkerKind
from energon.loader.pipeline import Pipeline
from energon.loader.savable import SavableDataLoader
from energon.worker import StartMethod, WorkerConfig

if TYPE_CHECKING:
    from energon.loader.replicas.context_parallel import ContextParallel

T = TypeVar("T")


@check_arguments
def get_savable_loader(
    dataset: Pipeline[T],
    *,
    worker_config: WorkerConfig | None = None,
    prefetch_factor: int = 2,
    cache_pool: CachePool | None = None,
    watchdog_timeout_seconds: float | None = 60,
    watchdog_initial_timeout_seconds: float | None = None,
    fail_on_timeout: bool = False,
    restart_patience_seconds: float = 120,
    start_method: StartMethod | None = None,
    workers: WorkerKind | RayWorkers = "process",
    shared_workers: Literal["host"] | None = None,
    pin_memory: bool | None = None,
    context_parallel: ContextParallel | None = None,
    verdict_seconds: float | None = 60,
    trace: str | PathLike[str] | None = None,
    trace_batches: int | tuple[int, int] = 100,
) -> SavableDataLoader[T]:
    """Return a loader over `dataset` whose position can be saved after any batch.

    Args:
        dataset: The result of `get_train_dataset` or another dataset getter.
        worker_config: Must be the one `dataset` was built with, if given.
        prefetch_factor: See `LoaderOptions`, as for all arguments below.
        cache_pool: The cache for cookers that request one, see `FileStoreCachePool`; None caches
            nothing.
        watchdog_timeout_seconds: How long a worker may make no progress before it is replaced.
        watchdog_initial_timeout_seconds: The same until its first sample.
        fail_on_timeout: Raise instead of replacing a worker that hangs.
        restart_patience_seconds: How long to keep replacing workers that die before making a batch.
        start_method: How worker processes start; None forks them on Linux.
        workers: Whether workers are processes, threads or Ray actors, see `RayWorkers`.
        shared_workers: "host" lets the ranks of a host share `num_workers` processes.
        pin_memory: Copy tensors into page-locked memory; None does so if CUDA is in use.
        context_parallel: Deliver the part of the sequences of this context-parallel rank.
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
        shared_workers=shared_workers,
        start_method=start_method,
        prefetch_factor=prefetch_factor,
        watchdog_timeout_seconds=watchdog_timeout_seconds,
        watchdog_initial_timeout_seconds=watchdog_initial_timeout_seconds,
        fail_on_timeout=fail_on_timeout,
        restart_patience_seconds=restart_patience_seconds,
        pin_memory=pin_memory,
        context_parallel=context_parallel,
        verdict_seconds=verdict_seconds,
        trace=trace,
        trace_batches=trace_batches,
        cache_pool=cache_pool,
    )
    return SavableDataLoader(dataset, worker_config=worker_config, options=options)


@check_arguments
def get_loader(
    dataset: Pipeline[T],
    *,
    worker_config: WorkerConfig | None = None,
    prefetch_factor: int = 2,
    cache_pool: CachePool | None = None,
    watchdog_timeout_seconds: float | None = 60,
    watchdog_initial_timeout_seconds: float | None = None,
    fail_on_timeout: bool = False,
    restart_patience_seconds: float = 120,
    start_method: StartMethod | None = None,
    workers: WorkerKind | RayWorkers = "process",
    shared_workers: Literal["host"] | None = None,
    pin_memory: bool | None = None,
    context_parallel: ContextParallel | None = None,
    verdict_seconds: float | None = 60,
    trace: str | PathLike[str] | None = None,
    trace_batches: int | tuple[int, int] = 100,
) -> BasicDataLoader[T]:
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
        shared_workers=shared_workers,
        start_method=start_method,
        prefetch_factor=prefetch_factor,
        watchdog_timeout_seconds=watchdog_timeout_seconds,
        watchdog_initial_timeout_seconds=watchdog_initial_timeout_seconds,
        fail_on_timeout=fail_on_timeout,
        restart_patience_seconds=restart_patience_seconds,
        pin_memory=pin_memory,
        context_parallel=context_parallel,
        verdict_seconds=verdict_seconds,
        trace=trace,
        trace_batches=trace_batches,
        cache_pool=cache_pool,
    )
    return BasicDataLoader(dataset, worker_config=worker_config, options=options)
