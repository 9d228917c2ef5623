"""The hooks of a join: combine the samples that it read for a key into one, and cook that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from energon.errors import ConfigError
from energon.metadataset.leaf import SampleJoiner
from energon.samples.crude import JOINED, CrudeSample, stamp
from energon.stages.hooks.hook import Compiled, Hook, compiled
from energon.task_encoder.cooker import Cooker, CookerArguments, find_cooker
from energon.task_encoder.hook_maker import AnyTaskEncoder, HookMaker
from energon.task_encoder.load import (
    JoinLoading,
    LeafLoading,
    LoadCrude,
    LoadFunction,
    LoadSample,
    arguments_of,
    cook_hook,
    decoder_for,
)
from energon.task_encoder.open_join import find_joiner


def join_hooks(hooks: HookMaker, loading: LeafLoading, join: JoinLoading) -> tuple[Hook, ...]:
    """Return the hooks that make, join and cook the samples of a leaf that joins datasets."""
    encoder = hooks.encoder
    loaders = tuple(_loader(member, decoder_for(member, encoder)) for member in join.members)
    joined = hooks.make("join", JoinSample(loaders, join.names, _joining(join)))
    try:
        cooker = find_cooker(encoder.cookers, loading.subflavors, dataset=loading.name)
    except ConfigError:  # no cooker applies, which is right if the joiner returns typed samples
        return (joined,)
    cook = CookJoined(encoder, cooker, arguments_of(cooker, loading, encoder))
    return joined, cook_hook(hooks, cook, cooker)


@dataclass(frozen=True)
class JoinSample(Compiled):
    """Combines the samples of the datasets of a join into one.

    Args:
        loaders: Make of the bytes of a dataset's sample what the joiner gets.
        names: For each, the argument of the joiner; None for the next one in order.
        joiner: Gets None for what is missing.
    """

    loaders: tuple[LoadFunction, ...]
    names: tuple[str | None, ...]
    joiner: Callable[..., Any]

    def _compile(self) -> Callable[[CrudeSample], Any]:
        joiner = self.joiner
        loaders = [compiled(load) for load in self.loaders]

        def join(raw: CrudeSample) -> Any:
            ordered: list[Any] = []
            named: dict[str, Any] = {}
            for load, name, part in zip(loaders, self.names, raw[JOINED], strict=True):
                sample = None if part is None else load(part)
                if name is None:
                    ordered.append(sample)
                else:
                    named[name] = sample
            joined = joiner(*ordered, **named)
            # Joiners pass on the key of one of the datasets, which has numbers of its own.
            stamp(joined, raw["__restore_key__"])
            return joined

        return join


@dataclass(frozen=True)
class CookJoined:
    """Cooks the result of a joiner if it is crude, that is, a dict."""

    encoder: AnyTaskEncoder
    cooker: Cooker[Any]
    arguments: CookerArguments

    def __call__(self, sample: Any) -> Any:
        """Return the cooked sample; samples that are not crude are returned unchanged."""
        if not isinstance(sample, dict):
            return sample
        crude = sample if isinstance(sample, CrudeSample) else CrudeSample(sample)
        return self.encoder.cook_crude_sample(crude, self.cooker, self.arguments(crude["__key__"]))


def _joining(join: JoinLoading) -> Callable[..., Any]:
    joiner = join.joiner
    return find_joiner(joiner, join.allow) if isinstance(joiner, SampleJoiner) else joiner


def _loader(loading: LeafLoading, decoder: LoadFunction | None) -> LoadFunction:
    samples = loading.samples
    if samples.load is not None:
        return samples.load
    if samples.sample_type is not None and samples.field_map is not None:
        return LoadSample(loading.dataset_path, samples.sample_type, samples.field_map, decoder)
    return LoadCrude(loading.dataset_path, decoder)
