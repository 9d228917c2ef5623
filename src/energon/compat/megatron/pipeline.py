"""The pipelines that builders of task encoders return, put together of wrappers or by a plan.

What a program leaves to the builders of this library is the recipe's own stage, in the order of
the plan. Where it puts something of its own in between, wrappers take the place of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeGuard

from energon.compat.megatron.datasets.leaf import LeafDataset
from energon.compat.megatron.wrappers.base import WrapperDataset
from energon.compat.megatron.wrappers.streams import (
    BlendDataset,
    EpochizeDataset,
    LimitDataset,
    RepeatDataset,
)
from energon.compat.megatron.wrappers.watchers import LogSampleDataset
from energon.errors import ConfigError
from energon.metadataset.leaf import BlendMode, LeafList
from energon.stages.base import Dataset
from energon.stages.hooks.hook import Hook
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.encoder import HookMaker
from energon.task_encoder.leaves import OpenedLeaf
from energon.task_encoder.recipe import Recipe, then
from energon.task_encoder.train_plan import TrainSettings
from energon.worker import WorkerConfig

building: ContextVar[Recipe] = ContextVar("recipe")
"""What is being built, by the outermost of several encoders around one another."""


@dataclass(frozen=True)
class LoadedDataset:
    """A dataset of a document, and how it takes part in a blend.

    Args:
        dataset: The dataset. In `build_train_datasets`, `dataset.build()` returns its samples;
            in what `load_dataset` returns, `dataset.source` has them by number.
        weight: Its share in a blend by weights at the beginning of a run; None if it is no such
            blend, or if weights come from sizes.
        repetitions: How often an epochized blend repeats it; None for once.
        aux: Auxiliary data by name.

    Example:
        >>> from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_train_dataset
        >>> class Telling(DefaultTaskEncoder):
        ...     def build_train_datasets(self, *, datasets, **settings):
        ...         print([loaded.dataset.name for loaded in datasets])
        ...         return super().build_train_datasets(datasets=datasets, **settings)
        >>> dataset = get_train_dataset(
        ...     "photos",
        ...     worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        ...     batch_size=4,
        ...     task_encoder=Telling(),
        ... )
        ['photos']
    """

    dataset: Any
    weight: float | None = None
    repetitions: float | None = None
    aux: Mapping[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        """Yield the dataset, and its weight or repetitions: the pairs of Megatron-Energon 5."""
        return iter((self.dataset, self.repetitions if self.weight is None else self.weight))


def current_recipe() -> Recipe:
    """Return the recipe of which a pipeline is being built.

    Raises:
        ConfigError: If none is.
    """
    recipe = building.get(None)
    if recipe is None:
        raise ConfigError(
            "the builders of a task encoder run while a dataset getter assembles a pipeline; "
            "call get_train_dataset or get_val_dataset, or build the pipeline of wrappers"
        )
    return recipe


def loaded_datasets(recipe: Recipe) -> list[LoadedDataset]:
    """Return the datasets of a recipe, each with its share in the blend."""
    return [
        LoadedDataset(dataset, leaf.weight, leaf.repetitions, dataset.opened.loading.aux)
        for dataset, leaf in zip(LeafDataset.of(recipe), recipe.plan.leaves, strict=True)
    ]


def load_samples(
    recipe: Recipe, datasets: Sequence[LoadedDataset], worker_config: WorkerConfig
) -> list[Any]:
    """Return the samples of each dataset, once, as the encoder loads them."""
    encoder: Any = recipe.encoder
    return [encoder._load_dataset(dataset, worker_config=worker_config) for dataset in datasets]


@dataclass(frozen=True, repr=False)
class PlannedDataset(SavableDataset):
    """The pipeline of a recipe, with what programs ask their datasets."""

    @classmethod
    def of(cls, dataset: SavableDataset) -> PlannedDataset:
        """Return `dataset` as one."""
        return cls(**{each.name: getattr(dataset, each.name) for each in fields(dataset)})

    def len_rank(self) -> int:
        """Return how many batches this rank delivers in an epoch."""
        return len(self)

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Return how many batches each worker makes per epoch, or one of them, rounded up."""
        workers = max(1, self.worker_config.num_workers)
        return len(range(worker_idx or 0, len(self), workers))

    def worker_has_samples(self) -> bool:
        """Return True: a dataset without samples cannot be opened."""
        return True

    def can_restore_sample(self) -> bool:
        """Return whether `restore_sample` is supported."""
        return True


def as_planned(pipeline: Any) -> Any:
    """Return the pipeline of an encoder, as a `PlannedDataset` if it is the recipe's own."""
    return PlannedDataset.of(pipeline) if isinstance(pipeline, SavableDataset) else pipeline


def planned(recipe: Recipe, hooks: Sequence[tuple[Hook, ...]]) -> Any:
    """Return the pipeline of a recipe, built by the builders of its encoder.

    Args:
        recipe: The recipe.
        hooks: What the samples of each leaf pass before they are encoded.
    """
    token = building.set(recipe)
    try:
        stage = then(recipe.samples(), tuple(hooks))
        samples = PlannedDataset.of(replace(recipe.savable(stage), stage=stage))
        pipeline = batched(recipe.encoder, samples, recipe)
    finally:
        building.reset(token)
    if isinstance(pipeline, SavableDataset):
        return PlannedDataset.of(recipe.savable(pipeline.stage))
    settings, config = recipe.settings, recipe.worker_config
    if isinstance(settings, TrainSettings):
        if settings.virtual_epoch_length:
            pipeline = EpochizeDataset(pipeline, settings.virtual_epoch_length, config)
        return logged(pipeline, "train", 1, config)
    limit = getattr(settings, "limit", None)
    if limit:
        pipeline = LimitDataset(pipeline, limit, reset_after_epoch=True, worker_config=config)
    return logged(pipeline, "val", 2, config)


