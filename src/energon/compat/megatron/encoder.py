"""Task encoders whose programs compose the stages themselves.

A program may override `build_train_datasets`, `build_val_datasets` or the methods that these call,
and wrap the results of `super()`. What it leaves to the builders of this library is the recipe's
own stage, in the order of the plan. Where it puts something of its own in between, wrappers take
the place of the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from types import FunctionType
from typing import Any

from energon.compat.megatron.datasets.arguments import bound
from energon.compat.megatron.datasets.leaf import LeafDataset
from energon.compat.megatron.wrappers.base import (
    DatasetAnswers,
    LogSampleDataset,
    WrapperDataset,
)
from energon.compat.megatron.wrappers.streams import (
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    LimitDataset,
    RepeatDataset,
    ShuffleBufferDataset,
)
from energon.errors import ConfigError
from energon.metadataset.leaf import BlendMode, LeafList
from energon.samples.collate import collate_samples, generic_batch
from energon.stages.base import Dataset
from energon.stages.hooks.hook import Hook
from energon.task_encoder import cooker as core_cooker
from energon.task_encoder import encoder as core
from energon.task_encoder.cooker import is_generator_function
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.encoder import (
    HOOKS,
    HookMaker,
    HookMethod,
    T_batch,
    T_encoded_sample,
    T_raw_batch,
    T_sample,
)
from energon.task_encoder.leaves import OpenedLeaf
from energon.task_encoder.recipe import Recipe, then, train_recipe, validation_recipe
from energon.task_encoder.train_plan import TrainSettings, ValidationSettings
from energon.worker import WorkerConfig

BUILDERS = (
    "build_train_datasets",
    "build_val_datasets",
    "build_encode_sample",
    "build_batch",
    "build_cook_crude_sample",
    "_load_dataset",
)


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


def load_samples(
    recipe: Recipe, datasets: Sequence[LoadedDataset], worker_config: WorkerConfig
) -> tuple[list[Any], tuple[tuple[Hook, ...], ...] | None]:
    """Return the samples of each dataset, once, as the encoder loads them, and their hooks.

    The hooks are None unless samples can be drawn in the order of a plan.
    """
    encoder: Any = recipe.encoder
    loaded = [encoder._load_dataset(dataset, worker_config=worker_config) for dataset in datasets]
    hooks: list[Any] = [getattr(samples, "item_hooks", None) for samples in loaded]
    return loaded, None if None in hooks else tuple(hooks)


def vars_of(described: Any) -> dict[str, Any]:
    """Return the values of a dataclass by field name, not copied."""
    return {each.name: getattr(described, each.name) for each in fields(described)}


@dataclass(frozen=True, repr=False)
class PlannedDataset(SavableDataset, DatasetAnswers):
    """The pipeline of a recipe, with what programs ask their datasets."""

    @classmethod
    def of(cls, dataset: SavableDataset) -> PlannedDataset:
        """Return `dataset` as one."""
        return cls(**vars_of(dataset))

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Return how many batches each worker makes per epoch, or one of them, rounded up."""
        workers = max(1, self.worker_config.num_workers)
        return len(range(worker_idx or 0, len(self), workers))


def as_planned(pipeline: Any) -> Any:
    """Return the pipeline of an encoder, as a `PlannedDataset` if it is the recipe's own."""
    return PlannedDataset.of(pipeline) if isinstance(pipeline, SavableDataset) else pipeline


def planned(recipe: Recipe, hooks: tuple[tuple[Hook, ...], ...]) -> PlannedDataset:
    """Return the samples of a recipe; `hooks` are those of each leaf before they are encoded."""
    stage = then(recipe.samples(), hooks)
    return PlannedDataset.of(replace(recipe.savable(stage), stage=stage))


def built(recipe: Recipe, samples: Any) -> Any:
    """Return `samples` encoded and batched, by the builders of the outermost encoder."""
    encoder: Any = recipe.encoder
    config, settings = recipe.worker_config, recipe.settings
    with bound(building, recipe):
        pipeline = encoder.build_batch(
            encoder.build_encode_sample(samples, worker_config=config),
            batch_size=settings.batch_size,
            batch_drop_last=settings.batch_drop_last,
            packing_buffer_size=settings.packing_buffer_size,
            worker_config=config,
        )
    if isinstance(pipeline, SavableDataset):
        return PlannedDataset.of(recipe.savable(pipeline.stage))
    length = recipe._epoch_length
    if length and recipe.training:
        pipeline = EpochizeDataset(pipeline, length, config)
    elif length:
        pipeline = LimitDataset(pipeline, length, reset_after_epoch=True, worker_config=config)
    mode, level = ("train", 1) if recipe.training else ("val", 2)
    return LogSampleDataset(pipeline, mode, config) if config.should_log(level) else pipeline


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
    if isinstance(dataset, SavableDataset) and dataset.plan is recipe.plan:
        return replace(dataset, stage=step(recipe, dataset.stage), **sizes)
    unplanned = {**vars_of(recipe), "plan": replace(recipe.plan, unit=1, balance=None)}
    stage = step(UnplannedRecipe(**unplanned), dataset)
    if stage is dataset:
        return dataset
    return WrapperDataset([dataset], stage=stage, worker_config=recipe.worker_config, **sizes)


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


