"""The processes of a training job that need the same batches.

With tensor, pipeline or context parallelism, several processes hold one copy of the model: a
*replica*. They have the same data-parallel rank, and get the same batches, which one of them loads.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from energon.errors import ConfigError

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
    """

    rank: int
    host: str
    needs_data: DataNeed
    context_rank: int | None = None


@dataclass(frozen=True, eq=False)
class Replica:
    """The processes with one data-parallel rank, and the position of this one among them.

    Made by `WorkerConfig.from_mesh`, `from_megatron` or `from_groups`.

    Args:
        members: The processes, by rank; the first one loads.
        position: The index of this process.
        context_size: How many processes share the sequences of a batch.
        group: Process group of torch.distributed of the members, for objects in memory.
    """

    members: Sequence[ReplicaMember]
    position: int
    context_size: int = 1
    group: Any = field(default=None, repr=False)

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
    """The position of a process in the job, as it states it to the others."""

    data_rank: int
    data_size: int
    host: str
    needs_data: DataNeed
    context_rank: int | None
    replica: tuple[int, ...] | None


def form_replica(
    data_rank: int,
    data_size: int,
    *,
    host: str | None = None,
    needs_data: DataNeed = True,
    ranks: Sequence[int] | None = None,
    context: tuple[int, int] | None = None,
) -> tuple[Replica, Any]:
    """Return the replica of this process, and the group of the same position in all replicas.

    All processes of the job must call this at the same time.

    Args:
        data_rank: The data-parallel rank of this process.
        data_size: The number of data-parallel ranks.
        host: The machine of this process; None finds out.
        needs_data: Whether it gets batches, see `ReplicaMember`.
        ranks: The ranks that the program takes for this replica; None for all with this data rank.
        context: The context-parallel rank and size of this process.

    Raises:
        ConfigError: If the processes do not agree, or replicas differ in size.
    """
    distributed = initialized_distributed("a replica")
    context_rank, context_size = context or (None, 1)
    claim = _Claim(
        data_rank,
        data_size,
        host or _this_host(),
        needs_data,
        context_rank,
        None if ranks is None else tuple(sorted(ranks)),
    )
    world = distributed.new_group(backend="gloo")
    claims: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(claims, claim, group=world)
    replicas = _checked(claims)
    distributed.destroy_process_group(world)
    own = replicas[data_rank]
    position = own.index(distributed.get_rank())
    # All processes create all groups, in one order: groups that only their members create get
    # names from how many groups each of them is in, which differs in programs with pipelines.
    order = sorted(replicas)
    groups = [distributed.new_group(replicas[number], backend="gloo") for number in order]
    peers = [
        distributed.new_group([replicas[number][at] for number in order], backend="gloo")
        for at in range(len(own))
    ]
    claimed = [(rank, claims[rank]) for rank in own]
    members = tuple(
        ReplicaMember(rank, claim.host, claim.needs_data, claim.context_rank)
        for rank, claim in claimed
    )
    replica = Replica(members, position, context_size, groups[data_rank])
    return replica, peers[position]


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
