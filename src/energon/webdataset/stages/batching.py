"""Collect items into batches, and split batches into items."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from energon.errors import SampleError, check_at_least
from energon.samples.collate import batch_stack
from energon.webdataset.stages.base import (
    NOTE_ITEMS,
    Context,
    ReplayLog,
    Stage,
    StageIterator,
    State,
    unpack,
)

_SCALARS = (int, float, np.number, np.bool_)

Collation = Callable[[list[Any]], Any]


def default_collation_fn(
    samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True
) -> Any:
    """Collate samples into a dict or tuple of columns.

    Numbers become arrays, arrays and tensors of equal shape are stacked, and everything else
    becomes a list. Samples that are neither dicts nor sequences form a single column.

    Args:
        samples: Dicts with the same keys, or tuples of the same length.
        combine_tensors: Whether to stack arrays and tensors.
        combine_scalars: Whether to combine numbers into arrays.

    Raises:
        SampleError: If samples differ in their names or lengths, or arrays in their shapes.

    Example:
        >>> default_collation_fn([{"cls": 1, "txt": "a"}, {"cls": 2, "txt": "b"}])
        {'cls': array([1, 2]), 'txt': ['a', 'b']}
    """

    def column(values: Sequence[Any]) -> Any:
        return combine_values(values, combine_tensors, combine_scalars)

    first = samples[0]
    if isinstance(first, dict):
        _check_alike([_names(sample) for sample in samples], "fields")
        return {name: column([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple | list):
        _check_alike([len(sample) for sample in samples], "lengths")
        return tuple(map(column, zip(*samples, strict=True)))
    return column(samples)


@dataclass(frozen=True)
class Batched(Stage):
    """Yields batches.

    Args:
        batchsize: Number of items in a batch.
        collation_fn: Combines a list of items; None leaves it a list.
        partial: Whether to yield a smaller batch at the end; otherwise it is dropped.

    Raises:
        ConfigError: If `batchsize` is not positive.
    """

    batchsize: int = 20
    collation_fn: Collation | None = default_collation_fn
    partial: bool = True

    def __post_init__(self) -> None:
        check_at_least(1, "batchsize", self.batchsize)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _BatchedIterator(self, source)

    def batches(self, lists: Iterator[list[Any]]) -> Iterator[Any]:
        """Return the batches of lists of items.

        No variable keeps a batch while the next one is made, which then reuses its memory.
        """
        if not self.partial:
            lists = filter(lambda batch: len(batch) == self.batchsize, lists)
        return lists if self.collation_fn is None else map(self.collation_fn, lists)


class _BatchedIterator(StageIterator):
    def __init__(self, stage: Batched, source: Iterator[Any]) -> None:
        self._stage = stage
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        stage, items = self._stage, iter(self._source)
        yield from stage.batches(iter(lambda: list(islice(items, stage.batchsize)), []))


@dataclass(frozen=True)
class FlatMap(Stage):
    """Yields all items that a function returns for each item, one after another.

    Args:
        function: Takes an item, and returns or yields any number of items. If a state is saved
            between two of these, it must return the same ones again.
    """

    function: Callable[[Any], Any]

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _FlatMapIterator(self, source)


class _FlatMapIterator(StageIterator):
    """Its position is the current input, and the number of its outputs already yielded."""

    def __init__(self, stage: FlatMap, source: Iterator[Any]) -> None:
        self._stage = stage
        self._log = ReplayLog(source)
        self._number = 0
        self._done = 0
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        function, skip = self._stage.function, self._done
        self._log.note(0, int)
        for item in self._source:
            for number, part in enumerate(islice(function(item), skip, None), skip + 1):
                self._done = number
                yield part
            skip = self._done = 0
            self._number += 1
            if not self._number % NOTE_ITEMS:
                self._log.note(self._number, lambda: self._number)

    def state_dict(self) -> State:
        return {"replay": self._log.state_at(self._number), "done": self._done}

    def load_state_dict(self, state: State) -> None:
        replay, self._done = unpack(state, "replay", "done")
        self._log.load_state_dict(replay)


def unbatch(batch: Any) -> Iterator[Any]:
    """Yield the samples of a batch: dicts for a dict of columns, tuples for a tuple of columns.

    Raises:
        SampleError: If columns differ in length, or the batch is neither a dict nor a tuple.
    """
    if isinstance(batch, dict):
        for row in _rows(list(batch.values()), list(batch)):
            yield dict(zip(batch, row, strict=True))
    elif isinstance(batch, tuple | list):
        yield from _rows(list(batch), list(range(len(batch))))
    else:
        raise SampleError(
            f"unbatched got {type(batch).__name__}, expected a dict or a tuple of columns; "
            "batches that are plain lists of items are taken apart by unlisted()"
        )


def unlist(batch: Any) -> Iterator[Any]:
    """Yield the items of a list.

    Raises:
        SampleError: If it is not a list.
    """
    if not isinstance(batch, list | tuple):
        raise SampleError(f"unlisted got {type(batch).__name__}, expected a list")
    return iter(batch)


def _rows(columns: list[Any], names: list[Any]) -> Iterator[tuple[Any, ...]]:
    columns = [_items(column, name) for column, name in zip(columns, names, strict=True)]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        by_name = dict(zip(names, lengths, strict=True))
        raise SampleError(f"unbatched got columns of different lengths: {by_name}")
    return zip(*columns, strict=True)


def _items(column: Any, name: Any) -> Any:
    """Return a column that can be iterated over: batches may be nested."""
    if isinstance(column, dict):
        return list(unbatch(column))
    if isinstance(column, str | bytes) or not hasattr(column, "__len__"):
        raise SampleError(
            f"unbatched got {type(column).__name__} as column {name!r}, expected lists, arrays "
            "or tensors with an entry for each item"
        )
    return column


def combine_values(
    b: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True
) -> Any:
    """Return a column of a batch: numbers as an array, arrays and tensors stacked, or a list.

    Raises:
        SampleError: If arrays or tensors differ in their shapes.
    """
    values = list(b)
    kinds = set(map(type, values))
    if combine_scalars and all(issubclass(kind, _SCALARS) for kind in kinds):
        return np.array(values)
    torch = sys.modules.get("torch")
    arrays = (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor)
    if combine_tensors and len(kinds) == 1 and issubclass(kinds.pop(), arrays):
        return batch_stack(values)
    return values


def _names(sample: Any) -> Any:
    return frozenset(sample) if isinstance(sample, dict) else type(sample).__name__


def _check_alike(values: list[Any], what: str) -> None:
    first = values[0]
    different = next((value for value in values if value != first), first)
    if different != first:
        shown = [
            sorted(value) if isinstance(value, frozenset) else value for value in (first, different)
        ]
        raise SampleError(
            f"the samples of a batch have different {what}: {shown[0]} and {shown[1]}; choose with "
            "to_tuple or rename, or collate with a function of your own (collation_fn)"
        )
