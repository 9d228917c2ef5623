"""Wrappers over streams: blend, concatenate, repeat, limit, shuffle, map and filter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from energon.compat.megatron.stages.blend import BlendStage, ConcatStage, Repeat
from energon.compat.megatron.stages.limit import LimitStage
from energon.compat.megatron.stages.streams import IterMap, ShuffleBuffer
from energon.compat.megatron.wrappers.base import WrapperDataset, describe, make_hook
from energon.errors import ConfigError, SkipSample
from energon.stages.base import Dataset
from energon.stages.hooks.failures import DEFAULT_TOLERANCE
from energon.stages.hooks.hook import ErrorHandler
from energon.stages.map import MapDataset as MapStage
from energon.worker import WorkerConfig


class BlendDataset(WrapperDataset):
    """Draw items from several datasets by weight, until all of them have ended.

    At any time, shares are exact to within an item or two.

    Args:
        datasets: Pairs of a dataset and its weight.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> endless = RepeatDataset(photos, worker_config=config)
        >>> captions = MapDataset(endless, lambda sample: sample.caption, worker_config=config)
        >>> blend = BlendDataset((endless, 0.75), (captions, 0.25), worker_config=config)
        >>> [type(item).__name__ for item, _ in zip(blend, range(4))]
        ['CaptioningSample', 'CaptioningSample', 'str', 'CaptioningSample']
    """

    def __init__(self, *datasets: tuple[Dataset[Any], float], worker_config: WorkerConfig) -> None:
        inner = tuple(dataset for dataset, _ in datasets)
        weights = tuple(float(weight) for _, weight in datasets)
        super().__init__(
            BlendStage(inner, weights), inner, worker_config=worker_config, weights=list(weights)
        )


class ConcatDataset(WrapperDataset):
    """Yield the items of several datasets, one dataset after the other.

    Args:
        datasets: The datasets.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> [sample.__key__ for sample in ConcatDataset(photos, photos, worker_config=config)]
        ['8', '9', '8', '9']
    """

    def __init__(self, *datasets: Dataset[Any], worker_config: WorkerConfig) -> None:
        super().__init__(ConcatStage(tuple(datasets)), datasets, worker_config=worker_config)


class RepeatDataset(WrapperDataset):
    """Repeat a finite dataset, each time in another order.

    Args:
        dataset: The items.
        repeats: Number of passes, possibly fractional; None for no limit.
        restart: Whether another pass follows when one ends. False makes a single pass.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> repeated = RepeatDataset(photos, repeats=1.5, worker_config=config)
        >>> [sample.__key__ for sample in repeated]
        ['8', '9', '8']
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        repeats: float | None = None,
        restart: bool = True,
        worker_config: WorkerConfig,
    ) -> None:
        passes = repeats if restart else min(1, 1 if repeats is None else repeats)
        super().__init__(
            Repeat(dataset, passes), [dataset], worker_config=worker_config, repeats=passes
        )


class EpochizeDataset(WrapperDataset):
    """End the loops of a loader after a number of items; the next loop continues from there.

    Only wrappers that watch the items may be put around it.

    Args:
        dataset: The items.
        length: Number of items of each rank in a loop.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_loader, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> endless = RepeatDataset(photos, worker_config=config)
        >>> loader = get_loader(EpochizeDataset(endless, 3, config))
        >>> [len([sample for sample in loader]) for epoch in range(2)]
        [3, 3]
    """

    def __init__(self, dataset: Dataset[Any], length: int, worker_config: WorkerConfig) -> None:
        if length < 1:
            raise ConfigError(f"an epoch must have 1 or more items, got {length}")
        super().__init__(dataset, [dataset], worker_config=worker_config, length=length)
        self.virtual_epoch_length = length


class LimitDataset(WrapperDataset):
    """Yield only the first items.

    Args:
        dataset: The items.
        length: Number of items of each rank.
        reset_after_epoch: Whether a loop of a loader starts over even if the previous one was
            left early.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> [sample.__key__ for sample in LimitDataset(photos, 1, worker_config=config)]
        ['8']
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        length: int,
        *,
        reset_after_epoch: bool = False,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(
            LimitStage(dataset, length * worker_config.world_size),
            [dataset],
            worker_config=worker_config,
            length=length,
        )
        self.restart = reset_after_epoch

    @property
    def is_drawn_again(self) -> bool:
        """False: each loop has the same first items."""
        return False


class ShuffleBufferDataset(WrapperDataset):
    """Yield each item once, drawn at random from the next `size`.

    The dataset getters do not use it: they shuffle row numbers before anything is read.

    Args:
        dataset: The items.
        size: Capacity of the buffer, whose items are read again when resuming.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> shuffled = ShuffleBufferDataset(photos, 2, worker_config=config)
        >>> sorted(sample.__key__ for sample in shuffled)
        ['8', '9']
    """

    def __init__(self, dataset: Dataset[Any], size: int, *, worker_config: WorkerConfig) -> None:
        super().__init__(
            ShuffleBuffer(dataset, size), [dataset], worker_config=worker_config, size=size
        )


class MapDataset(WrapperDataset):
    """Apply a function to each item. It may yield several, or raise `SkipSample`.

    Args:
        dataset: The items.
        map_fn: The function.
        stateless_map_fn: Accepted; functions are expected to depend only on the item.
        map_fn_config: Describes the function's behavior as plain data, or a function that returns
            it: saved states must match it.
        failure_tolerance: Number of consecutive failures that ends the run; 0 for no limit.
        error_handler: Called for each tolerated failure, see `BatchDataset`.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> captions = MapDataset(photos, lambda sample: sample.caption, worker_config=config)
        >>> list(captions)
        ['grey number 8', 'grey number 9']
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        map_fn: Callable[[Any], Any],
        *,
        stateless_map_fn: bool = False,
        map_fn_config: Any = None,
        failure_tolerance: int = DEFAULT_TOLERANCE,
        error_handler: ErrorHandler | None = None,
        worker_config: WorkerConfig,
    ) -> None:
        hook = make_hook(
            _name(map_fn),
            map_fn,
            worker_config,
            tolerance=failure_tolerance,
            handler=error_handler,
        )
        super().__init__(
            MapStage(dataset, ((hook,),)),
            [dataset],
            worker_config=worker_config,
            map_fn_config=describe(map_fn_config),
        )


class FilterDataset(WrapperDataset):
    """Drop items for which a function returns False.

    Args:
        dataset: The items.
        filter_fn: Returns whether to keep an item. Items on which it fails are skipped, logged
            and counted.
        filter_fn_config: Describes the function's behavior, see `MapDataset`.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> nines = FilterDataset(
        ...     photos, filter_fn=lambda sample: "9" in sample.caption, worker_config=config
        ... )
        >>> [sample.caption for sample in nines]
        ['grey number 9']
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

    Resuming runs the function again: from the last input that it took if outputs depend only on
    that (`stateless_iter_fn=True`), otherwise from the beginning of the run, which takes longer
    the further the run was.

    Args:
        dataset: The items.
        iter_map_fn: Takes an iterator, and returns an iterator. Its errors end the run.
        len_map_fn: Returns the number of outputs for a number of items.
        stateless_iter_fn: Whether an output depends only on the last item that was taken.
        iter_map_fn_config: Describes the function's behavior, see `MapDataset`.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> def with_numbers(samples):
        ...     for number, sample in enumerate(samples):
        ...         yield number, sample.caption
        >>> list(IterMapDataset(photos, with_numbers, worker_config=config))
        [(0, 'grey number 8'), (1, 'grey number 9')]
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
