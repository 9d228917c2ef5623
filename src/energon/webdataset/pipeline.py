"""Pipelines: a list of stages, from whatever a program lists as stages, and loops over them.

`pipeline` is that list, which a program may change; `append`, `with_epoch`, `repeat` and
`with_length` change the pipeline, every other method returns another one. What a pipeline iterates
over is a function of its stages, its seed and the epoch; epochs are counted as loops begin. A loop
keeps the stages that it began with. How far the latest one is can be saved and restored if all
stages can.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

from energon.errors import ConfigError
from energon.samples.display import register_with_notebook
from energon.webdataset.names import __getattr__ as __getattr__
from energon.webdataset.running.loop import Extent, Loop, Scope, Snapshot, runs_within_stage
from energon.webdataset.running.worker_info import (
    EpochCounter,
    TorchLookalike,
    add_length_method,
    current_worker_info,
    is_divided_by_trainer,
    set_divided_by_trainer,
    warn_of_trainer,
)
from energon.webdataset.shardlists import split_by_node, split_by_worker
from energon.webdataset.stages.base import (
    ALL_SPLITS,
    Context,
    Positioned,
    SplitAxis,
    Stage,
    State,
    UnsavableIterator,
    UnsavableSource,
    close,
    describe,
    open_source,
)
from energon.webdataset.stages.shuffling import default_seed

_SPLITTERS: dict[Any, SplitAxis] = {split_by_node: "rank", split_by_worker: "worker"}


class _FunctionStage(Stage):
    """Runs a function, which may be known to divide its items, or not to do so."""

    @property
    def called(self) -> Callable[..., Any]:
        """The function."""
        raise NotImplementedError

    @property
    def splits(self) -> frozenset[SplitAxis]:
        function = _unbound(self.called)
        return frozenset(split for splitter, split in _SPLITTERS.items() if function is splitter)

    @property
    def may_split(self) -> bool:
        return not str(_unbound(self.called).__module__).startswith("energon.webdataset.")


class FilterFunction(_FunctionStage):
    """A function of an iterator and further arguments, with these arguments bound."""

    def __init__(self, f: Callable[..., Iterable[Any]], *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw

    @property
    def called(self) -> Callable[..., Iterable[Any]]:
        return self.f

    def describe(self) -> dict[str, Any]:
        settings = {"f": describe(self.f), "args": describe(self.args), "kw": describe(self.kw)}
        return {"stage": "FilterFunction", **settings}

    def __str__(self) -> str:
        return f"<{getattr(self.f, '__name__', self.f)} {self.args} {self.kw}>"

    __repr__ = __str__

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        items = self.f(source, *self.args, **self.kw)
        return UnsavableIterator(items, describe(self.f), source)


class RestCurried:
    """Turns a function into a factory of stages, called with all arguments except the first."""

    def __init__(self, f: Callable[..., Iterable[Any]]) -> None:
        self.f = f

    def __call__(self, *args: Any, **kw: Any) -> FilterFunction:
        return FilterFunction(self.f, *args, **kw)


def pipelinefilter(f: Callable[..., Iterable[Any]]) -> RestCurried:
    """Return a factory of stages for a function whose first argument is an iterator.

    Example:
        >>> def add(source, number):
        ...     return (item + number for item in source)
        >>> list(pipelinefilter(add)(10)([1, 2]))
        [11, 12]
    """
    return RestCurried(f)


class PipelineStage:
    """Base for stages of users: a subclass defines `run`.

    Example:
        >>> class Twice(PipelineStage):
        ...     def run(self, source):
        ...         for item in source:
        ...             yield from (item, item)
        >>> from energon.webdataset.pipeline import DataPipeline
        >>> list(DataPipeline("ab", Twice()))
        ['a', 'a', 'b', 'b']
    """

    def run(self, src: Iterator[Any]) -> Iterable[Any]:
        """Return the stage's output for `src`; a source takes no argument."""
        raise NotImplementedError(f"{type(self).__name__} is a stage without run(src)")

    def invoke(self, *args: Any, **kw: Any) -> Iterable[Any]:
        """Run the stage."""
        return self.run(*args, **kw)


@dataclass(frozen=True)
class CallStage(_FunctionStage):
    """Runs a user function from iterator to iterator; one that is a source takes no argument."""

    function: Callable[..., Iterable[Any]]
    is_source: bool = False

    @property
    def called(self) -> Callable[..., Iterable[Any]]:
        return self.function

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        if self.is_source:
            return UnsavableSource(open_source(self.function), describe(self.function))
        return UnsavableIterator(self.function(source), describe(self.function), source)


