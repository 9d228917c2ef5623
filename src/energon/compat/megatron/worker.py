"""`WorkerConfig` as programs know it: mutable, and available to hooks while they run."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sys
import threading
from typing import Any

from energon import worker
from energon.messages import warn_once
from energon.stages.hooks.failures import log_exception, reraise_exception
from energon.stages.lane import active, active_call
from energon.stages.log_samples import append_line

logger = logging.getLogger("energon")


def note_ignored(reason: str, **is_given: bool) -> None:
    """Log, once each, that the arguments that were given have no effect."""
    for name in (name for name, given in is_given.items() if given):
        key = f"ignored {name}"
        warn_once(logger, key, "%s has no effect: %s", name, reason, level=logging.INFO)


class _Activated(threading.local):
    """The configuration that a program has activated in this thread, outside of hooks."""

    config: WorkerConfig | None = None
    indices: tuple[int, ...] = ()


_activated = _Activated()


def _active_config() -> worker.WorkerConfig | None:
    if _activated.config is not None:
        return _activated.config
    return None if active.lane is None else active.lane.worker_config


class _ActiveConfig(type):
    """Provides `active_worker_config`, which is specific to each thread."""

    @property
    def active_worker_config(cls) -> worker.WorkerConfig | None:
        """The configuration of the pipeline whose hook this thread is running; None outside.

        Programs may set it, to call their hooks without a loader, and reset it to None.
        """
        return _active_config()

    @active_worker_config.setter
    def active_worker_config(cls, config: WorkerConfig | None) -> None:
        _activated.config = config
        if config is None:
            _activated.indices = ()


class WorkerConfig(worker.WorkerConfig, metaclass=_ActiveConfig):
    """Where this process stands in the training job, see `energon.WorkerConfig`.

    Attributes may be set. Two are equal if they have the same rank, world size and number of
    workers. While hooks run, `WorkerConfig.active_worker_config` is that of their pipeline.
    `restore_error_handler` has no effect, as is logged once: failures after a restore are handled
    as usual.
    """

    worker_id_offset = 0
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__

    def __init__(self, *, restore_error_handler: Any = reraise_exception, **settings: Any) -> None:
        super().__init__(**{"global_error_handler": log_exception, **settings})
        note_ignored(
            "failures after a restore are handled as all others, by global_error_handler",
            restore_error_handler=restore_error_handler is not reraise_exception,
        )
        self.restore_error_handler = restore_error_handler

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, worker.WorkerConfig):
            return NotImplemented
        mine = (self.rank, self.world_size, self.num_workers)
        return mine == (other.rank, other.world_size, other.num_workers)

    def __hash__(self) -> int:
        return hash((self.rank, self.world_size, self.num_workers))

    @property
    def active_worker_config(self) -> worker.WorkerConfig | None:
        """The configuration of the pipeline whose hook this thread is running; None outside."""
        return _active_config()

    def global_rank(self) -> int:
        """Return the rank of this process in the whole job, all groups together."""
        if self.data_parallel_group is None:
            return self.rank
        import torch

        rank: int = torch.distributed.get_global_rank(self.data_parallel_group, self.rank)
        return rank

    def rank_worker_id(self) -> int:
        """Return the number of the current worker within this rank.

        In a hook, it is the worker that would host the lane if there were as many lanes as workers.
        """
        if active.lane is not None:
            return active.lane.number // self.world_size % max(1, self.num_workers)
        data = sys.modules.get("torch.utils.data")
        info = data.get_worker_info() if data is not None else None
        return 0 if info is None else int(info.id)

    def global_worker_id(self, override_local_worker_id: int | None = None) -> int:
        """Return the number of a worker over all ranks; None for the current one."""
        local = override_local_worker_id
        return self.rank * self.num_workers + (self.rank_worker_id() if local is None else local)

    def worker_seed(self, override_local_worker_id: int | None = None) -> int:
        """Return a 32-bit seed for the current worker, or for another one of this rank.

        In a hook, it is a seed for the lane, so that it does not depend on workers.
        """
        number = self.global_worker_id(override_local_worker_id)
        if self.num_workers == 0:
            number = self.rank
        if active.lane is not None and override_local_worker_id is None:
            number = active.lane.number
        digest = hashlib.sha1(f"{number},{self.seed_offset}".encode()).digest()
        return int.from_bytes(digest, "big") & 0xFFFFFFFF

    def assert_worker(self) -> None:
        """Do nothing: lanes may be opened in any process."""

    @property
    def active_worker_sample_index(self) -> int:
        """The number of the sample that the running hook received."""
        if _activated.indices:
            return _activated.indices[-1]
        lane, seed_key = active_call()
        return lane.sample_number(seed_key)

    @property
    def active_worker_batch_index(self) -> int:
        """The number of the batch that the running hook contributes to."""
        if _activated.indices:
            return _activated.indices[0]
        lane, seed_key = active_call()
        return lane.batch_number(seed_key)

    def worker_activate(
        self, sample_index: int, override_global_rank: int | None = None, cache_pool: Any = None
    ) -> None:
        """Make this the active configuration of the thread, for code outside of hooks."""
        _activated.config, _activated.indices = self, (sample_index,)

    def worker_deactivate(self) -> None:
        """Undo `worker_activate`."""
        _activated.config, _activated.indices = None, ()

    def worker_push_sample_index(self, sample_index: int) -> None:
        """Set the number of the sample until it is popped."""
        _activated.indices = (*_activated.indices, sample_index)

    def worker_pop_sample_index(self) -> int:
        """Return to the previous number, and return the one that was set."""
        *before, last = _activated.indices
        _activated.indices = tuple(before)
        return last

    def worker_log(self, data: dict[str, Any]) -> None:
        """Write a line of JSON to the file of the present worker, or to the logger "energon"."""
        if self.worker_debug_path is None:
            logger.info("%s", json.dumps(data))
            return
        lane = active.lane
        number = self.log_number() if lane is None else self.log_number(lane.number, lane.lanes)
        append_line(self.worker_debug_path, number, data)

    def config(self) -> dict[str, Any]:
        """Return the settings that determine what each rank loads, as plain data."""
        group = self.data_parallel_group
        config = {
            **super().config(),
            "data_parallel_group": None if group is None else group.size(),
        }
        if self.lanes is None:
            del config["lanes"]  # programs compare this with known values
        return config


# So that editors and `inspect` show the accepted arguments.
_more = inspect.Parameter(
    "restore_error_handler", inspect.Parameter.KEYWORD_ONLY, default=reraise_exception
)
WorkerConfig.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*inspect.signature(worker.WorkerConfig).parameters.values(), _more]
)
