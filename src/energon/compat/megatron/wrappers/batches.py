"""Wrappers that apply functions of a program: map, filter, batches, batches of groups, packs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from energon.compat.megatron.wrappers.base import WrapperDataset, make_hook
from energon.compat.megatron.wrappers.streams import BlendDataset
from energon.errors import SkipSample
from energon.packing.packer import Selection
from energon.stages.base import Dataset
from energon.stages.batch import BatchDataset as BatchStage
from energon.stages.batch import GroupDataset
from energon.stages.hooks.failures import DEFAULT_TOLERANCE, ErrorHandler
from energon.stages.hooks.hook import Hook
from energon.stages.map import MapDataset as MapStage
from energon.stages.pack import PackDataset
from energon.worker import WorkerConfig


class _HookedDataset(WrapperDataset):
    """Applies a hook to each item."""

    def __init__(self, dataset: Dataset[Any], hook: Hook, **settings: Any) -> None:
        super().__init__([dataset], stage=MapStage(dataset, ((hook,),)), **settings)
        hooks = getattr(dataset, "item_hooks", None)
        self.item_hooks = None if hooks is None else (*hooks, hook)


class MapDataset(_HookedDataset):
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
        super().__init__(dataset, hook, worker_config=worker_config, map_fn_config=map_fn_config)


class FilterDataset(_HookedDataset):
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
            dataset, hook, worker_config=worker_config, filter_fn_config=filter_fn_config
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


class BatchDataset(WrapperDataset):
    """Make batches of consecutive items.

    Args:
        dataset: The items.
        batch_size: Number of items in a batch.
        batcher: Turns a list of items into a batch; may yield several.
        batcher_stateless: Accepted; functions are expected to depend only on the items.
        batcher_config: Describes the function's behavior as plain data, or a function that returns
            it.
        drop_last: Whether to drop a smaller batch at the end.
        failure_tolerance: Number of consecutive failures that ends the run; 0 for no limit.
        error_handler: Called for each tolerated failure with the exception and the items, and with
            their sources if it accepts them; None for that of `worker_config`.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> def captions(samples):
        ...     return [sample.caption for sample in samples]
        >>> list(BatchDataset(photos, 2, captions, worker_config=config))
        [['grey number 8', 'grey number 9']]
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        batcher: Callable[[list[Any]], Any],
        *,
        batcher_stateless: bool = False,
        batcher_config: Any = None,
        drop_last: bool = False,
        failure_tolerance: int = DEFAULT_TOLERANCE,
        error_handler: ErrorHandler | None = None,
        worker_config: WorkerConfig,
    ) -> None:
        hook = make_hook(
            "batcher", batcher, worker_config, tolerance=failure_tolerance, handler=error_handler
        )
        super().__init__(
            [dataset],
            stage=BatchStage(dataset, batch_size, (hook,), drop_last),
            worker_config=worker_config,
            batch_size=batch_size,
            drop_last=drop_last,
            batcher_config=batcher_config,
        )


