"""What a metadataset resolves to: leaves, with the settings of the nodes above them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from energon.errors import ConfigError
from energon.io.address import is_remote, join_address, local_path
from energon.plan.blends.mix import Mix
from energon.plan.leaves.subset import Bound

Subset = tuple[Bound, Bound]
"""A range of samples, see `energon.plan.leaves.subset`."""


class BlendMode(Enum):
    """How the leaves of a list are mixed."""

    NONE = "none"
    DATASET_WEIGHT = "dataset_weight"
    SAMPLE_REPETITIONS = "sample_repetitions"


@dataclass(frozen=True)
class JoinMember:
    """A dataset of a join.

    Args:
        leaf: The dataset.
        nonmatch: What to do if it has no sample for a key: fail, skip the key, or pass None to
            the joiner.
        name: The argument of the joiner; None for the next one in order.
    """

    leaf: Leaf
    nonmatch: Literal["error", "skip", "none"] = "error"
    name: str | None = None


@dataclass(frozen=True)
class SampleJoiner:
    """What joins the samples of a join.

    Args:
        module: Its module.
        name: Its name there.
        is_type: Whether it is a sample type, whose `from_joined` is called, or a function.
        origin: Where it was written.
        document: The local file that it was written in; None for another.
    """

    module: str
    name: str
    is_type: bool
    origin: str = ""
    document: str | None = None


@dataclass(frozen=True)
class Leaf:
    """One dataset of a metadataset, with the settings of all levels above it.

    Joined datasets are one leaf, with the path of the first.

    Args:
        path: Absolute path of the dataset.
        split_part: The split to read.
        weight: Share of the blend at the start of a run; the shares of all leaves sum to 1. None
            if it depends on the sizes of datasets.
        repetitions: How often its samples occur in an epochized blend; may be a fraction.
        subflavors: Those of all levels, outer ones overriding inner ones. They override those of
            the dataset's own `dataset.yaml`, which are not included.
        shuffle_over_epochs_multiplier: 1 shuffles each epoch on its own, m over m epochs, -1
            draws with replacement, None keeps the order of the data.
        subsets: Ranges to narrow the split to, the innermost first.
        aux: Addresses of auxiliary data by the names that cookers use. Local paths are absolute,
            also after `filesystem://`.
        dataset_config: File below `.nv-meta` that describes its samples.
        split_config: File below `.nv-meta` that lists its splits.
        origin: Where the leaf was written, as `file:line:column`.
        kind: Which kind of dataset it is; of a join, that of the first.
        read: What a sample is, for kinds with a choice; see `DatasetKind.options`.
        join: The joined datasets; empty for a single dataset.
        joiner: What joins their samples.
    """

    path: str
    split_part: str
    weight: float | None = 1.0
    repetitions: float = 1.0
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    shuffle_over_epochs_multiplier: int | None = 1
    subsets: tuple[Subset, ...] = ()
    aux: Mapping[str, str] = field(default_factory=dict)
    dataset_config: str = "dataset.yaml"
    split_config: str = "split.yaml"
    origin: str = ""
    kind: str = "webdataset"
    read: Mapping[str, Any] = field(default_factory=dict)
    join: tuple[JoinMember, ...] = ()
    joiner: SampleJoiner | None = None

    @property
    def datasets(self) -> list[tuple[Leaf, Mapping[str, Any]]]:
        """The datasets of the leaf, with the subflavors that override their own."""
        if not self.join:
            return [(self, {})]
        return [(member.leaf, self.subflavors) for member in self.join]


@dataclass(frozen=True)
class LeafList:
    """The leaves of a split and how to mix them.

    Args:
        leaves: In the order of the document.
        blend_mode: The kind of mix.
        sources: For each source of the blend, the numbers of its leaves.
        mix: Shares of the sources.
        unit: Whether samples or whole batches are drawn; None leaves it to the call.
        read_from: The arguments of `resolve`, to resolve it again: `path` (without passwords),
            `split`, and any others. Empty for a document that is not a file.
    """

    leaves: tuple[Leaf, ...]
    blend_mode: BlendMode
    sources: tuple[tuple[int, ...], ...] = ()
    mix: Mix | None = None
    unit: Literal["sample", "batch"] | None = None
    read_from: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TraversedDatasetReference:
    """A leaf for tools that only need to know which datasets there are."""

    path: str
    split_part: str
    aux: Mapping[str, str] = field(default_factory=dict)
    subflavors: Mapping[str, Any] = field(default_factory=dict)


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
    """Combine the multipliers of two levels: None wins, then -1, else their product."""
    if inner is None or outer is None:
        return None
    return -1 if -1 in (inner, outer) else inner * outer


def check_cycle(trail: Sequence[tuple[str, str]], origin: str) -> None:
    """Raise ConfigError if the last document of the trail occurs in it before."""
    if trail[-1] in trail[:-1]:
        steps = " -> ".join(f"{file} ({part})" for file, part in trail)
        raise ConfigError(f"{origin}: the metadataset contains itself: {steps}")


def identity(address: str) -> str:
    """Return a canonical address, equal for the same file."""
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
