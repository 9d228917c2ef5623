"""Datasets that are joined become one leaf."""

from __future__ import annotations

from typing import TYPE_CHECKING

from energon.metadataset.leaf import Joiner, JoinMember, Leaf

if TYPE_CHECKING:
    from energon.metadataset.grammar import Join


def joined_leaf(node: Join, members: tuple[JoinMember, ...], document: str | None) -> Leaf:
    """Return the leaf of a join.

    Args:
        node: What is written.
        members: Its datasets; the first gives the leaf its path.
        document: The local file that it is written in; None for another.
    """
    first = members[0].leaf
    joiner = Joiner(
        node.joiner.module,
        node.joiner.class_ or str(node.joiner.function),
        node.joiner.class_ is not None,
        node.where("joiner"),
        document,
    )
    return Leaf(
        path=first.path,
        split_part=first.split_part,
        dataset_config=first.dataset_config,
        split_config=first.split_config,
        origin=node.where("join"),
        kind=first.kind,
        join=members,
        joiner=joiner,
    )
