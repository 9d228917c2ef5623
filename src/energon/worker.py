"""Who runs: ranks, workers and lanes, and the processes that need the same batches.

A run is divided into `lanes`: V fixed sequences of batches. Batch b of lane v has the global
number g = b·V + v. Of W ranks, rank r delivers the batches with g ≡ r (mod W), in ascending
order, so W must divide V; the lanes of a rank are dealt to its workers. Therefore neither
ranks nor workers affect the order: they only host lanes.

Unless the user says otherwise, a run gets a multiple of 24 lanes and of its workers, so that it
can continue with any number of ranks that divides 24, and no worker is idle. The lanes that begin
in one worker read the same slices of the data, and cost no more than one lane would.

With tensor, pipeline or context parallelism, several processes hold one copy of the model: a
*replica*. They have the same data-parallel rank, and get the same batches, which one of them loads.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import lcm
from operator import index
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast, get_args

from energon.errors import ConfigError, is_whole
from energon.messages import counted

DataNeed = bool | Literal["shapes"]
"""What a process needs of a batch: all of it, its tensors without their content, or nothing."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ReplicaMember(NamedTuple):
    """A process of a replica.

    Args:
        rank: Its rank in the whole job.
        host: The machine that it runs on.
        needs_data: Whether it gets batches. Otherwise it gets None for each, or, with "shapes", a
            batch whose tensors are on the device "meta".
        context_rank: Its rank among those that share the sequences of a batch; None if unknown.
        source: The rank that broadcasts tensors to its device, perhaps itself; None if they stay in
            the memory of the host.
    """

    rank: int
    host: str
    needs_data: DataNeed
    context_rank: int | None = None
    source: int | None = None

    @property
    def needs_passed_on(self) -> DataNeed:
        """What must be passed on to it of a batch, apart from tensors that are broadcast."""
        return self.needs_data if self.source in (None, self.rank) else "shapes"


@dataclass(frozen=True, eq=False)
class Replica:
    """The processes with one data-parallel rank, and the position of this one among them.

    Made by `WorkerConfig.from_mesh`, `from_megatron` or `from_groups`.

    Args:
        members: The processes, by rank; the first one loads.
        position: The index of this process.
        context_size: How many processes share the sequences of a batch.
        group: Process group of torch.distributed of the members, for objects in memory.
        device: The type of device that tensors are broadcast to; None if they are not.
        device_group: Process group of the members with the same source as this one; None if it has
            no others.
    """

    members: Sequence[ReplicaMember]
    position: int
    context_size: int = 1
    group: Any = field(default=None, repr=False)
    device: str | None = None
    device_group: Any = field(default=None, repr=False)

    @property
    def own(self) -> ReplicaMember:
        """The member that is this process."""
        return self.members[self.position]

    @property
    def has_others(self) -> bool:
        """Whether any other process needs the same batches."""
        return len(self.members) > 1

    @property
    def neighbors(self) -> list[int]:
        """The positions of the members on this host, this process included."""
        host = self.own.host
        return [i for i, member in enumerate(self.members) if member.host == host]

    @property
    def leaders(self) -> list[int]:
        """The position of the first member on each host, that of the loading process first."""
        first: dict[str, int] = {}
        for position, member in enumerate(self.members):
            first.setdefault(member.host, position)
        return list(first.values())


class _Claim(NamedTuple):
    """The position of a process in the job, as it states it to the others.

    Args:
        data_rank: Its data-parallel rank.
        data_size: The number of data-parallel ranks.
        host: Its machine.
        needs_data: Whether it gets batches, see `ReplicaMember`.
        context: Its context-parallel rank, and the number of them.
        stage: Its pipeline stage.
        device_broadcast: Whether tensors are broadcast to its device.
        replica: The ranks that the program takes for its replica; None for all with its data rank.
    """

    data_rank: int
    data_size: int
    host: str
    needs_data: DataNeed
    context: tuple[int, int]
    stage: int
    device_broadcast: bool
    replica: tuple[int, ...] | None = None