class GroupBatchDataset(WrapperDataset):
    """Make batches of items of the same group.

    Args:
        dataset: The items.
        fixed_batch_size: Number of items in a batch, if `sample_group_key` returns none.
        sample_group_key: Returns the group of an item (anything hashable), and the number of items
            in its batches or None.
        batcher: Turns a list of items into a batch; may yield several.
        batcher_stateless: Accepted, see `BatchDataset`.
        batcher_config: See `BatchDataset`.
        drop_last: Whether to drop the items still waiting at the end of the data.
        failure_tolerance: Number of consecutive failures that ends the run; 0 for no limit.
        error_handler: Called for each tolerated failure with the exception and the items, and with
            their sources if it accepts them; None for that of `worker_config`.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> def by_last_letter(sample):
        ...     return sample.caption[-1], None
        >>> def captions(samples):
        ...     return [sample.caption for sample in samples]
        >>> list(GroupBatchDataset(photos, 2, by_last_letter, captions, worker_config=config))
        [['grey number 8'], ['grey number 9']]
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        fixed_batch_size: int | None,
        sample_group_key: Callable[[Any], tuple[Hashable, int | None]],
        batcher: Callable[[list[Any]], Any],
        *,
        batcher_stateless: bool = False,
        batcher_config: Any = None,
        drop_last: bool = False,
        failure_tolerance: int = DEFAULT_TOLERANCE,
        error_handler: ErrorHandler | None = None,
        worker_config: WorkerConfig,
    ) -> None:
        criterion, hook = (
            make_hook(
                name, function, worker_config, tolerance=failure_tolerance, handler=error_handler
            )
            for name, function in (("sample_group_key", sample_group_key), ("batcher", batcher))
        )
        super().__init__(
            [dataset],
            stage=GroupDataset(dataset, criterion, fixed_batch_size, (hook,), drop_last),
            worker_config=worker_config,
            batch_size=fixed_batch_size,
            drop_last=drop_last,
            batcher_config=batcher_config,
        )


class PackingDataset(WrapperDataset):
    """Make packs of items that are close to each other in the stream.

    Args:
        dataset: The items.
        buffer_size: Number of items that are divided into groups together.
        pre_packer: Divides a list of items into groups, or returns a `Selection`.
        final_packer: Turns a group into a pack; may yield several.
        final_packer_stateless: Accepted, see `BatchDataset`.
        sample_encoder: Applied to each item of a group first; None for none.
        sample_encoder_stateless: Accepted, see `BatchDataset`.
        packer_config: Describes the functions' behavior, see `BatchDataset`.
        pre_packer_failure_tolerance: Number of consecutive failures, or of consecutive windows
            without a group, that ends the run; 0 for no limit.
        final_packer_failure_tolerance: The same for failures of `final_packer`.
        sample_encoder_failure_tolerance: The same for failures of `sample_encoder`.
        error_handler: See `BatchDataset`.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> def in_pairs(samples):
        ...     return [samples[i : i + 2] for i in range(0, len(samples), 2)]
        >>> def joined(samples):
        ...     return " ".join(sample.caption for sample in samples)
        >>> list(PackingDataset(photos, 10, in_pairs, joined, worker_config=config))
        ['grey number 8 grey number 9']
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        buffer_size: int,
        pre_packer: Callable[[list[Any]], Sequence[Sequence[Any]] | Selection],
        final_packer: Callable[[list[Any]], Any],
        *,
        final_packer_stateless: bool = False,
        sample_encoder: Callable[[Any], Any] | None = None,
        sample_encoder_stateless: bool = False,
        packer_config: Any = None,
        pre_packer_failure_tolerance: int = DEFAULT_TOLERANCE,
        final_packer_failure_tolerance: int = DEFAULT_TOLERANCE,
        sample_encoder_failure_tolerance: int = DEFAULT_TOLERANCE,
        error_handler: ErrorHandler | None = None,
        worker_config: WorkerConfig,
    ) -> None:
        def hook(name: str, function: Callable[[Any], Any], tolerance: int) -> Any:
            return make_hook(
                name, function, worker_config, tolerance=tolerance, handler=error_handler
            )

        encode = (
            ()
            if sample_encoder is None
            else (hook("sample_encoder", sample_encoder, sample_encoder_failure_tolerance),)
        )
        super().__init__(
            [dataset],
            stage=PackDataset(
                dataset,
                buffer_size,
                select=hook("pre_packer", pre_packer, pre_packer_failure_tolerance),
                pack=(hook("final_packer", final_packer, final_packer_failure_tolerance),),
                postencode=encode,
                tolerance=pre_packer_failure_tolerance,
            ),
            worker_config=worker_config,
            buffer_size=buffer_size,
            packer_config=packer_config,
        )


class MixBatchDataset(WrapperDataset):
    """Make batches of items drawn from several datasets by weight.

    Args:
        datasets: Pairs of a dataset and its weight.
        batch_size: Number of items in a batch.
        batch_mix_fn: Turns a list of items into a batch, such as `homogeneous_concat_mix`; without
            one, the list is the batch.
        worker_config: Rank and workers.

    Example:
        >>> from megatron.energon import (
        ...     MapDataset,
        ...     RepeatDataset,
        ...     WorkerConfig,
        ...     get_val_dataset,
        ... )
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> photos = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> endless = RepeatDataset(photos, worker_config=config)
        >>> captions = MapDataset(endless, lambda sample: sample.caption, worker_config=config)
        >>> batches = MixBatchDataset(
        ...     (endless, 0.75), (captions, 0.25), batch_size=4, worker_config=config
        ... )
        >>> [type(item).__name__ for item in next(iter(batches))]
        ['CaptioningSample', 'CaptioningSample', 'str', 'CaptioningSample']
    """

    def __init__(
        self,
        *datasets: tuple[Dataset[Any], float],
        batch_size: int,
        batch_mix_fn: Callable[[list[Any]], Any] = list,
        worker_config: WorkerConfig,
    ) -> None:
        blend = BlendDataset(*datasets, worker_config=worker_config)
        hook = make_hook("batch_mix_fn", batch_mix_fn, worker_config)
        super().__init__(
            blend.datasets,
            stage=BatchStage(blend, batch_size, (hook,)),
            worker_config=worker_config,
            weights=[weight for _, weight in datasets],
            batch_size=batch_size,
        )
