"""Loaders whose position can be saved and restored, on any topology, and the getters of loaders.

States of all ranks are gathered in one process, and scattered from it, over torch.distributed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from energon.arguments import check_arguments
from energon.cache.pool import CachePool
from energon.errors import ConfigError, StateError
from energon.loader.lane_worker import Continues, CountsRows, Pipeline
from energon.loader.loader import BasicDataLoader
from energon.loader.options import LoaderOptions, RayWorkers, WorkerKind, logger
from energon.loader.state import (
    build_state,
    check_coverage,
    check_fingerprint,
    check_steps,
    covered_by,
    flatten,
    may_differ,
    merge_states,
    read_positions,
    redist_command,
)
from energon.messages import counted, warn_once
from energon.plan.recipe import PlanRecipe
from energon.stages.base import State, T_co
from energon.worker import StartMethod, WorkerConfig, initialized_distributed

if TYPE_CHECKING:
    from energon.loader.relane import Relaned
    from energon.loader.replicas.context_parallel import ContextParallel


class SavableDataLoader(BasicDataLoader[T_co]):
    """A `BasicDataLoader` whose position can be saved.

    A saved state counts exactly what the trainer has received; saving does not wait for workers.
    States are JSON. They can be restored on a new loader of any world size that divides their
    number of lanes, with any number of workers, whether in-line, threads or processes; with
    `relane=True` also on any other world size.

    Example:
        >>> from energon import WorkerConfig, get_savable_loader, get_train_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_train_dataset("photos", worker_config=config, batch_size=4)
        >>> with get_savable_loader(dataset) as loader:
        ...     _, state = next(iter(loader)), loader.save_state_rank()
        ...     second = next(iter(loader))
        >>> with get_savable_loader(dataset) as loader:
        ...     loader.restore_state_rank(state)
        ...     next(iter(loader)).__key__ == second.__key__
        True
    """

    def save_state_rank(self) -> State:
        """Return the positions of the lanes of this rank."""
        config, covers = self.worker_config, None
        if config.world_size > 1:
            alone = self._tells_all_lanes()
            covers = {"rank": config.rank, "world_size": config.world_size, "alone": alone}
        return build_state(
            self._positions,
            lanes=self._lanes,
            fingerprint=self.dataset.fingerprint(self._lanes),
            covers=covers,
        )

    def _tells_all_lanes(self) -> bool:
        """Return whether the lanes of the other ranks can be derived from those of this one.

        They can if all batches take the same number of rows, and all ranks began at the same turn.
        """
        if not self._began_together or not isinstance(self.dataset, CountsRows):
            return False
        for position in self._positions.values():
            expected = self.dataset.state_after(position.batches)
            if expected is None or position.skip_rows:
                return False
            if position.batches and position.saved_state() != expected:
                return False
        return True

    def restore_state_rank(
        self,
        state: State | Sequence[State] | None,
        *,
        strict: bool | Collection[str] = True,
        relane: bool = False,
    ) -> None:
        """Continue from `state`, which must cover the lanes of this rank.

        Args:
            state: State of this rank, of all ranks, or a list of rank states. None, if there is
                none yet, stays at the beginning. The state of any rank of a run with another
                number of ranks continues, too: exactly if no hook skips samples and every batch
                uses the same number of rows, otherwise to within a batch, which is logged.
            strict: Which differences between saved and present configuration are errors; see
                `restore_state_global`.
            relane: Whether the run may continue with other lanes, for which a state of all ranks
                is needed; see `restore_state_global`.
        """
        if state is None:
            self._check_fresh()
        else:
            continuation = self._continuation(strict, relane)
            self._restore(continuation.of_other_ranks(continuation.merged(state)), continuation)

    def save_state_global(self, global_dst_rank: int = 0) -> State | None:
        """Return the positions of the lanes of all ranks, or None if this is not `global_dst_rank`.

        All ranks of the data-parallel group must call this after the same number of steps.

        Args:
            global_dst_rank: Which process gets the state, numbered within the whole job.
        """
        states = gather_states(self.save_state_rank(), self.worker_config, dst_rank=global_dst_rank)
        return None if states is None else merge_saved(states)

    def restore_state_global(
        self,
        state: State | Sequence[State] | None,
        *,
        src_rank: int | None = None,
        strict: bool | Collection[str] = True,
        relane: bool = False,
    ) -> None:
        """Continue from a global state.

        Args:
            state: A global state, or a list of rank states that together cover all lanes.
            src_rank: Which rank of the data-parallel group has it and sends it to the others,
                where `state` is ignored; all of them must call this. None means that each rank was
                given the state.
            strict: True raises if configuration or data differ from what was saved; False
                continues from the same rows whatever differs; a collection of names, like
                `["batch_size", "data.train"]`, lets only these differ; "steps" accepts
                ranks saved at different steps; each resumes from its own.
            relane: Whether the run may continue with other lanes, if those of the state cannot be
                dealt to this world size, or `WorkerConfig(lanes=...)` names others. The position
                in all data is kept and later epochs are exact, but some samples of the epochs in
                progress may come again or be left out; how many is logged.

        Raises:
            StateError: If the loader has started, lanes are missing or doubled, ranks were ahead
                of others, or the configuration differs.
        """
        self._check_fresh()
        continuation = self._continuation(strict, relane)
        if src_rank is None:
            merged = continuation.complete(continuation.merged(state))
        else:
            merged = scatter_states(
                lambda: continuation.dealt(continuation.complete(continuation.merged(state))),
                self.worker_config,
                src_rank=src_rank,
            )
        self._restore(merged, continuation)

    def state_dict(self) -> dict[str, Any]:
        """Return the content of `save_state_rank` as a flat dict of plain data.

        The keys name the lanes, so torch.distributed.checkpoint can store the states of all
        ranks side by side and load them on other ranks. The state of one rank is enough only if
        every batch uses the same number of rows and no hook has skipped a sample.
        """
        state = self.save_state_rank()
        whose = covered_by(state)
        if whose is not None and whose[0] == 0 and not whose[2]:
            warn_once(
                logger,
                "state of one rank",
                "state_dict() of rank 0 has the lanes of that rank only, of %d ranks. Save those "
                "of all: torch.distributed.checkpoint does so on its own, and "
                "save_state_global() gathers them on one rank",
                whose[1],
            )
        return dict(flatten(state))

    def load_state_dict(
        self,
        state_dict: State | Sequence[State],
        *,
        strict: bool | Collection[str] = True,
        relane: bool = False,
    ) -> None:
        """Continue from a state of any kind that covers the lanes of this rank.

        Takes what `state_dict`, `save_state_rank` or `save_state_global` returned, or a list of
        these from all ranks. Arguments are those of `restore_state_global`.
        """
        continuation = self._continuation(strict, relane)
        self._restore(continuation.merged(state_dict), continuation)

    def _continuation(self, strict: bool | Collection[str], relane: bool) -> Continuation:
        return Continuation(self.dataset, self.worker_config, strict, relane)

    def _restore(self, state: State, continuation: Continuation) -> None:
        """Go to the merged `state`."""
        self._check_fresh()
        state = continuation.continued(state)
        lanes = state["lanes"]
        positions = read_positions(state, map(int, state["positions"]))
        if isinstance(self.dataset, Continues):
            self.dataset = self.dataset.continuing(state["fingerprint"])
        own_lanes = self.worker_config.rank_lanes(lanes)
        self._note_idle_workers(len(own_lanes))
        self._began_together = self._is_turn(state)
        self._lanes = lanes
        self._positions = {v: positions.pop(v) for v in own_lanes}
        self._others = {v: position for v, position in positions.items() if not position.ended}
        self._pass_length = self._endless_length()

    def _note_idle_workers(self, lanes: int) -> None:
        """Log if a restored run has fewer lanes than workers."""
        workers = self.worker_config.num_workers
        if lanes < workers:
            logger.warning(
                "the state has %s for each rank, so %d of %d workers have nothing to do; change "
                "the number of lanes once, with WorkerConfig(lanes=...) and relane=True",
                counted(lanes, "lane"),
                workers - lanes,
                workers,
            )

    def _is_turn(self, state: State) -> bool:
        """Return whether all ranks of this run continue with the same turn from a state."""
        config, lanes = self.worker_config, state["lanes"]
        if len(state["positions"]) < lanes:
            whose = covered_by(state)
            return whose is not None and whose[1:] == (config.world_size, True)
        numbers = (p["batches"] * lanes + int(v) for v, p in state["positions"].items())
        turn: int = min(numbers)
        return turn % config.world_size == 0

    def _check_fresh(self) -> None:
        if self._stream is not None or self._delivered:
            raise StateError(
                f"this loader has delivered {counted(self._delivered, 'batch')}; restore a state "
                "before the first batch, on a new loader"
            )


@dataclass(frozen=True)
class Continuation:
    """How a run continues from saved states: functions from one merged state to another.

    None of them parses positions, which is done once, at the end.

    Args:
        dataset: The present pipeline.
        config: The present rank and number of ranks.
        strict: Which differences between saved and present configuration are errors.
        relane: Whether the run may continue with other lanes.
    """

    dataset: Pipeline[Any]
    config: WorkerConfig
    strict: bool | Collection[str]
    relane: bool

    def merged(self, state: State | Sequence[State] | None) -> State:
        """Return one state of all that is given, checked to be of one step of the run."""
        merged = merge_states(state)
        if ahead := check_steps(state, merged, strict=self.strict):
            logger.warning("%s; each lane continues from where it was", ahead)
        return merged

    def continued(self, state: State) -> State:
        """Return a state of this run, with the lanes of this rank at least."""
        state = self.with_rank_lanes(self.with_batch_size(state))
        lanes = state["lanes"]
        if self.config.lanes not in (None, lanes):
            raise StateError(
                f"the state was saved with {counted(lanes, 'lane')}, this loader has "
                f"WorkerConfig(lanes={self.config.lanes}); leave lanes out to take them "
                "from the state, or pass relane=True to continue with these, to within a batch of "
                "each"
            )
        own_lanes = self.config.rank_lanes(lanes)
        state = self.with_missing_lanes(state, own_lanes)
        check_coverage(state, own_lanes)
        for difference in self.differences(state):
            logger.warning("restored although the configuration differs: %s", difference)
        return self.with_mix(state)

    def differences(self, state: State) -> list[str]:
        """Return the permitted differences between the configuration of a state and this one.

        Raises:
            StateError: If it differs in anything else.
        """
        present = self.dataset.fingerprint(state["lanes"])
        return check_fingerprint(state["fingerprint"], present, strict=self.strict)

    def of_other_ranks(self, state: State) -> State:
        """Return the state of a rank of a run with another number of ranks, with all lanes.

        The lanes become as many as can be dealt to the ranks of this run. All of its ranks make
        the same lanes of the states of different ranks.
        """
        whose, config, lanes = covered_by(state), self.config, state["lanes"]
        if whose is None or whose[1] == config.world_size or config.lanes not in (None, lanes):
            return state
        times = lcm(lanes, config.world_size) // lanes
        own = config.rank_lanes(lanes) if times == 1 else range(lanes)
        if set(map(str, own)) <= state["positions"].keys():
            return state
        state = self._with_all_lanes(state, *whose, estimates=True)
        if (
            times == 1
            or len(state["positions"]) < lanes
            or not isinstance(self.dataset, CountsRows)
        ):
            return state
        from energon.loader.relane import divide_lanes

        return divide_lanes(state, times, self.dataset.state_at)

    def complete(self, state: State) -> State:
        """Return a state with all lanes."""
        lanes = range(state["lanes"])
        state = self.with_missing_lanes(state, lanes)
        check_coverage(state, lanes)
        return state

    def with_batch_size(self, state: State) -> State:
        """Return a state with the batch size of this run, if each global batch keeps its samples.

        That is tried only where it may differ, and the program has not chosen the lanes. Ranks must
        not differ in whether it is done, so a state that lacks lanes is refused.
        """
        dataset, saved = self.dataset, state["fingerprint"].get("batch_size")
        if not isinstance(dataset, CountsRows) or not may_differ("batch_size", self.strict):
            return state
        size = dataset.batch_size
        if self.config.lanes or size in (None, saved):
            return state
        if not isinstance(saved, int) or saved < 1:
            return state
        from energon.loader.relane import IndivisibleError, rebatch

        try:
            if dataset.batch_rows is None:
                raise IndivisibleError("which samples a batch has is not known in advance")
            changed = rebatch(
                self.with_missing_lanes(state, range(state["lanes"])), size, dataset.state_at
            )
        except IndivisibleError as error:
            logger.warning(
                "lanes continue from their rows with batches of %d instead of %d, so the samples "
                "of a global batch do not stay together: %s",
                size,
                saved,
                error,
            )
            return state
        logger.warning(
            "continued with batches of %d instead of %d, in %s instead of %d: the samples of a "
            "global batch stay together",
            size,
            saved,
            counted(changed["lanes"], "lane"),
            state["lanes"],
        )
        return changed

    def with_rank_lanes(self, state: State) -> State:
        """Return a state whose lanes can be dealt to the ranks of this run.

        It gets others if they cannot, and that is needed or costs nothing.
        """
        config, lanes = self.config, state["lanes"]
        if (config.lanes or lanes) == lanes and lanes % config.world_size == 0:
            return state
        if not self.relane and config.lanes is not None:
            return state
        try:
            relaned = self._relaned(state)
        except StateError as error:
            if self.relane:
                raise
            config.rank_lanes(lanes, hint=f"nor can the number of lanes be changed ({error})")
            raise
        if not self.relane and (relaned.again or relaned.left_out):
            config.rank_lanes(
                lanes,
                hint=f"or pass relane=True to continue with {relaned.describe()}. To convert "
                f"files: {redist_command(lanes, config.world_size)}",
            )
        logger.warning(
            "converted the state of %s to %s", counted(lanes, "lane"), relaned.describe()
        )
        return relaned.state

    def _relaned(self, state: State) -> Relaned:
        """Return a state with the lanes of a new run."""
        from energon.loader.relane import relane

        dataset = self.dataset
        streams = dataset.default_streams if isinstance(dataset, Continues) else None
        lanes = dataset.default_lanes
        if self.config.lanes is None:
            lanes = lcm(lanes, PlanRecipe.from_json(state["fingerprint"]).parts)
        return relane(self.with_missing_lanes(state, range(state["lanes"])), lanes, streams=streams)

    def dealt(self, state: State) -> list[State]:
        """Return for each rank the part that it needs of a state that has all lanes."""
        state = self.with_rank_lanes(self.with_batch_size(state))
        self.differences(state)
        state, ranks = self.with_mix(state), self.config.world_size
        # Where data ends, ranks have to know whether others are within the same pass.
        ends = self.dataset.num_batches(0, state["lanes"]) is not None
        return [state] * ranks if ends else _deal(state, ranks)

    def with_mix(self, state: State) -> State:
        """Return a state in which the present mix has begun, in all its lanes."""
        saved, positions, lanes = state["fingerprint"], state["positions"], state["lanes"]
        if isinstance(self.dataset, Continues):
            states = {int(lane): position["state"] for lane, position in positions.items()}
            begun = self.dataset.begin_mix(saved, states, lanes)
            positions = {v: {**each, "state": begun[int(v)]} for v, each in positions.items()}
        if saved.get("mix") != self.dataset.fingerprint(lanes).get("mix"):
            # Whether the data end there, too, is for the new mix to say.
            positions = {v: {**each, "ended": False} for v, each in positions.items()}
        return {**state, "positions": positions}

    def with_missing_lanes(self, state: State, lanes: Iterable[int]) -> State:
        """Return a state with some lanes, if it has them or they follow from its own."""
        whose = covered_by(state)
        if whose is None or set(map(str, lanes)) <= state["positions"].keys():
            return state
        return self._with_all_lanes(state, *whose)

    def _with_all_lanes(
        self, state: State, rank: int, world_size: int, alone: bool, *, estimates: bool = False
    ) -> State:
        """Return the state of one rank with the lanes of all.

        Without a change if they neither follow from it nor are to be estimated.
        """
        dataset, fingerprint = self.dataset, state["fingerprint"]
        if not isinstance(dataset, CountsRows) or not (alone or estimates):
            return state
        if not alone and fingerprint.get("mix") != dataset.fingerprint(state["lanes"]).get("mix"):
            return state  # ranks would begin the new mix at different rows
        from energon.loader.relane import add_lanes_of_other_ranks

        complete = add_lanes_of_other_ranks(
            state,
            rank,
            world_size,
            dataset.state_at,
            batch_rows=(fingerprint.get("batch_size") or 1) if alone else None,
        )
        if complete is None:
            return state
        ranks = self.config.world_size
        logger.warning(
            "continued from the state of rank %d of %d on %s, %s. To continue from where each rank "
            "was, pass the states of all ranks as a list, or convert their files before the run: "
            "%s",
            rank,
            world_size,
            counted(ranks, "rank"),
            "with the lanes of the other ranks where batches of a fixed number of samples lead; "
            "samples that hooks skipped there would shift them"
            if alone
            else "to within a batch: samples are skipped, packed or grouped, so the positions of "
            "the other ranks are estimated from that of this one, and some samples may be repeated "
            "or missed",
            redist_command(state["lanes"], ranks),
        )
        return complete


def _deal(state: State, world_size: int) -> list[State]:
    """Return for each rank the part of `state` that it needs."""
    ranks: list[State] = [{**state, "positions": {}} for _ in range(world_size)]
    for lane, position in state["positions"].items():
        ranks[int(lane) % world_size]["positions"][lane] = position
    return ranks


def gather_states(state: State, config: WorkerConfig, *, dst_rank: int) -> list[State] | None:
    """Return the states of all ranks on the process with the global rank `dst_rank`, else None.

    All ranks of the data-parallel group must call this. If the model is parallel, too, each of the
    groups may call it: those without `dst_rank` gather nothing.
    """
    if config.world_size == 1 and not config.is_replicated:
        return [state]
    distributed = _distributed(config)
    if dst_rank not in distributed.get_process_group_ranks(config.data_parallel_group):
        return None
    here = distributed.get_rank() == dst_rank
    texts: list[Any] | None = [None] * config.world_size if here else None
    distributed.gather_object(
        json.dumps(state), texts, dst=dst_rank, group=config.data_parallel_group
    )
    return [json.loads(text) for text in texts] if texts is not None else None


def merge_saved(states: list[State]) -> State:
    """Return the states of all ranks as one, and log if ranks were ahead of others."""
    merged = merge_states(states)
    if ahead := check_steps(states, merged, strict=False):
        logger.warning("%s; restoring this state will be refused", ahead)
    return merged


def scatter_states(
    make: Callable[[], list[State]], config: WorkerConfig, *, src_rank: int
) -> State:
    """Call `make` on `src_rank` of the data-parallel group; return its result for this rank.

    All ranks of the group must call this. If `make` fails, all of them raise.
    """
    if config.world_size == 1:
        return make()[0]
    if not 0 <= src_rank < config.world_size:
        raise ConfigError(
            f"src_rank counts within the data-parallel group, from 0 to {config.world_size - 1}; "
            f"got {src_rank}"
        )
    distributed, group = _distributed(config), config.data_parallel_group
    texts = _answers(make, config.world_size) if config.rank == src_rank else None
    received: list[Any] = [None]
    source = src_rank if group is None else distributed.get_global_rank(group, src_rank)
    distributed.scatter_object_list(received, texts, src=source, group=group)
    answer = json.loads(received[0])
    if "error" in answer:
        raise StateError(answer["error"])
    state: State = answer["state"]
    return state


def _answers(make: Callable[[], list[State]], world_size: int) -> list[str]:
    """Return one text for each rank, so that no rank is left waiting if `make` fails."""
    try:
        return [json.dumps({"state": state}) for state in make()]
    except Exception as error:
        return [json.dumps({"error": f"{error}"})] * world_size


def _distributed(config: WorkerConfig) -> Any:
    distributed = initialized_distributed(
        f"a global state of world size {config.world_size}",
        hint=", or save and restore the state of each rank",
    )
    size = distributed.get_world_size(config.data_parallel_group)
    if size != config.world_size:
        raise ConfigError(
            f"the data-parallel group has {counted(size, 'rank')}, the worker config says "
            f"{config.world_size}; pass the group as WorkerConfig(data_parallel_group=…)"
        )
    return distributed


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
