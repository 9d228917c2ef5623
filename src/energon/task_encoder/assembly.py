"""Put together what the getters return: a plan, a reader and the stages between them."""

from __future__ import annotations

from collections.abc import Sequence

from energon.metadataset.leaf import LeafList
from energon.plan.recipe import PlanRecipe
from energon.sources.ahead import window_rows
from energon.task_encoder.augment import overrides
from energon.task_encoder.build import BUILDERS, built
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.hook_maker import AnyTaskEncoder
from energon.task_encoder.leaf_dataset import loaded_datasets, make_reader
from energon.task_encoder.leaves import OpenedLeaf
from energon.task_encoder.recipe import build_pipeline, check_encoder
from energon.task_encoder.settings import BatchSettings, TrainSettings, ValidationSettings
from energon.task_encoder.train_plan import train_plan
from energon.worker import WorkerConfig
from energon.wrappers.base import WrapperDataset
from energon.wrappers.watching import LogSampleDataset


def train_pipeline(
    resolved: LeafList,
    opened: Sequence[OpenedLeaf],
    encoder: AnyTaskEncoder,
    settings: TrainSettings,
    worker_config: WorkerConfig,
) -> SavableDataset | WrapperDataset:
    """Return the training pipeline over leaves that are mixed as `resolved` says.

    Raises:
        ConfigError: If the settings, the document and the hooks do not fit together.
    """
    check_encoder(encoder, packing=bool(settings.packing_buffer_size))
    plan = train_plan(resolved, opened, settings, seed=worker_config.seed_offset)
    if _builds(encoder, "build_train_datasets"):
        return built(
            encoder.build_train_datasets,
            datasets=loaded_datasets(opened, plan.leaves, encoder, worker_config, training=True),
            worker_config=worker_config,
            batch_size=settings.batch_size,
            batch_drop_last=settings.batch_drop_last,
            packing_buffer_size=settings.packing_buffer_size,
            virtual_epoch_length=settings.virtual_epoch_length,
            shuffle_buffer_size=settings.shuffle_buffer_size,
            blend_mode=resolved.blend_mode,
            repeat=settings.repeat,
        )
    return _pipeline(
        opened,
        plan,
        encoder,
        settings,
        worker_config,
        epoch_length=settings.virtual_epoch_length,
        restart=False,
    )


def validation_pipeline(
    opened: Sequence[OpenedLeaf],
    encoder: AnyTaskEncoder,
    settings: ValidationSettings,
    worker_config: WorkerConfig,
) -> SavableDataset | WrapperDataset:
    """Return the pipeline that yields the samples of all leaves once, in order.

    Raises:
        ConfigError: If the settings and the hooks do not fit together.
    """
    check_encoder(encoder, packing=bool(settings.packing_buffer_size))
    if _builds(encoder, "build_val_datasets"):
        return built(
            encoder.build_val_datasets,
            datasets=loaded_datasets(opened, None, encoder, worker_config, training=False),
            worker_config=worker_config,
            batch_size=settings.batch_size,
            batch_drop_last=settings.batch_drop_last,
            packing_buffer_size=settings.packing_buffer_size,
            limit=settings.limit,
        )
    plan = PlanRecipe(
        kind="concat",
        leaves=tuple(leaf.plan_leaf for leaf in opened),
        seed=worker_config.seed_offset,
        repeat=False,
        stripe=settings.batch_size or 1,
    )
    return _pipeline(
        opened,
        plan,
        encoder,
        settings,
        worker_config,
        epoch_length=settings.limit or 0,
        restart=True,
    )


def _builds(encoder: AnyTaskEncoder, whole: str) -> bool:
    """Return whether an encoder has a say in how its stages are put together."""
    return any(overrides(encoder, name) for name in (whole, *BUILDERS))


def _pipeline(
    opened: Sequence[OpenedLeaf],
    plan: PlanRecipe,
    encoder: AnyTaskEncoder,
    settings: BatchSettings,
    worker_config: WorkerConfig,
    *,
    epoch_length: int,
    restart: bool,
) -> SavableDataset:
    reader = make_reader(opened, window_rows(plan.leaves, shuffle_window=plan.shuffle_window))
    leaves = [leaf.leaf for leaf in opened]
    stage = build_pipeline(
        leaves, reader, plan, encoder, settings, worker_config.global_error_handler
    )
    # As in `PipelineBuilder`: validation says less.
    mode, level = ("val", 2) if restart else ("train", 1)
    if worker_config.should_log(level):
        stage = LogSampleDataset(stage, mode, worker_config).stage
    return SavableDataset(
        stage=stage,
        plan=plan,
        worker_config=worker_config,
        batch_size=settings.batch_size,
        packing_buffer_size=settings.packing_buffer_size,
        reader=reader,
        data={leaf.plan_leaf.uid: leaf.source.fingerprint() for leaf in opened},
        virtual_epoch_length=epoch_length,
        restart=restart,
        batch_drop_last=settings.batch_drop_last,
    )
