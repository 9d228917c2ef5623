"""Loaders as programs know them: created by their classes, and `DataLoader`s to torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from energon.compat.megatron.worker import WorkerConfig as LoggingConfig
from energon.compat.megatron.worker import note_ignored
from energon.loader import loader as core_loader
from energon.loader import savable as core_savable
from energon.loader.lane_worker import Pipeline, RestoresSamples
from energon.loader.options import LoaderOptions
from energon.loader.savable import gather_states, merge_saved
from energon.stages.base import T_co
from energon.stages.log_samples import keys_of
from energon.worker import WorkerConfig

T = TypeVar("T")
_ids = count()

if TYPE_CHECKING:
    _DataLoader = object
else:
    try:
        from torch.utils.data import DataLoader as _DataLoader
    except ImportError:
        _DataLoader = object


class _LikeTorch(_DataLoader):
    """The attributes of torch's loaders that programs read, derived from how lanes are hosted."""

    worker_config: WorkerConfig
    options: LoaderOptions
    batch_size = None
    """None, since the pipeline makes the batches."""
    drop_last = False
    timeout = 0
    persistent_workers = True
    # The constructor of torch's class is never called, so none of its machinery runs.
    _DataLoader__initialized = False

    @property
    def num_workers(self) -> int:
        """Number of workers of this rank."""
        return self.worker_config.num_workers

    @property
    def prefetch_factor(self) -> int | None:
        """Number of batches that each worker prepares ahead; None without workers."""
        return self.options.prefetch_factor if self.num_workers else None

    @property
    def pin_memory(self) -> bool:
        """Whether tensors are copied into page-locked memory."""
        return bool(self.options.pin_memory)

    @cached_property
    def id(self) -> int:
        """A number that is unique among the loaders of this process."""
        return self.next_id()

    @classmethod
    def next_id(cls) -> int:
        """Return a new number for a loader of this process, or for a loop over one."""
        return next(_ids)


class BasicDataLoader(core_loader.BasicDataLoader[T_co], _LikeTorch):
    """The batches of a rank, see `energon.BasicDataLoader`.

    Args:
        dataset: The result of a dataset getter, or a wrapper.
        worker_config: Must be that of `dataset`, if given.
        gc_collect_every_n_steps: Has no effect, as is logged once: Python decides when to collect
            garbage.
        gc_freeze_at_start: Has no effect, as is logged once.
        options: How lanes are hosted; None for the defaults.
        settings: Fields of `LoaderOptions`, which override those of `options`.
    """

    def __init__(
        self,
        dataset: Pipeline[T_co],
        *,
        worker_config: WorkerConfig | None = None,
        gc_collect_every_n_steps: int = 10,
        gc_freeze_at_start: bool = True,
        options: LoaderOptions | None = None,
        **settings: Any,
    ) -> None:
        note_ignored(
            "Python decides when to collect garbage",
            gc_collect_every_n_steps=gc_collect_every_n_steps != 10,
            gc_freeze_at_start=not gc_freeze_at_start,
        )
        options = replace(options or LoaderOptions(), **settings)
        super().__init__(dataset, worker_config=worker_config, options=options)
        self._batches_logged = 0
        if self._log is not None:
            kind = "SavableLoader" if isinstance(self, SavableDataLoader) else "BasicDataLoader"
            described = dataset.config() if hasattr(dataset, "config") else None
            self._log({"t": f"{kind}.__init__", "config": described})

    @property
    def _log(self) -> Callable[[dict[str, Any]], None] | None:
        """Writes a line to the log of this process; None unless the configuration asks for it."""
        config = self.worker_config
        if not isinstance(config, LoggingConfig) or not config.should_log(1):
            return None
        return lambda line: config.worker_log(
            {"t": line.pop("t"), "r": config.rank, "w": None, "id": self.id, **line}
        )

    def __iter__(self) -> Iterator[T_co]:
        batches = super().__iter__()
        return batches if self._log is None else self._logged(batches, self._log)

    def _logged(
        self, batches: Iterator[Any], log: Callable[[dict[str, Any]], None]
    ) -> Iterator[Any]:
        """Yield batches, and log when the loop begins and ends, and the keys of each batch."""
        kind = "SavableDataLoader" if isinstance(self, SavableDataLoader) else "BasicDataLoader"
        loop = self.next_id()
        log({"t": f"{kind}.iter", "iter_id": loop})
        try:
            for number, batch in enumerate(batches):
                keys = keys_of(batch)
                line = {
                    "t": f"{kind}.yield",
                    "iter_id": loop,
                    "idx": number if self.num_workers else self._batches_logged,
                    "iter_idx": number,
                    "global_idx": self._batches_logged,
                }
                log(line if keys is None else {**line, "keys": keys})
                self._batches_logged += 1
                yield batch
        finally:
            log({"t": f"{kind}.StopIteration", "iter_id": loop})

    def can_restore_sample(self) -> bool:
        """Return whether the pipeline supports `restore_sample`."""
        return isinstance(self.dataset, RestoresSamples)


