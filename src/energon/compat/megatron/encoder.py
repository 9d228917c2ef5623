"""Task encoders whose programs put the stages together themselves.

A program may override `build_train_datasets`, `build_val_datasets` or what they call, and wrap
what `super()` returns. The builders that it leaves alone return the recipe's own stages: samples
come in the order of the plan, whoever else has a say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, TypeVar

from energon.compat.megatron.datasets.leaf import LeafDataset, SampleDataset
from energon.compat.megatron.wrappers import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    FilterDataset,
    GroupBatchDataset,
    LimitDataset,
    LogSampleDataset,
    MapDataset,
    PackingDataset,
    RepeatDataset,
    ShuffleBufferDataset,
    WrapperDataset,
)
from energon.errors import ConfigError
from energon.metadataset.leaf import BlendMode, LeafList
from energon.plan.leaf import PlanLeaf
from energon.stages.base import Dataset
from energon.stages.hook import Hook
from energon.task_encoder import encoder as core
from energon.task_encoder.cooker import is_generator_function
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.encoder import HookMethod
from energon.task_encoder.leaves import OpenedLeaf
from energon.task_encoder.recipe import Recipe, then, train_recipe, validation_recipe
from energon.task_encoder.train_plan import TrainSettings, ValidationSettings
from energon.worker import WorkerConfig

T_sample = TypeVar("T_sample")
T_encoded_sample = TypeVar("T_encoded_sample")
T_raw_batch = TypeVar("T_raw_batch")
T_batch = TypeVar("T_batch")

BUILDERS = (
    "build_train_datasets",
    "build_val_datasets",
    "build_encode_sample",
    "build_batch",
    "build_cook_crude_sample",
    "_load_dataset",
)

_recipe: ContextVar[Recipe] = ContextVar("recipe")
"""What is being built, by the outermost of several encoders around one another."""


@dataclass(frozen=True)
class LoadedDataset:
    """A dataset of a document, and how it takes part in a blend.

    Args:
        dataset: The dataset. In `build_train_datasets`, `dataset.build()` returns its samples;
            in what `load_dataset` returns, `dataset.source` has them by number.
        weight: Its share in a blend by weights at the beginning of a run; None if it is no such
            blend, or if weights come from sizes.
        repetitions: How often it comes in an epochized blend; None for once.
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
        """Yield the samples, repeated without end, and the weight: as `BlendDataset` takes them."""
        samples = self.dataset.build()
        weight = 1.0 if self.weight is None else self.weight
        return iter((RepeatDataset(samples, worker_config=samples.worker_config), weight))


