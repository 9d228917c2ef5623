"""Task encoders: hooks by which users define what happens to samples, and the marks of hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from energon.cache.pool import CachePool, active_pool
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError
from energon.messages import nearest, warn_once
from energon.samples.collate import collate_samples, field_names
from energon.samples.crude import key_of, sample_keys
from energon.samples.provenance import SourceInfo
from energon.sources.reader import LeafReader
from energon.stages.hooks.failures import (
    DEFAULT_TOLERANCE,
    UNTRIED_TOLERANCE,
    ErrorHandler,
    Tolerance,
)
from energon.stages.hooks.hook import Compiled, Hook
from energon.stages.lane import active_call, active_generator
from energon.task_encoder.cooker import Cooker, is_generator_function

if TYPE_CHECKING:
    import numpy as np

    from energon.packing.packer import Selection

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # An encoder that does not name its types has hooks of Any.
    T_sample = TypeVarWithDefault("T_sample", default=Any)
    T_encoded_sample = TypeVarWithDefault("T_encoded_sample", default=Any)
    T_raw_batch = TypeVarWithDefault("T_raw_batch", default=Any)
    T_batch = TypeVarWithDefault("T_batch", default=Any)
else:
    T_sample, T_encoded_sample = TypeVar("T_sample"), TypeVar("T_encoded_sample")
    T_raw_batch, T_batch = TypeVar("T_raw_batch"), TypeVar("T_batch")


@dataclass(frozen=True)
class HookMethod:
    """A hook of a task encoder, as the recipe needs it.

    Args:
        function: The function to call.
        marked: The object marked by `stateless`, which determines how the hook runs; usually the
            function itself.
        overridden: Whether it does anything: a hook that does not adds no stage.
    """

    function: Callable[..., Any]
    marked: Any
    overridden: bool


class TaskEncoder(Generic[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """The hooks that turn samples into batches. Subclass it and override those that you need.

    A sample passes `cook_crude_sample` (crude datasets only), `encode_sample`, `batch` and
    `encode_batch`, in this order. With packing it passes `preencode_sample` (or `encode_sample`),
    `select_samples_to_pack`, `postencode_sample` and `pack_selected_samples` before `batch`.
    Hooks are functions of their argument: they may run in any worker, again after a restore, and
    out of order. A hook may raise `SkipSample`; hooks that "may be a generator" may also yield any
    number of results. A hook that is not overridden costs nothing.

    Attributes:
        cookers: For crude datasets, tried in order. Without any, crude samples are passed on
            as they are.
        decoder: Decodes the parts of samples; None leaves them as bytes.
        seeds_global_generators: Whether `random`, `numpy.random` and torch are seeded for each
            batch, or for each call. Without that, which takes about 10 µs each time, hooks may
            only draw from `current_rng`. Pipelines that a program makes of wrappers, such as
            `MapDataset` of `energon.compat.megatron`, are always seeded.
        __default_failure_tolerance__: How many consecutive failures of a hook end the run, unless
            the hook sets its own; 0 for never.
        __default_failure_rate__: The share of samples a hook may fail on, checked in each worker
            after 1,000 samples; None for any.

    Example:
        >>> from energon import WorkerConfig, get_val_dataset
        >>> class Captions(TaskEncoder):
        ...     decoder = None
        ...     def encode_sample(self, sample):
        ...         return sample.caption.decode().upper()
        >>> dataset = get_val_dataset(
        ...     "photos",
        ...     worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        ...     batch_size=2,
        ...     task_encoder=Captions(),
        ... )
        >>> next(iter(dataset))
        ['GREY NUMBER 8', 'GREY NUMBER 9']
    """

    cookers: ClassVar[Sequence[Cooker[Any]]] = ()
    decoder: SampleDecoder | None = SampleDecoder()
    seeds_global_generators: bool = True
    __default_failure_tolerance__: int = DEFAULT_TOLERANCE
    __default_failure_rate__: float | None = None

    def cook_crude_sample(self, sample: Any, cooker: Cooker[Any], aux: dict[str, Any]) -> Any:
        """Return the sample that `cooker` makes from a crude one."""
        return cooker.cook(sample, **aux)

    def encode_sample(self, sample: T_sample) -> T_encoded_sample | Iterator[T_encoded_sample]:
        """Return a sample as the batch needs it. May be a generator."""
        return sample  # type: ignore[return-value]

    def preencode_sample(self, sample: T_sample) -> T_sample | Iterator[T_sample]:
        """Return a sample as packing needs it; instead of `encode_sample`. May be a generator."""
        return sample

    def postencode_sample(self, sample: T_sample) -> T_encoded_sample:
        """Return a sample as the pack needs it; instead of `encode_sample`."""
        return sample  # type: ignore[return-value]

    # What packing and batching receive depends on the hooks of an encoder: samples before or after
    # encoding, or packs. So these hooks accept Any, and overriding ones name the type they get.

    def select_samples_to_pack(self, samples: list[Any]) -> Sequence[Sequence[Any]] | Selection:
        """Divide the samples of a window into packs.

        Args:
            samples: As many as `packing_buffer_size`; fewer at the end of the data.

        Returns:
            Lists of samples, one for each pack; or a `Selection`, which can carry samples over
            to the next window. Samples in neither are dropped.
        """
        raise NotImplementedError

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        """Combine the samples of a pack into one. May be a generator."""
        raise NotImplementedError

    def batch_group_criterion(self, sample: Any) -> tuple[Hashable, int | None]:
        """Return the group whose samples share batches, and its batch size.

        A size of None stands for the `batch_size` of the dataset.
        """
        return None, None

    def batch(self, samples: list[Any]) -> T_raw_batch:
        """Combine samples into a batch. May be a generator."""
        return collate_samples(samples)  # type: ignore[no-any-return]

    def encode_batch(self, batch: T_raw_batch) -> T_batch:
        """Return a batch as the training step needs it. May be a generator."""
        return batch  # type: ignore[return-value]

    @property
    def current_batch_index(self) -> int:
        """Number of the batch of the current hook call, counted over all ranks.

        The same on every topology and after every restore. While samples wait for packing or in a
        group, it is the number of the batch being made at that time; for the outputs of a
        generator, that of the batch for which it started.

        Raises:
            ConfigError: If no hook is running, or a single sample is restored from a pipeline
                whose batches take varying numbers of samples.
        """
        lane, seed_key = active_call()
        return lane.batch_number(seed_key)

    @property
    def current_sample_index(self) -> int:
        """Number of the sample of the current hook call, counted over all ranks.

        Batches of B samples have the numbers 0 to B - 1, B to 2 * B - 1, and so on, in their order.
        In the hooks of packs and batches, it is that of their first sample. The same on every
        topology, after every restore and in `restore_sample`.

        Raises:
            ConfigError: If no hook is running, or samples are drawn with replacement.
        """
        lane, seed_key = active_call()
        return lane.sample_number(seed_key)

    @property
    def current_rng(self) -> np.random.Generator:
        """Random generator for the current hook call, reproducible for its sample.

        Seeded by the run, the hook, and the sample with its epoch (for packs and batches, their
        first sample). Unlike the global generators, it costs nothing unless used, and is not
        shared by threads.

        Raises:
            ConfigError: If no hook is running.
        """
        return active_generator()

    @property
    def cache(self) -> CachePool:
        """The cache pool of the loader; without one, a pool that caches nothing."""
        return active_pool()

    def assemble(self, recipe: Any) -> Any:
        """Return the pipeline of a run, as the dataset getters return it.

        Override it to add stages of your own between or around those of the recipe.

        Args:
            recipe: The `Recipe` of the run: opened datasets, their order, and the steps from
                samples to batches.
        """
        return recipe.pipeline()

    @property
    def _is_plain(self) -> bool:
        """Whether the encoder has no code of the program."""
        return type(self) in (TaskEncoder, DefaultTaskEncoder)

    def _hook_method(self, name: str) -> HookMethod:
        """Return the hook of this name, and how it runs."""
        method, overridden = getattr(self, name), overrides(self, name)
        collates = name == "batch" and not overridden
        return HookMethod(collate_samples if collates else method, method, overridden)

    def _may_yield(self, name: str) -> bool:
        """Return whether one input of the hook of this name may become several outputs."""
        spaces = (vars(self), *map(vars, type(self).__mro__))
        return any(is_generator_function(space[name]) for space in spaces if name in space)


class DefaultTaskEncoder(TaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """A task encoder that is usable as is: it batches samples field by field.

    Args:
        encoded_sample_type: Type to convert samples to before batching, by field names: a
            dataclass, a named tuple or dict; None leaves them unchanged.
        raw_batch_type: What `batch` returns; None for the type of the samples.
        batch_type: What `encode_batch` returns; None leaves batches as they are.

    Example:
        >>> from energon import WorkerConfig, get_loader, get_val_dataset
        >>> class Shouting(DefaultTaskEncoder):
        ...     def encode_sample(self, sample):
        ...         sample.caption = sample.caption.upper()
        ...         return sample
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_val_dataset(
        ...     "photos", worker_config=config, batch_size=2, task_encoder=Shouting()
        ... )
        >>> next(iter(get_loader(dataset))).caption
        ['GREY NUMBER 8', 'GREY NUMBER 9']
    """

    # For subclasses whose constructor does not call this one.
    _encoded_sample_type: type | None = None
    _raw_batch_type: type | None = None
    _batch_type: type | None = None

    def __init__(
        self,
        *,
        encoded_sample_type: type | None = None,
        raw_batch_type: type | None = None,
        batch_type: type | None = None,
    ) -> None:
        self._encoded_sample_type = encoded_sample_type
        self._raw_batch_type = raw_batch_type
        self._batch_type = batch_type

    def encode_sample(self, sample: T_sample) -> T_encoded_sample | Iterator[T_encoded_sample]:
        """Convert `sample` to `encoded_sample_type`."""
        return convert(sample, self._encoded_sample_type)  # type: ignore[no-any-return]

    def batch(self, samples: list[Any]) -> T_raw_batch:
        """Collate `samples` to a `raw_batch_type`."""
        return collate_samples(samples, self._raw_batch_type)  # type: ignore[no-any-return]

    def encode_batch(self, batch: T_raw_batch) -> T_batch:
        """Convert `batch` to `batch_type`."""
        return convert(batch, self._batch_type)  # type: ignore[no-any-return]


def overrides(encoder: TaskEncoder[Any, Any, Any, Any], hook: str) -> bool:
    """Return whether `encoder` overrides `hook`."""
    if hook in vars(encoder):
        return True
    function = getattr(type(encoder), hook)
    if function is getattr(TaskEncoder, hook):
        return False
    if function is getattr(DefaultTaskEncoder, hook, None):
        settings = {
            "encode_sample": "_encoded_sample_type",
            "batch": "_raw_batch_type",
            "encode_batch": "_batch_type",
        }
        # A subclass that does not call our constructor has no types to convert to.
        return hook not in settings or getattr(encoder, settings[hook], None) is not None
    return True


def convert(value: Any, target: type | None) -> Any:
    """Convert `value` to `target` by the fields that both have; None leaves it unchanged."""
    if target is None or type(value) is target:
        return value
    kind: Any = type(value)
    names = field_names(kind) or (tuple(value) if isinstance(value, dict) else ())
    read = dict.__getitem__ if isinstance(value, dict) else getattr
    if target is dict:
        return {name: read(value, name) for name in names}
    accepted = set(field_names(target) or names)
    return target(**{name: read(value, name) for name in names if name in accepted})


logger = logging.getLogger("energon")

AnyTaskEncoder = TaskEncoder[Any, Any, Any, Any]


@dataclass(frozen=True)
class HookMaker:
    """Turns the methods of a task encoder into hooks.

    Args:
        encoder: The user's hooks.
        reader: Locates the sources of samples.
        names: The names of the leaves in statistics.
        error_handler: Called for each tolerated failure of a sample; None logs it.
        seed_each: Whether every call is seeded separately, marked or not. This is needed where
            samples are recreated apart from their batch, as when resuming between two outputs
            of a generator.
    """

    encoder: AnyTaskEncoder
    reader: LeafReader
    names: tuple[str, ...]
    error_handler: ErrorHandler | None
    seed_each: bool = False

    def make(self, name: str, function: Callable[[Any], Any], settings: Any = None) -> Hook:
        """Return `function` as a hook, run according to its marks or those of `settings`."""
        if isinstance(function, Compiled):
            function.prepare()
        encoder, marked = self.encoder, function if settings is None else settings
        tolerance = mark_of(marked, "__failure_tolerance__", encoder.__default_failure_tolerance__)
        return Hook(
            name=name,
            function=function,
            tolerance=Tolerance(
                tolerance,
                untried=UNTRIED_TOLERANCE if tolerance == DEFAULT_TOLERANCE else tolerance,
                rate=mark_of(marked, "__failure_rate__", encoder.__default_failure_rate__),
            ),
            restore_seeds=encoder.seeds_global_generators
            and (self.seed_each or mark_of(marked, "__restore_seeds__", False)),
            may_yield=self.seed_each,
            locate=Locate(self.reader),
            dataset=DatasetName(self.names),
            handler=mark_of(marked, "__error_handler__", self.error_handler),
            title=_title(encoder, name, function) if name in (*YIELDING, _PACKING[1]) else None,
        )

    def method(self, name: str) -> Hook:
        """Return the hook of this name."""
        hook = self.encoder._hook_method(name)
        return self.make(name, hook.function, settings=hook.marked)

    def overridden(self, *names: str) -> tuple[Hook, ...]:
        """Return the hooks of these names that the encoder overrides."""
        return tuple(
            self.method(name) for name in names if self.encoder._hook_method(name).overridden
        )


YIELDING = (
    "cook_crude_sample",
    "encode_sample",
    "preencode_sample",
    "postencode_sample",
    "batch",
    "encode_batch",
)
"""The hooks that may be generators wherever they run; `pack_selected_samples` only makes packs."""


def _title(encoder: AnyTaskEncoder, name: str, function: Callable[[Any], Any]) -> str:
    """Return class and method of a hook, or the name of a cooker's function."""
    cooker = getattr(function, "cooker", None)
    user = function if cooker is None else cooker.cook
    qualified: str = getattr(user, "__qualname__", f"{type(encoder).__name__}.{name}")
    return qualified.rpartition("<locals>.")[2]


