"""Load pipelines in worker processes: `WebLoader`, both a DataLoader and a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from energon.errors import ConfigError, StateError, UnknownArgumentError
from energon.loader.options import LoaderOptions
from energon.loader.savable import SavableDataLoader
from energon.loader.state import LanePosition, merge_states
from energon.messages import nearest
from energon.samples.collate import has_torch
from energon.webdataset.compat import FluidInterface
from energon.webdataset.pipeline import DataPipeline
from energon.webdataset.running.lanes import (
    LanePipeline,
    LaneProcess,
    convert,
    merge_rank_states,
    returns_argument,
    torch_or_none,
)
from energon.webdataset.running.loop import Loop, Snapshot
from energon.webdataset.running.place import current_place
from energon.webdataset.stages.base import Context, Stage, StageIterator, State, unpack
from energon.webdataset.stages.batching import Batched, default_collation_fn
from energon.worker import WorkerConfig


class WebLoader(DataPipeline, FluidInterface):
    """Loads a pipeline in worker processes, and is a pipeline itself.

    Stages after it run in the training process. Worker processes live until the loader is
    closed. Batches are passed through shared memory; workers that die are replaced without
    changing the order. A state can be loaded with any number of workers. The states of all ranks
    together can be loaded on any number of ranks that divides the number of lanes (ranks ×
    workers of the first run).

    Args:
        dataset: A pipeline. Other datasets are loaded by torch's DataLoader, with these
            arguments.
        batch_size: Size of the batches made in the workers; None passes on items unchanged, for
            pipelines that make batches themselves.
        num_workers: Number of worker processes; 0 loads in the training process.
        collate_fn: Combines a list of items into a batch or, without a batch size, converts each
            item. None collates, and converts arrays to tensors, as DataLoader does.
        pin_memory: Whether to copy tensors to page-locked memory.
        drop_last: Whether to drop the last batch of a worker if it is smaller.
        timeout: Seconds after which a worker that makes no progress is replaced; 0 for no limit.
        worker_init_fn: Called with the number of the worker, in each worker process.
        multiprocessing_context: How processes start: "fork", "forkserver" or "spawn"; None stands
            for ENERGON_START_METHOD if that is set, else "fork" on Linux, "forkserver" elsewhere.
        prefetch_factor: Number of batches that each worker prepares ahead; None for 2.
        kw: Other arguments of DataLoader; those that have no effect here are accepted.

    Example:
        >>> from energon.webdataset.compat import WebDataset
        >>> dataset = WebDataset("photos/shard-0.tar", shardshuffle=False).to_tuple("txt")
        >>> with WebLoader(dataset, batch_size=4) as loader:
        ...     [len(batch[0]) for batch in loader]
        [4, 4, 2]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        **kw: Any,
    ) -> None:
        if not isinstance(dataset, DataPipeline):
            super().__init__(
                _torch_loader(
                    dataset,
                    batch_size=batch_size,
                    num_workers=num_workers,
                    collate_fn=collate_fn,
                    pin_memory=pin_memory,
                    drop_last=drop_last,
                    timeout=timeout,
                    worker_init_fn=worker_init_fn,
                    multiprocessing_context=multiprocessing_context,
                    prefetch_factor=prefetch_factor,
                    **kw,
                )
            )
            return
        _check_ignored(kw)
        place = current_place()
        process = LaneProcess(dataset, worker_init_fn, dataset.seed) if num_workers else None
        lanes = LanePipeline(
            dataset,
            WorkerConfig(rank=place.rank, world_size=place.world_size, num_workers=num_workers),
            None if batch_size is None else _batches(batch_size, collate_fn, drop_last),
            process,
            collate_fn if batch_size is None and not returns_argument(collate_fn) else None,
        )
        options = LoaderOptions(
            start_method=_start_method(multiprocessing_context),
            prefetch_factor=prefetch_factor or 2,
            watchdog_timeout_seconds=timeout or None,
            pin_memory=pin_memory or None,
        )
        # As in DataLoader, arrays become tensors unless something else has batched them.
        converts = collate_fn is None and batch_size is None
        source = LoaderSource(LaneLoader(lanes, options=options), converts)
        super().__init__(source, seed=dataset.seed)

    # As those of a DataLoader without workers over a dataset of batches, for programs that make
    # another DataLoader from the attributes of one, such as accelerate.skip_first_batches.
    batch_size: int | None = None
    prefetch_factor: int | None = None
    drop_last = False

    @property
    def dataset(self) -> Any:
        """The loader itself, as the dataset of its batches; a program may set another one."""
        return self.__dict__.get("dataset", self)

    @dataset.setter
    def dataset(self, dataset: Any) -> None:
        self.__dict__["dataset"] = dataset

    def load_state_dict(self, state_dict: State | Sequence[State]) -> None:
        """Let the next loop continue where a state was saved.

        Args:
            state_dict: The result of `state_dict` on this rank or, for another number of ranks, a
                list of the results of every rank. The state of a single rank is sufficient on its
                own.

        Raises:
            StateError: If it was saved by another pipeline, or does not cover all workers.
        """
        states = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        for each in states:
            Loop.check(self.snapshot(), each)
        place = current_place()
        here = [place.rank, place.world_size, place.worker, place.num_workers]
        if not states:
            raise StateError("the list of states is empty; expected the state of every rank")
        if len(states) == 1 and states[0]["place"] in (None, here):
            super().load_state_dict(states[0])
        else:
            super().load_state_dict(merge_rank_states(states))

    def close(self) -> None:
        """Stop the workers."""
        super().close()
        for stage in self.stages:
            if isinstance(stage, LoaderSource):
                stage.loader.close()


