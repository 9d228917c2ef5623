"""Wrappers over whole streams: blend, concatenate, repeat, limit, shuffle."""

from __future__ import annotations

from typing import Any

from energon.compat.megatron.stages.blend import Blend, Concat
from energon.compat.megatron.stages.limit import Limit
from energon.compat.megatron.stages.repeat import Repeat
from energon.compat.megatron.stages.shuffle_buffer import ShuffleBuffer
from energon.compat.megatron.wrappers.base import WrapperDataset
from energon.errors import ConfigError
from energon.stages.base import Dataset
from energon.worker import WorkerConfig


class BlendDataset(WrapperDataset):
    """Draw items from several datasets by weight, until all of them have ended.

    Shares are exact but for an item or two at any time.

    Args:
        datasets: Pairs of a dataset and its weight.
        worker_config: Who loads it.
    """

    def __init__(self, *datasets: tuple[Dataset[Any], float], worker_config: WorkerConfig) -> None:
        inner = tuple(dataset for dataset, _ in datasets)
        weights = tuple(float(weight) for _, weight in datasets)
        super().__init__(
            Blend(inner, weights), inner, worker_config=worker_config, weights=list(weights)
        )


class ConcatDataset(WrapperDataset):
    """Yield the items of several datasets, one dataset after the other.

    Args:
        datasets: The datasets.
        worker_config: Who loads it.
    """

    def __init__(self, *datasets: Dataset[Any], worker_config: WorkerConfig) -> None:
        super().__init__(Concat(tuple(datasets)), datasets, worker_config=worker_config)


class RepeatDataset(WrapperDataset):
    """Read a finite dataset again and again, each time in another order.

    Args:
        dataset: The items.
        repeats: How often, a fraction allowed; None never ends.
        restart: Whether to go on with the next pass where one ends. False gives one.
        worker_config: Who loads it.
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
    """End the loops of a loader after a number of items; the next one goes on from there.

    Belongs around everything but what only watches.

    Args:
        dataset: The items.
        length: Items of each rank in a loop.
        worker_config: Who loads it.
    """

    def __init__(self, dataset: Dataset[Any], length: int, worker_config: WorkerConfig) -> None:
        if length < 1:
            raise ConfigError(f"an epoch has 1 or more items, not {length}")
        super().__init__(dataset, [dataset], worker_config=worker_config, length=length)
        self.virtual_epoch_length = length


class LimitDataset(WrapperDataset):
    """Yield the first items only.

    Args:
        dataset: The items.
        length: Items of each rank.
        reset_after_epoch: Whether a loop of a loader begins anew also if the one before was
            left early.
        worker_config: Who loads it.
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
            Limit(dataset, length * worker_config.world_size),
            [dataset],
            worker_config=worker_config,
            length=length,
        )
        self.restart = reset_after_epoch


class ShuffleBufferDataset(WrapperDataset):
    """Yield each item once, drawn at random from the next `size`.

    The dataset getters need none: they shuffle numbers before anything is read.

    Args:
        dataset: The items.
        size: How many are held; resuming reads these again.
        worker_config: Who loads it.
    """

    def __init__(self, dataset: Dataset[Any], size: int, *, worker_config: WorkerConfig) -> None:
        super().__init__(
            ShuffleBuffer(dataset, size), [dataset], worker_config=worker_config, size=size
        )
