"""The order of the stages.

`build_pipeline` read from top to bottom is the way of a sample: the plan says which come
when, they are read, decoded, cooked, encoded, packed, batched. Blending and shuffling happen
in the plan, on numbers. There is no other place where the order is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon.errors import ConfigError
from energon.plan.recipe import PlanRecipe
from energon.sources.reader import LeafReader
from energon.stages.base import Dataset
from energon.stages.batch import BatchDataset
from energon.stages.group import GroupDataset
from energon.stages.hook import ErrorHandler
from energon.stages.map import MapDataset
from energon.stages.pack import PackDataset
from energon.stages.random_state import may_draw
from energon.stages.read import ReadDataset
from energon.stages.seed import SeedDataset
from energon.stages.unit_batch import UnitBatchDataset
from energon.task_encoder.augment import may_yield, overrides
from energon.task_encoder.cooker import is_generator_function
from energon.task_encoder.encoder import TaskEncoder
from energon.task_encoder.hook_maker import AnyTaskEncoder, HookMaker
from energon.task_encoder.join_hooks import leaf_hooks
from energon.task_encoder.load import OpenLeaf, SampleHooks
from energon.task_encoder.settings import BatchSettings


def build_pipeline(
    leaves: Sequence[OpenLeaf],
    reader: LeafReader,
    plan: PlanRecipe,
    encoder: AnyTaskEncoder,
    settings: BatchSettings,
    error_handler: ErrorHandler | None = None,
) -> Dataset[Any]:
    """Return the stages from the samples of `leaves` to batches.

    Args:
        leaves: One for each leaf of `plan`.
        reader: Reads their samples.
        plan: The order.
        encoder: The user's hooks. A hook that is not overridden adds no stage.
        settings: How samples are packed and batched. Without a batch_size they come one by one,
            or the criterion of groups decides.
        error_handler: Called for each sample that fails and is tolerated; None logs it.

    Raises:
        ConfigError: If hooks exclude one another, or a crude dataset has no cooker.
    """
    packing_buffer_size, batch_size = settings.packing_buffer_size, settings.batch_size
    drop_last = settings.batch_drop_last
    grouping = overrides(encoder, "batch_group_criterion")
    if grouping and plan.unit > 1:
        raise ConfigError(
            "the blend draws whole batches of one dataset, but batch_group_criterion decides "
            "what goes into a batch; drop one of the two"
        )
    hooks = HookMaker(
        encoder,
        reader,
        tuple(leaf.name for leaf in leaves),
        error_handler,
        seed_each=grouping or bool(packing_buffer_size) or plan.unit > 1 or _yields(encoder),
    )
    encoding = ("encode_sample", "preencode_sample")
    postencode = hooks.overridden("postencode_sample")

    pipeline: Dataset[Any] = ReadDataset(plan, reader)
    per_sample = hooks.overridden(*encoding) + (() if packing_buffer_size else postencode)
    sample_hooks = SampleHooks(tuple((*leaf_hooks(hooks, leaf), *per_sample) for leaf in leaves))
    if any(sample_hooks.leaves):
        pipeline = MapDataset(pipeline, sample_hooks)
    if packing_buffer_size:
        pipeline = PackDataset(
            pipeline,
            packing_buffer_size,
            select=hooks.method("select_samples_to_pack"),
            postencode=postencode,
            pack=hooks.overridden("pack_selected_samples"),
        )
    unit = "packs" if packing_buffer_size else "samples"
    batch_hooks = (hooks.method("batch"), *hooks.overridden("encode_batch"))
    if grouping:
        criterion = hooks.method("batch_group_criterion")
        pipeline = GroupDataset(pipeline, criterion, batch_size, batch_hooks, drop_last, unit)
    elif batch_size is not None:
        batches = UnitBatchDataset if plan.unit > 1 else BatchDataset
        pipeline = batches(pipeline, batch_size, batch_hooks, drop_last, unit)
    users = hooks.overridden(*_SEEDED)
    if encoder.cookers or any(may_draw(hook.function) for hook in users):
        pipeline = SeedDataset(pipeline)
    return pipeline


_SEEDED = (
    "encode_sample",
    "preencode_sample",
    "select_samples_to_pack",
    "postencode_sample",
    "pack_selected_samples",
    "batch_group_criterion",
    "batch",
    "encode_batch",
)
_YIELDING = (
    "cook_crude_sample",
    "encode_sample",
    "preencode_sample",
    "postencode_sample",
    "batch",
    "encode_batch",
)


def _yields(encoder: AnyTaskEncoder) -> bool:
    """Return whether one input of a hook may become several."""
    cooks = any(is_generator_function(cooker.cook) for cooker in encoder.cookers)
    return cooks or any(may_yield(encoder, name) for name in _YIELDING)


_PACKING = ("select_samples_to_pack", "pack_selected_samples")


def check_encoder(encoder: AnyTaskEncoder, *, packing: bool) -> None:
    """Raise ConfigError if `encoder` is none, or its hooks exclude one another."""
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
    missing = [hook for hook in _PACKING if not overrides(encoder, hook)]
    if packing and missing:
        raise ConfigError(
            f"packing_buffer_size is set, but {name} does not override {' and '.join(missing)}; "
            "say there which samples make a pack and how, for example with energon.packing"
        )
