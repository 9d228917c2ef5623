"""Combine the samples that a join read for a key into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from energon.errors import ConfigError
from energon.metadataset.leaf import SampleJoiner
from energon.samples.crude import CrudeSample, stamp
from energon.sources.join import JOINED
from energon.stages.hooks.hook import Compiled, Hook, compiled
from energon.task_encoder.cooker import Cooker, CookerArguments, cooker_arguments, find_cooker
from energon.task_encoder.hook_maker import AnyTaskEncoder, HookMaker
from energon.task_encoder.load import (
    LoadCrude,
    LoadFunction,
    LoadSample,
    OpenJoin,
    OpenLeaf,
    decoder_for,
    load_hooks,
    permitted,
)
from energon.task_encoder.open_join import find_joiner


def leaf_hooks(hooks: HookMaker, leaf: OpenLeaf) -> tuple[Hook, ...]:
    """Return the hooks that turn the bytes of a leaf's samples into the input of encoding hooks."""
    if leaf.join is None:
        return load_hooks(hooks, leaf)
    encoder = hooks.encoder
    loaders = tuple(_loader(member, decoder_for(member, encoder)) for member in leaf.join.members)
    join = JoinSample(loaders, leaf.join.names, _joining(leaf.join))
    cook = _cook_joined(leaf, encoder)
    if cook is None:
        return (hooks.make("join", join),)
    marked = encoder._hook_method("cook_crude_sample").marked
    if hasattr(cook.cooker.cook, "__stateless__"):
        marked = cook.cooker.cook
    return (hooks.make("join", join), hooks.make("cook_crude_sample", cook, settings=marked))


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


def _joining(join: OpenJoin) -> Callable[..., Any]:
    joiner = join.joiner
    return find_joiner(joiner, join.allow) if isinstance(joiner, SampleJoiner) else joiner


def _loader(leaf: OpenLeaf, decoder: LoadFunction | None) -> LoadFunction:
    if leaf.load is not None:
        return leaf.load
    if leaf.sample_type is not None and leaf.field_map is not None:
        return LoadSample(leaf.dataset_path, leaf.sample_type, leaf.field_map, decoder)
    return LoadCrude(leaf.dataset_path, decoder)


def _cook_joined(leaf: OpenLeaf, encoder: AnyTaskEncoder) -> CookJoined | None:
    """Return the hook that cooks the samples of a join; None if no cooker applies."""
    try:
        cooker = find_cooker(encoder.cookers, leaf.subflavors, dataset=leaf.name)
    except ConfigError:
        return None
    arguments = cooker_arguments(
        cooker,
        aux=leaf.aux,
        primary=leaf.primary,
        decoder=permitted(encoder.decoder, leaf.allow),
        dataset=leaf.name,
    )
    return CookJoined(encoder, cooker, arguments)
