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
        return _HandledIterator(self.handler, self._result, source)

    def _result(self, item: Any) -> Any:
        result = self.f(item)
        if result is None:
            return _DROPPED
        if isinstance(result, dict) and isinstance(item, dict) and "__key__" in item:
            result["__key__"] = item["__key__"]
        return result


@dataclass(frozen=True)
class Apply(Stage):
    """Yields the result of a function for each item, unchanged."""

    f: Callable[[Any], Any]
    handler: Handler = reraise_exception

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _HandledIterator(self.handler, self.f, source)


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
        return _HandledIterator(self.handler, self._chosen, source)

    def _chosen(self, item: Any) -> Any:
        return item if self.predicate(item) else _DROPPED


_DROPPED = object()
"""Returned for an item that a stage does not pass on."""


class _HandledIterator(StageIterator):
    """Holds no items back: its position is that of its source, and whether its handler ended it.

    Args:
        handler: Called for errors of the function.
        function: Returns the result for an item.
        source: The items.
    """

    def __init__(
        self, handler: Handler, function: Callable[[Any], Any], source: Iterator[Any]
    ) -> None:
        self._handler = handler
        self._function = function
        self._has_stopped = False
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        function = self._function
        for item in self._source:
            try:
                result = function(item)
            except BaseException as error:
                if self._goes_on(error, item):
                    continue
                return
            if result is not _DROPPED:
                yield result
            del item, result  # the next ones reuse their memory

    def state_dict(self) -> State:
        state = state_of(self._source)
        return {"stopped": state} if self._has_stopped else state

    def load_state_dict(self, state: State) -> None:
        # If this is the mark of a stage before, which holds nothing back either, no item is left.
        self._has_stopped = isinstance(state, dict) and set(state) == {"stopped"}
        if self._has_stopped:
            state = state["stopped"]
            self._items = iter(())
        load_state(self._source, state)

    def _goes_on(self, error: BaseException, item: Any) -> bool:
        """Ask the handler about an error, after adding the key of the item to it.

        Handlers are not asked about errors that end a program, such as an interrupt.
        """
        if isinstance(item, dict) and "__key__" in item:
            error.add_note(f"sample {item['__key__']!r} of {item.get('__url__', 'unknown origin')}")
        if not isinstance(error, Exception):
            raise error
        self._has_stopped = not self._handler(error)
        return not self._has_stopped


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