def mark_of(marked: Any, name: str, default: Any) -> Any:
    """Return the mark that `stateless` left, or the default of the task encoder."""
    value = getattr(marked, name, None)
    return default if value is None else value


def _keys_of(argument: Any) -> list[tuple[int, int, int]]:
    """Return the keys of the samples in a sample, pack or batch, or in a list of samples."""
    samples = argument if isinstance(argument, list) else [argument]
    return [key for sample in samples for key in sample_keys(key_of(sample) or ())]


@dataclass(frozen=True)
class DatasetName:
    """Names the dataset of a sample, pack or batch, from its restore key."""

    names: tuple[str, ...]

    def __call__(self, argument: Any) -> str:
        """Return its name, "several datasets" for a mix, or "data" if it is unknown."""
        leaves = {leaf for leaf, _, _ in _keys_of(argument)}
        if len(leaves) > 1:
            return "several datasets"
        leaf = leaves.pop() if leaves else -1
        return self.names[leaf] if 0 <= leaf < len(self.names) else "data"


@dataclass(frozen=True)
class Locate:
    """Finds the sources of a sample, a list of samples or a batch, from their restore keys."""

    reader: LeafReader

    def __call__(self, argument: Any) -> tuple[SourceInfo, ...]:
        """Return the known sources of `argument`.

        There may be none: hooks may return anything, and messages about failures need an answer.
        """
        sources: list[SourceInfo] = []
        for key in _keys_of(argument):
            with suppress(IndexError):
                sources += self.reader.locate(key)
        return tuple(sources)


