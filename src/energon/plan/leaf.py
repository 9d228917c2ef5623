"""A leaf of a plan: what determines the order of its samples."""

from __future__ import annotations

from dataclasses import dataclass

from energon.errors import ConfigError

SLICE_BYTES = 4 << 20
MAX_SLICE_SAMPLES = 128
PARALLEL_SLICES = 16
"""Slices of a dataset that are open at a time in a lane, unless a setting says otherwise."""
WITH_REPLACEMENT = -1


@dataclass(frozen=True)
class PlanLeaf:
    """The properties of a leaf that determine its order.

    Args:
        uid: Distinct for every leaf of a run; part of all its keys.
        num_samples: How many samples it has.
        weight: Share in a blend, relative to the others; 0 draws nothing.
        repetitions: How often an epochized line repeats it; may be a fraction.
        slice_samples: L, consecutive samples that are read together; 1 shuffles globally.
        parallel_slices: S, slices open at a time in a lane.
        shuffle_over_epochs: m permutes m copies of the leaf together; -1 draws with
            replacement; None keeps the order of the samples.
        blocks: Samples of each of the consecutive blocks that slices follow, which are about
            `slice_samples` long; None to cut slices anywhere.

    Raises:
        ConfigError: If a number is invalid.
    """

    uid: str
    num_samples: int
    weight: float = 1.0
    repetitions: float = 1.0
    slice_samples: int = 1
    parallel_slices: int = PARALLEL_SLICES
    shuffle_over_epochs: int | None = 1
    blocks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(f"leaf {self.uid} has {self.num_samples} samples, needs at least 1")
        if not 0 <= self.weight < float("inf"):
            raise ConfigError(f"leaf {self.uid}: weight is {self.weight}; expected 0 or more")
        if not 0 < self.repetitions < float("inf"):
            raise ConfigError(f"leaf {self.uid}: cannot be repeated {self.repetitions} times")
        if self.slice_samples < 1 or self.parallel_slices < 1:
            raise ConfigError(
                f"leaf {self.uid}: slices of {self.slice_samples} samples, "
                f"{self.parallel_slices} at a time; both must be at least 1"
            )
        multiplier = self.shuffle_over_epochs
        if multiplier is not None and multiplier < 1 and multiplier != WITH_REPLACEMENT:
            raise ConfigError(
                f"leaf {self.uid}: shuffle_over_epochs is {multiplier}; expected a number of "
                "epochs, -1 to draw with replacement, or None to keep the order"
            )
        if self.blocks is not None and (
            min(self.blocks, default=0) < 1 or sum(self.blocks) != self.num_samples
        ):
            raise ConfigError(
                f"leaf {self.uid}: {len(self.blocks)} blocks with {sum(self.blocks)} samples in "
                f"all, but it has {self.num_samples}"
            )


def choose_slice_samples(mean_sample_bytes: float) -> int:
    """Return the default L: about 4 MiB a slice, between 1 and 128 samples.

    More than about 100 samples make no read cheaper, and a shorter slice shuffles better.
    """
    return int(min(MAX_SLICE_SAMPLES, max(1, SLICE_BYTES // max(1.0, mean_sample_bytes))))
