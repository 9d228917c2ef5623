"""Wrappers that apply functions to single items, or to the stream of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from energon.compat.megatron.stages.iter_map import IterMap
from energon.compat.megatron.wrappers.base import WrapperDataset, describe, make_hook
from energon.errors import SkipSample
from energon.stages.base import Dataset
from energon.stages.hook import DEFAULT_TOLERANCE
from energon.stages.map import MapDataset as MapStage
from energon.worker import WorkerConfig


class MapDataset(WrapperDataset):
    """Apply a function to each item. It may yield several, or raise `SkipSample`.

    Args:
        dataset: The items.
        map_fn: The function.
        stateless_map_fn: Accepted; functions are expected to depend on nothing but the item.
        map_fn_config: What decides what the function does, as plain data or a function that
            returns it: saved states have to agree with it.
        failure_tolerance: How many failures in a row end the run; 0 never ends it.
        worker_config: Who loads it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        map_fn: Callable[[Any], Any],
        *,
        stateless_map_fn: bool = False,
        map_fn_config: Any = None,
        failure_tolerance: int = DEFAULT_TOLERANCE,
        worker_config: WorkerConfig,
    ) -> None:
        hook = make_hook(_name(map_fn), map_fn, worker_config, tolerance=failure_tolerance)
        super().__init__(
            MapStage(dataset, ((hook,),)),
            [dataset],
            worker_config=worker_config,
            map_fn_config=describe(map_fn_config),
        )


class FilterDataset(WrapperDataset):
    """Leave out items for which a function returns False.

    Args:
        dataset: The items.
        filter_fn: Returns whether an item stays. What it fails on is left out, logged and
            counted.
        filter_fn_config: What decides what the function does, see `MapDataset`.
        worker_config: Who loads it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        filter_fn: Callable[[Any], bool],
        filter_fn_config: Any = None,
        worker_config: WorkerConfig,
    ) -> None:
        hook = make_hook(_name(filter_fn), _Keep(filter_fn), worker_config)
        super().__init__(
            MapStage(dataset, ((hook,),)),
            [dataset],
            worker_config=worker_config,
            filter_fn_config=describe(filter_fn_config),
        )


class IterMapDataset(WrapperDataset):
    """Apply a function to the iterator of all items.

    Resuming runs the function again: from the last input it took if outputs depend on nothing
    else (`stateless_iter_fn=True`), otherwise from the beginning of the run, which takes the
    longer the further the run was.

    Args:
        dataset: The items.
        iter_map_fn: Takes an iterator, returns an iterator. What it raises ends the run.
        len_map_fn: Returns the number of outputs for a number of items.
        stateless_iter_fn: Whether an output depends on nothing but the last item taken.
        iter_map_fn_config: What decides what the function does, see `MapDataset`.
        worker_config: Who loads it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        iter_map_fn: Callable[[Iterator[Any]], Iterable[Any]],
        *,
        len_map_fn: Callable[[int], int] = int,
        stateless_iter_fn: bool = False,
        iter_map_fn_config: Any = None,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(
            IterMap(dataset, iter_map_fn, len_map_fn, remembers=not stateless_iter_fn),
            [dataset],
            worker_config=worker_config,
            iter_map_fn_config=describe(iter_map_fn_config),
        )


@dataclass(frozen=True)
class _Keep:
    """Turns a predicate into a hook."""

    predicate: Callable[[Any], bool]

    def __call__(self, item: Any) -> Any:
        if not self.predicate(item):
            raise SkipSample
        return item


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
