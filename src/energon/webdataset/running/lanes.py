"""Host a pipeline in the workers of energon's loader.

Each worker of a DataLoader is a lane: it has its part of the shards and its own place in the
job, that stays the same wherever the lane is hosted. So the order of the batches is a function
of the number of lanes alone, and a state fits any number of ranks and workers.

Code in workers finds what torch's DataLoader would tell it, and batches of arrays become tensors
as they do there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import FunctionType
from typing import Any

import numpy as np

from energon.errors import ConfigError, StateError
from energon.formats.json_text import parse_json
from energon.loader.state import merge_states
from energon.messages import counted
from energon.plan.randomness import derive_seed
from energon.samples.collate import has_torch
from energon.stages.base import DatasetIterator
from energon.stages.lane import Lane
from energon.webdataset import utils
from energon.webdataset.running.loop import Extent
from energon.webdataset.running.place import Place, running_at
from energon.webdataset.stages.base import (
    Context,
    StageIterator,
    State,
    load_state,
    state_of,
    unpack,
)
from energon.webdataset.stages.batching import Batched
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

    @property
    def is_parent(self) -> bool:
        """Whether this is the training process."""
        return os.getpid() == self._parent

    def enter(self, place: Place, epoch: int) -> None:
        """Say that this process works for the worker at `place` now, in a loop of this number."""
        if self.is_parent:
            return
        utils.enforce_security = self._enforce_security
        module: Any = sys.modules.get("torch.utils.data._utils.worker")
        if module is not None:
            # The one way to be found by torch.utils.data.get_worker_info().
            module._worker_info = module.WorkerInfo(
                id=place.worker,
                num_workers=place.num_workers,
                seed=self._loop_seed(place.rank, epoch) + place.worker,
                dataset=self._dataset,
            )
        if self._init is not None and self._initialized != os.getpid():
            self._initialized = os.getpid()
            self._init(place.worker)

    def _loop_seed(self, rank: int, epoch: int) -> int:
        """Return what the workers of a rank add their numbers to, for seeds of their own.

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
    found = None if state["items"] is None else state["items"]["pass"]
    if not isinstance(found, Mapping) or set(found) != {"epoch", "loader"}:
        raise StateError(
            "the number of ranks has changed, and stages after the loader hold items of a rank (a "
            "shuffle, a batch taken apart), or a rank has ended its epoch before the others; save "
            "at the end of an epoch, or let these stages run in the workers"
        )
    return dict(found)


_IDENTITY: Any = lambda value: value  # noqa: E731


def returns_argument(function: Any) -> bool:
    """Return whether a function does nothing but return its only argument.

    Many programs pass one to keep batches as they are.

    Example:
        >>> returns_argument(lambda batch: batch), returns_argument(list)
        (True, False)
    """
    if type(function) is not FunctionType:
        return False
    code = function.__code__
    return bool(code.co_code == _IDENTITY.__code__.co_code and code.co_argcount == 1)


_PLAIN = frozenset({bytes, str, int, float, bool, type(None)})


def torch_or_none() -> Any:
    """Return torch, or None where it is not installed."""
    if not has_torch():
        return None
    import torch
    import torch.utils.data

    return torch


def convert(value: Any) -> Any:
    """Return a value with tensors in place of numpy arrays and numbers; tuples become lists.

    torch is imported for the first array.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {n: v if type(v) in _PLAIN else convert(v) for n, v in value.items()}
    if kind is list or kind is tuple:
        return [v if type(v) in _PLAIN else convert(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return value if value.dtype.kind in "USO" else torch_or_none().as_tensor(value)
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
        """Return what a saved state has to agree with, as JSON."""
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
        self._place = Place(lane.number % ranks, ranks, lane.number // ranks, lane.lanes // ranks)
        self._noted: str | None = state["noted"]
        self._since: int = state["since"]
        self._unsavable: str | None = None
        self._is_new = True
        with running_at(self._place):
            self._source = _open(pipeline, self._place, state["epoch"])
            if self._noted is not None:
                load_state(self._source, parse_json(self._noted, origin="the noted state"))
            self._items = iter(self._source)
            self._skip(self._since)
        self._noted_at = 0.0

    def __next__(self) -> Any:
        with running_at(self._place):
            if self._process is not None:
                self._process.enter(self._place, self._state["epoch"])
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

    def _skip(self, count: int) -> None:
        passed = sum(1 for _ in islice(self._items, count))
        if passed < count:
            raise StateError(
                f"the data has ended {count - passed} batches before the saved position; has it "
                "changed since?"
            )


class EpochBatches(StageIterator):
    """Batches of items without end, none of which belongs to two epochs.

    Args:
        items: What the batches are made of.
        length: How many items an epoch has.
        batch: Makes the batches.
    """

    def __init__(self, items: Iterator[Any], length: int, batch: Batched) -> None:
        self._length = self._left = length
        self._batch = batch
        super().__init__(items)

    def _run(self) -> Iterator[Any]:
        items = iter(self._source)
        yield from self._batch.batches(iter(lambda: self._next_items(items), []))

    def _next_items(self, items: Iterator[Any]) -> list[Any]:
        batch = list(islice(items, min(self._batch.batchsize, self._left)))
        self._left = self._left - len(batch) or self._length
        return batch

    def state_dict(self) -> State:
        return {"source": state_of(self._source), "left": self._left}

    def load_state_dict(self, state: State) -> None:
        source, self._left = unpack(state, "source", "left")
        load_state(self._source, source)


def _open(pipeline: LanePipeline, place: Place, epoch: int) -> Iterator[Any]:
    snapshot, batch = pipeline.dataset.snapshot(), pipeline.batch
    extent = snapshot.extent
    if extent.goes_on:
        items: Iterator[Any] = snapshot.passes(place, first=epoch, count=None)
        if batch is not None and extent.scope == "worker":
            return EpochBatches(items, extent.rank_share(place.world_size), batch)
    else:
        items = snapshot.items_of_loop(place, epoch)
    if batch is None:
        return items
    return batch.open(items, Context(place, snapshot.seed, epoch, ("loader",)))