def _form_replica(claim: _Claim) -> tuple[Replica, Any]:
    """Return the replica of this process, and the group of the same position in all replicas.

    All processes of the job must call this at the same time.

    Raises:
        ConfigError: If the processes do not agree, or replicas differ in size.
    """
    distributed = initialized_distributed("a replica")
    world = distributed.new_group(backend="gloo")
    claims: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(claims, claim, group=world)
    replicas = _checked(claims)
    distributed.destroy_process_group(world)
    rank, own = distributed.get_rank(), replicas[claim.data_rank]
    # All processes create all groups, in one order: groups that only their members create get
    # names from how many groups each of them is in, which differs in programs with pipelines.
    order = sorted(replicas)
    groups = [distributed.new_group(replicas[number], backend="gloo") for number in order]
    peers = [
        distributed.new_group([replicas[number][at] for number in order], backend="gloo")
        for at in range(len(own))
    ]
    device, backend = "cpu", "gloo"
    if "nccl" in distributed.get_backend_config():
        device, backend = "cuda", "nccl"
    sources: dict[int, int] = {}
    device_group = None
    for ranks in _broadcasts(claims):
        sources |= dict.fromkeys(ranks, ranks[0])
        group = distributed.new_group(ranks, backend=backend) if len(ranks) > 1 else None
        device_group = group if rank in ranks else device_group
    members = tuple(
        ReplicaMember(each, claim.host, claim.needs_data, claim.context[0], sources.get(each))
        for each, claim in ((each, claims[each]) for each in own)
    )
    replica = Replica(
        members,
        own.index(rank),
        claim.context[1],
        groups[claim.data_rank],
        device if claim.device_broadcast else None,
        device_group,
    )
    return replica, peers[replica.position]


def _broadcasts(claims: Sequence[_Claim]) -> list[list[int]]:
    """Return the ranks of each broadcast to devices; the first one is the source.

    A broadcast needs all of them at the same time. Pipeline stages take the same batch one after
    the other, so each has its own.
    """
    stages: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, claim in enumerate(claims):
        if claim.device_broadcast and claim.needs_data is True:
            stages[claim.data_rank, claim.stage].append(rank)
    return [stages[key] for key in sorted(stages)]


def members_of(group: Any, host: str | None = None) -> Replica:
    """Return the processes of a group, with their hosts, and the position of this one.

    All of them must call this at the same time.

    Args:
        group: A group of torch.distributed for objects in memory.
        host: The machine of this process; None finds out.
    """
    distributed = initialized_distributed("a replica")
    members: list[Any] = [None] * distributed.get_world_size(group)
    own = ReplicaMember(distributed.get_rank(), host or _this_host(), True)
    distributed.all_gather_object(members, own, group=group)
    return Replica(members, distributed.get_rank(group), group=group)


def _checked(claims: Sequence[_Claim]) -> dict[int, list[int]]:
    """Return the ranks of each replica, by data rank.

    Raises:
        ConfigError: If the claims contradict each other.
    """
    replicas: defaultdict[int, list[int]] = defaultdict(list)
    for rank, claim in enumerate(claims):
        replicas[claim.data_rank].append(rank)
        if claim.data_size != claims[0].data_size:
            raise ConfigError(
                f"rank 0 has {claims[0].data_size} data-parallel ranks, rank {rank} has "
                f"{claim.data_size}; all processes need the same number"
            )
        if claim.device_broadcast != claims[0].device_broadcast:
            raise ConfigError(
                f"rank 0 has device_broadcast={claims[0].device_broadcast}, rank {rank} has "
                f"{claim.device_broadcast}; all processes need the same"
            )
    size = claims[0].data_size
    if missing := sorted(set(range(size)) - replicas.keys()):
        raise ConfigError(
            f"no process has data rank {missing[0]} of {size}; the {len(claims)} processes have "
            f"data ranks {', '.join(map(str, sorted(replicas)))}"
        )
    smallest, largest = (pick(replicas, key=lambda d: len(replicas[d])) for pick in (min, max))
    if len(replicas[smallest]) != len(replicas[largest]):
        raise ConfigError(
            f"data rank {smallest} has ranks {replicas[smallest]}, data rank {largest} has ranks "
            f"{replicas[largest]}; all replicas need the same number of processes"
        )
    for rank, claim in enumerate(claims):
        expected = replicas[claim.data_rank]
        if claim.replica is not None and list(claim.replica) != expected:
            raise ConfigError(
                f"rank {rank} has a replica of ranks {list(claim.replica)}, but the ranks with "
                f"data rank {claim.data_rank} are {expected}; the processes of a replica need the "
                "same data rank, and those of different replicas different ones"
            )
    return dict(replicas)


