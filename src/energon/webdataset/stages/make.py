"""Convert whatever a program lists as stages into stages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from energon.errors import ConfigError
from energon.webdataset.shardlists import split_by_node, split_by_worker
from energon.webdataset.stages.base import (
    Context,
    Positioned,
    SplitAxis,
    Stage,
    State,
    UnsavableIterator,
    UnsavableSource,
    describe,
    open_source,
)


class FilterFunction(Stage):
    """A function of an iterator and further arguments, with these arguments bound."""

    def __init__(self, f: Callable[..., Iterable[Any]], *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw

    def describe(self) -> dict[str, Any]:
        settings = {"f": describe(self.f), "args": describe(self.args), "kw": describe(self.kw)}
        return {"stage": "FilterFunction", **settings}

    def __str__(self) -> str:
        return f"<{getattr(self.f, '__name__', self.f)} {self.args} {self.kw}>"

    __repr__ = __str__

    @property
    def splits(self) -> frozenset[SplitAxis]:
        return _splits(self.f)

    @property
    def may_split(self) -> bool:
        return _may_split(self.f)

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
class CallStage(Stage):
    """Runs a user function from iterator to iterator; one that is a source takes no argument."""

    function: Callable[..., Iterable[Any]]
    is_source: bool = False

    @property
    def splits(self) -> frozenset[SplitAxis]:
        return _splits(self.function)

    @property
    def may_split(self) -> bool:
        return _may_split(self.function)

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
        about = len(items) if isinstance(items, list | tuple) else describe(items)
        return {"stage": "IterableStage", "items": about}


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
        found: Sequence[random.Random] = self.pipeline.snapshot().generators
        return found

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
        items: Iterator[Any] = snapshot.items_of_loop(context.place, context.epoch)
        return items

    def describe(self) -> dict[str, Any]:
        return {"stage": "PipelineSource", "pipeline": self.pipeline.describe()}


def _splits(function: Callable[..., Any]) -> frozenset[SplitAxis]:
    """Return among what a function is known to divide its items."""
    function = _unbound(function)
    return frozenset(split for splitter, split in _SPLITTERS if function is splitter)


def _may_split(function: Callable[..., Any]) -> bool:
    """Return whether a function may divide its items: those of this package are known not to."""
    return not str(_unbound(function).__module__).startswith("energon.webdataset.")


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    return _unbound(function.func) if isinstance(function, partial) else function


_SPLITTERS: tuple[tuple[Any, SplitAxis], ...] = (
    (split_by_node, "rank"),
    (split_by_worker, "worker"),
)


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
        stages.append(_as_stage(each, is_source=not has_source and not stages))
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


def _as_stage(each: Any, *, is_source: bool) -> Stage:
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
    import inspect

    try:
        inspect.signature(run).bind()
    except TypeError:
        return True
    return False
