"""The order of the stages.

`Recipe`, read from top to bottom, is the life of a sample: it is picked by the plan, read, decoded,
cooked, encoded, packed and batched. Blending and shuffling happen in the plan, as arithmetic on
row numbers. No other place decides on order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from energon.errors import ConfigError
from energon.io.address import shown_address
from energon.messages import counted, warn_once
from energon.metadataset.leaf import LeafList
from energon.plan.fill import PACK_ROWS
from energon.plan.packs import PackedOrder
from energon.plan.recipe import PlanRecipe
from energon.sources.reader import LeafReader, window_rows
from energon.stages.base import Dataset
from energon.stages.batch import BatchDataset
from energon.stages.hooks.hook import Hook
from energon.stages.map import MapDataset
from energon.stages.read import ReadDataset, raise_unreadable
from energon.stages.seed import SeedDataset
from energon.surroundings import usable_memory
from energon.task_encoder.cooker import is_generator_function
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.encoder import (
    HOOKS,
    YIELDING,
    AnyTaskEncoder,
    HookMaker,
    check_encoder,
)
from energon.task_encoder.leaves import OpenedLeaf
from energon.task_encoder.load import join_hooks, load_hooks, needs_sources, runs_user_code
from energon.task_encoder.train_plan import (
    BatchSettings,
    TrainSettings,
    ValidationSettings,
    streams,
    train_plan,
)
from energon.worker import WorkerConfig

logger = logging.getLogger("energon")

SMALL_MEMORY = 1 << 30
"""The least memory of a machine that trains, in bytes. Reading its limits takes 0.5 ms."""


def train_recipe(
    resolved: LeafList,
    opened: Sequence[OpenedLeaf],
    encoder: AnyTaskEncoder,
    settings: TrainSettings,
    worker_config: WorkerConfig,
) -> Recipe:
    """Return the recipe of a training run over leaves that are mixed as `resolved` says.

    Raises:
        ConfigError: If the settings, the document and the hooks do not fit together.
    """
    return Recipe(
        opened=tuple(opened),
        plan=train_plan(resolved, opened, settings, worker_config),
        encoder=encoder,
        settings=settings,
        worker_config=worker_config,
        resolved=resolved,
    )


def validation_recipe(
    opened: Sequence[OpenedLeaf],
    encoder: AnyTaskEncoder,
    settings: ValidationSettings,
    worker_config: WorkerConfig,
) -> Recipe:
    """Return the recipe that yields the samples of all leaves once, in order.

    Raises:
        ConfigError: If the settings and the hooks do not fit together.
    """
    plan = PlanRecipe(
        kind="concat",
        leaves=tuple(leaf.plan_leaf for leaf in opened),
        seed=worker_config.seed_offset,
        repeat=False,
        stripe=settings.batch_size or 1,
        streams=streams(worker_config),
    )
    return Recipe(
        opened=tuple(opened),
        plan=plan,
        encoder=encoder,
        settings=settings,
        worker_config=worker_config,
    )


@dataclass(frozen=True)
class Recipe:
    """The parts of a pipeline, and the steps from samples to batches.

    Args:
        opened: The datasets, one for each leaf of `plan`.
        plan: The order of their samples.
        encoder: The user's hooks. A hook that is not overridden adds no stage.
        settings: How samples are packed and batched. Without a batch_size, samples are yielded
            one by one, or the grouping hook decides the size.
        worker_config: Rank and workers.
        resolved: How the document mixes the leaves; None for validation, which mixes nothing.

    Raises:
        ConfigError: If hooks conflict with one another or with the settings.

    Example:
        >>> from energon import DefaultTaskEncoder, WorkerConfig, get_train_dataset
        >>> class WithoutBatches(DefaultTaskEncoder):
        ...     def assemble(self, recipe):
        ...         return recipe.savable(recipe.encoded(recipe.samples()))
        >>> dataset = get_train_dataset(
        ...     "photos",
        ...     worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        ...     batch_size=4,
        ...     task_encoder=WithoutBatches(),
        ... )
        >>> type(next(iter(dataset))).__name__
        'CaptioningSample'
    """

    opened: tuple[OpenedLeaf, ...]
    plan: PlanRecipe
    encoder: AnyTaskEncoder
    settings: BatchSettings
    worker_config: WorkerConfig
    resolved: LeafList | None = None

    def __post_init__(self) -> None:
        check_encoder(
            self.encoder,
            selecting=bool(self.settings.packing_buffer_size),
            packing=self._plans_packs,
        )
        if self._groups and self.plan.unit > 1:
            raise ConfigError(
                "the blend draws whole batches of one dataset, but batch_group_criterion decides "
                "what goes into a batch; drop one of the two"
            )
        if self.plan.balance is not None and (self._groups or self._yields):
            raise ConfigError(
                "balance deals samples to batches of equal size, but a hook of the encoder decides "
                "how many a batch has (batch_group_criterion, or a generator); drop one of the two"
            )

    @property
    def training(self) -> bool:
        """Whether this is a training run."""
        return isinstance(self.settings, TrainSettings)

    def pipeline(self) -> SavableDataset:
        """Return the whole pipeline: batches, ready for a loader."""
        whole = self.savable(self.batches(self.encoded(self.samples())))
        return replace(whole, batch_rows=self._batch_rows)

    def samples(self) -> Dataset[Any]:
        """Return the samples in the order of the plan: read, decoded, cooked."""
        hooks = self._hooks
        per_leaf = tuple(leaf_hooks(hooks, leaf) for leaf in self.opened)
        return then(
            ReadDataset(self.plan, self.reader, hooks.make("read", raise_unreadable)), per_leaf
        )

    def encoded(self, samples: Dataset[Any]) -> Dataset[Any]:
        """Return `samples` after the hooks that encode single samples.

        Where samples are packed, `postencode_sample` runs on those that were selected.
        """
        names = ["encode_sample", "preencode_sample"]
        if not self._packs:
            names.append("postencode_sample")
        per_sample = self._hooks.overridden(*names)
        return then(samples, (per_sample,))

    def batches(self, samples: Dataset[Any]) -> Dataset[Any]:
        """Return encoded `samples` packed, grouped and batched as the hooks and settings say."""
        hooks, settings, plan = self._hooks, self.settings, self.plan
        drop_last, batch_size = settings.batch_drop_last, settings.batch_size
        if self._planned is not None and not self._plans_packs:
            batch_size = 1  # a batch is all that a pack has
        pipeline = samples
        if settings.packing_buffer_size:
            from energon.stages.pack import PackDataset

            pipeline = PackDataset(
                pipeline,
                settings.packing_buffer_size,
                select=hooks.method("select_samples_to_pack"),
                postencode=hooks.overridden("postencode_sample"),
                pack=hooks.overridden("pack_selected_samples"),
            )
        elif self._plans_packs:
            from energon.stages.pack import PlannedLength, PlannedPackDataset

            postencode = hooks.overridden("postencode_sample")
            packs = getattr(settings, "pack", None)
            if self._planned is not None and packs is not None and packs.encoded_length is not None:
                planned = PlannedLength(packs, packs.encoded_length, self._planned.lengths)
                postencode += (hooks.make("planned length", planned),)
            pipeline = PlannedPackDataset(
                pipeline,
                PACK_ROWS,
                postencode=postencode,
                pack=hooks.overridden("pack_selected_samples"),
            )
        unit = "packs" if self._packs else "samples"
        batch_hooks = (hooks.method("batch"), *hooks.overridden("encode_batch"))
        if self._groups:
            criterion = hooks.method("batch_group_criterion")
            from energon.stages.batch import GroupDataset

            pipeline = GroupDataset(pipeline, criterion, batch_size, batch_hooks, drop_last, unit)
        elif batch_size is not None:
            collates = not self.encoder._hook_method("batch").overridden
            arguments = (pipeline, batch_size, batch_hooks, drop_last, unit, collates)
            if plan.unit > 1 or plan.balance is not None:
                from energon.stages.batch import UnitBatchDataset

                rows = batch_size if self._planned is None else self._planned.unit_rows
                repeats = plan.balance is not None and plan.balance.balance.skipped == "repeat"
                pipeline = UnitBatchDataset(*arguments, unit_rows=rows, repeats=repeats)
            else:
                pipeline = BatchDataset(*arguments)
        return pipeline

    def savable(self, stage: Dataset[Any]) -> SavableDataset:
        """Return a pipeline for loaders whose last stage is `stage`."""
        config, settings = self.worker_config, self.settings
        if self.encoder.seeds_global_generators and self._runs_user_code:
            stage = SeedDataset(stage)
        # Validation is logged from a higher level on.
        mode, level = ("train", 1) if self.training else ("val", 2)
        if config.should_log(level):
            from energon.stages.log_samples import LogSamplesDataset

            stage = LogSamplesDataset(stage, mode, config)
        self._warn_of_hopeless_settings()
        return SavableDataset(
            stage=stage,
            plan=self.plan,
            worker_config=config,
            batch_size=settings.batch_size,
            packing_buffer_size=settings.packing_buffer_size,
            reader=self.reader,
            data={leaf.plan_leaf.uid: leaf.source.fingerprint() for leaf in self.opened},
            virtual_epoch_length=self._epoch_length,
            restart=not self.training,
            batch_drop_last=settings.batch_drop_last,
            grouping=self._groups,
            read_from=self._read_from,
        )

    def _warn_of_hopeless_settings(self) -> None:
        """Warn once of settings that have no effect because there are too few samples."""
        samples = sum(leaf.num_samples for leaf in self.plan.leaves)
        names = ", ".join(leaf.loading.name for leaf in self.opened[:3])
        size, window = self.settings.batch_size or 1, self.plan.shuffle_window
        if self.training and size > samples:
            outcome = "batches contain samples several times"
            passed = sum(leaf.num_samples * leaf.repetitions for leaf in self.plan.leaves)
            if self.plan.kind == "epochized" and not self.plan.repeat and size > passed:
                outcome = "the only batch of a pass is smaller"
                if self.settings.batch_drop_last:
                    outcome = "batch_drop_last=True leaves no batch at all"
            warn_once(
                logger,
                f"batch of {names}",
                "batch_size=%d is more than the %s of %s: %s",
                size,
                counted(samples, "sample"),
                names,
                outcome,
            )
        if window > samples > 1:
            warn_once(
                logger,
                f"window of {names}",
                "shuffle_buffer_size=%d is more than the %s of %s, which are fully shuffled "
                "without it",
                window,
                counted(samples, "sample"),
                names,
            )
        open_bytes = self._open_slice_bytes()
        memory = usable_memory() if open_bytes > SMALL_MEMORY else None
        if memory is not None and open_bytes > memory:
            warn_once(
                logger,
                f"open slices of {names}",
                "the open slices of %s have %.1f GiB in total, and this machine has %.1f GiB of "
                "memory, so samples are read from disk one by one. Lower parallel_shard_iters, "
                "max_samples_per_sequence or the number of lanes",
                names,
                open_bytes / (1 << 30),
                memory / (1 << 30),
            )

    def _open_slice_bytes(self) -> float:
        """Return the size of the slices that the lanes of this rank have open at a time.

        Only slices whose length was set count: automatically chosen ones are small.
        """
        settings, total = self.settings, 0.0
        lanes = self.worker_config.default_lanes
        for leaf, opened in zip(self.plan.leaves, self.opened, strict=True):
            source = opened.source
            given: list[Any] = [opened.config]
            if isinstance(settings, TrainSettings):
                given.append(settings)
            is_set = any(g.max_samples_per_sequence or g.parallel_shard_iters for g in given)
            if is_set and not source.is_remote and leaf.shuffle_over_epochs is not None:
                samples = min(leaf.slice_samples * leaf.parallel_slices, leaf.num_samples / lanes)
                total += samples * source.mean_sample_bytes
        return total * lanes / self.worker_config.world_size

    @cached_property
    def reader(self) -> LeafReader:
        """Reads the samples of all leaves."""
        rows = window_rows(self.plan.leaves, shuffle_window=self.plan.shuffle_window)
        return make_reader(self.encoder, self.opened, rows)

    @property
    def _read_from(self) -> dict[str, str]:
        """Where commands find the data of a saved state; empty unless they are files."""
        settings, resolved = self.settings, self.resolved
        if not isinstance(settings, TrainSettings) or resolved is None or not resolved.read_from:
            return {}
        excluded = settings.exclude_from
        more = {} if excluded is None else {"exclude_from": shown_address(excluded)}
        return {**resolved.read_from, **more}

    @property
    def _epoch_length(self) -> int:
        if isinstance(self.settings, TrainSettings):
            return self.settings.virtual_epoch_length
        return getattr(self.settings, "limit", None) or 0

    @property
    def _batch_rows(self) -> int | None:
        """Number of rows per batch, unless hooks skip some; None if batches differ."""
        differs = self._packs or self._planned or self._groups or self._yields
        return None if differs else self.settings.batch_size or 1

    @cached_property
    def _yields(self) -> bool:
        """Whether one input of a hook may become several."""
        cooks = any(is_generator_function(cooker.cook) for cooker in self.encoder.cookers)
        return cooks or any(map(self.encoder._may_yield, YIELDING))

    @property
    def _groups(self) -> bool:
        return self.encoder._hook_method("batch_group_criterion").overridden

    @property
    def _planned(self) -> PackedOrder | None:
        """How packs are planned; None if they are not."""
        order = self.plan.balance
        return order if isinstance(order, PackedOrder) else None

    @property
    def _packs(self) -> bool:
        return bool(self.settings.packing_buffer_size) or self._plans_packs

    @property
    def _plans_packs(self) -> bool:
        return getattr(self.settings, "pack", None) is not None

    @cached_property
    def _hooks(self) -> HookMaker:
        return HookMaker(
            self.encoder,
            self.reader,
            tuple(leaf.loading.name for leaf in self.opened),
            self.worker_config.global_error_handler,
            seed_each=self._groups or self._packs or self.plan.unit > 1 or self._yields,
        )

    @property
    def _overridden(self) -> tuple[Hook, ...]:
        return self._hooks.overridden(*HOOKS)

    @property
    def _runs_user_code(self) -> bool:
        """Whether code of the program or of a dataset runs, which may draw random numbers."""
        encoder = self.encoder
        return bool(encoder.cookers or self._overridden) or any(
            runs_user_code(leaf.loading, encoder) for leaf in self.opened
        )


def make_reader(
    encoder: AnyTaskEncoder, opened: Sequence[OpenedLeaf], window_rows: int = 0
) -> LeafReader:
    """Return the reader of the samples of `opened` for an encoder."""
    loadings = [leaf.loading for leaf in opened]
    return LeafReader(
        sources=tuple(leaf.source for leaf in opened),
        subflavors=tuple(leaf.subflavors for leaf in opened),
        window_rows=window_rows,
        source_paths=tuple(
            loading.dataset_path if needs_sources(encoder, loading) else None
            for loading in loadings
        ),
    )


def then(stage: Dataset[Any], hooks: tuple[tuple[Hook, ...], ...]) -> Dataset[Any]:
    """Return `stage` with more hooks for single samples, merged into one stage.

    Args:
        stage: The samples.
        hooks: For the samples of each leaf; a single entry for all samples.
    """
    if not any(hooks):
        return stage
    if not isinstance(stage, MapDataset):
        return MapDataset(stage, hooks)
    present, size = stage.hooks, max(len(stage.hooks), len(hooks))
    if len(present) == 1:
        present *= size
    if len(hooks) == 1:
        hooks *= size
    together = zip(present, hooks, strict=True)
    return replace(stage, hooks=tuple(first + then for first, then in together))


def leaf_hooks(hooks: HookMaker, leaf: OpenedLeaf) -> tuple[Hook, ...]:
    """Return the hooks that turn the bytes of a leaf's samples into the input of encoding hooks."""
    loading = leaf.loading
    if loading.join is None:
        return load_hooks(hooks, loading)
    return join_hooks(hooks, loading, loading.join)
