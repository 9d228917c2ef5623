"""The order of the stages.

`build_pipeline` read from top to bottom is the way of a sample: the plan says which come
when, they are read, decoded, cooked, encoded, batched. Blending and shuffling happen in the
plan, on numbers. There is no other place where the order is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError
from energon.samples.crude import CrudeSample
from energon.samples.field_map import FieldMap
from energon.samples.source_info import SourceInfo
from energon.sources.file_store import FileStore
from energon.sources.reader import LeafReader
from energon.stages.apply import BatchDataset, MapDataset
from energon.stages.base import Dataset
from energon.stages.hook import ErrorHandler, Hook
from energon.stages.read import ReadDataset
from energon.stages.seed import SeedDataset
from energon.task_encoder.aux import CookerArguments, cooker_arguments
from energon.task_encoder.cooker import Cooker, find_cooker
from energon.task_encoder.dataset import PlanRecipe
from energon.task_encoder.encoder import TaskEncoder, overrides

AnyTaskEncoder = TaskEncoder[Any, Any, Any, Any]


@dataclass(frozen=True)
class OpenLeaf:
    """A leaf whose dataset is open, with what turns its samples into those of the user.

    Args:
        name: How messages call it.
        subflavors: Of the dataset and all documents that refer to it.
        sample_type: What its samples become; None for crude datasets.
        field_map: From parts to the fields of `sample_type`.
        aux: Auxiliary data by name, for cookers.
        primary: The files of the dataset by name, for cookers that want them.
    """

    name: str
    dataset_path: str
    subflavors: Mapping[str, Any]
    sample_type: type | None = None
    field_map: FieldMap | None = None
    aux: Mapping[str, FileStore[Any]] = field(default_factory=dict)
    primary: FileStore[Any] | None = None


def build_pipeline(
    leaves: Sequence[OpenLeaf],
    reader: LeafReader,
    plan: PlanRecipe,
    encoder: AnyTaskEncoder,
    *,
    batch_size: int | None,
    drop_last: bool = False,
    error_handler: ErrorHandler | None = None,
) -> Dataset[Any]:
    """Return the stages from the samples of `leaves` to batches.

    Args:
        leaves: One for each leaf of `plan`.
        reader: Reads their samples.
        plan: The order.
        encoder: The user's hooks. A hook that is not overridden adds no stage.
        batch_size: Samples per batch; None yields samples.
        drop_last: Whether a last, smaller batch is left out.
        error_handler: Called for each sample that fails and is tolerated; None logs it.

    Raises:
        ConfigError: If hooks exclude one another, or a crude dataset has no cooker.
    """
    _check_hooks(encoder)
    hooks = _HookMaker(encoder, reader, error_handler)

    pipeline: Dataset[Any] = ReadDataset(plan, reader)
    sample_hooks = SampleHooks(
        tuple((*_load_hooks(hooks, leaf), *hooks.overridden(*_ENCODING)) for leaf in leaves)
    )
    if any(sample_hooks.leaves):
        pipeline = MapDataset(pipeline, sample_hooks)
    batch_hooks = hooks.overridden("encode_batch")
    if batch_size is not None:
        batch = hooks.make("batch", encoder.batch)
        pipeline = BatchDataset(pipeline, batch_size, (batch, *batch_hooks), drop_last)
    if encoder.cookers or hooks.overridden(*_ENCODING, "batch", "encode_batch"):
        pipeline = SeedDataset(pipeline)
    return pipeline


_ENCODING = ("encode_sample", "preencode_sample", "postencode_sample")
_PACKING = ("select_samples_to_pack", "pack_selected_samples")


@dataclass(frozen=True)
class SampleHooks:
    """The hooks that a sample passes one after the other, for each leaf."""

    leaves: tuple[tuple[Hook, ...], ...]

    def __call__(self, sample: Mapping[str, Any]) -> tuple[Hook, ...]:
        """Return the hooks for a sample that was just read."""
        return self.leaves[sample["__restore_key__"][0]]


@dataclass(frozen=True)
class _HookMaker:
    encoder: AnyTaskEncoder
    reader: LeafReader
    error_handler: ErrorHandler | None

    def make(self, name: str, function: Callable[[Any], Any], settings: Any = None) -> Hook:
        """Return `function` as a hook, run as its marks (or those of `settings`) say."""
        marked = function if settings is None else settings
        tolerance = getattr(marked, "__failure_tolerance__", None)
        return Hook(
            name=name,
            function=function,
            tolerance=self.encoder.__default_failure_tolerance__
            if tolerance is None
            else tolerance,
            restore_seeds=getattr(marked, "__restore_seeds__", False),
            locate=Locate(self.reader),
            handler=self.error_handler,
        )

    def overridden(self, *names: str) -> tuple[Hook, ...]:
        return tuple(
            self.make(name, getattr(self.encoder, name))
            for name in names
            if overrides(self.encoder, name)
        )


@dataclass(frozen=True)
class Locate:
    """Tells the sources of a sample, a list of them or a batch, through their restore keys."""

    reader: LeafReader

    def __call__(self, argument: Any) -> tuple[SourceInfo, ...]:
        """Return what is known about where `argument` came from.

        That may be nothing: hooks may return anything, and messages are made of this.
        """
        samples = argument if isinstance(argument, list) else [argument]
        keys = (key for sample in samples for key in _restore_keys(sample))
        return tuple(source for key in keys for source in self._locate(key))

    def _locate(self, key: Sequence[int]) -> tuple[SourceInfo, ...]:
        try:
            return self.reader.locate(tuple(key))
        except IndexError:
            return ()


def _restore_keys(sample: Any) -> list[Sequence[int]]:
    """Return the restore key of a sample, or those of a batch."""
    if isinstance(sample, dict):
        found = sample.get("__restore_key__")
    else:
        found = getattr(sample, "__restore_key__", None)
    if not isinstance(found, list | tuple):
        return []
    keys = [found] if found and isinstance(found[0], int) else found
    return [key for key in keys if _is_restore_key(key)]


def _is_restore_key(key: Any) -> bool:
    return (
        isinstance(key, list | tuple)
        and len(key) >= 3
        and all(isinstance(number, int) for number in key[:3])
    )


def _load_hooks(hooks: _HookMaker, leaf: OpenLeaf) -> tuple[Hook, ...]:
    """Return what turns the bytes of a leaf's samples into what the encoding hooks take."""
    encoder = hooks.encoder
    if leaf.sample_type is not None and leaf.field_map is not None:
        load = LoadSample(leaf.dataset_path, leaf.sample_type, leaf.field_map, encoder.decoder)
        return (hooks.make("load_sample", load),)
    if not encoder.cookers:
        return (hooks.make("decode", encoder.decoder),) if encoder.decoder is not None else ()
    cooker = find_cooker(encoder.cookers, leaf.subflavors, dataset=leaf.name)
    arguments = cooker_arguments(
        cooker, aux=leaf.aux, primary=leaf.primary, decoder=encoder.decoder, dataset=leaf.name
    )
    cook = CookSample(leaf.dataset_path, encoder, cooker, encoder.decoder, arguments)
    marked = cooker.cook if hasattr(cooker.cook, "__stateless__") else encoder.cook_crude_sample
    return (hooks.make("cook_crude_sample", cook, settings=marked),)