class SavableDataLoader(BasicDataLoader[T_co], core_savable.SavableDataLoader[T_co]):
    """A `BasicDataLoader` with a state, see `energon.SavableDataLoader`.

    Args:
        dataset: The result of a dataset getter, or a wrapper.
        checkpoint_every_sec: Has no effect, as is logged once: every batch carries the state after
            it.
        checkpoint_every_min_n_samples: Has no effect, as is logged once.
        n_checkpoints: Has no effect, as is logged once.
        settings: Arguments of `BasicDataLoader`.
    """

    def __init__(
        self,
        dataset: Pipeline[T_co],
        *,
        checkpoint_every_sec: float = 60,
        checkpoint_every_min_n_samples: int | None = None,
        n_checkpoints: int | None = None,
        **settings: Any,
    ) -> None:
        note_ignored(
            "every batch carries the state after it",
            checkpoint_every_sec=checkpoint_every_sec != 60,
            checkpoint_every_min_n_samples=checkpoint_every_min_n_samples is not None,
            n_checkpoints=n_checkpoints is not None,
        )
        super().__init__(dataset, **settings)

    def save_state_global(self, global_dst_rank: int = 0, *, dst_rank: int | None = None) -> Any:
        """Return the states of all ranks as a list, or None if this is not `global_dst_rank`.

        Programs index it by rank. See `energon.SavableDataLoader.save_state_global`.
        """
        target = global_dst_rank if dst_rank is None else dst_rank
        state = self.save_state_rank()
        states = gather_states(state, self.worker_config, dst_rank=target)
        if states is not None:
            merge_saved(states)  # which reports states that could not be restored
        return states

    def restore_state_rank(self, state: Any, **arguments: Any) -> None:
        """Continue where `state` was saved; None leaves the position unchanged."""
        if state is not None:
            arguments.setdefault("strict", self._strict(state))
            super().restore_state_rank(state, **arguments)

    def restore_state_global(self, state: Any, **arguments: Any) -> None:
        """Continue where a global state was saved; None leaves the position unchanged."""
        if state is not None or arguments.get("src_rank") is not None:
            arguments.setdefault("strict", self._strict(state))
            super().restore_state_global(state, **arguments)

    def save_state(self, dst_rank: int = 0) -> Any:
        """Do what `save_state_global` does, under its former name."""
        return self.save_state_global(dst_rank)

    def restore_state(self, state: Any, **arguments: Any) -> None:
        """Do what `restore_state_global` does, under its former name."""
        self.restore_state_global(state, **arguments)

    def _strict(self, state: Any) -> bool | list[str]:
        """Return settings that may differ: a batch size that divides the saved one."""
        states = state if isinstance(state, list) else [state]
        saved = {(each or {}).get("fingerprint", {}).get("batch_size") for each in states}
        size = getattr(self.dataset, "batch_size", None)
        if size and all(each and each != size and each % size == 0 for each in saved):
            return ["batch_size"]
        return True


def get_loader(dataset: Pipeline[T], **settings: Any) -> BasicDataLoader[T]:
    """Return a loader over `dataset` without a state; arguments are those of `BasicDataLoader`."""
    return BasicDataLoader(dataset, **settings)


def get_savable_loader(dataset: Pipeline[T], **settings: Any) -> SavableDataLoader[T]:
    """Return a loader over `dataset` whose position can be saved, see `SavableDataLoader`."""
    return SavableDataLoader(dataset, **settings)


def _joined(*kinds: type) -> inspect.Signature:
    """Return the combined signature of the classes, for editors and `inspect`."""
    parameters: dict[str, inspect.Parameter] = {}
    for kind in kinds:
        for each in inspect.signature(kind).parameters.values():
            if each.kind is not inspect.Parameter.VAR_KEYWORD:
                parameters.setdefault(each.name, each)
    return inspect.Signature(list(parameters.values()))


_basic = _joined(BasicDataLoader, LoaderOptions)
_savable = _joined(SavableDataLoader, BasicDataLoader, LoaderOptions)
vars(get_loader)["__signature__"] = _basic
BasicDataLoader.__signature__ = _basic  # type: ignore[attr-defined]
vars(get_savable_loader)["__signature__"] = _savable
SavableDataLoader.__signature__ = _savable  # type: ignore[attr-defined]
