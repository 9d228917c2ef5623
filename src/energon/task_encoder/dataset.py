"""What the getters return: a pipeline with its plan, ready to be given to a loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from energon.errors import ConfigError
from energon.plan.build import blend_plan, concat_plan, epochized_plan
from energon.plan.leaf import PlanLeaf
from energon.plan.rows import Plan
from energon.samples.restore_key import RestoreKey, to_tuple
from energon.sources.reader import LeafReader
from energon.stages.base import Dataset, DatasetIterator, State
from energon.stages.lane import Lane
from energon.worker import WorkerConfig

ORDER_VERSION = 1
"""Counts changes of the order that a configuration and a seed give."""


@dataclass(frozen=True)
class PlanRecipe:
    """All that decides the order, but the number of lanes.

    Args:
        kind: "blend" draws from the leaves by weight without end; "epochized" permutes all
            their samples as one line; "concat" lays them end to end.
        leaves: The leaves with their sizes.
        seed: Seed of the run.
        repeat: Whether an epochized line starts again at its end.
        stripe: How many consecutive samples go to the same lane where a line keeps its order.
        shuffle_window: Rows that are permuted together after blending; 0 for none.
    """

    kind: Literal["blend", "epochized", "concat"]
    leaves: tuple[PlanLeaf, ...]
    seed: int
    repeat: bool = True
    stripe: int = 1
    shuffle_window: int = 0

    @property
    def is_striped(self) -> bool:
        """Whether `stripe` has a say in the order."""
        shuffles = any(leaf.shuffle_over_epochs is not None for leaf in self.leaves)
        return self.kind == "concat" or (self.kind == "epochized" and not shuffles)

    def __call__(self, lanes: int) -> Plan:
        """Return the plan for `lanes` lanes."""
        if self.kind == "blend":
            return blend_plan(
                self.leaves, lanes=lanes, seed=self.seed, shuffle_window=self.shuffle_window
            )
        if self.kind == "epochized":
            return epochized_plan(
                self.leaves,
                lanes=lanes,
                seed=self.seed,
                repeat=self.repeat,
                stripe=self.stripe,
                shuffle_window=self.shuffle_window,
            )
        return concat_plan(self.leaves, lanes=lanes, stripe=self.stripe)


@dataclass(frozen=True)
class SavableDataset:
    """A pipeline from the samples of some leaves to batches. Give it to a loader.

    Immutable and without a position: any number of loaders may share one.

    Args:
        stage: The last stage of the pipeline.
        plan: The order of its samples.
        worker_config: Who loads it.
        batch_size: Samples (or packs) of a batch; None yields them one by one.
        packing_buffer_size: Samples that are divided into packs together; None does not pack.
        reader: Reads the samples; knows where each one lies.
        data: For each leaf, what a saved state must find unchanged.
        virtual_epoch_length: Batches of each rank after which an epoch ends; 0 never ends it.
        restart: Whether each pass starts from the beginning (validation) or goes on.
    """

    stage: Dataset[Any]
    plan: PlanRecipe
    worker_config: WorkerConfig
    batch_size: int | None
    reader: LeafReader
    packing_buffer_size: int | None = None
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    virtual_epoch_length: int = 0
    restart: bool = False

    def __post_init__(self) -> None:
        if self.virtual_epoch_length < 0:
            raise ConfigError(
                f"a virtual epoch has 0 (no end) or more batches, not {self.virtual_epoch_length}"
            )

    def __len__(self) -> int:
        """Return how many batches this rank delivers in an epoch."""
        config = self.worker_config
        lanes = config.default_lanes
        batches = [self.num_batches(lane, lanes) for lane in config.rank_lanes(lanes)]
        if None not in batches:
            total = sum(count or 0 for count in batches)
            return min(total, self.virtual_epoch_length or total)
        if self.virtual_epoch_length:
            return self.virtual_epoch_length
        samples = sum(leaf.num_samples for leaf in self.plan.leaves)
        return -(-samples // (self.batch_size or 1) // config.world_size)

    def open_lane(self, lane: Lane, state: State | None = None) -> DatasetIterator[Any]:
        """Start or resume one lane."""
        lane.seed = self.plan.seed
        return self.stage.open(lane, state)

    def num_batches(self, lane: int, lanes: int) -> int | None:
        """Return how many batches a lane has at most; None means no end."""
        return self.stage.num_items(lane, lanes)

    def describe_row(self, lane: int, lanes: int, row: int) -> str:
        """Return which sample comes at a row of a lane: its key, shard and offset, in words.

        Never fails on account of the data, since messages about failures are made of this.
        """
        found = self.plan(lanes).at(lane, np.array([row]))
        leaf, epoch, ordinal = (int(column[0]) for column in found)
        (source,) = self.reader.locate((leaf, epoch, ordinal))
        return f"{source}, epoch {epoch}"

    def restore_sample(self, key: RestoreKey) -> Any:
        """Make again what has this restore key: a batch, or a sample or pack within one.

        Read anew from the data, wherever it was in the run, by the same hooks.

        Args:
            key: The `__restore_key__` of a batch gives the batch. That of a sample gives the
                sample as it is before packing and batching.

        Raises:
            StateError: If there is no such key, or a hook skips the sample.
        """
        restored, _ = self.stage.restore(Lane(0, 1, seed=self.plan.seed), to_tuple(key))
        return restored

    def fingerprint(self, lanes: int) -> dict[str, Any]:
        """Return all that decides the order, as JSON: a state fits only where it is equal."""
        plan = self.plan
        return {
            "order_version": ORDER_VERSION,
            "kind": plan.kind,
            "seed": plan.seed,
            "lanes": lanes,
            "repeat": plan.repeat,
            **({"stripe": plan.stripe} if plan.is_striped else {}),
            "shuffle_window": plan.shuffle_window,
            "batch_size": self.batch_size,
            "packing_buffer_size": self.packing_buffer_size,
            "leaves": {
                leaf.uid: {
                    **self.data.get(leaf.uid, {}),
                    "weight": leaf.weight,
                    "repetitions": leaf.repetitions,
                    "slice": [leaf.slice_samples, leaf.parallel_slices],
                    "shuffle_over_epochs": leaf.shuffle_over_epochs,
                }
                for leaf in plan.leaves
            },
        }

    def config(self) -> dict[str, Any]:
        """Return a description of the pipeline as plain data."""
        return self.fingerprint(self.worker_config.default_lanes)
