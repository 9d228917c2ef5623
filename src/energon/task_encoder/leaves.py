"""Open the leaves of a resolved document: from paths to samples that are counted."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon.errors import ConfigError
from energon.metadataset.dataset_config import DatasetConfig, load_dataset_config
from energon.metadataset.leaf import Leaf
from energon.metadataset.inherit import multiply_shuffle
from energon.plan.leaf import PlanLeaf
from energon.samples.field_map import FieldMap
from energon.samples.registry import resolve_class
from energon.sources.file_store_open import open_aux
from energon.sources.file_store_webdataset import WebdatasetFileStore
from energon.sources.shards import ShardPool
from energon.sources.webdataset import WebdatasetSource
from energon.task_encoder.load import OpenLeaf


@dataclass(frozen=True)
class OpenedLeaf:
    """A leaf whose samples are counted: what its reading, its order and its hooks need."""

    source: WebdatasetSource
    leaf: OpenLeaf
    plan_leaf: PlanLeaf
    config: DatasetConfig


def open_leaves(leaves: Sequence[Leaf], subflavors: Mapping[str, Any] | None) -> list[OpenedLeaf]:
    """Open the datasets that `leaves` refer to, with `subflavors` merged over theirs.

    Raises:
        ConfigError: If a dataset.yaml makes no sense, or asks for what is not there.
        DatasetNotFoundError: If there is no such dataset.
        EmptyDatasetError: If a leaf has no samples in its split.
    """
    seen: dict[str, int] = {}
    pool = ShardPool()
    return [_open_leaf(leaf, subflavors, seen, pool) for leaf in leaves]


def _open_leaf(
    leaf: Leaf, subflavors: Mapping[str, Any] | None, seen: dict[str, int], pool: ShardPool
) -> OpenedLeaf:
    if leaf.join:
        raise ConfigError(f"{leaf.origin}: joins are not part of this release")
    config = load_dataset_config(leaf.path, leaf.dataset_config)
    if leaf.aux and not config.crude:
        raise ConfigError(
            f"{leaf.origin}: aux ({', '.join(leaf.aux)}) is for cookers, and {config.origin} "
            "describes samples that need none; make it a CrudeWebdataset, or drop aux"
        )
    if "decoder" in config.given:
        raise ConfigError(
            f"{config.origin}: a decoder of its own for a dataset is not part of this release; set "
            "`decoder` of the task encoder"
        )
    sample_type, field_map = _sample_type(config, leaf)
    source = WebdatasetSource(
        leaf.path,
        split_part=config.split_part or leaf.split_part,
        split_config=config.split_config or leaf.split_config,
        subsets=(*((config.subset,) if config.subset else ()), *leaf.subsets),
        parts=_parts(config, field_map),
        pool=pool,
    )
    name = f"{os.path.basename(os.path.normpath(leaf.path))}/{leaf.split_part}"
    # Neither the place in the document nor the mount point is part of the identity of a leaf,
    # so that others may be added and data may be moved without a change of its order.
    count = seen[name] = seen.get(name, 0) + 1
    uid = name if count == 1 else f"{name}#{count}"
    return OpenedLeaf(
        source=source,
        leaf=OpenLeaf(
            name=uid,
            dataset_path=leaf.path,
            subflavors={**config.subflavors, **leaf.subflavors, **(subflavors or {})},
            sample_type=sample_type,
            field_map=field_map,
            aux=open_aux(leaf.aux, origin=leaf.origin, pool=pool),
            primary=WebdatasetFileStore(leaf.path, pool=pool) if config.crude else None,
        ),
        plan_leaf=PlanLeaf(
            uid=uid,
            num_samples=len(source),
            repetitions=leaf.repetitions,
            shuffle_over_epochs=multiply_shuffle(
                config.shuffle_over_epochs if "shuffle_over_epochs" in config.given else 1,
                leaf.shuffle_over_epochs_multiplier,
            ),
        ),
        config=config,
    )


def _sample_type(config: DatasetConfig, leaf: Leaf) -> tuple[type | None, FieldMap | None]:
    if config.crude:
        return None, None
    if config.sample_type is None or config.field_map is None:
        raise ConfigError(
            f"{leaf.path}/.nv-meta/{leaf.dataset_config}: sample_loader is not part of this "
            "release; use a field_map, or CrudeWebdataset and a cooker"
        )
    sample_type = resolve_class(*config.sample_type)
    field_map = FieldMap.parse(config.field_map)
    field_map.check(sample_type)
    return sample_type, field_map


def _parts(config: DatasetConfig, field_map: FieldMap | None) -> Collection[str] | None:
    """Return the parts to read; None for all."""
    if isinstance(config.part_filter, str):
        raise ConfigError(
            f"{config.origin}: part_filter: {config.part_filter!r} is code, which is not part of "
            "this release; list the names of the parts to read"
        )
    return config.part_filter if field_map is None else field_map.parts
