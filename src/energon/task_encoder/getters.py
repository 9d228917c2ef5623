"""Get a dataset: from a path to a pipeline that a loader takes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from energon.errors import ConfigError
from energon.metadataset.resolve import resolve
from energon.plan.recipe import PlanRecipe
from energon.sources.ahead import window_rows
from energon.task_encoder.augment import overrides
from energon.task_encoder.build import built
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.hook_maker import AnyTaskEncoder
from energon.task_encoder.leaf_dataset import LeafDataset, loaded_datasets, make_reader
from energon.task_encoder.leaves import OpenedLeaf, open_leaves
from energon.task_encoder.legacy import with_legacy_arguments
from energon.task_encoder.recipe import build_pipeline, check_encoder
from energon.task_encoder.train_plan import train_plan
from energon.worker import WorkerConfig
from energon.wrappers.base import WrapperDataset

DatasetPath = str | os.PathLike[str] | Mapping[str, Any]


def get_train_dataset(
    path: DatasetPath,
    *,
    split_part: str = "train",
    worker_config: WorkerConfig,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    shuffle_buffer_size: int | None = None,
    max_samples_per_sequence: int | None = None,
    virtual_epoch_length: int = 0,
    shuffle_over_epochs_multiplier: int | None = 1,
    parallel_shard_iters: int | None = None,
    blend_unit: Literal["sample", "batch"] | None = None,
    task_encoder: AnyTaskEncoder | None = None,
    repeat: bool = True,
    dataset_config: str | None = None,
    split_config: str | None = None,
    subflavors: Mapping[str, Any] | None = None,
    exclude_from: str | os.PathLike[str] | None = None,
    allow: Collection[str] = (),
    **legacy: Any,
) -> SavableDataset | WrapperDataset:
    """Return the training pipeline over a dataset or metadataset, ready for a loader.

    Args:
        path: Folder of a prepared dataset, a metadataset YAML, or the document as a dict.
        split_part: Which split.
        worker_config: Who loads it, its lanes and seed.
        batch_size: Samples per batch; None yields samples.
        batch_drop_last: Whether a last, smaller batch is left out (only where data end).
        packing_buffer_size: Samples of a lane that are divided into packs together, by the
            hooks `select_samples_to_pack` and `pack_selected_samples`; None does not pack.
        shuffle_buffer_size: Rows of a lane that are permuted together after blending. No
            buffer exists: the order is computed. None or 0 for none.
        max_samples_per_sequence: How many consecutive samples are read together (a slice);
            1 shuffles globally; None chooses by the size of samples.
        virtual_epoch_length: Batches of each rank after which a `for` loop ends; 0 for never.
        shuffle_over_epochs_multiplier: 1 shuffles each epoch by itself, m over m epochs, -1
            draws with replacement, None keeps the order of the data.
        parallel_shard_iters: Slices of a dataset that are open at a time in a lane; None for
            16.
        blend_unit: Whether a blend draws single samples, so that batches are mixed, or whole
            batches of one dataset; None for what the metadataset says, or else samples.
        task_encoder: The user's hooks; None for those of `DefaultTaskEncoder`. If it overrides
            `build_train_datasets`, that builds what is returned, of wrappers.
        repeat: Whether the data start again at their end. A blend by weights has no end, unless
            all of its entries have `max_epochs`; then it ends in any case.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        subflavors: Merged over those of the datasets.
        exclude_from: Folder of quarantine files, see `Quarantine`; the samples in them are
            left out. None for none.
        allow: "code" lets code beside datasets make their samples (`sample_loader.py`), and
            modules be imported that they name. ENERGON_ALLOW=code does, too.
        legacy: Deprecated settings of the decoder, see `energon.task_encoder.legacy`.

    Raises:
        ConfigError: If an argument or a document makes no sense.
        DatasetNotFoundError: If there is no such dataset.
        EmptyDatasetError: If a leaf has no samples in this split.
        SecurityError: If a dataset needs what is not allowed.
    """
    _check_least(1, max_samples_per_sequence=max_samples_per_sequence)
    _check_least(1, parallel_shard_iters=parallel_shard_iters)
    _check_least(0, shuffle_buffer_size=shuffle_buffer_size)
    resolved = resolve(
        path,
        split_part=split_part,
        training=True,
        dataset_config=dataset_config,
        split_config=split_config,
    )
    opened = open_leaves(resolved.leaves, subflavors, exclude_from, allow)
    encoder = with_legacy_arguments(task_encoder, legacy)
    check_encoder(encoder, packing=bool(packing_buffer_size))
    plan = train_plan(
        resolved,
        opened,
        seed=worker_config.seed_offset,
        batch_size=batch_size,
        packing_buffer_size=packing_buffer_size,
        shuffle_buffer_size=shuffle_buffer_size,
        max_samples_per_sequence=max_samples_per_sequence,
        parallel_shard_iters=parallel_shard_iters,
        shuffle_over_epochs_multiplier=shuffle_over_epochs_multiplier,
        blend_unit=blend_unit,
        repeat=repeat,
    )
    if overrides(encoder, "build_train_datasets"):
        return built(
            encoder.build_train_datasets,
            datasets=loaded_datasets(opened, plan.leaves, encoder, worker_config, training=True),
            worker_config=worker_config,
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            packing_buffer_size=packing_buffer_size,
            virtual_epoch_length=virtual_epoch_length,
            shuffle_buffer_size=shuffle_buffer_size,
            blend_mode=resolved.blend_mode,
            repeat=repeat,
        )
    return _build(
        opened,
        plan,
        worker_config=worker_config,
        task_encoder=encoder,
        batch_size=batch_size,
        drop_last=batch_drop_last,
        packing_buffer_size=packing_buffer_size,
        virtual_epoch_length=virtual_epoch_length,
        restart=False,
    )


def get_val_dataset(
    path: DatasetPath,
    *,
    split_part: str = "val",
    worker_config: WorkerConfig,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    limit: int | None = None,
    task_encoder: AnyTaskEncoder | None = None,
    dataset_config: str | None = None,
    split_config: str | None = None,
    subflavors: Mapping[str, Any] | None = None,
    exclude_from: str | os.PathLike[str] | None = None,
    allow: Collection[str] = (),
    **legacy: Any,
) -> SavableDataset | WrapperDataset:
    """Return the validation pipeline: each sample once, leaf after leaf, in order.

    Weights and repetitions do not count. Every pass starts from the beginning.

    Args:
        path: Folder of a prepared dataset, a metadataset YAML, or the document as a dict.
        split_part: Which split.
        worker_config: Who loads it.
        batch_size: Samples per batch; None yields samples.
        batch_drop_last: Whether a last, smaller batch is left out.
        packing_buffer_size: Samples of a lane that are divided into packs together, by the
            hooks `select_samples_to_pack` and `pack_selected_samples`; None does not pack.
        limit: Most batches of each rank in a pass; None or 0 for all.
        task_encoder: The user's hooks; None for those of `DefaultTaskEncoder`.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        subflavors: Merged over those of the datasets.
        exclude_from: Folder of quarantine files, see `Quarantine`; the samples in them are
            left out. None for none.
        allow: "code" lets code beside datasets make their samples (`sample_loader.py`), and
            modules be imported that they name. ENERGON_ALLOW=code does, too.
        legacy: Deprecated settings of the decoder, see `energon.task_encoder.legacy`.

    Raises:
        ConfigError: If an argument or a document makes no sense.
        DatasetNotFoundError: If there is no such dataset.
        EmptyDatasetError: If a leaf has no samples in this split.
        SecurityError: If a dataset needs what is not allowed.
    """
    leaves = resolve(
        path,
        split_part=split_part,
        training=False,
        dataset_config=dataset_config,
        split_config=split_config,
    ).leaves
    return _build_validation(
        open_leaves(leaves, subflavors, exclude_from, allow),
        worker_config=worker_config,
        task_encoder=with_legacy_arguments(task_encoder, legacy),
        batch_size=batch_size,
        drop_last=batch_drop_last,
        packing_buffer_size=packing_buffer_size,
        limit=limit,
    )


def get_val_datasets(
    path: DatasetPath,
    *,
    split_part: str = "val",
    worker_config: WorkerConfig,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    limit: int | None = None,
    task_encoder: AnyTaskEncoder | None = None,
    dataset_config: str | None = None,
    split_config: str | None = None,
    subflavors: Mapping[str, Any] | None = None,
    exclude_from: str | os.PathLike[str] | None = None,
    allow: Collection[str] = (),
    **legacy: Any,
) -> list[tuple[SavableDataset | WrapperDataset, LeafDataset]]:
    """Return a validation pipeline for each leaf, so that losses can be told apart.

    Arguments and errors are those of `get_val_dataset`.
    """
    leaves = resolve(
        path,
        split_part=split_part,
        training=False,
        dataset_config=dataset_config,
        split_config=split_config,
    ).leaves
    encoder = with_legacy_arguments(task_encoder, legacy)
    return [
        (
            _build_validation(
                [opened],
                worker_config=worker_config,
                task_encoder=encoder,
                batch_size=batch_size,
                drop_last=batch_drop_last,
                packing_buffer_size=packing_buffer_size,
                limit=limit,
            ),
            loaded_datasets([opened], None, encoder, worker_config, training=False)[0].dataset,
        )
        for opened in open_leaves(leaves, subflavors, exclude_from, allow)
    ]


def _build_validation(
    opened: Sequence[OpenedLeaf], *, batch_size: int | None, limit: int | None, **settings: Any
) -> SavableDataset | WrapperDataset:
    _check_least(0, limit=limit)
    encoder, worker_config = settings["task_encoder"], settings["worker_config"]
    check_encoder(encoder, packing=bool(settings["packing_buffer_size"]))
    if overrides(encoder, "build_val_datasets"):
        return built(
            encoder.build_val_datasets,
            datasets=loaded_datasets(opened, None, encoder, worker_config, training=False),
            worker_config=worker_config,
            batch_size=batch_size,
            batch_drop_last=settings["drop_last"],
            packing_buffer_size=settings["packing_buffer_size"],
            limit=limit,
        )
    plan = PlanRecipe(
        kind="concat",
        leaves=tuple(leaf.plan_leaf for leaf in opened),
        seed=settings["worker_config"].seed_offset,
        repeat=False,
        stripe=batch_size or 1,
    )
    return _build(
        opened,
        plan,
        batch_size=batch_size,
        virtual_epoch_length=limit or 0,
        restart=True,
        **settings,
    )


def _check_least(least: int, **settings: int | None) -> None:
    for name, value in settings.items():
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, or None, got {value}")


def _build(
    opened: Sequence[OpenedLeaf],
    plan: PlanRecipe,
    *,
    worker_config: WorkerConfig,
    task_encoder: AnyTaskEncoder,
    batch_size: int | None,
    drop_last: bool,
    packing_buffer_size: int | None,
    virtual_epoch_length: int,
    restart: bool,
) -> SavableDataset:
    reader = make_reader(opened, window_rows(plan.leaves, shuffle_window=plan.shuffle_window))
    return SavableDataset(
        stage=build_pipeline(
            [leaf.leaf for leaf in opened],
            reader,
            plan,
            task_encoder,
            batch_size=batch_size,
            packing_buffer_size=packing_buffer_size,
            drop_last=drop_last,
            error_handler=worker_config.global_error_handler,
        ),
        plan=plan,
        worker_config=worker_config,
        batch_size=batch_size,
        packing_buffer_size=packing_buffer_size,
        reader=reader,
        data={leaf.plan_leaf.uid: leaf.source.fingerprint() for leaf in opened},
        virtual_epoch_length=virtual_epoch_length,
        restart=restart,
    )