@dataclass(frozen=True)
class IterableStage(Stage):
    """Yields the items of an iterable that can be iterated over repeatedly."""

    items: Any

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        if isinstance(self.items, list | tuple):
            return Positioned(partial(_taken, self.items), taken=0)
        if isinstance(self.items, Stage):
            return self.items.open(source, context)
        opened = open_source(iter, self.items)
        if hasattr(opened, "state_dict"):
            return opened
        return UnsavableSource(opened, describe(self.items))

    def describe(self) -> dict[str, Any]:
        items = self.items
        described = len(items) if isinstance(items, list | tuple) else describe(items)
        return {"stage": "IterableStage", "items": described}


def _taken(items: Sequence[Any], source: Iterator[Any], at: State) -> Iterator[Any]:
    while at["taken"] < len(items):
        at["taken"] += 1
        yield items[at["taken"] - 1]


@dataclass(frozen=True)
class PipelineSource(Stage):
    """One pass over another pipeline, as long as its own loops would be."""

    pipeline: Any

    @property
    def generators(self) -> Sequence[random.Random]:
        generators: Sequence[random.Random] = self.pipeline.snapshot().generators
        return generators

    @property
    def splits(self) -> frozenset[SplitAxis]:
        stages: Sequence[Stage] = self.pipeline.snapshot().stages
        return frozenset[SplitAxis]().union(*(stage.splits for stage in stages))

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        snapshot = replace(
            self.pipeline.snapshot(),
            later_splits=context.later_splits,
            divides=context.divides,
        )
        items: Iterator[Any] = snapshot.items_of_loop(context.worker, context.epoch)
        return items

    def describe(self) -> dict[str, Any]:
        return {"stage": "PipelineSource", "pipeline": self.pipeline.describe()}


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    return _unbound(function.func) if isinstance(function, partial) else function


def as_stages(listed: Iterable[Any], *, has_source: bool = False) -> tuple[Stage, ...]:
    """Return the stages that a program has listed.

    Args:
        listed: See `DataPipeline`.
        has_source: Whether there are stages before these.

    Raises:
        ConfigError: If one of them is not a stage.
    """
    stages: list[Stage] = []
    for each in flat(listed):
        stages.append(as_stage(each, is_source=not has_source and not stages))
    return tuple(stages)


def flat(listed: Iterable[Any]) -> Iterator[Any]:
    """Yield stages, with lists flattened and None omitted."""
    for each in listed:
        if isinstance(each, list) and all(map(_may_be_stage, each)):
            yield from flat(each)
        elif each is not None:
            yield each


def _may_be_stage(each: Any) -> bool:
    return each is None or callable(each) or isinstance(each, list) or hasattr(each, "run")


def as_stage(each: Any, *, is_source: bool) -> Stage:
    """Return a stage, function or object as a stage.

    Args:
        each: Anything that `DataPipeline` takes, but for None and lists of stages.
        is_source: Whether it is the first one, and may be any iterable.

    Raises:
        ConfigError: If it is not a stage.
    """
    if isinstance(each, Stage):
        return each
    if hasattr(each, "snapshot"):
        return PipelineSource(each)
    if is_source and hasattr(each, "__iter__"):
        return IterableStage(each)
    if hasattr(each, "run"):
        return CallStage(each.run, is_source and not _takes_source(each.run))
    if callable(each):
        return CallStage(each, is_source)
    raise ConfigError(
        f"{each!r} is not a stage: expected stages of energon.webdataset, functions from iterator "
        "to iterator, objects with run(iterator), and an iterable or a function as the first"
    )


def _takes_source(run: Callable[..., Any]) -> bool:
    try:
        inspect.signature(run).bind()
    except TypeError:
        return True
    return False


