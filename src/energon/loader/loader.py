"""Iterate over the batches of a rank, wherever its lanes are hosted."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from threading import RLock, get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, SupportsIndex, TypeVar

from energon.cache.pool import activated
from energon.errors import ConfigError, EmptyDatasetError, StateError
from energon.io.threads import keep_forkable
from energon.loader.hosting import LaneHost, RankStream, close_all, deal_lanes
from energon.loader.lane_worker import Continues, LaneWorker, Pipeline, Reports, RestoresSamples
from energon.loader.memory import keep_heap, pin_batches
from energon.loader.monitoring.accounts import TrainerTrace
from energon.loader.monitoring.monitor import Monitor, Watched, flat_stats
from energon.loader.options import LoaderOptions, RayWorkers, logger
from energon.loader.state import LanePosition
from energon.loader.workers import make_workers
from energon.messages import counted, warn_once
from energon.samples.display import safe_html, shown_in_notebooks, table_html
from energon.stages.base import T_co
from energon.stages.iterate import loop_length
from energon.worker import WorkerConfig

if TYPE_CHECKING:
    from rich.console import Console

    from energon.loader.ray_actors.scaling import ActorScaling
    from energon.loader.ray_actors.workers import ActorSupply
    from energon.loader.replicas.replica_worker import DeviceBroadcast, ReplicaWorker
    from energon.loader.shared_workers import SharedWorkers


T = TypeVar("T")

_SAVING = ("state_dict", "load_state_dict", "save_state_rank", "save_state_global")


def loop(loader: Iterable[T]) -> Iterator[T]:
    """Yield the batches of a loader without end: after one loop, the next.

    For training loops that count steps, such as that of Megatron-LM. States are those of the
    loader: save and restore it as usual, before or after the loop begins.

    Args:
        loader: A loader, whose loops may end with a virtual epoch, or with the data.

    Raises:
        EmptyDatasetError: If two loops in a row have no batch, as those of a rank without data.

    Example:
        >>> from energon import WorkerConfig, get_loader, get_train_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_train_dataset("photos", worker_config=config, batch_size=4, repeat=False)
        >>> batches = loop(get_loader(dataset))
        >>> [len(next(batches).__key__) for _ in range(5)]
        [4, 4, 4, 4, 4]
    """
    empty_loops = 0
    while empty_loops < 2:  # the first after a restore is empty if the epoch had just ended
        empty_loops += 1
        for batch in loader:
            empty_loops = 0
            yield batch
    raise EmptyDatasetError(
        f"{loader!r} has no batches; give each rank at least one, with more data or fewer ranks"
    )


def _check_dataset(dataset: Any, worker_config: WorkerConfig | None) -> None:
    """Raise ConfigError if it is no dataset, or was built with another configuration."""
    if not hasattr(dataset, "worker_config"):
        raise ConfigError(
            f"expected the result of get_train_dataset or its like, found {dataset!r}"
        )
    if worker_config not in (None, dataset.worker_config):
        raise ConfigError(
            f"the loader got {worker_config}, its dataset was built with "
            f"{dataset.worker_config}; omit worker_config here"
        )


class BasicDataLoader(Generic[T_co]):
    """The batches of a rank, in an order that does not depend on how they are loaded.

    Every `for` loop continues where the previous one stopped, whether it stopped at `break` or at
    the end of a virtual epoch. After the last batch of data that ends, the next loop is another
    pass over all of it, in another order. Loops over a validation pipeline always start at the
    first batch. Several threads may loop over a loader at the same time: they share the batches of
    a pass. Workers start with the first batch, or now if they are Ray actors and this process is
    connected to Ray; they run until that pass ends, or the loader is closed or deleted.

    Args:
        dataset: The result of `get_train_dataset` or another dataset getter.
        worker_config: Must be the one `dataset` was built with, if given.
        options: How lanes are hosted.

    Example:
        >>> from energon import WorkerConfig, get_loader, get_train_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_train_dataset("photos", worker_config=config, batch_size=4, repeat=False)
        >>> with get_loader(dataset) as loader:
        ...     [len(batch.__key__) for batch in loader]
        [4, 4]
    """

    def __init__(
        self,
        dataset: Pipeline[T_co],
        *,
        worker_config: WorkerConfig | None = None,
        options: LoaderOptions | None = None,
    ) -> None:
        _check_dataset(dataset, worker_config)
        self.dataset = dataset
        self.worker_config = dataset.worker_config
        self.options = options or LoaderOptions()
        if self.options.forks and self.worker_config.num_workers:
            keep_forkable()
        self._lanes = dataset.default_lanes
        self._positions = {lane: LanePosition() for lane in self._rank_lanes()}
        self._pass_length = self._endless_length()
        self._stream: RankStream | None = None
        self._workers: list[LaneWorker] = []
        self._scaling: ActorScaling | None = None
        self._replica = self._new_replica()
        cut = self.options.context_parallel
        self._cut = None if cut is None else cut.of(self.worker_config.replica)
        self._broadcast = self._new_broadcast()
        self._pin = pin_batches(self.options.pin_memory)
        self._pins_later = self.options.pin_memory is None and "torch" not in sys.modules
        keep_heap(self.options.kept_heap_bytes)
        self._monitor = Monitor()
        self._trace: TrainerTrace | None = None
        if self.options.trace is not None:
            self._trace = TrainerTrace(self.options, self.worker_config)
        self._delivered = 0
        self._lock = RLock()
        self._loops: weakref.WeakSet[_Loop] = weakref.WeakSet()
        # How many batches had been delivered when the present pass or virtual epoch began; loops
        # that began before are over.
        self._began_after = 0
        # After a restore: lanes of other ranks that may have batches left in the present pass.
        self._others: Mapping[int, LanePosition] = {}
        # Whether all ranks of the run have delivered the same number of batches, as far as is
        # known.
        self._began_together = True
        self._close = weakref.finalize(self, close_all, self._workers, self._trace)
        self._actors = self._new_actors()
        self._shared = self._new_shared_workers()

    def _new_replica(self) -> ReplicaWorker | None:
        """Return the host of the lanes of a rank of several processes; None for a single one."""
        if not self.worker_config.is_replicated:
            return None
        from energon.loader.replicas.replica_worker import ReplicaWorker

        return ReplicaWorker(self.worker_config, self.options, self._own_workers)

    def _new_broadcast(self) -> DeviceBroadcast | None:
        """Return the broadcast of batches to devices; None if they stay in memory."""
        replica = self.worker_config.replica
        if replica is None or replica.own.source is None:
            return None
        from energon.loader.replicas.replica_worker import DeviceBroadcast

        # Others may be late, as with any collective: they may save a checkpoint.
        limit = self.options.watchdog_timeout_seconds if self.options.fail_on_timeout else None
        return DeviceBroadcast(replica, limit)

    def _new_actors(self) -> ActorSupply | None:
        """Return the Ray actors of the rank, started if there is a cluster; None without Ray."""
        if not isinstance(self.options.workers, RayWorkers):
            return None
        from energon.loader.ray_actors.workers import ActorSupply

        actors = ActorSupply(self.options.workers, self.options)
        if self._replica is None and actors.has_cluster:
            from energon.loader.ray_actors.scaling import initial_actors

            number = initial_actors(self.options, self.worker_config, len(self._positions))
            actors.start_ahead(self.dataset, number)
        return actors

    def _new_shared_workers(self) -> SharedWorkers | None:
        """Return the workers that other ranks may ask for from now on; None if it has its own."""
        config = self.worker_config
        loads = config.replica is None or config.replica.position == 0
        if self.options.shared_workers is None or config.world_size == 1 or not loads:
            return None
        from energon.loader.shared_workers import SharedWorkers

        return SharedWorkers(config, self.options, self._make_workers)

    if not TYPE_CHECKING:  # to which all names would be known then

        def __getattr__(self, name: str) -> Any:
            hint = "; get_savable_loader returns a loader with a state" if name in _SAVING else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{hint}",
                name=name,
                obj=self,
            )

    def __iter__(self) -> Iterator[T_co]:
        with self._lock:
            again = self.dataset.restart and self._stream is not None and self._stream.delivered
            if again and not any(loop.goes_on_in_another_thread for loop in self._loops):
                self._restart()
            loop = _Loop(self)
            self._loops.add(loop)
        ipython = sys.modules.get("IPython")
        in_notebook = ipython is not None and ipython.get_ipython() is not None
        return shown_in_notebooks(loop) if in_notebook else loop

    def _repr_html_(self) -> str:
        """Return tables of its progress and of its dataset, for notebooks."""
        config = self.worker_config
        rows = [
            ("rank", f"{config.rank} of {config.world_size}"),
            ("lanes", f"{len(self._positions):,} of {self._lanes:,}"),
            ("workers", f"{config.num_workers:,}"),
            ("batches delivered", f"{self._delivered:,}"),
            *([("verdict", safe_html(self.verdict()))] if self._delivered else []),
        ]
        return table_html(type(self).__name__, rows) + getattr(self.dataset, "_repr_html_", str)()

    def __repr__(self) -> str:
        config = self.worker_config
        return (
            f"<{type(self).__name__} of rank {config.rank} of {config.world_size}: "
            f"{counted(self._lanes, 'lane')}, {counted(config.num_workers, 'worker')}, "
            f"{counted(self._delivered, 'batch')} delivered>"
        )

    def __len__(self) -> int:
        """Return the number of batches of one loop of this rank.

        If the data has no end and there is no virtual epoch, this is the number of batches in one
        pass over the data.

        Raises:
            TypeError: If the dataset has no length either.
        """
        length = loop_length(self.dataset, self._rank_lanes(), self._lanes)
        if length is not None:
            return length
        if isinstance(self.dataset, Sized):
            return len(self.dataset)
        raise TypeError(
            "this loader has no length, because its data is repeated without end; set "
            "virtual_epoch_length to give a loop a length"
        )

    def _endless_length(self) -> int:
        """Return the number of batches in a pass over endless data; -1 if loops end."""
        ends = loop_length(self.dataset, self._rank_lanes()[:1], self._lanes) is not None
        if not ends and isinstance(self.dataset, Sized):
            with suppress(TypeError):  # wrappers around endless data have no length
                return len(self.dataset)
        return -1

    def stats(self, *, flat: bool = False) -> dict[str, Any]:
        """Return the statistics since this loader was created, as JSON.

        Counts by name are at the top level: batches, samples, failures, deaths of workers. Figures
        for the `run` (from the first batch on) and the `last_minute` are samples and bytes per
        second, the share of time that the trainer waited, and the time of each stage: in total, per
        sample and by dataset. `workers`, `memory`, and `failures` and `skips` by reason with their
        first samples follow.

        Args:
            flat: Return only numbers, keyed by paths such as `run/wait_share`.
        """
        stats = self._monitor.stats(self._watched())
        if self._scaling is not None:
            stats["actors"] = self._scaling.stats()
        return dict(flat_stats(stats)) if flat else stats

    def verdict(self) -> str:
        """Return one sentence about what the trainer waited for in the last minute."""
        return self._monitor.verdict(self._watched())

    def progress(self, console: Console | None = None) -> Iterator[Any]:
        """Yield the batches, and show the progress of the run in the terminal or notebook.

        It shows samples per second, the share of time that the trainer waits, samples that were
        skipped or failed, and the epochs drawn from each dataset. Nothing is shown if the output
        is a file.

        Args:
            console: Where to show it; None for standard error, or the notebook cell.

        Example:
            >>> for batch in loader.progress():  # doctest: +SKIP
            ...     train(batch)
        """
        from energon.loader.monitoring.monitor import with_progress

        return with_progress(self, console)

    @property
    def is_open(self) -> bool:
        """Whether workers are running: from the first batch until the loader is closed."""
        return bool(self._workers)

    def _watched(self) -> Watched:
        # Other threads may call this while the trainer takes batches.
        positions, workers = self._positions, list(self._used_workers)
        dealt = deal_lanes(list(positions), len(workers)) if workers else []
        return Watched(
            self.dataset,
            self.options,
            self._lanes,
            positions,
            [(w.status, v, w.stats()) for w, v in zip(workers, dealt, strict=False)],
            self._delivered,
        )

    def report(self) -> dict[str, Any]:
        """Return the samples that this rank has drawn from each dataset in the run, as JSON.

        For each dataset: the number of samples, their share, epochs over all ranks, bytes
        (estimated), tokens (if the metadataset gives them), and the samples that hooks skipped or
        failed on since this loader was created. Samples count when they are drawn, including those
        that wait for packing or a group.

        Raises:
            ConfigError: If the pipeline does not know.
        """
        if not isinstance(self.dataset, Reports):
            raise ConfigError(f"{type(self.dataset).__name__} does not record what it has read")
        return self.dataset.report(
            lanes=self._lanes,
            states={lane: position.saved_state() for lane, position in self._positions.items()},
            counts={name: n for name, n in self.stats().items() if isinstance(n, int)},
        )

    def restore_sample(self, restore_key: Any) -> Any:
        """Recreate a batch, or a sample within one, in this process.

        Args:
            restore_key: The `__restore_key__` of the batch or sample.

        Raises:
            StateError: If there is no such key, or a hook now skips the sample.
        """
        if not isinstance(self.dataset, RestoresSamples):
            raise StateError(f"{type(self.dataset).__name__} cannot restore single samples")
        states = {lane: position.saved_state() for lane, position in self._positions.items()}
        with activated(self.options.cache_pool):
            return self.dataset.restore_sample(restore_key, lanes=self._lanes, states=states)

    def config(self) -> dict[str, Any]:
        """Return a description of the run and of the loader's settings, as JSON."""
        return {
            "type": type(self).__name__,
            "rank": self.worker_config.rank,
            "world_size": self.worker_config.world_size,
            "num_workers": self.worker_config.num_workers,
            "lanes": self._lanes,
            "virtual_epoch_length": self.dataset.virtual_epoch_length,
            "dataset": self.dataset.fingerprint(self._lanes),
        }

    def close(self) -> None:
        """Stop the workers. Positions are kept: states can still be saved."""
        self._stop_workers()
        for joint in (self._replica, self._shared):
            if joint is not None:
                joint.leave()

    def _stop_workers(self) -> None:
        self._stream = None
        if self._pin is not None:
            self._pin.clear()
        close_all(self._workers, self._trace)
        self._trace = None
        if self._actors is not None:
            self._actors.keep(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # A shallow copy would deliver from the same workers, but count batches on its own.
        raise TypeError(
            "loaders cannot be pickled or copied, because their workers belong to one process; "
            "pass on the dataset, create another loader with get_loader or get_savable_loader, "
            "and restore loader.state_dict() there"
        )

    def _rank_lanes(self) -> Sequence[int]:
        return self.worker_config.rank_lanes(self._lanes)

    def _begin_next_pass(self) -> bool:
        """Move to the next pass, as the present one is over; return False if it is not for all."""
        others, self._others = self._others, {}
        if not any(position.batches for position in self._positions.values()):
            return False  # the data has no batch
        if others and not self._delivered:
            host = LaneHost(self.dataset, others, lanes=self._lanes, pool=self.options.cache_pool)
            if not all(event.ended for event in host):
                return False
        self._restart()
        return True

    def _restart(self) -> None:
        """Move to the first batch of every lane, remembering which rows are bad in this order."""
        self._began_after = self._delivered
        before = self.dataset
        if isinstance(before, Continues):
            self.dataset = before.restarted()
        keeps_order = self.dataset is before
        if not keeps_order:
            self._stop_workers()
        self._positions = {
            lane: LanePosition(
                skip_rows=position.skip_rows if keeps_order else (),
                counts=position.counts,
                times=position.times,
            )
            for lane, position in self._positions.items()
        }
        self._stream = None

    def _open_stream(self) -> RankStream:
        """Start or continue the present pass.

        Raises:
            StopIteration: If it is over.
        """
        if all(position.ended for position in self._positions.values()):
            raise StopIteration
        if not self._workers:
            self._workers += [self._replica] if self._replica else self._own_workers()
            self._scaling = self._scaling or self._new_scaling()
        self._stream = RankStream(
            self._used_workers,
            self._positions,
            lanes=self._lanes,
            epoch_length=self.dataset.virtual_epoch_length,
            is_pass=self.dataset.restart,
        )
        return self._stream

    @property
    def _used_workers(self) -> Sequence[LaneWorker]:
        """The workers that host lanes."""
        return self._workers if self._scaling is None else self._workers[: self._scaling.in_use]

    def _new_scaling(self) -> ActorScaling | None:
        """Return the scaling of Ray actors; None if all workers are used."""
        if self._actors is None:
            return None
        from energon.loader.ray_actors.scaling import scaling_of

        number, pool = len(self._workers), self._actors.pool
        return scaling_of(self.options, self.worker_config, number, pool=pool)

    def _scale(self) -> None:
        """Use more or fewer workers, if that was decided."""
        scaling, stream, mark = self._scaling, self._stream, self._monitor.last
        if scaling is None or stream is None or mark is None or not scaling.decide(mark):
            return
        stream.deal(self._used_workers)
        for worker in self._workers[scaling.in_use :]:
            worker.close()

    def _own_workers(self) -> list[LaneWorker]:
        """Return the workers of this process: those that it shares, or new ones."""
        return self._make_workers() if self._shared is None else [self._shared]

    def _make_workers(self, ranks: int = 1) -> list[LaneWorker]:
        """Return new workers for the lanes of as many ranks."""
        lanes = len(self._positions) * ranks
        return make_workers(
            self.dataset,
            self.options,
            lanes=lanes,
            ranks=ranks,
            trace=self._trace,
            actors=self._actors,
        )

    def _finished(self, batch: Any) -> Any:
        """Return a batch as it is delivered: broadcast, cut and pinned if batches are."""
        if self._broadcast is not None:
            batch = self._broadcast(batch)
        if self._cut is not None and not (self._replica and self._replica.is_cut):
            batch = self._cut(batch)
        if self._pins_later and "torch" in sys.modules:
            # It has been imported since, perhaps for the tensors of this batch.
            self._pins_later, self._pin = False, pin_batches(None)
        return batch if self._pin is None else self._pin(batch)

    def _end_loop(self, error: BaseException) -> None:
        """Give up what belongs to a loop that ends with an error, or because there is no more."""
        self._monitor.waiting_since = None
        if not isinstance(error, Exception):
            # An interrupt may have come between any two steps.
            self.close()
        elif not isinstance(error, StopIteration):
            # Work done ahead is dropped: the next call continues after the last delivered batch,
            # even if it fails again.
            self._stream = None


class _Loop(Iterator[Any]):
    """One `for` loop over a loader."""

    def __init__(self, loader: BasicDataLoader) -> None:
        self._loader = loader
        self._thread = get_ident()
        self._began_after = loader._delivered
        self._has_ended = False
        self._count = 0

    @property
    def goes_on_in_another_thread(self) -> bool:
        """Whether another thread may still take batches from this loop."""
        is_over = self._has_ended or self._began_after < self._loader._began_after
        return self._thread != get_ident() and not is_over

    def __next__(self) -> Any:
        loader, monitor = self._loader, self._loader._monitor
        with loader._lock:
            if self._has_ended or self._began_after < loader._began_after:
                raise StopIteration
            asked_at = perf_counter()
            if loader._delivered and asked_at >= monitor.next_look:
                asked_at = monitor.look(loader._watched(), asked_at)
                loader._scale()
            monitor.waiting_since = asked_at
            try:
                stream = loader._stream or loader._open_stream()
                is_new = loader._cut is not None or loader._broadcast is not None
                changes = loader._pins_later or loader._pin is not None or is_new
                batch = stream.next_batch(loader._finished if changes else None)
                if loader._pin is not None and not is_new:
                    following = stream.arrived()
                    if following is not None:
                        loader._pin.begin(following)
            except BaseException as error:
                # If no batch has come since this loop began, the pass was over before.
                is_first = loader._delivered == self._began_after
                if isinstance(error, StopIteration) and is_first and loader._begin_next_pass():
                    return next(self)
                self._has_ended = True
                loader._end_loop(error)
                raise
            loader._delivered += 1
            now, monitor.waiting_since = perf_counter(), None
            monitor.waited += now - asked_at
            if loader._trace is not None:
                loader._trace.waited(asked_at, now)
            if stream.epoch_is_over:
                loader._began_after = loader._delivered
        self._count += 1
        if self._count == loader._pass_length + 1:
            _warn_of_endless_loop(loader._pass_length)
        return batch


def _warn_of_endless_loop(length: int) -> None:
    """Log once that a loop continues, although it has had len(loader) batches."""
    warn_once(
        logger,
        "loop behind len(loader)",
        "this loop has passed len(loader) = %d batches and will not stop on its own: training "
        "data repeats. To end loops there, pass virtual_epoch_length=%d to get_train_dataset",
        length,
        length,
    )