@dataclass(frozen=True)
class Cooker(core_cooker.Cooker[Any]):
    """A function that converts crude samples, see `energon.Cooker`.

    Args:
        cook: The function.
        has_subflavors: The subflavors that a dataset must have.
        is_subflavor: The `subflavor` that it must have in a document of version 1.
        condition: Cannot be given: datasets are assigned to cookers, not single samples.
    """

    is_subflavor: str | None = field(default=None, kw_only=True)
    condition: Callable[[Any], bool] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.condition is not None:
            raise ConfigError(
                "Cooker(condition=...) chose a cooker for each sample; pass one cooker for the "
                "dataset, whose function decides how to cook a sample, or raises SkipSample"
            )
        if self.is_subflavor is not None:
            required = {**(self.has_subflavors or {}), "__subflavor__": self.is_subflavor}
            object.__setattr__(self, "has_subflavors", required)


class TaskEncoder(core.TaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """The hooks of `energon.TaskEncoder`, and the builders that compose their stages.

    Override `build_train_datasets` and `build_val_datasets`, or the methods that they call.
    """

    _raw_batch_type: type | None = None

    def batch(self, samples: list[Any]) -> T_raw_batch:
        """Combine samples into a batch with `_batch`."""
        return self._batch(samples, self._raw_batch_type)  # type: ignore[no-any-return]

    def _batch(
        self,
        samples: Sequence[Any],
        result_type: type | None = None,
        actions: dict[str, Callable[[list[Any]], Any]] | None = None,
        default_action: Callable[[list[Any]], Any] = generic_batch,
    ) -> Any:
        """Collate `samples`, see `collate_samples`."""
        return collate_samples(samples, result_type, actions, default_action)

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cook = vars(cls).get("cook_crude_sample")
        if isinstance(cook, FunctionType) and len(inspect.signature(cook).parameters) == 2:
            # Overrides for version 5 receive only the sample.
            @wraps(cook)
            def cook_sample(self: Any, sample: Any, *_: Any) -> Any:
                return cook(self, sample)

            cls.cook_crude_sample = cook_sample  # type: ignore[assignment]

    def cook_crude_sample(
        self, sample: Any, cooker: core_cooker.Cooker[Any] | None = None, aux: Any = None
    ) -> Any:
        """Return the sample that a cooker makes from a crude one.

        Args:
            sample: The crude sample.
            cooker: The cooker; None for the first one that applies.
            aux: Its keyword arguments by name.
        """
        if cooker is None:
            subflavors = sample["__subflavors__"] or {}
            cooker = core_cooker.find_cooker(self.cookers, subflavors, dataset="the sample")
        return super().cook_crude_sample(sample, cooker, aux or {})

    def _hook_method(self, name: str) -> HookMethod:
        method = super()._hook_method(name)
        if name == "cook_crude_sample" and "cook_crude_sample" not in vars(self):
            is_own = type(self).cook_crude_sample is not TaskEncoder.cook_crude_sample
            return replace(method, overridden=is_own)
        if name != "batch" or self._raw_batch_type is not None:
            return method
        hooks = [getattr(hook, "__func__", None) for hook in (self.batch, self._batch)]
        if hooks != [TaskEncoder.batch, TaskEncoder._batch]:
            return method
        return replace(method, function=collate_samples, overridden=False)

    def assemble(self, recipe: Recipe) -> Any:
        builds = any(getattr(leaf.dataset, "builds_itself", False) for leaf in recipe.opened)
        if not builds and not any(_overrides(self, name) for name in BUILDERS):
            return as_planned(super().assemble(recipe))
        with bound(building, recipe):
            return _build(self, recipe)

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
        recipe = current_recipe()
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
        loaded, hooks = load_samples(recipe, datasets, worker_config)
        if hooks is not None:
            resolved, opened = mixed(recipe, datasets, blend_mode)
            changed = train_recipe(resolved, opened, recipe.encoder, settings, worker_config)
            return built(changed, planned(changed, hooks))
        samples = blended(datasets, loaded, worker_config, blend_mode, repeat=repeat)
        if shuffle_buffer_size:
            samples = ShuffleBufferDataset(
                samples, shuffle_buffer_size, worker_config=worker_config
            )
        return built(replace(recipe, settings=settings, worker_config=worker_config), samples)

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
        recipe = current_recipe()
        settings = ValidationSettings(
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            packing_buffer_size=packing_buffer_size,
            limit=limit,
        )
        loaded, hooks = load_samples(recipe, datasets, worker_config)
        if hooks is not None:
            opened = [each.dataset.opened for each in datasets]
            changed = validation_recipe(opened, recipe.encoder, settings, worker_config)
            return built(changed, planned(changed, hooks))
        samples = ConcatDataset(*loaded, worker_config=worker_config)
        return built(replace(recipe, settings=settings, worker_config=worker_config), samples)

    def build_encode_sample(self, dataset: Dataset[Any], *, worker_config: WorkerConfig) -> Any:
        """Return the items of `dataset` after `encode_sample` or `preencode_sample`."""
        return next_step(dataset, current_recipe(), Recipe.encoded)

    def build_cook_crude_sample(
        self,
        dataset: Dataset[Any],
        *,
        worker_config: WorkerConfig,
        subflavors: Mapping[str, Any] | None = None,
        get_primary_aux: Callable[[], Any] | None = None,
        aux: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return `dataset` unchanged: the samples of `LoadedDataset.dataset` are already cooked.

        An override is called for each crude dataset, and may wrap it. Without cookers, its
        samples are crude.

        Args:
            dataset: The samples of one dataset.
            worker_config: Rank and workers.
            subflavors: The subflavors of the dataset.
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
        """Return batches of the items of `dataset`: packed, grouped and encoded by the hooks."""
        recipe = current_recipe()
        sizes: dict[str, Any] = {
            "batch_size": batch_size,
            "batch_drop_last": batch_drop_last,
            "packing_buffer_size": packing_buffer_size,
        }
        changed = replace(recipe, settings=replace(recipe.settings, **sizes))
        return next_step(dataset, changed, Recipe.batches, **sizes)

    def _load_dataset(
        self,
        dataset: LoadedDataset,
        worker_rotation_offset: int = 0,
        worker_config: WorkerConfig | None = None,
    ) -> Any:
        """Return the samples of one of the `datasets`, each once."""
        leaf = dataset.dataset
        samples = leaf.build()
        encoder = current_recipe().encoder
        if leaf.primary is None or not _overrides(encoder, "build_cook_crude_sample"):
            return samples
        build = encoder.build_cook_crude_sample  # type: ignore[attr-defined]
        arguments = {
            "worker_config": worker_config or samples.worker_config,
            "subflavors": leaf.subflavors,
            "get_primary_aux": leaf.as_file_store,
            "aux": dataset.aux,
        }
        return build(samples, **_accepted(build, arguments))


class DefaultTaskEncoder(
    TaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch],
    core.DefaultTaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch],
):
    """The hooks of `energon.DefaultTaskEncoder`, and the builders that compose their stages."""


