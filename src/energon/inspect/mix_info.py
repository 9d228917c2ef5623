"""Describe how the datasets of a metadataset are mixed, as plain data. No sample is read."""

from __future__ import annotations

from typing import Any

from energon.errors import EmptyDatasetError
from energon.io.address import redact
from energon.metadataset.leaf import BlendMode, Leaf, LeafList
from energon.sources.join import JoinedSource
from energon.sources.kinds import kind_named
from energon.sources.shards import ShardPool
from energon.task_encoder.open_join import find_index, join_digest


def describe_mix(mix: LeafList) -> dict[str, Any]:
    """Return what a split of a metadataset is made of.

    `samples` is None where that depends on the index of a join which is not there yet.
    """
    pool = ShardPool()
    leaves = [_leaf(leaf, mix, pool) for leaf in mix.leaves]
    known = all(leaf["samples"] is not None for leaf in leaves)
    about = {
        "samples": sum(leaf["samples"] for leaf in leaves) if known else None,
        "blend": mix.blend_mode.value,
        "leaves": leaves,
    }
    if mix.blend_mode is BlendMode.SAMPLE_REPETITIONS and known:
        about["samples_per_epoch"] = round(
            sum(leaf["samples"] * leaf["repetitions"] for leaf in leaves)
        )
    return about


def _leaf(leaf: Leaf, mix: LeafList, pool: ShardPool) -> dict[str, Any]:
    about: dict[str, Any] = {
        "path": redact(leaf.path),
        "split_part": leaf.split_part,
        "samples": _count_joined(leaf, pool) if leaf.join else _count(leaf, pool),
        "weight": leaf.weight if mix.blend_mode is BlendMode.DATASET_WEIGHT else None,
        "repetitions": leaf.repetitions,
        "subflavors": dict(leaf.subflavors),
        "aux": {name: redact(place) for name, place in leaf.aux.items()},
    }
    if leaf.join:
        about["join"] = [
            {
                "path": redact(member.leaf.path),
                "split_part": member.leaf.split_part,
                "nonmatch": member.nonmatch,
            }
            for member in leaf.join
        ]
    return about


def _count(leaf: Leaf, pool: ShardPool) -> int:
    try:
        return len(_open(leaf, pool))
    except EmptyDatasetError:
        return 0


def _count_joined(leaf: Leaf, pool: ShardPool) -> int | None:
    try:
        members = [_open(member.leaf, pool) for member in leaf.join]
        digest = join_digest(leaf, members)
        index = find_index(leaf, digest)
        if index is None:
            return None
        return len(JoinedSource(members, index, digest=digest, subsets=leaf.subsets))
    except EmptyDatasetError:
        return 0


def _open(leaf: Leaf, pool: ShardPool) -> Any:
    kind = kind_named(leaf.kind)
    return kind.open(leaf, kind.config(leaf), pool=pool)
