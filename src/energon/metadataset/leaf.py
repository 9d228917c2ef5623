"""What a metadataset boils down to: leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from energon.plan.mix import Mix
from energon.plan.subset import Bound

Subset = tuple[Bound, Bound]
"""A range of samples, see `energon.plan.subset`."""


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
        nonmatch: What is done where it has no sample of a key: fail, leave the key out of the
            join, or give None to the joiner.
        name: The argument of the joiner; None for the next one in order.
    """

    leaf: Leaf
    nonmatch: Literal["error", "skip", "none"] = "error"
    name: str | None = None


@dataclass(frozen=True)
class SampleJoiner:
    """What puts the samples of a join together.

    Args:
        module: Where it is.
        name: What it is called there.
        is_type: Whether it is a sample type, whose `from_joined` does it, or a function.
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
    """One dataset of a metadataset, with all that the levels above say of it.

    Datasets that are joined are one leaf, with the path of the first.

    Args:
        path: Absolute path of the dataset.
        split_part: Which of its splits.
        weight: Share in the blend when a run begins, those of all leaves sum to 1; None if it
            depends on the sizes of datasets.
        repetitions: How often its samples come in an epochized blend; may be a fraction.
        subflavors: Those of all levels, outer ones over inner ones. Those of the dataset's own
            `dataset.yaml` lie below and are not in here.
        shuffle_over_epochs_multiplier: 1 shuffles each epoch on its own, m over m epochs, -1
            draws with replacement, None keeps the order of the data.
        subsets: Ranges to narrow the split to, the innermost first.
        aux: Addresses of auxiliary data by the name that cookers know them by. Local paths are
            absolute, also behind `filesystem://`.
        dataset_config: File below `.nv-meta` that describes its samples.
        split_config: File below `.nv-meta` that lists its splits.
        origin: Where the leaf was written, as `file:line:column`.
        kind: Which kind of dataset it is; of a join, that of the first.
        read: What a sample is, for kinds that leave a choice; see `DatasetKind.options`.
        join: The datasets that are joined; none for a single dataset.
        joiner: What puts their samples together.
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
        """The datasets of the leaf, with the subflavors that go over their own."""
        if not self.join:
            return [(self, {})]
        return [(member.leaf, self.subflavors) for member in self.join]


@dataclass(frozen=True)
class LeafList:
    """The leaves of a split and how to mix them.

    Args:
        leaves: In the order of the document.
        blend_mode: What kind of mix it is.
        sources: What is drawn from: for each source the numbers of its leaves.
        mix: Shares of the sources.
        unit: Whether samples or whole batches are drawn; None for what the call says.
        read_from: The arguments of `resolve`, for those who resolve it again: `path` (without
            passwords), `split`, and what else was given. Empty for a document that is not a file.
    """

    leaves: tuple[Leaf, ...]
    blend_mode: BlendMode
    sources: tuple[tuple[int, ...], ...] = ()
    mix: Mix | None = None
    unit: Literal["sample", "batch"] | None = None
    read_from: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TraversedDatasetReference:
    """A leaf as tools see it that only want to know which datasets there are."""

    path: str
    split_part: str
    aux: Mapping[str, str] = field(default_factory=dict)
    subflavors: Mapping[str, Any] = field(default_factory=dict)
