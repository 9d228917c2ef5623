"""Load pipelines in worker processes: `WebLoader`, both a DataLoader and a pipeline."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from inspect import signature
from itertools import islice
from typing import Any

import numpy as np

from energon.errors import ConfigError, StateError, UnknownArgumentError
from energon.formats.text import parse_json
from energon.loader.options import LoaderOptions
from energon.loader.savable import SavableDataLoader
from energon.loader.state import LanePosition, merge_states
from energon.messages import counted, nearest
from energon.plan.randomness import derive_seed
from energon.samples.collate import has_torch
from energon.stages.base import DatasetIterator
from energon.stages.lane import Lane
from energon.webdataset import utils
from energon.webdataset.compat import FluidInterface
from energon.webdataset.pipeline import DataPipeline
from energon.webdataset.running.loop import Extent, Loop, Passes, Snapshot
from energon.webdataset.running.worker_info import WorkerInfo, current_worker_info, running_as
from energon.webdataset.stages.base import (
    Context,
    Positioned,
    Stage,
    StageIterator,
    State,
    load_state,
    skip_items,
    state_of,
    unpack,
)
from energon.webdataset.stages.batching import Batched, default_collation_fn
from energon.worker import WorkerConfig


class LaneProcess:
    """What is done once in each worker process, and before each batch.

    Args:
        dataset: What `get_worker_info().dataset` is.
        init: Called with the number of the worker, once in each process; None does nothing.
        seed: The seed of the pipeline.
    """

    def __init__(self, dataset: Any, init: Callable[[int], Any] | None, seed: int) -> None:
        self._dataset = dataset
        self._init = init
        torch = sys.modules.get("torch")
        drawn = 0 if torch is None else int(torch.empty((), dtype=torch.int64).random_())
        self._seeds = seed, drawn
        self._parent = os.getpid()
        self._initialized = 0
        self._enforce_security = utils.enforce_security

    def enter(self, worker: WorkerInfo, epoch: int) -> None:
        """Let this process work for a worker from now on, in a loop of this number."""
        if os.getpid() == self._parent:
            return
        utils.enforce_security = self._enforce_security
        module: Any = sys.modules.get("torch.utils.data._utils.worker")
        if module is not None:
            # The one way to be found by torch.utils.data.get_worker_info().
            module._worker_info = module.WorkerInfo(
                id=worker.number,
                num_workers=worker.num_workers,
                seed=self._loop_seed(worker.rank, epoch) + worker.number,
                dataset=self._dataset,
            )
        if self._init is not None and self._initialized != os.getpid():
            self._initialized = os.getpid()
            self._init(worker.number)

    def _loop_seed(self, rank: int, epoch: int) -> int:
        """Return the number to which workers of a rank add theirs, for seeds of their own.

        As in torch's DataLoader, it is drawn from the generator of the program, so it differs in
        each loop of each loader, and is the same in a restored loop if the program seeds the
        generator in the same way.
        """
        return derive_seed(*self._seeds, "worker info", rank, epoch) >> 2


def merge_rank_states(states: Sequence[State]) -> State:
    """Return a state of a loader that any rank of any job can load.

    Args:
        states: What `state_dict` of a `WebLoader` returned, once, on every rank.

    Raises:
        StateError: If they were saved at different times, or hold more than the position of the
            workers: a stage after the loader that keeps items, or counts them.
    """
    first = states[0]
    for other in states[1:]:
        for name in ("stages", "seed", "epoch"):
            if other[name] != first[name]:
                raise StateError(
                    f"the states of the ranks do not belong together: {name} is {first[name]!r} "
                    f"in one and {other[name]!r} in another; were they saved after the same step?"
                )
    if all(state["items"] is None for state in states):
        return {**first, "place": None}
    if any(state["given"] for state in states):
        raise StateError(
            "the number of ranks has changed, and an epoch that was set after the loader counts "
            "the items of a rank; set it on the dataset: WebLoader(dataset.with_epoch(n))"
        )
    positions = [_position(state) for state in states]
    merged = {**positions[0], "loader": merge_states([each["loader"] for each in positions])}
    return {**first, "place": None, "items": {**first["items"], "pass": merged}}


def _position(state: State) -> dict[str, Any]:
    """Return where the workers of a rank are, if that is all there is to know."""
    position = None if state["items"] is None else state["items"]["pass"]
    if not isinstance(position, Mapping) or set(position) != {"epoch", "loader"}:
        raise StateError(
            "the number of ranks has changed, and stages after the loader hold items of a rank (a "
            "shuffle, a batch taken apart), or a rank has ended its epoch before the others; save "
            "at the end of an epoch, or let these stages run in the workers"
        )
    return dict(position)


_PLAIN = frozenset({bytes, str, int, float, bool, type(None)})


def convert(value: Any) -> Any:
    """Return a value with tensors in place of numpy arrays and numbers; tuples become lists.

    torch is imported for the first array.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {name: convert(each) for name, each in value.items()}
    if kind is list or kind is tuple:
        return list(map(convert, value))
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind in "USO":
            return value
        from torch import as_tensor

        return as_tensor(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(convert(each) for each in value))
    return value


