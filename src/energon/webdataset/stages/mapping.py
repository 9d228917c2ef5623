"""Apply functions to items, and select items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from energon.errors import ConfigError
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.stages.base import (
    Context,
    Stage,
    StageIterator,
    State,
    load_state,
    state_of,
    unpack,
)
from energon.webdataset.stages.columns import ColumnReader, OnColumns
from energon.webdataset.stages.shuffling import make_draws


@dataclass(frozen=True)
class Map(Stage):
    """Yields the result of a function for each item; None drops the item.

    If both are dicts, the result keeps the `__key__` of the item.

    Args:
        f: Takes an item.
        handler: Called for errors of the function.
    """

    f: Callable[[Any], Any]
    handler: Handler = reraise_exception

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _Mapped(_map(source, self.f, self.handler), source)


@dataclass(frozen=True)
class Apply(Stage):
    """Yields the result of a function for each item, unchanged."""

    f: Callable[[Any], Any]
    handler: Handler = reraise_exception

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        function = self.f.compiled() if hasattr(self.f, "compiled") else self.f
        return Applied(self, _apply(source, function, self.handler), source)

    @property
    def on_columns(self) -> OnColumns | None:
        """The same function for many items at once, if there is one."""
        return getattr(self.f, "on_columns", None)


@dataclass(frozen=True)
class Select(Stage):
    """Yields the items for which a function returns True.

    Args:
        predicate: Takes an item.
        handler: Called for errors of the function.
    """

    predicate: Callable[[Any], Any]
    handler: Handler = reraise_exception

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _Mapped(_select(source, self.predicate, self.handler), source)


class _Mapped(StageIterator):
    """Holds no items back, so its position is that of its source."""

    def __init__(self, items: Iterator[Any], source: Iterator[Any]) -> None:
        super().__init__(source)
        self._items = items

    def _run(self) -> Iterator[Any]:
        return iter(())


class Applied(_Mapped):
    """The results of an `Apply`.

    Args:
        stage: The stage.
        items: Its results.
        source: What it reads.
    """

    def __init__(self, stage: Apply, items: Iterator[Any], source: Iterator[Any]) -> None:
        super().__init__(items, source)
        self.stage = stage


def read_columns(
    items: Iterator[Any], context: Context, *, takes_columns: bool
) -> ColumnReader | None:
    """Return a reader of the same items that changes many at once, or None if no stage can.

    Args:
        items: Ends with the stages that may change many at once.
        context: That of these stages.
        takes_columns: Whether it saves time to read columns even if no stage changes them.
    """
    stages: list[Apply] = []
    functions: list[OnColumns] = []
    while isinstance(items, Applied) and (function := items.stage.on_columns) is not None:
        stages.insert(0, items.stage)
        functions.insert(0, function)
        items = items._source
    if not stages and not takes_columns:
        return None

    def one_by_one(source: Iterator[Any]) -> Iterator[Any]:
        for stage in stages:
            source = stage.open(source, context)
        return source

    return ColumnReader(items, functions, one_by_one, owns_source=context.is_in_pipeline)


def _goes_on(error: BaseException, item: Any, handler: Handler) -> bool:
    """Ask the handler about an error, after adding the key of the item to it.

    Handlers are not asked about what ends a program, such as an interrupt: it is raised.
    """
    if isinstance(item, dict) and "__key__" in item:
        error.add_note(f"sample {item['__key__']!r} of {item.get('__url__', 'unknown origin')}")
    if not isinstance(error, Exception):
        raise error
    return handler(error)


def _map(source: Iterator[Any], function: Callable[[Any], Any], handler: Handler) -> Iterator[Any]:
    for item in source:
        try:
            result = function(item)
        except BaseException as error:
            if _goes_on(error, item, handler):
                continue
            return
        if result is None:
            continue
        if isinstance(result, dict) and isinstance(item, dict) and "__key__" in item:
            result["__key__"] = item["__key__"]
        yield result
        del item, result  # the next ones reuse their memory


def _apply(
    source: Iterator[Any], function: Callable[[Any], Any], handler: Handler
) -> Iterator[Any]:
    for item in source:
        try:
            result = function(item)
        except BaseException as error:
            if _goes_on(error, item, handler):
                continue
            return
        yield result
        del item, result  # the next ones reuse their memory


def _select(
    source: Iterator[Any], predicate: Callable[[Any], Any], handler: Handler
) -> Iterator[Any]:
    for item in source:
        try:
            selected = predicate(item)
        except BaseException as error:
            if _goes_on(error, item, handler):
                continue
            return
        if selected:
            yield item


@dataclass(frozen=True)
class RandomSample(Stage):
    """Yields each item with probability `p`; the choices are a function of the seed."""

    is_random = True

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ConfigError(f"rsample(p={self.p!r}): a probability is between 0 and 1")

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _RandomSampleIterator(self.p, source, context)


class _RandomSampleIterator(StageIterator):
    def __init__(self, p: float, source: Iterator[Any], context: Context) -> None:
        self._p = p
        self._draws = make_draws(None, context.seed_of)
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        p, fraction = self._p, self._draws.fraction
        for item in self._source:
            if fraction() < p:
                yield item

    def state_dict(self) -> State:
        return {"source": state_of(self._source), **self._draws.state_dict()}

    def load_state_dict(self, state: State) -> None:
        source, drawn = unpack(state, "source", "drawn")
        load_state(self._source, source)
        self._draws.load_state_dict({"drawn": drawn})


class Slice(Stage):
    """Yields the items that `itertools.islice` would: `Slice(stop)`, `Slice(start, stop, step)`.

    Raises:
        ConfigError: If the numbers do not form a slice.
    """

    def __init__(self, *args: int | None) -> None:
        try:
            islice((), *args)
        except (TypeError, ValueError) as error:
            given = ", ".join(map(repr, args))
            raise ConfigError(
                f"slice({given}): expected a stop, or a start, a stop and a step; start and stop "
                "must be at least 0 or None, and the step at least 1 or None"
            ) from error
        chosen = slice(*args)
        self.start, self.stop, self.step = chosen.start or 0, chosen.stop, chosen.step or 1

    def describe(self) -> dict[str, Any]:
        return {"stage": "Slice", "slice": [self.start, self.stop, self.step]}

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _SliceIterator(self, source)


class _SliceIterator(StageIterator):
    def __init__(self, stage: Slice, source: Iterator[Any]) -> None:
        self._stage = stage
        self._taken = 0
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        stage, source = self._stage, iter(self._source)
        while stage.stop is None or self._taken < stage.stop:
            item = next(source, _END)
            if item is _END:
                return
            number, self._taken = self._taken, self._taken + 1
            if number >= stage.start and not (number - stage.start) % stage.step:
                yield item

    def state_dict(self) -> State:
        return {"source": state_of(self._source), "taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        source, self._taken = unpack(state, "source", "taken")
        load_state(self._source, source)


_END = object()
