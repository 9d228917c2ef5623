"""What a node of a document says of the leaves below it, and how addresses in it are meant."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from energon.errors import ConfigError
from energon.formats.meta.yaml import plain
from energon.io.address import is_remote, join_address, local_path
from energon.metadataset.leaf import Leaf, Subset

if TYPE_CHECKING:
    from energon.metadataset.grammar import Join
    from energon.metadataset.grammar_values import Inner, Reference


@dataclass(frozen=True)
class NodeContext:
    """What is handed down to a node."""

    split_part: str
    dataset_config: str
    split_config: str
    folder: str
    document: str | None = None
    trail: tuple[tuple[str, str], ...] = ()  # documents and splits on the way

    def below(self, node: Reference | Join) -> NodeContext:
        """Return what a reference or a join hands down."""
        return replace(
            self,
            split_part=node.split_part or self.split_part,
            dataset_config=node.dataset_config or self.dataset_config,
            split_config=node.split_config or self.split_config,
        )


def repeated(leaf: Leaf, times: float) -> Leaf:
    """Return `leaf` repeated that many times more."""
    return replace(leaf, repetitions=leaf.repetitions * times)


def inherit(leaf: Leaf, node: Inner) -> Leaf:
    """Return `leaf` with what a node above it says."""
    bounds = None if node.subset is None else node.subset.bounds
    leaf = replace(leaf, subflavors={**leaf.subflavors, **plain(node.subflavors)})
    return narrow(leaf, bounds, node.shuffle_over_epochs_multiplier)


def narrow(leaf: Leaf, subset: Subset | None, multiplier: int | None) -> Leaf:
    """Return `leaf` below a subset (None for all) and a multiplier of shuffling over epochs."""
    return replace(
        leaf,
        subsets=leaf.subsets if subset is None else (*leaf.subsets, subset),
        shuffle_over_epochs_multiplier=multiply_shuffle(
            leaf.shuffle_over_epochs_multiplier, multiplier
        ),
    )


def multiply_shuffle(inner: int | None, outer: int | None) -> int | None:
    """Return the multiplier of two levels: None wins over all, then -1, else the product."""
    if inner is None or outer is None:
        return None
    return -1 if -1 in (inner, outer) else inner * outer


def check_cycle(trail: Sequence[tuple[str, str]], origin: str) -> None:
    """Raise ConfigError if the last of the documents on the way was there before."""
    if trail[-1] in trail[:-1]:
        steps = " -> ".join(f"{file} ({part})" for file, part in trail)
        raise ConfigError(f"{origin}: the metadataset contains itself: {steps}")


def check_subset(node: Inner, *, is_leaf: bool) -> None:
    """Raise ConfigError if a node counts samples of more than one dataset."""
    subset = node.subset
    if subset and not is_leaf and int in map(type, subset.bounds):
        raise ConfigError(
            f"{subset.where('range')}: a number of samples makes sense for one dataset only: can "
            "only use absolute subset ranges for a leaf dataset. Use percentages like "
            '["0%", "50%"] for all datasets of a blend or metadataset'
        )


def identity(address: str) -> str:
    """Return an address that is equal for the same file."""
    return address if is_remote(address) else os.path.realpath(address)


def absolute(path: str, folder: str) -> str:
    """Return the address of a path in a document that is in `folder`."""
    joined = join_address(folder, path)
    return joined if is_remote(joined) else local_path(joined)


def absolute_aux(address: str, folder: str) -> str:
    """Return the same for auxiliary data."""
    scheme = "filesystem://"
    if address.startswith(scheme):
        return scheme + absolute(address.removeprefix(scheme), folder)
    return absolute(address, folder)