_SETTINGS = (
    "cookers",
    "decoder",
    "__default_failure_tolerance__",
    "__default_failure_rate__",
)


class AugmentTaskEncoder(TaskEncoder[Any, Any, Any, Any]):
    """Extends another task encoder. Subclass it, override hooks, and call `super()`.

    Hooks, settings and other attributes that the subclass does not define are those of
    `task_encoder`, with their marks; an override without marks inherits those of the hook.

    Args:
        task_encoder: The encoder to extend.

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
        )

    def _may_yield(self, name: str) -> bool:
        is_own = is_generator_function(getattr(type(self), name, None))
        return is_own or self.task_encoder._may_yield(name)

    def _has_own(self, name: str) -> bool:
        """Return whether this encoder does more than delegate a hook or a builder."""
        own = getattr(type(self), name) is not getattr(AugmentTaskEncoder, name)
        return own or name in vars(self)


def _delegate(name: str) -> Callable[..., Any]:
    """Return a method of `AugmentTaskEncoder` that delegates its call to the inner encoder."""
    described = getattr(TaskEncoder, name)

    def call_inner(self: AugmentTaskEncoder, *args: Any, **arguments: Any) -> Any:
        inner = self.task_encoder
        if hasattr(inner, name):
            return getattr(inner, name)(*args, **arguments)
        return described(self, *args, **arguments)

    call_inner.__name__, call_inner.__doc__ = name, described.__doc__
    return call_inner


for _name in ("cook_crude_sample", *HOOKS, *BUILDERS):
    setattr(AugmentTaskEncoder, _name, _delegate(_name))


def _overrides(encoder: core.TaskEncoder[Any, Any, Any, Any], builder: str) -> bool:
    """Return whether a program overrides a builder of an encoder."""
    while isinstance(encoder, AugmentTaskEncoder):
        if encoder._has_own(builder):
            return True
        encoder = encoder.task_encoder
    function = getattr(type(encoder), builder, None)
    return function is not getattr(TaskEncoder, builder) and function is not None


def _build(encoder: TaskEncoder[Any, Any, Any, Any], recipe: Recipe) -> Any:
    """Return the pipeline that an encoder builds; raise an error unless a loader can use it."""
    settings = recipe.settings
    arguments: dict[str, Any] = {
        "datasets": [
            LoadedDataset(dataset, leaf.weight, leaf.repetitions, dataset.opened.loading.aux)
            for dataset, leaf in zip(LeafDataset.of(recipe), recipe.plan.leaves, strict=True)
        ],
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
    pipeline = build(**_accepted(build, arguments))
    if not isinstance(pipeline, WrapperDataset | SavableDataset):
        raise ConfigError(
            "build_train_datasets and build_val_datasets have to return a wrapper like "
            f"BatchDataset, found {type(pipeline).__name__}"
        )
    return pipeline


def _accepted(build: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a builder names: overrides for older versions lack some."""
    parameters = inspect.signature(build).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}