class TaskEncoder(core.TaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """The hooks of `energon.TaskEncoder`, and how their stages are put together.

    Override `build_train_datasets` and `build_val_datasets`, or what they call.
    """

    def assemble(self, recipe: Recipe) -> Any:
        builds = any(getattr(leaf.dataset, "builds_itself", False) for leaf in recipe.opened)
        if not builds and not any(_overrides(self, name) for name in BUILDERS):
            return super().assemble(recipe)
        token = _recipe.set(recipe)
        try:
            return _build(self, recipe)
        finally:
            _recipe.reset(token)

    def build_train_datasets(
        self,
        *,
        datasets: Sequence[LoadedDataset],
        worker_config: WorkerConfig,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        virtual_epoch_length: int = 0,
        shuffle_buffer_size: int | None = None,
        blend_mode: BlendMode = BlendMode.NONE,
        repeat: bool = True,
    ) -> Any:
        """Return the training pipeline over `datasets`. Override it to build another one."""
        recipe = _present()
        if not isinstance(recipe.settings, TrainSettings):
            raise ConfigError("build_train_datasets was called while validation is assembled")
        settings = replace(
            recipe.settings,
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            packing_buffer_size=packing_buffer_size,
            virtual_epoch_length=virtual_epoch_length,
            shuffle_buffer_size=shuffle_buffer_size,
            repeat=repeat,
        )
        loaded = _load(recipe, datasets, worker_config)
        hooks = _item_hooks(loaded)
        if hooks is not None:
            resolved, opened = _mixed(recipe, datasets, blend_mode)
            changed = train_recipe(resolved, opened, recipe.encoder, settings, worker_config)
            return _planned(changed, hooks)
        samples = _blended(datasets, loaded, worker_config, blend_mode, repeat=repeat)
        if shuffle_buffer_size:
            samples = ShuffleBufferDataset(
                samples, shuffle_buffer_size, worker_config=worker_config
            )
        batches = _batched(recipe.encoder, samples, replace(recipe, settings=settings))
        if virtual_epoch_length:
            batches = EpochizeDataset(batches, virtual_epoch_length, worker_config)
        return _logged(batches, "train", 1, worker_config)

    def build_val_datasets(
        self,
        *,
        datasets: Sequence[LoadedDataset],
        worker_config: WorkerConfig,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        limit: int | None = None,
    ) -> Any:
        """Return the validation pipeline over `datasets`. Override it to build another one."""
        recipe = _present()
        settings = ValidationSettings(
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            packing_buffer_size=packing_buffer_size,
            limit=limit,
        )
        loaded = _load(recipe, datasets, worker_config)
        hooks = _item_hooks(loaded)
        if hooks is not None:
            opened = [each.dataset.opened for each in datasets]
            return _planned(
                validation_recipe(opened, recipe.encoder, settings, worker_config), hooks
            )
        samples = ConcatDataset(*loaded, worker_config=worker_config)
        batches = _batched(recipe.encoder, samples, replace(recipe, settings=settings))
        if limit:
            batches = LimitDataset(
                batches, limit, reset_after_epoch=True, worker_config=worker_config
            )
        return _logged(batches, "val", 2, worker_config)

    def build_encode_sample(self, dataset: Dataset[Any], *, worker_config: WorkerConfig) -> Any:
        """Return the items of `dataset` after `encode_sample` or `preencode_sample`."""
        recipe = _present()
        if _is_planned(dataset, recipe):
            return replace(dataset, stage=recipe.encoded(dataset.stage))
        for name in ("encode_sample", "preencode_sample"):
            hook = recipe.encoder._hook_method(name)
            if hook.overridden:
                dataset = MapDataset(dataset, hook.function, worker_config=worker_config)
        return dataset

    def build_cook_crude_sample(
        self,
        dataset: Dataset[Any],
        *,
        worker_config: WorkerConfig,
        subflavors: Mapping[str, Any],
        get_primary_aux: Callable[[], Any] | None = None,
        aux: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return `dataset` as it is: the samples of `LoadedDataset.dataset` come cooked.

        An override is called for each crude dataset, and may wrap what it gets. Those of an
        encoder without cookers are crude samples.

        Args:
            dataset: The samples of one dataset.
            worker_config: Who loads them.
            subflavors: Of the dataset.
            get_primary_aux: Returns its files by name.
            aux: Its auxiliary data by name.
        """
        return dataset

    def build_batch(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig,
    ) -> Any:
        """Return batches of the items of `dataset`: packed, grouped and encoded as hooks say."""
        recipe = _present()
        if _is_planned(dataset, recipe):
            sizes: dict[str, Any] = {
                "batch_size": batch_size,
                "batch_drop_last": batch_drop_last,
                "packing_buffer_size": packing_buffer_size,
            }
            changed = replace(recipe, settings=replace(recipe.settings, **sizes))
            return replace(dataset, stage=changed.batches(dataset.stage), **sizes)

        def hook(name: str) -> Callable[..., Any] | None:
            method = recipe.encoder._hook_method(name)
            return method.function if method.overridden else None

        post = hook("postencode_sample")
        if packing_buffer_size:
            dataset = PackingDataset(
                dataset,
                packing_buffer_size,
                recipe.encoder._hook_method("select_samples_to_pack").function,
                recipe.encoder._hook_method("pack_selected_samples").function,
                sample_encoder=post,
                worker_config=worker_config,
            )
        elif post is not None:
            dataset = MapDataset(dataset, post, worker_config=worker_config)
        batch = recipe.encoder._hook_method("batch").function
        criterion = hook("batch_group_criterion")
        if criterion is not None:
            dataset = GroupBatchDataset(
                dataset,
                batch_size,
                criterion,
                batch,
                drop_last=batch_drop_last,
                worker_config=worker_config,
            )
        elif batch_size is not None:
            dataset = BatchDataset(
                dataset, batch_size, batch, drop_last=batch_drop_last, worker_config=worker_config
            )
        else:
            return dataset
        encode = hook("encode_batch")
        return (
            dataset if encode is None else MapDataset(dataset, encode, worker_config=worker_config)
        )

    def _load_dataset(
        self,
        dataset: LoadedDataset,
        worker_rotation_offset: int = 0,
        worker_config: WorkerConfig | None = None,
    ) -> Any:
        """Return the samples of one of the `datasets`, each once."""
        leaf = dataset.dataset
        samples = leaf.build()
        encoder = _present().encoder
        if leaf.primary is None or not _overrides(encoder, "build_cook_crude_sample"):
            return samples
        return encoder.build_cook_crude_sample(  # type: ignore[attr-defined]
            samples,
            worker_config=worker_config or samples.worker_config,
            subflavors=leaf.subflavors,
            get_primary_aux=leaf.as_file_store,
            aux=dataset.aux,
        )


class DefaultTaskEncoder(
    TaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch],
    core.DefaultTaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch],
):
    """The hooks of `energon.DefaultTaskEncoder`, and how their stages are put together."""


_SETTINGS = (
    "cookers",
    "decoder",
    "__default_failure_tolerance__",
    "__default_failure_rate__",
)


class AugmentTaskEncoder(TaskEncoder[Any, Any, Any, Any]):
    """Adds to what another task encoder does. Subclass it, override hooks, call `super()`.

    All hooks, settings and other attributes that the subclass does not have are those of
    `task_encoder`, with their marks; an override without marks has those of what it overrides.

    Args:
        task_encoder: The encoder that does the rest.

    Example:
        >>> class Loud(AugmentTaskEncoder):
        ...     def encode_sample(self, sample):
        ...         return super().encode_sample(sample).upper()
    """

    def __init__(self, task_encoder: core.TaskEncoder[Any, Any, Any, Any]) -> None:
        self.task_encoder = task_encoder
        for name in _SETTINGS:
            if getattr(type(self), name) is getattr(core.TaskEncoder, name):
                setattr(self, name, getattr(task_encoder, name))

    def __getattr__(self, name: str) -> Any:
        if name == "task_encoder":  # while a copy is being unpickled
            raise AttributeError(name)
        return getattr(self.task_encoder, name)

    def _hook_method(self, name: str) -> HookMethod:
        inner = self.task_encoder._hook_method(name)
        if not self._has_own(name):
            return inner
        function = getattr(self, name)
        return HookMethod(
            function=function,
            marked=function if hasattr(function, "__stateless__") else inner.marked,
            overridden=True,
            may_yield=inner.may_yield or is_generator_function(getattr(type(self), name, None)),
        )

    def _has_own(self, name: str) -> bool:
        """Return whether this encoder does more than to hand a hook or a builder on."""
        own = getattr(type(self), name) is not getattr(AugmentTaskEncoder, name)
        return own or name in vars(self)


def _delegate(name: str) -> Callable[..., Any]:
    """Return a method of `AugmentTaskEncoder` that hands its call on to the inner encoder."""
    described = getattr(TaskEncoder, name)

    def call_inner(self: AugmentTaskEncoder, *args: Any, **arguments: Any) -> Any:
        inner = self.task_encoder
        if hasattr(inner, name):
            return getattr(inner, name)(*args, **arguments)
        return described(self, *args, **arguments)

    call_inner.__name__, call_inner.__doc__ = name, described.__doc__
    return call_inner


HOOKS = (
    "cook_crude_sample",
    "encode_sample",
    "preencode_sample",
    "postencode_sample",
    "select_samples_to_pack",
    "pack_selected_samples",
    "batch_group_criterion",
    "batch",
    "encode_batch",
)
for _name in (*HOOKS, *BUILDERS):
    setattr(AugmentTaskEncoder, _name, _delegate(_name))


def _overrides(encoder: core.TaskEncoder[Any, Any, Any, Any], builder: str) -> bool:
    """Return whether a program has a say in how an encoder builds something."""
    while isinstance(encoder, AugmentTaskEncoder):
        if encoder._has_own(builder):
            return True
        encoder = encoder.task_encoder
    function = getattr(type(encoder), builder, None)
    return function is not getattr(TaskEncoder, builder) and function is not None


def _present() -> Recipe:
    recipe = _recipe.get(None)
    if recipe is None:
        raise ConfigError(
            "the builders of a task encoder run while a dataset getter assembles a pipeline; "
            "call get_train_dataset or get_val_dataset, or build the pipeline of wrappers"
        )
    return recipe


def _build(encoder: TaskEncoder[Any, Any, Any, Any], recipe: Recipe) -> Any:
    """Return what an encoder builds, if a loader can do anything with it."""
    settings = recipe.settings
    arguments: dict[str, Any] = {
        "datasets": loaded_datasets(recipe),
        "worker_config": recipe.worker_config,
        "batch_size": settings.batch_size,
        "batch_drop_last": settings.batch_drop_last,
        "packing_buffer_size": settings.packing_buffer_size,
    }
    build: Callable[..., Any]
    if isinstance(settings, TrainSettings):
        build = encoder.build_train_datasets
        arguments |= {
            "virtual_epoch_length": settings.virtual_epoch_length,
            "shuffle_buffer_size": settings.shuffle_buffer_size,
            "blend_mode": recipe.resolved.blend_mode if recipe.resolved else BlendMode.NONE,
            "repeat": settings.repeat,
        }
    else:
        build = encoder.build_val_datasets
        arguments["limit"] = getattr(settings, "limit", None)
    # Overrides of older versions do not know all arguments; they get those that they name.
    parameters = inspect.signature(build).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    pipeline = build(**arguments)
    if not isinstance(pipeline, WrapperDataset | SavableDataset):
        raise ConfigError(
            "build_train_datasets and build_val_datasets have to return a wrapper like "
            f"BatchDataset, found {type(pipeline).__name__}"
        )
    return pipeline


def loaded_datasets(recipe: Recipe) -> list[LoadedDataset]:
    """Return the datasets of a recipe, each with its share in the blend."""
    return [
        LoadedDataset(
            _dataset(leaf, plan_leaf, recipe),
            weight=plan_leaf.weight,
            repetitions=plan_leaf.repetitions,
            aux=leaf.leaf.aux,
        )
        for leaf, plan_leaf in zip(recipe.opened, recipe.plan.leaves, strict=True)
    ]


def _dataset(leaf: OpenedLeaf, plan_leaf: PlanLeaf, recipe: Recipe) -> LeafDataset:
    """Return a leaf of a recipe as builders see it: the program's own object, if there is one."""
    if isinstance(leaf.dataset, LeafDataset):
        return leaf.dataset.within(
            leaf, encoder=recipe.encoder, plan_leaf=plan_leaf, among=recipe.opened
        )
    return LeafDataset(
        leaf,
        encoder=recipe.encoder,
        worker_config=recipe.worker_config,
        training=recipe.training,
        plan_leaf=plan_leaf,
        among=recipe.opened,
    )


def _load(
    recipe: Recipe, datasets: Sequence[LoadedDataset], worker_config: WorkerConfig
) -> list[Any]:
    """Return the samples of each dataset, once, as the encoder loads them."""
    encoder: Any = recipe.encoder
    return [encoder._load_dataset(dataset, worker_config=worker_config) for dataset in datasets]


def _item_hooks(loaded: Sequence[Any]) -> list[tuple[Hook, ...]] | None:
    """Return what a program does to the single samples of each dataset.

    None if it does anything else: then the datasets are pipelines of their own, and the plan,
    which draws from datasets, cannot be asked which sample comes when.
    """
    found = []
    for dataset in loaded:
        hooks: tuple[Hook, ...] = ()
        while type(dataset) in (MapDataset, FilterDataset):
            hooks = (*dataset.stage.hooks[0], *hooks)
            (dataset,) = dataset.datasets
        if type(dataset) is not SampleDataset:
            return None
        found.append(hooks)
    return found


def _planned(recipe: Recipe, hooks: Sequence[tuple[Hook, ...]]) -> Any:
    """Return the pipeline of a recipe, built by the builders of its encoder.

    Args:
        recipe: The recipe.
        hooks: What the samples of each leaf pass before they are encoded.
    """
    token = _recipe.set(recipe)
    try:
        stage = then(recipe.samples(), tuple(hooks))
        samples = replace(recipe.savable(stage), stage=stage)
        pipeline = _batched(recipe.encoder, samples, recipe)
    finally:
        _recipe.reset(token)
    if isinstance(pipeline, SavableDataset):
        return recipe.savable(pipeline.stage)
    settings, config = recipe.settings, recipe.worker_config
    if isinstance(settings, TrainSettings):
        if settings.virtual_epoch_length:
            pipeline = EpochizeDataset(pipeline, settings.virtual_epoch_length, config)
        return _logged(pipeline, "train", 1, config)
    limit = getattr(settings, "limit", None)
    if limit:
        pipeline = LimitDataset(pipeline, limit, reset_after_epoch=True, worker_config=config)
    return _logged(pipeline, "val", 2, config)


def _batched(encoder: Any, samples: Any, recipe: Recipe) -> Any:
    """Return `samples` encoded and batched, by the builders of the outermost encoder."""
    config, settings = recipe.worker_config, recipe.settings
    return encoder.build_batch(
        encoder.build_encode_sample(samples, worker_config=config),
        batch_size=settings.batch_size,
        batch_drop_last=settings.batch_drop_last,
        packing_buffer_size=settings.packing_buffer_size,
        worker_config=config,
    )


def _is_planned(dataset: Any, recipe: Recipe) -> TypeGuard[SavableDataset]:
    """Return whether a dataset has the samples of the recipe and nothing else."""
    return isinstance(dataset, SavableDataset) and dataset.plan is recipe.plan


def _logged(pipeline: Any, mode: str, level: int, config: WorkerConfig) -> Any:
    return LogSampleDataset(pipeline, mode, config) if config.should_log(level) else pipeline


def _mixed(
    recipe: Recipe, datasets: Sequence[LoadedDataset], blend_mode: BlendMode
) -> tuple[LeafList, Sequence[OpenedLeaf]]:
    """Return how `datasets` are mixed, and their leaves.

    That is what the document says, schedules included, unless the program changed the datasets,
    their shares or the kind of blend: then it is what the program says.
    """
    given = recipe.resolved or LeafList(leaves=(), blend_mode=BlendMode.NONE)
    found = [(each.dataset.opened, each.weight, each.repetitions) for each in datasets]
    expected = [
        (leaf, plan_leaf.weight, plan_leaf.repetitions)
        for leaf, plan_leaf in zip(recipe.opened, recipe.plan.leaves, strict=True)
    ]
    if found == expected and given.blend_mode is blend_mode:
        return given, recipe.opened
    if not datasets:
        raise ConfigError("there is no dataset to build a pipeline of")
    opened = [
        replace(
            leaf,
            plan_leaf=replace(
                leaf.plan_leaf,
                weight=1.0 if weight is None else float(weight),
                repetitions=repetitions or 1.0,
            ),
        )
        for leaf, weight, repetitions in found
    ]
    return LeafList(leaves=(), blend_mode=blend_mode, unit=given.unit), opened


def _blended(
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
        raise ConfigError("there is no dataset to build a pipeline of")
    by_weight = blend_mode is BlendMode.DATASET_WEIGHT
    if by_weight and not repeat:
        raise ConfigError("a blend by weights has no end, so repeat=False makes no sense")
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
