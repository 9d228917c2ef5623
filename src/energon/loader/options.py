"""How lanes are hosted, validated once; and the package's logger."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, get_args

from energon.cache.pool import CachePool
from energon.errors import ConfigError, check_at_least, is_whole
from energon.worker import StartMethod, default_start_method

if TYPE_CHECKING:
    from energon.loader.replicas.context_parallel import ContextParallel

logger = logging.getLogger("energon")


WorkerKind = Literal["process", "thread", "ray"]


@dataclass(frozen=True, kw_only=True)
class RayWorkers:
    """Actors of a Ray cluster as the workers of a rank; `workers="ray"` stands for `RayWorkers()`.

    Batches, their order and saved states are those of worker processes, so a run may be resumed
    with either. The dataset must have the same path or address on all machines, and energon the
    same version.

    Args:
        num_actors: How many actors each rank has; None for `num_workers` of its worker config, or
            1 if that is 0.
        min_actors: With `max_actors` in place of `num_actors`: how many actors to begin with, and
            at least. A rank uses more after a minute in which it waited more than 5 % of the time,
            and fewer while they are idle.
        max_actors: How many actors each rank uses at most.
        num_cpus: How many CPUs Ray reserves for each actor.
        resources: What else Ray reserves for each, such as `{"decoding": 1}` to keep them on
            machines that have it.
        address: The cluster, as for `ray.init`; None for the one that this program is connected
            to, or that RAY_ADDRESS names, or else a new one on this machine.
        pool: The name of a pool that the ranks of a job share: `num_actors` are then those of all
            ranks together. Each begins with an equal part, and ranks that wait get actors of those
            that do not, without another start if they run the same program on the same data.
        runtime_env: The environment of the actors, as for Ray: packages, variables, files.

    Example:
        >>> RayWorkers(num_actors=4, resources={"decoding": 1}).num_cpus
        1
    """

    num_actors: int | None = None
    min_actors: int | None = None
    max_actors: int | None = None
    num_cpus: float = 1
    resources: Mapping[str, float] | None = None
    address: str | None = None
    pool: str | None = None
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("num_actors", "min_actors", "max_actors"):
            if getattr(self, name) is not None:
                check_at_least(1, name, getattr(self, name))
        if (self.min_actors is None) != (self.max_actors is None):
            raise ConfigError("min_actors and max_actors belong together; pass both, or num_actors")
        if self.max_actors is not None and self.num_actors is not None:
            raise ConfigError("pass either num_actors, or min_actors and max_actors")
        if self.pool is not None and self.num_actors is None:
            raise ConfigError(f"pool={self.pool!r} needs num_actors, those of all ranks together")
        if self.min_actors is not None and self.max_actors is not None:
            check_at_least(self.min_actors, "max_actors", self.max_actors)
        if not (isinstance(self.num_cpus, int | float) and self.num_cpus >= 0):
            raise ConfigError(f"num_cpus must be 0 or more, got {self.num_cpus!r}")
        if self.address is not None and self.address.startswith("ray://"):
            raise ConfigError(
                f"address={self.address!r}: batches cannot cross a Ray client; run the training "
                "program on a machine of the cluster, and pass the address of its head node"
            )


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How lanes are hosted. Nothing here affects the batches or their order.

    Args:
        workers: Whether workers are processes, threads, or actors of a Ray cluster ("ray", or
            `RayWorkers`). Threads need no transfer, and pay off if the work releases the GIL; a
            thread that hangs cannot be replaced.
        shared_workers: "host" lets all data-parallel ranks of a host share `num_workers` worker
            processes, run by the first of them, in place of as many for each; of replicas, the
            processes that load share them. Every rank of the job needs the same loops, and
            torch.distributed initialized. Hooks see the rank that runs the workers. None gives
            each rank workers of its own.
        start_method: How processes start. "fork" inherits everything from the training process;
            "forkserver" forks from a clean process that has imported what the pipeline names;
            "spawn" imports again. None stands for ENERGON_START_METHOD if that is set, else "fork"
            on Linux and "forkserver" elsewhere.
        cache_pool: What cookers that ask for a cache get; None caches nothing.
        prefetch_factor: How many finished batches of each worker may wait. Batches of a few kB
            travel together, so more of those may wait.
        watchdog_timeout_seconds: How long a worker that the trainer waits for may go without
            starting another sample before it is replaced; None means no limit.
        watchdog_initial_timeout_seconds: The same until its first sample, which includes
            imports and opening the data; None means five times as long.
        fail_on_timeout: Raise `WorkerError` instead of replacing a worker that hangs.
        max_deaths: How often a worker may die at the same row before that row is skipped, and how
            often it may crash elsewhere without delivering a batch before the run ends.
        restart_patience_seconds: How long to keep restarting a worker that is killed from outside
            (SIGKILL, for example when memory runs out) and delivers no batch, before the run ends.
            The pauses between restarts grow to 10 seconds.
        shared_memory_bytes: How much shared memory a worker may use, unless a single batch
            needs more.
        kept_heap_bytes: How much freed memory the C library keeps for reuse, in the training
            process and in each worker process, see `memory`; 0 does not change its settings.
        pin_memory: Copy tensors into page-locked memory; None does so if torch is imported when
            the first batch is made, and sees CUDA.
        context_parallel: Cuts the sequences of batches for the context-parallel rank of this
            process; None delivers them whole.
        verdict_seconds: Minimum time between log messages on what the trainer waits for; None
            logs none.
        trace: The file for a trace of what workers and trainer do, see `monitoring/trace.py`;
            None for no trace.
        trace_batches: The batches of the rank to trace: a number of batches from the first on,
            or the first and the one after the last.
    """

    workers: WorkerKind | RayWorkers = "process"
    shared_workers: Literal["host"] | None = None
    start_method: StartMethod | None = None
    cache_pool: CachePool | None = None
    prefetch_factor: int = 2
    watchdog_timeout_seconds: float | None = 60
    watchdog_initial_timeout_seconds: float | None = None
    fail_on_timeout: bool = False
    max_deaths: int = 3
    restart_patience_seconds: float = 120
    shared_memory_bytes: int = 2 << 30
    kept_heap_bytes: int = 128 << 20
    pin_memory: bool | None = None
    context_parallel: ContextParallel | None = None
    verdict_seconds: float | None = 60
    trace: str | PathLike[str] | None = None
    trace_batches: int | tuple[int, int] = 100

    def __post_init__(self) -> None:
        if self.workers == "ray":
            object.__setattr__(self, "workers", RayWorkers())
        if self.start_method is None:
            object.__setattr__(self, "start_method", default_start_method())
        for name, kinds in (("workers", WorkerKind), ("start_method", StartMethod)):
            value = getattr(self, name)
            if value not in get_args(kinds) and not isinstance(value, RayWorkers):
                raise ConfigError(
                    f"{name} must be one of {', '.join(get_args(kinds))}, got {value!r}"
                )
        if self.shared_workers not in ("host", None) or (
            self.shared_workers is not None and self.workers != "process"
        ):
            raise ConfigError(
                f"shared_workers={self.shared_workers!r} with workers={self.workers!r}: expected "
                "'host' with worker processes, or None"
            )
        if self.cache_pool is not None and not isinstance(self.cache_pool, CachePool):
            raise ConfigError(
                f"cache_pool={self.cache_pool!r}: expected a pool such as FileStoreCachePool(), or "
                "None"
            )
        if self.context_parallel is not None and not hasattr(self.context_parallel, "dims"):
            raise ConfigError(
                f"context_parallel={self.context_parallel!r}: expected a ContextParallel, or None"
            )
        for name in ("prefetch_factor", "max_deaths", "shared_memory_bytes"):
            check_at_least(1, name, getattr(self, name))
        for name in (
            "watchdog_timeout_seconds",
            "watchdog_initial_timeout_seconds",
            "verdict_seconds",
        ):
            seconds = getattr(self, name)
            if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
                raise ConfigError(f"{name} must be positive or None, got {seconds!r}")
        if self.watchdog_initial_timeout_seconds is None and self.watchdog_timeout_seconds:
            initial = 5 * self.watchdog_timeout_seconds
            object.__setattr__(self, "watchdog_initial_timeout_seconds", initial)
        patience = self.restart_patience_seconds
        if not (isinstance(patience, int | float) and patience >= 0):
            raise ConfigError(f"restart_patience_seconds must be 0 or more, got {patience!r}")
        start, stop = self.trace_window
        if not (is_whole(start) and is_whole(stop) and 0 <= start < stop):
            raise ConfigError(
                "trace_batches must be a number of batches, or the first and the one after the "
                f"last as in (100, 200), got {self.trace_batches!r}"
            )
        for name in ("fail_on_timeout", "pin_memory"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.workers == "process" and sys.platform == "win32":
            raise ConfigError(
                "worker processes need Unix sockets, which Windows lacks; pass workers='thread'"
            )

    @property
    def forks(self) -> bool:
        """Whether workers are forks of the training process."""
        return self.workers == "process" and self.start_method == "fork"

    @property
    def kind(self) -> WorkerKind:
        """What the workers are."""
        return "ray" if isinstance(self.workers, RayWorkers) else self.workers

    @property
    def trace_window(self) -> tuple[int, int]:
        """The first batch to trace, and the one after the last."""
        batches = self.trace_batches
        return (0, batches) if isinstance(batches, int) else (batches[0], batches[1])