def initialized_distributed(purpose: str, *, hint: str = "") -> Any:
    """Return torch.distributed.

    Args:
        purpose: The use that is made of it, for the message.
        hint: What else can be done, for the message.

    Raises:
        ConfigError: If it is not initialized.
    """
    torch: Any = sys.modules.get("torch")
    distributed = torch and torch.distributed
    if not distributed or not distributed.is_available() or not distributed.is_initialized():
        raise ConfigError(f"{purpose} needs torch.distributed; call init_process_group first{hint}")
    return distributed


def _this_host() -> str:
    """Return a name of this machine that no other machine has, and that its containers share."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot} {os.getuid()}"


logger = logging.getLogger("energon")

StartMethod = Literal["forkserver", "spawn", "fork"]
START_METHOD_VARIABLE = "ENERGON_START_METHOD"
"""Environment variable that sets how worker processes start."""

COMMON_LANES = 24
"""The number of lanes of a run with few workers: many numbers of ranks divide it."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The place of this process in the training job, and how it loads data.

    Args:
        rank: Data-parallel rank of this process.
        world_size: Number of data-parallel ranks.
        num_workers: Loader workers of this rank; 0 loads in the training process.
        lanes: Number of fixed sequences of batches. A run can be resumed on any `world_size`
            that divides it, with any number of workers, and continues exactly. None means the
            number of a restored state, or for a new run the least common multiple of 24 and
            `world_size * max(1, num_workers)`; a pipeline that holds samples back (packing,
            grouping) or has little data gets one lane for each worker. Runs with the same
            explicit number have the same global order on any topology from the start.
        data_parallel_group: Process group of torch.distributed over which global states are
            gathered; None means the default group.
        replica: The processes that need the same batches, of which one loads; None if this is the
            only one. Set by `from_mesh`, `from_megatron` and `from_groups`.
        seed_offset: The seed of the run.
        worker_debug_path: File to which the keys of batches are written, with {worker_id} (see
            `log_number`) and {pid} in it replaced; None for the logger "energon".
        worker_log_level: 1 or more writes the keys of all training batches, 2 or more also those
            of validation batches. `energon analyze-debug` counts them.
        global_error_handler: Called as `handler(exception, sample, sources)` for every sample
            that fails and is tolerated; None logs it.

    Raises:
        ConfigError: If the numbers are inconsistent.

    Example:
        >>> config = WorkerConfig(rank=1, world_size=4, num_workers=2, lanes=8)
        >>> list(config.rank_lanes(8))
        [1, 5]
        >>> WorkerConfig(rank=0, world_size=3, num_workers=2).default_lanes
        24
    """

    rank: int
    world_size: int
    num_workers: int
    lanes: int | None = None
    data_parallel_group: Any = field(default=None, compare=False)
    replica: Replica | None = field(default=None, compare=False)
    seed_offset: int = 0
    worker_debug_path: str | None = None
    worker_log_level: int = 0
    global_error_handler: Callable[..., Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        numbers: dict[str, Any] = {
            "rank": self.rank,
            "world_size": self.world_size,
            "num_workers": self.num_workers,
            "seed_offset": self.seed_offset,
            "lanes": 1 if self.lanes is None else self.lanes,
        }
        for name, value in numbers.items():
            if not is_whole(value):
                raise TypeError(
                    f"WorkerConfig({name}={value!r}): expected a whole number, found "
                    f"{type(value).__name__}; numbers of the command line or the environment need "
                    "int(...)"
                )
            if getattr(self, name) is not None:  # states are plain data, without numbers of numpy
                object.__setattr__(self, name, index(value))
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} of world size {self.world_size}: ranks count from 0 to "
                "world_size - 1"
            )
        if self.num_workers < 0:
            raise ConfigError(f"num_workers must be 0 or more, got {self.num_workers}")
        if self.lanes is not None:
            check_lanes(self.lanes, self.world_size)
        handler = self.global_error_handler
        if handler is not None and not callable(handler):
            raise ConfigError(
                f"global_error_handler={handler!r}: expected a function that is called as "
                "handler(exception, sample, sources), or None to log failures"
            )

    @property
    def total_workers(self) -> int:
        """How many workers all ranks have together; a rank without workers counts as one."""
        return self.world_size * max(1, self.num_workers)

    @property
    def default_lanes(self) -> int:
        """The number of lanes of a new run, unless its pipeline needs one per worker."""
        return self.lanes or lcm(self.total_workers, COMMON_LANES)

    @property
    def is_replicated(self) -> bool:
        """Whether other processes need the same batches, of which one loads."""
        return self.replica is not None and self.replica.has_others

    def rank_lanes(self, lanes: int, *, hint: str = "") -> range:
        """Return the lanes that this rank delivers, of `lanes` in all, in order of delivery.

        Args:
            lanes: How many lanes the run has.
            hint: What else can be done if they cannot be dealt to the ranks, for the message.

        Raises:
            ConfigError: If they cannot.
        """
        check_lanes(lanes, self.world_size, hint=hint)
        return range(self.rank, lanes, self.world_size)

    def should_log(self, level: int) -> bool:
        """Return whether messages of `level` are written, see `worker_log_level`."""
        return self.worker_log_level >= level

    def log_number(self, lane: int | None = None, lanes: int = 1) -> int:
        """Return the number of the debug log of the worker that hosts a lane.

        Each rank has a log for its training process, which is also that of lanes if there are no
        workers, and one for each worker.

        Args:
            lane: The lane; None for the training process.
            lanes: How many lanes the run has.

        Example:
            >>> config = WorkerConfig(rank=1, world_size=2, num_workers=2)
            >>> config.log_number(), [config.log_number(lane, 8) for lane in config.rank_lanes(8)]
            (3, [4, 5, 4, 5])
        """
        own = self.rank * (self.num_workers + 1)
        workers = min(self.num_workers, lanes // self.world_size)
        if lane is None or not workers:
            return own
        return own + 1 + lane // self.world_size % workers

    def config(self) -> dict[str, Any]:
        """Return the settings that determine what each rank loads, as plain data."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "num_workers": self.num_workers,
            "lanes": self.lanes,
        }

    @classmethod
    def default_worker_config(
        cls,
        num_workers: int = 4,
        data_parallel_group: Any = None,
        *,
        lanes: int | None = None,
        seed_offset: int = 0,
    ) -> Self:
        """Return the configuration of this process, as torch.distributed knows it.

        Without an initialized process group that is rank 0 of 1. Arguments are those of the
        class.
        """
        rank, world_size = 0, 1
        import sys

        # A process that has not imported torch cannot have initialized a process group.
        torch = sys.modules.get("torch")
        distributed = torch.distributed if torch is not None else None
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank = distributed.get_rank(data_parallel_group)
            world_size = distributed.get_world_size(data_parallel_group)
        elif os.environ.get("WORLD_SIZE", "1") != "1":
            logger.warning(
                "WORLD_SIZE is %s, but torch.distributed is not initialized, so each of these "
                "processes reads all of the data; call torch.distributed.init_process_group "
                "first, or WorkerConfig with rank and world_size",
                os.environ["WORLD_SIZE"],
            )
        return cls(
            rank=rank,
            world_size=world_size,
            num_workers=num_workers,
            lanes=lanes,
            data_parallel_group=data_parallel_group,
            seed_offset=seed_offset,
        )

    @staticmethod
    def from_mesh(
        device_mesh: Any,
        *,
        data_dims: Sequence[str] = ("dp_replicate", "dp_shard"),
        context_dim: str = "cp",
        pipeline_dim: str = "pp",
        num_workers: int = 4,
        lanes: int | None = None,
        seed_offset: int = 0,
        needs_data: DataNeed = True,
        host: str | None = None,
        device_broadcast: bool = False,
    ) -> WorkerConfig:
        """Return the configuration of this process in a `torch.distributed` device mesh.

        The processes that differ only in the other dimensions form a replica: one of them loads,
        and all get its batches. All processes of the job must call this at the same time.

        Args:
            device_mesh: A `DeviceMesh` of all processes, with names of its dimensions.
            data_dims: The dimensions over which data is divided; those that the mesh lacks are
                left out.
            context_dim: The dimension over which sequences are divided, see `ContextParallel`; a
                mesh may lack it.
            pipeline_dim: The dimension of pipeline stages; a mesh may lack it.
            num_workers: Loader workers of each replica.
            lanes: As for the class.
            seed_offset: As for the class.
            needs_data: Whether this process gets batches. Others, like pipeline stages in the
                middle, get None for each batch or, with "shapes", the batch with tensors on the
                device "meta", which have a shape and a type and no content.
            host: The machine of this process; None finds out.
            device_broadcast: Deliver batches with their tensors on the device of each process. Of
                the processes of a pipeline stage that get batches, the first copies each batch to
                its device once, and broadcasts it to the devices of the others: with NCCL if
                torch.distributed uses it, or else in memory, with gloo.

        Raises:
            ConfigError: If the mesh has none of the dimensions, or is not that of all processes.
        """
        names = tuple(device_mesh.mesh_dim_names or ())
        own_dims = [names.index(name) for name in data_dims if name in names]
        if not own_dims:
            raise ConfigError(
                f"the mesh has the dimensions {', '.join(names) or '(without names)'}, none of "
                f"{', '.join(data_dims)}; name those over which data is divided as data_dims"
            )
        world = initialized_distributed("a device mesh").get_world_size()
        if device_mesh.size() != world:
            raise ConfigError(
                f"the mesh has {device_mesh.size()} of {world} processes; pass that of all of them"
            )
        rank, size = 0, 1
        for dim in own_dims:
            rank = rank * device_mesh.size(dim) + device_mesh.get_local_rank(dim)
            size *= device_mesh.size(dim)
        context, stage = (0, 1), 0
        if context_dim in names:
            dim = names.index(context_dim)
            context = device_mesh.get_local_rank(dim), device_mesh.size(dim)
        if pipeline_dim in names:
            stage = device_mesh.get_local_rank(pipeline_dim)
        claim = _Claim(
            rank, size, host or _this_host(), needs_data, context, stage, device_broadcast
        )
        return _in_replica(claim, num_workers, lanes, seed_offset)

    @staticmethod
    def from_megatron(
        *,
        num_workers: int = 4,
        lanes: int | None = None,
        seed_offset: int = 0,
        needs_data: DataNeed | None = None,
        host: str | None = None,
        device_broadcast: bool = False,
    ) -> WorkerConfig:
        """Return the configuration of this process in the parallel state of Megatron-Core.

        The tensor, pipeline and context-parallel ranks of a data-parallel rank form a replica, as
        in `from_mesh`.

        Args:
            num_workers: Loader workers of each replica.
            lanes: As for the class.
            seed_offset: As for the class.
            needs_data: As in `from_mesh`; None means the first and the last pipeline stage.
            host: As in `from_mesh`.
            device_broadcast: As in `from_mesh`.

        Raises:
            ConfigError: If the parallel state is not initialized.
        """
        state: Any = sys.modules.get("megatron.core.parallel_state")
        if state is None or not state.model_parallel_is_initialized():
            raise ConfigError(
                "the parallel state of Megatron-Core is not initialized; call "
                "megatron.core.parallel_state.initialize_model_parallel first"
            )
        if needs_data is None:
            needs_data = state.is_pipeline_first_stage() or state.is_pipeline_last_stage()
        rank, size = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
        context = state.get_context_parallel_rank(), state.get_context_parallel_world_size()
        stage = state.get_pipeline_model_parallel_rank()
        claim = _Claim(
            rank, size, host or _this_host(), needs_data, context, stage, device_broadcast
        )
        return _in_replica(claim, num_workers, lanes, seed_offset)

    @staticmethod
    def from_groups(
        *,
        data_parallel: Any,
        replica: Any,
        context_parallel: Any = None,
        pipeline_parallel: Any = None,
        num_workers: int = 4,
        lanes: int | None = None,
        seed_offset: int = 0,
        needs_data: DataNeed = True,
        host: str | None = None,
        device_broadcast: bool = False,
    ) -> WorkerConfig:
        """Return the configuration of this process in process groups of torch.distributed.

        Args:
            data_parallel: The group of the processes that have this one's position in each of the
                replicas.
            replica: The group of the processes that need the same batches as this one.
            context_parallel: The group of those that share its sequences, see `ContextParallel`;
                None if there is none.
            pipeline_parallel: The group of the pipeline stages; None if there is none.
            num_workers: Loader workers of each replica.
            lanes: As for the class.
            seed_offset: As for the class.
            needs_data: As in `from_mesh`.
            host: As in `from_mesh`.
            device_broadcast: As in `from_mesh`.

        Raises:
            ConfigError: If the groups do not divide all processes into replicas.
        """
        distributed = initialized_distributed("a replica")
        rank = distributed.get_rank(data_parallel)
        size = distributed.get_world_size(data_parallel)
        ranks = distributed.get_process_group_ranks(replica)
        context = 0, 1
        if context_parallel is not None:
            context = (
                distributed.get_rank(context_parallel),
                distributed.get_world_size(context_parallel),
            )
        stage = 0 if pipeline_parallel is None else distributed.get_rank(pipeline_parallel)
        claim = _Claim(
            rank,
            size,
            host or _this_host(),
            needs_data,
            context,
            stage,
            device_broadcast,
            tuple(sorted(ranks)),
        )
        return _in_replica(claim, num_workers, lanes, seed_offset)