def batched(encoder: Any, samples: Any, recipe: Recipe) -> Any:
    """Return `samples` encoded and batched, by the builders of the outermost encoder."""
    config, settings = recipe.worker_config, recipe.settings
    return encoder.build_batch(
        encoder.build_encode_sample(samples, worker_config=config),
        batch_size=settings.batch_size,
        batch_drop_last=settings.batch_drop_last,
        packing_buffer_size=settings.packing_buffer_size,
        worker_config=config,
    )


class UnplannedRecipe(Recipe):
    """The steps of a recipe, for items of wrappers, whose order is not that of its plan."""

    @cached_property
    def _hooks(self) -> HookMaker:
        # A stage around them may read single items again, so each call has seeds of its own.
        return replace(super()._hooks, seed_each=True)


def next_step(
    dataset: Dataset[Any],
    recipe: Recipe,
    step: Callable[[Recipe, Dataset[Any]], Dataset[Any]],
    **sizes: Any,
) -> Any:
    """Return `dataset` after a step of a recipe.

    Args:
        dataset: The samples of the recipe, or a wrapper.
        recipe: The recipe.
        step: A method of `Recipe`.
        sizes: Attributes of the result that the step decides.
    """
    if is_planned(dataset, recipe):
        return replace(dataset, stage=step(recipe, dataset.stage), **sizes)
    unplanned = UnplannedRecipe(
        opened=recipe.opened,
        plan=replace(recipe.plan, unit=1, balance=None),
        encoder=recipe.encoder,
        settings=recipe.settings,
        worker_config=recipe.worker_config,
        resolved=recipe.resolved,
    )
    stage = step(unplanned, dataset)
    if stage is dataset:
        return dataset
    return WrapperDataset([dataset], stage=stage, worker_config=recipe.worker_config, **sizes)


def is_planned(dataset: Any, recipe: Recipe) -> TypeGuard[SavableDataset]:
    """Return whether a dataset has the samples of the recipe and nothing else."""
    return isinstance(dataset, SavableDataset) and dataset.plan is recipe.plan


def logged(pipeline: Any, mode: str, level: int, config: WorkerConfig) -> Any:
    """Return a pipeline that logs what it yields, if `config` asks for records of a level."""
    return LogSampleDataset(pipeline, mode, config) if config.should_log(level) else pipeline


def mixed(
    recipe: Recipe, datasets: Sequence[LoadedDataset], blend_mode: BlendMode
) -> tuple[LeafList, Sequence[OpenedLeaf]]:
    """Return how `datasets` are mixed, and their leaves.

    That is what the document says, schedules included, unless the program changed the datasets,
    their shares or the kind of blend: then it is what the program says.
    """
    given = recipe.resolved or LeafList(leaves=(), blend_mode=BlendMode.NONE)
    entries = [(each.dataset.opened, each.weight, each.repetitions) for each in datasets]
    expected = [
        (leaf, plan_leaf.weight, plan_leaf.repetitions)
        for leaf, plan_leaf in zip(recipe.opened, recipe.plan.leaves, strict=True)
    ]
    if entries == expected and given.blend_mode is blend_mode:
        return given, recipe.opened
    if not datasets:
        raise ConfigError("a pipeline needs at least one dataset, got none")
    opened = [
        replace(
            leaf,
            plan_leaf=replace(
                leaf.plan_leaf,
                weight=1.0 if weight is None else float(weight),
                repetitions=repetitions or 1.0,
            ),
        )
        for leaf, weight, repetitions in entries
    ]
    return LeafList(leaves=(), blend_mode=blend_mode, unit=given.unit), opened


def blended(
    datasets: Sequence[LoadedDataset],
    loaded: Sequence[Any],
    worker_config: WorkerConfig,
    blend_mode: BlendMode,
    *,
    repeat: bool,
) -> Any:
    """Return the samples of all datasets, repeated and blended as the document says.

    Args:
        datasets: The datasets.
        loaded: The samples of each, once.
        worker_config: Who loads them.
        blend_mode: What the document says.
        repeat: Whether the blend has no end.
    """
    if not datasets:
        raise ConfigError("a pipeline needs at least one dataset, got none")
    by_weight = blend_mode is BlendMode.DATASET_WEIGHT
    if by_weight and not repeat:
        raise ConfigError("a weighted blend has no end, so repeat=False is impossible")
    epochized = not by_weight and (blend_mode is BlendMode.SAMPLE_REPETITIONS or not repeat)
    branches = []
    for dataset, samples in zip(datasets, loaded, strict=True):
        repetitions = dataset.repetitions or 1
        weight = repetitions * len(dataset.dataset) if epochized else dataset.weight
        branches.append(
            (
                RepeatDataset(
                    samples,
                    repeats=repetitions if epochized else None,
                    worker_config=worker_config,
                ),
                1.0 if weight is None else float(weight),
            )
        )
    blend = BlendDataset(*branches, worker_config=worker_config)
    return RepeatDataset(blend, worker_config=worker_config) if epochized and repeat else blend
