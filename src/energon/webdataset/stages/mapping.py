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
        return _MappedIterator(self, self.f, source)


@dataclass(frozen=True)
class Apply(Stage):
    """Yields the result of a function for each item, unchanged."""

    f: Callable[[Any], Any]
    handler: Handler = reraise_exception

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        function = self.f.compiled() if hasattr(self.f, "compiled") else self.f
        return _AppliedIterator(self, function, source)

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
        return _SelectedIterator(self, self.predicate, source)


class _HandledIterator(StageIterator):
    """Holds no items back: its position is that of its source, and whether its handler ended it.

    Args:
        stage: The stage, which has a handler.
        function: Takes an item.
        source: What it reads.
    """

    def __init__(
        self, stage: Map | Apply | Select, function: Callable[[Any], Any], source: Iterator[Any]
    ) -> None:
        self.stage = stage
        self.has_stopped = False
        self._function = function
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        return self.results(self._source)

    def results(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield what the stage makes of the items of a source."""
        raise NotImplementedError

    def state_dict(self) -> State:
        state = state_of(self._source)
        return {"stopped": state} if self.has_stopped else state

    def load_state_dict(self, state: State) -> None:
        # If this is the mark of a stage before, which holds nothing back either, no item is left.
        self.has_stopped = isinstance(state, dict) and set(state) == {"stopped"}
        if self.has_stopped:
            state = state["stopped"]
            self._items = iter(())
        load_state(self._source, state)

    def _goes_on(self, error: BaseException, item: Any) -> bool:
        """Ask the handler about an error, after adding the key of the item to it.

        Handlers are not asked about what ends a program, such as an interrupt: it is raised.
        """
        if isinstance(item, dict) and "__key__" in item:
            error.add_note(f"sample {item['__key__']!r} of {item.get('__url__', 'unknown origin')}")
        if not isinstance(error, Exception):
            raise error
        self.has_stopped = not self.stage.handler(error)
        return not self.has_stopped


class _MappedIterator(_HandledIterator):
    def results(self, source: Iterator[Any]) -> Iterator[Any]:
        function = self._function
        for item in source:
            try:
                result = function(item)
            except BaseException as error:
                if self._goes_on(error, item):
                    continue
                return
            if result is None:
                continue
            if isinstance(result, dict) and isinstance(item, dict) and "__key__" in item:
                result["__key__"] = item["__key__"]
            yield result
            del item, result  # the next ones reuse their memory


class _AppliedIterator(_HandledIterator):
    stage: Apply

    def results(self, source: Iterator[Any]) -> Iterator[Any]:
        function = self._function
        for item in source:
            try:
                result = function(item)
            except BaseException as error:
                if self._goes_on(error, item):
                    continue
                return
            yield result
            del item, result  # the next ones reuse their memory


class _SelectedIterator(_HandledIterator):
    def results(self, source: Iterator[Any]) -> Iterator[Any]:
        function = self._function
        for item in source:
            try:
                selected = function(item)
            except BaseException as error:
                if self._goes_on(error, item):
                    continue
                return
            if selected:
                yield item


def read_columns(
    items: Iterator[Any], context: Context, *, takes_columns: bool
) -> ColumnReader | None:
    """Return a reader of the same items that changes many at once, or None if no stage can.

    Args:
        items: Ends with the stages that may change many at once.
        context: That of these stages.
        takes_columns: Whether it saves time to read columns even if no stage changes them.
    """
    applied: list[_AppliedIterator] = []
    functions: list[OnColumns] = []
    while isinstance(items, _AppliedIterator) and (function := items.stage.on_columns) is not None:
        applied.insert(0, items)
        functions.insert(0, function)
        items = items._source
    if not applied and not takes_columns:
        return None

    def one_by_one(source: Iterator[Any]) -> Iterator[Any]:
        for each in applied:
            source = each.results(source)
        return source

    return ColumnReader(
        items,
        functions,
        one_by_one,
        has_stopped=lambda: any(each.has_stopped for each in applied),
        owns_source=context.is_in_pipeline,
    )


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