def _in_replica(
    claim: _Claim, num_workers: int, lanes: int | None, seed_offset: int
) -> WorkerConfig:
    """Return the configuration of a process, in its replica."""
    replica, group = _form_replica(claim)
    return WorkerConfig(
        rank=claim.data_rank,
        world_size=claim.data_size,
        num_workers=num_workers,
        lanes=lanes,
        data_parallel_group=group,
        replica=replica,
        seed_offset=seed_offset,
    )


def check_lanes(lanes: int, world_size: int, *, hint: str = "") -> None:
    """Raise ConfigError unless `lanes` can be divided evenly among `world_size` ranks.

    Args:
        lanes: The number of lanes.
        world_size: That of ranks.
        hint: What else can be done, for the message.
    """
    if lanes < 1:
        raise ConfigError(f"lanes must be 1 or more, got {lanes}")
    if lanes % world_size:
        nearest = max(1, round(lanes / world_size)) * world_size
        raise ConfigError(
            f"{counted(lanes, 'lane')} can't be divided evenly among "
            f"{counted(world_size, 'rank')}; "
            f"use a world size that divides {lanes}, {hint or f'or a new run with lanes={nearest}'}"
        )


def default_start_method() -> StartMethod:
    """Return how worker processes start unless the program says so.

    Raises:
        ConfigError: If ENERGON_START_METHOD names no start method.
    """
    name = os.environ.get(START_METHOD_VARIABLE)
    if not name:
        return "fork" if sys.platform == "linux" else "forkserver"
    for method in get_args(StartMethod):
        if name == method:
            return cast(StartMethod, method)
    raise ConfigError(
        f"{START_METHOD_VARIABLE}={name!r}: expected one of {', '.join(get_args(StartMethod))}"
    )
