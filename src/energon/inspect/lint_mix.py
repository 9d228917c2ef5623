"""What is wrong with how the datasets of a metadataset are put together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from energon.errors import EnergonError, SecurityError
from energon.inspect.leaves import FoundLeaves, find_leaves
from energon.metadataset.leaf import Leaf
from energon.sources.shards import ShardPool
from energon.task_encoder.leaves import open_members
from energon.task_encoder.open_join import check_join, find_joiner

NOT_TRAINED = ("val", "test")
"""Splits whose weights say nothing, as nobody trains from them."""


def mix_problems(
    path: str | os.PathLike[str],
    found: FoundLeaves,
    *,
    dataset_config: str | None = None,
    split_config: str | None = None,
    allow: Sequence[str] = (),
) -> Iterator[tuple[str, str, str]]:
    """Yield the split, the dataset and what is wrong, for weights and joins of a metadataset.

    Args:
        path: The metadataset; nothing is wrong with anything else.
        found: What it consists of.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: The same for splits; None for split.yaml.
        allow: What the user allows.
    """
    if found.kind != "metadataset":
        return
    trained = [split for split in found.splits if split not in NOT_TRAINED]
    if trained:
        weighted = find_leaves(
            path,
            splits=trained,
            dataset_config=dataset_config,
            split_config=split_config,
            training=True,
            allow=allow,
        )
        for split, problem in weighted.problems:
            yield split, os.fspath(path), problem
    for split, mix in found.mixes.items():
        for leaf in mix.leaves:
            for problem in _join_problems(leaf, allow):
                yield split, leaf.path, problem


def _join_problems(leaf: Leaf, allow: Sequence[str]) -> Iterator[str]:
    if leaf.joiner is None:
        return
    try:
        find_joiner(leaf.joiner, allow)
    except SecurityError:
        pass  # it may not be looked at here, so nothing is known about it
    except EnergonError as error:
        yield str(error)
    try:
        members = open_members(leaf, ShardPool(), allow)
        with TemporaryDirectory(prefix="energon-lint-") as folder:
            check_join(leaf, members, Path(folder))
    except EnergonError as error:
        yield f"{leaf.origin}: {error}"
