"""States of all ranks in one process, and back, over torch.distributed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from energon.errors import ConfigError, StateError
from energon.loader.options import logger
from energon.loader.state import check_steps, merge_states
from energon.messages import counted
from energon.replica import initialized_distributed
from energon.stages.base import State
from energon.worker import WorkerConfig


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