NOTE_SECONDS = 0.05
"""How old a noted position may be: restoring repeats what was done since."""


@dataclass(frozen=True)
class LanePipeline:
    """A pipeline as the loader sees it.

    Args:
        dataset: The pipeline.
        worker_config: Where this process stands, and how many workers it has.
        batch: Makes batches of its items; None leaves them as they are.
        process: Told of the worker process; None in the training process.
        finish: Changes what is yielded; None yields it as it is.
        lanes: How many lanes the run has; None for the default.
    """

    dataset: Any
    worker_config: WorkerConfig
    batch: Batched | None = None
    process: LaneProcess | None = None
    finish: Callable[[Any], Any] | None = None
    lanes: int | None = None

    restart = False
    start_method_argument = "multiprocessing_context"
    """How `WebLoader` calls the start method, for messages."""

    @property
    def default_lanes(self) -> int:
        """The number of lanes of a new run: each has its part of the shards, as workers have."""
        return self.worker_config.total_workers

    @property
    def virtual_epoch_length(self) -> int:
        """Batches of a rank after which a loop ends; 0 means where the data ends."""
        if not self.dataset.goes_on:  # asked after every batch
            return 0
        extent: Extent = self.dataset.extent
        ranks = self.worker_config.world_size
        counts = (self.lanes or self.default_lanes) // ranks if extent.scope == "worker" else 1
        return counts * self._num_batches_of(extent.rank_share(ranks))

    def _num_batches_of(self, items: int) -> int:
        """Return how many batches items that are counted together make."""
        if self.batch is None:
            return items
        size = self.batch.batchsize
        if self.batch.partial:
            return -(-items // size)
        if items < size:
            raise ConfigError(
                f"with_epoch({items}) and drop_last=True: an epoch of {counted(items, 'item')} has "
                f"no whole batch of {size}"
            )
        return items // size

    def first_state(self, epoch: int) -> State:
        """Return the state of a lane before the first batch of an epoch."""
        return {
            "epoch": epoch,
            "world_size": self.worker_config.world_size,
            "noted": None,
            "since": 0,
            "unsavable": None,
        }

    def open_lane(self, lane: Lane, state: State | None) -> DatasetIterator[Any]:
        """Return the batches of a lane from where `state` was saved; None is the beginning."""
        return LaneItems(self, lane, self.first_state(0) if state is None else state)

    def num_batches(self, lane: int, lanes: int) -> int | None:
        """Return None: the number of samples is not known."""
        return None

    def fingerprint(self, lanes: int) -> dict[str, Any]:
        """Return the fingerprint that a saved state must match, as JSON."""
        return {
            "stages": self.dataset.describe(),
            "seed": self.dataset.seed,
            "batch_size": None if self.batch is None else self.batch.batchsize,
        }


class LaneItems(DatasetIterator[Any]):
    """The batches of one lane, from a saved position."""

    def __init__(self, pipeline: LanePipeline, lane: Lane, state: State) -> None:
        if state["unsavable"] is not None:
            raise StateError(state["unsavable"])
        self._state = state
        self._process = pipeline.process
        self._finish = pipeline.finish
        ranks = state["world_size"]
        self._worker = WorkerInfo(
            lane.number % ranks, ranks, lane.number // ranks, lane.lanes // ranks
        )
        self._noted: str | None = state["noted"]
        self._since: int = state["since"]
        self._unsavable: str | None = None
        self._is_new = True
        with running_as(self._worker):
            self._source = _open(pipeline, self._worker, state["epoch"])
            if self._noted is not None:
                load_state(self._source, parse_json(self._noted, origin="the noted state"))
            self._items = iter(self._source)
            skip_items(self._items, self._since)
        self._noted_at = 0.0

    def __next__(self) -> Any:
        with running_as(self._worker):
            if self._process is not None:
                self._process.enter(self._worker, self._state["epoch"])
            self.only_counts = not self._is_new
            self._note()
            item = next(self._items)
            self._since += 1
            if self._is_new:
                self._check_savable()
            return item if self._finish is None else self._finish(item)

    @property
    def row(self) -> int:
        """Number of the batch within the lane; rows of samples are not counted here."""
        return self._since

    def state_dict(self) -> State:
        """Return a position noted lately, and how many batches came since."""
        return {
            **self._state,
            "noted": self._noted,
            "since": self._since,
            "unsavable": self._unsavable,
        }

    def _note(self) -> None:
        """Note the position before the next batch, now and then."""
        now = time.monotonic()
        if now - self._noted_at < NOTE_SECONDS or self._unsavable is not None:
            return
        self.only_counts = False
        try:
            self._noted = json.dumps(state_of(self._source))
            self._since = 0
        except StateError as error:
            self._unsavable = str(error)
        # Writing it down may take long, too.
        self._noted_at = time.monotonic()

    def _check_savable(self) -> None:
        """Find out whether positions can be noted, as soon as all stages are open."""
        self._is_new = False
        try:
            state_of(self._source)
        except StateError as error:
            self._unsavable = str(error)


def _epoch_batches(length: int, batch: Batched, source: Iterator[Any], at: State) -> Iterator[Any]:
    """Yield batches of items without end, none of which belongs to two epochs of a length."""
    items = iter(source)

    def next_items() -> list[Any]:
        chosen = list(islice(items, min(batch.batchsize, at["left"])))
        at["left"] = at["left"] - len(chosen) or length
        return chosen

    yield from batch.batches(iter(next_items, []))


def _open(pipeline: LanePipeline, worker: WorkerInfo, epoch: int) -> Iterator[Any]:
    snapshot, batch = pipeline.dataset.snapshot(), pipeline.batch
    extent = snapshot.extent
    if extent.goes_on:
        items: Iterator[Any] = Passes(snapshot, worker, first=epoch)
        if batch is not None and extent.scope == "worker":
            length = extent.rank_share(worker.world_size)
            return Positioned(partial(_epoch_batches, length, batch), items, left=length)
    else:
        items = snapshot.items_of_loop(worker, epoch)
    if batch is None:
        return items
    return batch.open(items, Context(worker, snapshot.seed, epoch, ("loader",)))


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
            from torch.utils.data import DataLoader

            super().__init__(
                DataLoader(
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
        worker = current_worker_info()
        process = LaneProcess(dataset, worker_init_fn, dataset.seed) if num_workers else None
        lanes = LanePipeline(
            dataset,
            WorkerConfig(rank=worker.rank, world_size=worker.world_size, num_workers=num_workers),
            None
            if batch_size is None
            else Batched(batch_size, collate_fn or collate_default, not drop_last),
            process,
            collate_fn if batch_size is None else None,
        )
        start_method = multiprocessing_context
        if hasattr(start_method, "get_start_method"):
            start_method = start_method.get_start_method()
        options = LoaderOptions(
            start_method=start_method,
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
        here = list(astuple(current_worker_info()))
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
        first = self.dataset.first_state(epoch)
        positions = {}
        for lane, position in self._positions.items():
            # A lane keeps its rank and worker.
            ranks = (position.saved_state() or first)["world_size"]
            positions[lane] = LanePosition(
                state={**first, "world_size": ranks},
                skip_rows=position.skip_rows,
                counts=position.counts,
                times=position.times,
            )
        self._positions, self._stream = positions, None

    def _begin_next_pass(self) -> bool:
        """Return False: the pipeline begins its epochs."""
        return False

    def go_to(self, state: State) -> None:
        """Move to a saved position, even after the first batch."""
        self._stream = None
        self._delivered = self._began_after = 0
        self._restore(merge_states(state), self._continuation(strict=True, relane=False))
        self.dataset = replace(self.dataset, lanes=self._lanes)


def collate_default(items: list[Any]) -> Any:
    """Collate a batch as torch's DataLoader does, or into arrays without torch."""
    if not has_torch():
        return default_collation_fn(items)
    from torch.utils.data import default_collate

    return default_collate(items)


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