class DataPipeline(TorchLookalike):
    """A source and the stages after it.

    Stages are the ones of this package, functions from iterator to iterator, or objects with
    `run(iterator)`. The first one may be any iterable, or a function without arguments. None is
    left out, lists are taken as several stages.

    Args:
        stages: The source and what comes after it.
        seed: Determines all random choices of the stages; None means WDS_SEED of the environment,
            or 0.
        kw: Accepted for compatibility.

    Attributes:
        pipeline: The stages, as they were given. Each loop takes them as they are when it begins.
        repetitions: How many passes over the data a loop makes.
        nsamples: Number of items after which a loop ends; -1 for where the data ends.

    Example:
        >>> from energon.webdataset.filters import batched
        >>> pipeline = DataPipeline(range(5), batched(2, collation_fn=list))
        >>> list(pipeline)
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, *stages: Any, seed: int | None = None, **kw: Any) -> None:
        self.pipeline: list[Any] = list(flat(stages))
        self.seed = default_seed(seed)
        self.length = -1
        self.repetitions = 1
        self.nsamples = -1
        # None until an epoch is set: only then nsamples means something.
        self._scope: Scope | None = None
        # None depends on the stages: what is random continues.
        self._continues: bool | None = False
        self._first_epoch = 0
        self._epochs = EpochCounter()
        self._loop: Loop | None = None
        self._pending: State | None = None
        self._check_stages()
        register_with_notebook()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, with functions and objects of the program wrapped as stages."""
        return as_stages(self.pipeline)

    @property
    def is_random(self) -> bool:
        """Whether a stage yields other items, or another order, in each epoch."""
        return any(getattr(stage, "is_random", False) for stage in self.pipeline)

    @property
    def extent(self) -> Extent:
        """How far a loop goes."""
        return Extent(
            passes=None if self.repetitions >= sys.maxsize else self.repetitions,
            items=self.nsamples if self._is_limited else None,
            scope=self._scope or "worker",
            goes_on=self.goes_on,
            first_epoch=self._first_epoch,
        )

    @property
    def goes_on(self) -> bool:
        """Whether a loop starts where the one before stopped."""
        if not self._is_limited:
            return False
        return self.is_random if self._continues is None else self._continues

    @property
    def _is_limited(self) -> bool:
        return self.nsamples > 0 and (self._scope is not None or self.repetitions != 1)

    def snapshot(self) -> Snapshot:
        """Return this pipeline as it is now."""
        return Snapshot(tuple(self.pipeline), self.stages, self.seed, self.extent)

    def __iter__(self) -> Iterator[Any]:
        worker, before = current_worker_info(), self._loop
        snapshot = self.snapshot()
        if before is not None and not snapshot.has_stages_of(before.snapshot):
            # Positions in other stages mean nothing here.
            self._first_epoch = self._epochs.epochs
            snapshot, before = self.snapshot(), None
        snapshot = replace(snapshot, divides=not runs_within_stage())
        state, self._pending = self._pending, None
        if state is None:
            epoch = self._epochs.begin()
            if epoch == 0 and worker.number == 0:
                warn_of_trainer()
            self._loop = Loop(snapshot, self._epochs, worker, epoch, before)
        else:
            self._loop = Loop(snapshot, self._epochs, worker, state["epoch"], state=state)
        return self._loop

    def iterator(self) -> Iterator[Any]:
        """Return the items of the next loop, as if no number of items were set."""
        return self.snapshot().passes_of_loop(current_worker_info(), self._epochs.begin())

    def iterator1(self) -> Iterator[Any]:
        """Return the items of one pass."""
        return self.snapshot().open(Context(current_worker_info(), self.seed, self._epochs.begin()))

    def invoke(self, f: Any, *args: Any, **kw: Any) -> Iterator[Any]:
        """Return the output of one stage for an iterator; a source takes none."""
        if kw or len(args) > 1:
            return iter(f(*args, **kw))
        (stage,) = as_stages([f], has_source=bool(args))
        source = iter(args[0]) if args else iter(())
        worker, epoch = current_worker_info(), self._epochs.epochs
        return stage.open(source, Context(worker, self.seed, epoch, later_splits=ALL_SPLITS))

    def compose(self, *stages: Any) -> Self:
        """Return another pipeline, with more stages at its end."""
        changed = self._copied()
        changed.pipeline.extend(flat(stages))
        changed._check_stages()
        return changed

    def append(self, f: Any) -> Self:
        """Add a stage to this pipeline, and return it; the next loop begins with a new pass."""
        self.pipeline.extend(flat([f]))
        self._check_stages()
        self._first_epoch = self._epochs.epochs
        return self

    def stage(self, i: int) -> Any:
        """Return stage number `i` as it was given, counted from 0."""
        return self.pipeline[i]

    def with_epoch(
        self,
        nsamples: int = -1,
        nbatches: int = -1,
        *,
        scope: Scope = "worker",
        continues: bool | None = None,
    ) -> Self:
        """Let each loop over this pipeline yield this many items, and return the pipeline.

        Items are what leaves the pipeline: samples, or batches after `batched`. The data is
        repeated, and reshuffled, for as long as it takes.

        Args:
            nsamples: How many items; -1 for loops without end.
            nbatches: Another name for the same.
            scope: Who counts the items together: each worker on its own, all workers of a rank, or
                all ranks of the job, which then get the same number each.
            continues: Whether a loop continues where the one before stopped, or starts over. None
                continues if a stage is random, as after a shuffle, and starts over if not, so that
                every loop over unshuffled data yields the same items.
        """
        items = max(nsamples, nbatches)
        if items < 1 and items != -1:
            raise ConfigError(f"with_epoch({items}): expected 1 or more, or -1 for no limit")
        if self._continues is False:
            self._first_epoch = self._epochs.epochs
        if continues is not False:
            self._epochs.keep_notes()
        self.repetitions, self.nsamples = sys.maxsize, items
        self._scope, self._continues = scope, continues
        return self

    def repeat(self, nepochs: int | None = None, nbatches: int | None = None) -> Self:
        """Let each loop over this pipeline make several passes, and return the pipeline.

        Args:
            nepochs: How many; None, 0 or less for loops without end.
            nbatches: Number of items of this worker after which a loop ends anyway; None, 0 or
                less for no limit.
        """
        self.repetitions = sys.maxsize if nepochs is None or nepochs < 1 else nepochs
        self.nsamples = -1 if nbatches is None or nbatches < 1 else nbatches
        self._scope, self._continues = "worker", False
        return self

    def with_length(self, n: int | None = None, silent: bool = False) -> Self:
        """Let `len` of this pipeline return a length, and return the pipeline.

        Args:
            n: The length; None counts the samples that the indexes of its shards list.
            silent: Accepted for compatibility.

        Raises:
            ConfigError: If the length is negative, or there are no indexes.
        """
        if n is None:
            from energon.webdataset.descriptor import count_samples

            n = count_samples(self)
        if not isinstance(n, int) or n < 0:
            raise ConfigError(f"with_length({n!r}): expected a whole number, 0 or more")
        self.size = n
        add_length_method(self)
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next loop to `epoch`, here and in workers that start with it."""
        self._epochs.set(epoch)
        self._loop = None

    def state_dict(self) -> State:
        """Return where the latest loop is: its next item is the first one after a restore.

        Raises:
            StateError: If a stage cannot be saved; it is named.
        """
        if self._pending is not None:
            return self._pending
        if self._loop is None:
            return Loop.state_before(self.snapshot(), self._epochs.epochs)
        snapshot = self.snapshot()
        if self._loop.is_over and not snapshot.has_stages_of(self._loop.snapshot):
            return Loop.state_before(snapshot, self._loop.epoch + 1)
        return self._loop.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """Let the next loop continue where a state was saved.

        Raises:
            StateError: If it was saved by another pipeline, or elsewhere in the job.
        """
        Loop.check(self.snapshot(), state_dict)
        self._pending = state_dict

    def describe(self) -> list[Any]:
        """Return the fingerprint that a saved state must match, as JSON."""
        return self.snapshot().describe()

    def close(self) -> None:
        """Release what the latest loop holds: files, processes, connections."""
        close(self._loop)
        self._loop = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __add__(self, other: Any) -> Any:
        from torch.utils.data import ChainDataset

        return ChainDataset([self, other])

    def __repr__(self) -> str:
        names = ", ".join(str(stage["stage"]) for stage in self.describe())
        return f"<{type(self).__name__}: {names}>"

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is not forked does not have the stack of the training process.
        is_divided = get_spawning_popen() is not None and is_divided_by_trainer()
        return {**self.__dict__, "_loop": None, "_is_divided_by_trainer": is_divided}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.__dict__.pop("_is_divided_by_trainer"):
            set_divided_by_trainer()

    def _check_stages(self) -> None:
        """Raise ConfigError for anything but stages, and for files that override two shards."""
        stages = self.stages
        urls = getattr(stages[0], "urls", None) if stages else None
        for stage in stages if isinstance(urls, list) else ():
            cache = getattr(getattr(stage, "opening", None), "cache", None)
            if cache is not None:
                cache.check_overrides(urls)

    def _copied(self) -> Self:
        """Return a copy that has not begun yet."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        epochs = EpochCounter()
        if self._continues is not False:
            epochs.keep_notes()
        copied.__dict__.update(_epochs=epochs, _loop=None, _pending=None, _first_epoch=0)
        copied.pipeline = list(self.pipeline)
        return copied
