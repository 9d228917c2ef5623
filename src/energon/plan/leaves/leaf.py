"""A leaf of a plan: what determines the order of its samples.

Samples may be in blocks that are decoded as a whole, such as row groups. In each pass over a leaf,
its blocks are then laid end to end in an order of their own, and each lane has one stretch of that
line. So a block is read by one lane, or by two where their stretches meet, and within a lane its
samples are close together. If a lane would read very few blocks in an epoch, they are cut into
pieces first, so that it mixes more of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon.arrays import Ints
from energon.errors import ConfigError
from energon.plan.randomness import permute

SLICE_BYTES = 4 << 20
MAX_SLICE_SAMPLES = 128
PARALLEL_SLICES = 16
"""Slices of a dataset that are open at a time in a lane, unless a setting says otherwise."""
WITH_REPLACEMENT = -1
MAX_BLOCKS = 1 << 18
"""Above this number, sorting the blocks of a pass would be felt: slices do not follow them."""
MAX_ROWS = 1 << 53
"""Rows of a leaf with all repetitions, or permuted together: what floats can count."""
KEPT_PASSES = 4
"""Lanes of a leaf are in a few passes at a time: some have begun the next one."""


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
        rows = self.num_samples * max(1, self.repetitions, multiplier or 1)
        if rows > MAX_ROWS:
            raise ConfigError(
                f"leaf {self.uid}: {self.num_samples:,} samples, repeated {self.repetitions:g} "
                f"times and shuffled over {multiplier or 1} epochs, are more than the {MAX_ROWS:,} "
                "that can be counted; lower `repetitions` or `shuffle_over_epochs_multiplier`"
            )
        if self.blocks is not None and (
            min(self.blocks, default=0) < 1 or sum(self.blocks) != self.num_samples
        ):
            raise ConfigError(
                f"leaf {self.uid}: {len(self.blocks)} blocks with {sum(self.blocks)} samples in "
                f"all, but it has {self.num_samples}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the settings that determine its order, for the fingerprint of states."""
        blocks = [len(self.blocks)] if self.blocks else []
        return {
            "repetitions": self.repetitions,
            "slice": [self.slice_samples, self.parallel_slices, *blocks],
            "shuffle_over_epochs": self.shuffle_over_epochs,
        }

    @classmethod
    def from_json(cls, uid: str, saved: Mapping[str, Any]) -> PlanLeaf:
        """Return the leaf of a fingerprint, which counts blocks, but does not have their sizes.

        Without them, draws have the same numbers, but stand for other samples.

        Args:
            uid: Its name.
            saved: What `to_json` returned, and how many `samples` it has.
        """
        slice_samples, parallel_slices, *_ = saved["slice"]
        return cls(
            uid,
            saved["samples"],
            repetitions=saved["repetitions"],
            slice_samples=slice_samples,
            parallel_slices=parallel_slices,
            shuffle_over_epochs=saved["shuffle_over_epochs"],
        )


def choose_slice_samples(mean_sample_bytes: float) -> int:
    """Return the default L: about 4 MiB a slice, between 1 and 128 samples.

    More than about 100 samples make no read cheaper, and a shorter slice shuffles better.
    """
    return int(min(MAX_SLICE_SAMPLES, max(1, SLICE_BYTES // max(1.0, mean_sample_bytes))))


class BlockLine:
    """The blocks of a leaf, in the order of each pass.

    Args:
        sizes: The number of samples of each block, in the order of the samples.
    """

    def __init__(self, sizes: Ints) -> None:
        self._edges = np.concatenate(([0], np.cumsum(sizes)))
        self._passes: OrderedDict[int, tuple[Ints, Ints]] = OrderedDict()

    def samples_at(self, line_indices: Ints, key: int) -> Ints:
        """Return the samples at some indices on the line of a pass with a key."""
        order, begins = self._pass(key)
        at = np.searchsorted(begins, line_indices, side="right") - 1
        return np.asarray(self._edges[order[at]] + line_indices - begins[at])

    def index_of(self, sample: int, key: int) -> int:
        """Return the index of a sample on the line of a pass with a key."""
        order, begins = self._pass(key)
        block = int(np.searchsorted(self._edges, sample, side="right")) - 1
        at = int(np.flatnonzero(order == block)[0])
        return int(begins[at]) + sample - int(self._edges[block])

    def within(self, samples: Ints, steps: Ints) -> Ints:
        """Return the samples some steps after others, going round in the block of each."""
        block = np.searchsorted(self._edges, samples, side="right") - 1
        begin, size = self._edges[block], self._edges[block + 1] - self._edges[block]
        return np.asarray(begin + (samples - begin + steps) % size)

    def _pass(self, key: int) -> tuple[Ints, Ints]:
        """Return the blocks in the order of a pass, and where each begins on its line."""
        line = self._passes.get(key)
        if line is None:
            sizes = np.diff(self._edges)
            count = np.array([len(sizes)])
            order = permute(np.arange(len(sizes)), count, np.array([key], np.uint64))
            begins = np.concatenate(([0], np.cumsum(sizes[order])[:-1]))
            line = self._passes[key] = order, begins
            if len(self._passes) > KEPT_PASSES:
                self._passes.popitem(last=False)
        return line


def block_sizes(edges: Ints) -> tuple[int, ...] | None:
    """Return the sizes of blocks with these edges, for a plan; None if there are too many.

    Example:
        >>> block_sizes(np.array([0, 5, 5, 8]))
        (5, 3)
    """
    sizes = np.diff(edges)
    sizes = sizes[sizes > 0]
    return tuple(sizes.tolist()) if 0 < len(sizes) <= MAX_BLOCKS else None


def even_sizes(num_samples: int, length: int) -> tuple[int, ...]:
    """Return sizes of blocks of one length, of which the last may be shorter.

    Example:
        >>> even_sizes(7, 3)
        (3, 3, 1)
    """
    full, rest = divmod(num_samples, length)
    return (length,) * full + (rest,) * (rest > 0)


def pieces_of(sizes: Ints, length: int) -> Ints:
    """Return the sizes of pieces of blocks, none of them longer than a length.

    Example:
        >>> pieces_of(np.array([7, 3, 4]), 3).tolist()
        [3, 2, 2, 3, 2, 2]
    """
    counts = -(-sizes // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    sizes, counts = np.repeat(sizes, counts), np.repeat(counts, counts)
    return np.asarray(sizes // counts + (number < sizes % counts))