class LoaderSource(Stage):
    """A source that yields the batches of a loader, pass after pass.

    Args:
        loader: The loader, which belongs to the process that created it.
        converts: Whether arrays become tensors.
    """

    def __init__(self, loader: LaneLoader, converts: bool) -> None:
        self.loader = loader
        self.converts = converts

    @property
    def is_random(self) -> bool:
        return bool(self.loader.dataset.dataset.is_random)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _LoaderIterator(self.loader, context.epoch, self.converts)

    def describe(self) -> dict[str, Any]:
        # The dataset is checked with the state of the loader.
        return {"stage": "LoaderSource"}


class _LoaderIterator(StageIterator):
    def __init__(self, loader: LaneLoader, epoch: int, converts: bool) -> None:
        self._loader = loader
        self._epoch = epoch
        self._converts = converts
        self._is_restored = False
        super().__init__()

    def _run(self) -> Iterator[Any]:
        loader = self._loader
        if not self._is_restored:
            loader.begin_epoch(self._epoch)
        loader.reader = self
        converts = self._converts and has_torch()
        for batch in map(convert, loader) if converts else loader:
            yield batch
            if loader.reader is not self:
                raise ConfigError(
                    "another loop over this WebLoader has begun, and has its workers: iterate in "
                    "one loop at a time, or create a WebLoader for each thread"
                )

    def state_dict(self) -> State:
        state = self._loader.save_state_rank()
        for position in state["positions"].values():
            if position["state"] is not None and position["state"]["unsavable"] is not None:
                raise StateError(position["state"]["unsavable"])
        return {"epoch": self._epoch, "loader": state}

    def load_state_dict(self, state: State) -> None:
        self._epoch, loader = unpack(state, "epoch", "loader")
        self._loader.go_to(loader)
        self._is_restored = True


class LaneLoader(SavableDataLoader):
    """A loader whose loops are the epochs of a pipeline."""

    dataset: LanePipeline
    reader: object = None
    """The loop that takes the batches."""
    _snapshot: Snapshot | None = None

    def begin_epoch(self, epoch: int) -> None:
        """Set the number of the next loop to `epoch`."""
        before, self._snapshot = self._snapshot, self.dataset.dataset.snapshot()
        if before is not None and not self._snapshot.has_stages_of(before):
            # Workers keep the stages that they started with; positions are valid for these only.
            self.close()
            self._positions = {lane: LanePosition() for lane in self._rank_lanes()}
        has_begun = any(position.state is not None for position in self._positions.values())
        if self.dataset.virtual_epoch_length and has_begun:
            # The data is endless: each loop continues where the previous one stopped.
            (self._stream or self._open_stream()).end_epoch()
            return
        self._positions = {
            lane: LanePosition(
                state=self._first_state(epoch, position),
                skip_rows=position.skip_rows,
                counts=position.counts,
                times=position.times,
            )
            for lane, position in self._positions.items()
        }
        self._stream = None

    def _first_state(self, epoch: int, position: LanePosition) -> State:
        """Return the state of a lane before an epoch; its place in the job does not change."""
        first = self.dataset.first_state(epoch)
        before = position.saved_state() or first
        return {**first, "world_size": before["world_size"]}

    def _begin_next_pass(self) -> bool:
        """Return False: the pipeline begins its epochs."""
        return False

    def go_to(self, state: State) -> None:
        """Move to a saved position, even after the first batch."""
        self._stream = None
        self._delivered = self._began_after = 0
        self._restore(merge_states(state), True)
        self.dataset = replace(self.dataset, lanes=self._lanes)


def _batches(size: int, collate: Callable[[Any], Any] | None, drop_last: bool) -> Batched:
    return Batched(size, collate or collate_default, not drop_last)


def collate_default(items: list[Any]) -> Any:
    """Collate a batch as torch's DataLoader does, or into arrays without torch."""
    torch = torch_or_none()
    if torch is None:
        return default_collation_fn(items)
    return torch.utils.data.default_collate(items)


def _start_method(context: Any) -> Any:
    return context if context is None or isinstance(context, str) else context.get_start_method()


_WITHOUT_EFFECT = ("persistent_workers", "generator", "pin_memory_device", "in_order", "shuffle")
_SAMPLING = ("shuffle", "sampler", "batch_sampler")


def _check_ignored(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in (*_WITHOUT_EFFECT, *_SAMPLING):
            close = nearest(name, (*signature(WebLoader).parameters, *_WITHOUT_EFFECT))
            advice = f"did you mean {close!r}?" if close else "see `help(WebLoader)`"
            raise UnknownArgumentError(f"WebLoader() has no argument {name!r}; {advice}")
        if name in _SAMPLING and value is not None and value is not False:
            raise ConfigError(
                f"WebLoader({name}={value!r}): pipelines are shuffled and sampled by their own "
                "stages; leave it out"
            )


def _torch_loader(dataset: Any, **arguments: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, **arguments)
