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
class Leaf:
    """One dataset of a metadataset, with all that the levels above say of it.

    Args:
        path: Absolute path of the dataset folder or `.jsonl` file.
        split_part: Which of its splits.
        weight: Share in the blend when a run begins, those of all leaves sum to 1; None if it
            depends on the sizes of datasets.
        repetitions: How often its samples come in an epochized blend; may be a fraction.
        subflavors: Those of all levels, outer ones over inner ones. Those of the dataset's own
            `dataset.yaml` lie below and are not in here.
        shuffle_over_epochs_multiplier: 1 shuffles each epoch by itself, m over m epochs, -1
            draws with replacement, None keeps the order of the data.
        subsets: Ranges to narrow the split to, the innermost first.
        aux: Addresses of auxiliary data by the name that cookers know them by. Local paths are
            absolute, also behind `filesystem://`.
        dataset_config: File below `.nv-meta` that describes its samples.
        split_config: File below `.nv-meta` that lists its splits.
        origin: Where the leaf was written, as `file:line`.
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


@dataclass(frozen=True)
class LeafList:
    """The leaves of a split and how to mix them.

    Args:
        leaves: In the order of the document.
        blend_mode: What kind of mix it is.
        sources: What is drawn from: for each source the numbers of its leaves.
        mix: Shares of the sources.
        unit: Whether samples or whole batches are drawn; None for what the call says.
    """

    leaves: tuple[Leaf, ...]
    blend_mode: BlendMode
    sources: tuple[tuple[int, ...], ...] = ()
    mix: Mix | None = None
    unit: Literal["sample", "batch"] | None = None


@dataclass(frozen=True)
class TraversedDatasetReference:
    """A leaf as tools see it that only want to know which datasets there are."""

    path: str
    split_part: str
    aux: Mapping[str, str] = field(default_factory=dict)
    subflavors: Mapping[str, Any] = field(default_factory=dict)