_PACKING = ("select_samples_to_pack", "pack_selected_samples")


def check_encoder(
    encoder: AnyTaskEncoder, *, selecting: bool = False, packing: bool = False
) -> None:
    """Raise ConfigError if `encoder` is not a task encoder, or its hooks exclude each other.

    Args:
        encoder: The user's hooks.
        selecting: Whether a hook selects the samples of each pack.
        packing: Whether the plan does.
    """
    if isinstance(encoder, type):
        raise ConfigError(
            f"task_encoder: {encoder.__name__} is a class; pass an instance, such as "
            f"{encoder.__name__}()"
        )
    name = type(encoder).__name__
    if not isinstance(encoder, TaskEncoder):
        raise ConfigError(f"task_encoder: expected a TaskEncoder, found {encoder!r} of type {name}")
    decoder: Any = encoder.decoder
    if decoder is not None and not callable(decoder):
        raise ConfigError(
            f"{name}.decoder: expected a SampleDecoder, or None to leave parts as bytes, found "
            f"{decoder!r}"
        )
    _warn_of_misspelled_hooks(encoder)
    if _overrides(encoder, "encode_sample") and _overrides(encoder, "preencode_sample"):
        raise ConfigError(
            f"{name} overrides encode_sample and preencode_sample; preencode_sample replaces "
            "encode_sample where samples are packed, so override one of them"
        )
    missing = [hook for hook in _PACKING if not _overrides(encoder, hook)]
    if packing and _PACKING[1] in missing:
        raise ConfigError(
            f"pack is set, but {name} does not override {_PACKING[1]}; define there how the "
            "samples of a pack are combined; energon.packing helps with it"
        )
    if packing and encoder._may_yield(_PACKING[1]):
        raise ConfigError(
            f"{name}.{_PACKING[1]} is a generator, but a planned pack is one item; return it"
        )
    if selecting and missing:
        raise ConfigError(
            f"packing_buffer_size is set, but {name} does not override {' and '.join(missing)}; "
            "define there which samples form a pack and how they are combined; energon.packing "
            "helps with both"
        )


def _warn_of_misspelled_hooks(encoder: AnyTaskEncoder) -> None:
    """Warn of methods whose names are nearly those of a hook that is not overridden."""
    hooks = [name for name in HOOKS if not _overrides(encoder, name)]
    classes = type(encoder).__mro__[:-1]
    own = {name for kind in classes for name, value in vars(kind).items() if callable(value)}
    for name in sorted(own - vars(TaskEncoder).keys()):
        close = None if name.startswith("_") else nearest(name, hooks, cutoff=0.9)
        if close is None or name == f"{close}s":
            continue
        method = f"{type(encoder).__name__}.{name}"
        warn_once(logger, method, "%s is not a hook, did you mean %s?", method, close)


HOOKS = (
    *("encode_sample", "preencode_sample", "postencode_sample", "batch", "encode_batch"),
    *("select_samples_to_pack", "pack_selected_samples", "batch_group_criterion"),
)
"""The hooks that any dataset may have; crude ones also have `cook_crude_sample`."""


def _overrides(encoder: AnyTaskEncoder, hook: str) -> bool:
    return encoder._hook_method(hook).overridden