@dataclass(frozen=True)
class LoadSample:
    """Makes a typed sample of the bytes of its parts."""

    dataset_path: str
    sample_type: type
    field_map: FieldMap
    decoder: SampleDecoder | None

    def __call__(self, raw: CrudeSample) -> Any:
        """Return the sample of `raw`, decoded."""
        parts = self.decoder(raw) if self.decoder is not None else raw
        return self.sample_type(
            __key__=raw["__key__"],
            __restore_key__=raw["__restore_key__"],
            __subflavors__=raw["__subflavors__"],
            __sources__=_sources(self.dataset_path, raw),
            **self.field_map.apply(parts),
        )


@dataclass(frozen=True)
class CookSample:
    """Makes a sample of a crude one, with the cooker of its leaf."""

    dataset_path: str
    encoder: AnyTaskEncoder
    cooker: Cooker
    decoder: SampleDecoder | None
    arguments: CookerArguments

    def __call__(self, raw: CrudeSample) -> Any:
        """Return what the cooker makes of `raw`, decoded if there is a decoder."""
        sources = _sources(self.dataset_path, raw)
        sample = self.decoder(raw) if self.decoder is not None else raw
        sample["__sources__"] = sources
        return self.encoder.cook_crude_sample(sample, self.cooker, self.arguments(raw["__key__"]))


def _sources(dataset_path: str, raw: CrudeSample) -> tuple[SourceInfo, ...]:
    key = raw["__key__"]
    return (
        SourceInfo(
            dataset_path=dataset_path,
            index=raw["__restore_key__"][2],
            shard_name=raw["__shard__"],
            file_names=tuple(f"{key}.{part}" for part in raw if not part.startswith("__")),
        ),
    )


def _check_hooks(encoder: AnyTaskEncoder) -> None:
    if isinstance(encoder, type):
        raise ConfigError(
            f"task_encoder: {encoder.__name__} is a class; pass one of its kind, like "
            f"{encoder.__name__}()"
        )
    name = type(encoder).__name__
    if not isinstance(encoder, TaskEncoder):
        raise ConfigError(f"task_encoder: wanted is a TaskEncoder, found {encoder!r} of {name}")
    if overrides(encoder, "encode_sample") and overrides(encoder, "preencode_sample"):
        raise ConfigError(
            f"{name} overrides encode_sample and preencode_sample; preencode_sample replaces "
            "encode_sample where samples are packed, so override one of them"
        )
    unsupported = [
        hook for hook in (*_PACKING, "batch_group_criterion") if overrides(encoder, hook)
    ]
    if unsupported:
        raise ConfigError(
            f"{name} overrides {', '.join(unsupported)}: packing and grouping are not part of this "
            "release"
        )
