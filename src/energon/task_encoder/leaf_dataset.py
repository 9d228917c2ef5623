"""One dataset of a document, as users see it who put pipelines together themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.plan.build import blend_plan, concat_plan
from energon.plan.leaf import Ints, PlanLeaf
from energon.plan.rows import Plan, Rows
from energon.sources.file_store import FileStore
from energon.sources.reader import LeafReader
from energon.stages.base import Dataset
from energon.stages.map import MapDataset as MapStage
from energon.stages.read import ReadDataset
from energon.stages.read_pass import ReadPass
from energon.task_encoder.build import LoadedDataset
from energon.task_encoder.hook_maker import AnyTaskEncoder, HookMaker
from energon.task_encoder.join_hooks import leaf_hooks
from energon.task_encoder.leaves import OpenedLeaf
from energon.worker import WorkerConfig
from energon.wrappers.base import Always, WrapperDataset


@dataclass(frozen=True)
class LeafDataset:
    """A dataset of a document: what it is, and its samples.

    Args:
        name: Name of the dataset folder.
        paths: The dataset folder, as a list of one; those of all datasets of a join.
        subflavors: Of the dataset and all documents that refer to it.
        num_samples: How many samples it has.
        samples: The stage that yields them once, decoded and cooked.
        worker_config: Who loads it.
        identity: What a saved state must find unchanged.
        primary: Its files by name, where cookers may want them.
    """

    name: str
    paths: list[str]
    subflavors: Mapping[str, Any]
    num_samples: int = field(default=0, repr=False)
    samples: Dataset[Any] | None = field(default=None, repr=False)
    worker_config: WorkerConfig | None = field(default=None, repr=False)
    identity: Mapping[str, Any] = field(default_factory=dict, repr=False)
    primary: FileStore[Any] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.num_samples

    def build(self, worker_rotation_offset: int = 0) -> SampleDataset:
        """Return the samples, each once.

        Args:
            worker_rotation_offset: Has no effect: samples are dealt to lanes evenly anyhow.
        """
        if self.samples is None or self.worker_config is None:
            raise TypeError(f"{self.name} was made without its samples")
        return SampleDataset(self.samples, worker_config=self.worker_config, leaf=self.identity)

    def as_file_store(self) -> FileStore[Any]:
        """Return the files of the dataset by name."""
        if self.primary is None:
            raise TypeError(f"{self.name} gives its files by name only if it is crude")
        return self.primary


class SampleDataset(WrapperDataset):
    """The samples of one dataset, each once; `RepeatDataset` shuffles them anew each time."""

    def __init__(
        self, stage: Dataset[Any], *, worker_config: WorkerConfig, leaf: Mapping[str, Any]
    ) -> None:
        super().__init__(stage, [], worker_config=worker_config, leaf=dict(leaf))


def make_reader(opened: Sequence[OpenedLeaf], window_rows: int = 0) -> LeafReader:
    """Return what reads the samples of `opened`."""
    sources = tuple(leaf.source for leaf in opened)
    return LeafReader(sources, tuple(leaf.leaf.subflavors for leaf in opened), window_rows)


def loaded_datasets(
    opened: Sequence[OpenedLeaf],
    plan_leaves: Sequence[PlanLeaf] | None,
    encoder: AnyTaskEncoder,
    worker_config: WorkerConfig,
    *,
    training: bool,
) -> list[LoadedDataset]:
    """Return `opened` as datasets of their own; in training, each pass is shuffled anew.

    Args:
        opened: The leaves.
        plan_leaves: How each is ordered; None for what they say themselves.
        encoder: Cooks the samples of crude ones.
        worker_config: Who loads them.
        training: False gives the samples in order.
    """
    reader = make_reader(opened)
    plan_leaves = plan_leaves or [leaf.plan_leaf for leaf in opened]
    hooks = HookMaker(
        encoder,
        reader,
        tuple(leaf.leaf.name for leaf in opened),
        worker_config.global_error_handler,
        seed_each=True,
    )
    datasets = []
    for number, (leaf, plan_leaf) in enumerate(zip(opened, plan_leaves, strict=True)):
        plan = LeafPlan(plan_leaf, number, worker_config.seed_offset, training)
        datasets.append(
            LoadedDataset(
                _leaf_dataset(leaf, plan, reader, hooks, worker_config),
                weight=plan_leaf.weight,
                repetitions=plan_leaf.repetitions,
                aux=leaf.leaf.aux,
            )
        )
    return datasets


def _leaf_dataset(
    opened: OpenedLeaf,
    plan: LeafPlan,
    reader: LeafReader,
    hooks: HookMaker,
    worker_config: WorkerConfig,
) -> LeafDataset:
    leaf = plan.leaf
    stage: Dataset[Any] = (
        ReadPass(plan, reader, leaf.num_samples, plan.number)
        if plan.training
        else ReadDataset(plan, reader, plan.number)
    )
    loading = leaf_hooks(hooks, opened.leaf)
    return LeafDataset(
        name=opened.source.path.name,
        paths=[str(path) for path in opened.source.paths],
        subflavors=opened.leaf.subflavors,
        num_samples=leaf.num_samples,
        samples=MapStage(stage, Always(loading)) if loading else stage,
        worker_config=worker_config,
        identity={
            "uid": leaf.uid,
            **opened.source.fingerprint(),
            "slice": [leaf.slice_samples, leaf.parallel_slices],
            "shuffle_over_epochs": leaf.shuffle_over_epochs,
        },
        primary=opened.leaf.primary,
    )


@dataclass(frozen=True)
class LeafPlan:
    """The order of one leaf by itself, under the number that it has among all.

    Args:
        leaf: The leaf.
        number: Its number.
        seed: Seed of the run.
        training: Whether it is endless and shuffled, or each sample comes once, in order.
    """

    leaf: PlanLeaf
    number: int
    seed: int
    training: bool

    def __call__(self, lanes: int) -> Plan:
        """Return the plan for `lanes` lanes."""
        leaf = replace(self.leaf, weight=1.0, repetitions=1.0)
        plan = (
            blend_plan([leaf], lanes=lanes, seed=self.seed)
            if self.training
            else concat_plan([leaf], lanes=lanes)
        )
        return _Numbered(plan, self.number)


@dataclass(frozen=True)
class _Numbered:
    """The only leaf of a plan under another number."""

    plan: Plan
    number: int

    @cached_property
    def lanes(self) -> int:
        return self.plan.lanes

    def at(self, lane: int, rows: Ints) -> Rows:
        return self._renumber(self.plan.at(lane, rows))

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> Plan:
        return replace(self, plan=self.plan.with_changes(lane, rows))

    def rows(self, lane: int, start: int, count: int) -> Rows:
        return self._renumber(self.plan.rows(lane, start, count))

    def num_rows(self, lane: int) -> int | None:
        return self.plan.num_rows(lane)

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        return self.plan.leaf_counts(lane, row)

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        return self.plan.find(0, epoch, ordinal)

    def _renumber(self, rows: Rows) -> Rows:
        return rows._replace(leaf=np.full_like(rows.leaf, self.number))
