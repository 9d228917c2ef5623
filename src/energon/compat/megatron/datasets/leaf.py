"""One dataset of a document, for programs that compose pipelines themselves."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from types import GenericAlias
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.compat.megatron.datasets.arguments import DatasetSubset
from energon.compat.megatron.wrappers.base import WrapperDataset
from energon.decode.sample_decoder import SampleDecoder
from energon.io.epath import AnyPath, EPath
from energon.metadataset.dataset_config import DatasetConfig
from energon.plan.build import blend_plan, concat_plan
from energon.plan.leaves.leaf import PARALLEL_SLICES, PlanLeaf, choose_slice_samples
from energon.plan.rows import LanesAreStreams, Plan, Rows
from energon.samples.crude import RestoreKey
from energon.sources.files.store import FileStore
from energon.sources.source import Source
from energon.stages.base import Dataset, DatasetIterator, ItemPlace, ThroughIterator
from energon.stages.lane import Lane
from energon.stages.map import MapDataset as MapStage
from energon.stages.read import ReadDataset, raise_unreadable
from energon.task_encoder.dataset_class import DatasetClass
from energon.task_encoder.encoder import DefaultTaskEncoder
from energon.task_encoder.hook_maker import AnyTaskEncoder, HookMaker
from energon.task_encoder.leaves import OpenedLeaf
from energon.task_encoder.load import LeafLoading
from energon.task_encoder.recipe import leaf_hooks, make_reader
from energon.worker import WorkerConfig

MAX_OVERSIZE = 1.5
"""A slice that exceeds its intended length by this factor is split."""


class Sharder:
    """Divides samples among the workers of all ranks, evenly and in runs as long as possible."""

    @classmethod
    def split_samples_to_workers(
        cls,
        start_samples: int,
        end_samples: int,
        worker_config: WorkerConfig,
        *,
        rotation_offset: int = 0,
    ) -> list[int]:
        """Return the start of each worker's samples for this rank, and the end of the last.

        Args:
            start_samples: Number of the first sample.
            end_samples: Number of the one after the last.
            worker_config: This rank, and the number of ranks and workers.
            rotation_offset: The first worker to get one sample more than others.
        """
        workers = max(1, worker_config.num_workers)
        total = workers * worker_config.world_size
        each, more = divmod(end_samples - start_samples, total)
        counts = [0] * total
        for turn, worker in enumerate(_spread(list(range(total)))):
            counts[worker] = each + ((turn - rotation_offset) % total < more)
        edges = list(accumulate(counts, initial=start_samples))
        first = worker_config.rank * workers
        return edges[first : first + workers + 1]

    @classmethod
    def shard_workers(
        cls,
        shards: Sequence[Any],
        worker_config: WorkerConfig,
        *,
        max_samples_per_sequence: int | None,
        subset: DatasetSubset | None = None,
        rotation_offset: int = 0,
    ) -> tuple[tuple[int, ...], ...]:
        """Return the starts of each worker's slices for this rank, and the end of its last one.

        Args:
            shards: Objects with a `count`; slices do not cross shards.
            worker_config: See `split_samples_to_workers`.
            max_samples_per_sequence: Maximum length of a slice; None for no limit.
            subset: The part of the samples to use.
            rotation_offset: See `split_samples_to_workers`.
        """
        edges = list(accumulate((shard.count for shard in shards), initial=0))
        start, stop = (0, edges[-1]) if subset is None else subset.compute_subset(edges[-1])
        ranges = cls.split_samples_to_workers(
            start, stop, worker_config, rotation_offset=rotation_offset
        )
        return tuple(
            _slices(
                [low, *(edge for edge in edges if low < edge < high), high],
                max_samples_per_sequence,
            )
            for low, high in pairwise(ranges)
        )

    @classmethod
    def slice_workers(
        cls,
        total_samples: int,
        worker_config: WorkerConfig,
        *,
        max_samples_per_sequence: int | None,
        subset: DatasetSubset | None = None,
        rotation_offset: int = 0,
    ) -> tuple[tuple[int, ...], ...]:
        """Return the result of `shard_workers` for samples in a single file."""
        start, stop = (0, total_samples)
        if subset is not None:
            start, stop = subset.compute_subset(total_samples)
        ranges = cls.split_samples_to_workers(
            start, stop, worker_config, rotation_offset=rotation_offset
        )
        return tuple(_slices(each, max_samples_per_sequence) for each in pairwise(ranges))


def _slices(edges: Sequence[int], longest: int | None) -> tuple[int, ...]:
    """Return the starts of the slices between some edges, and the end of the last."""
    starts = (start for low, high in pairwise(edges) for start in _cut(low, high, longest))
    return (*dict.fromkeys(starts), edges[-1])


def _cut(low: int, high: int, longest: int | None) -> Iterator[int]:
    size = high - low
    if size <= 0:
        return
    count = 1
    if longest is not None and size > longest * MAX_OVERSIZE:
        count = max(round(size / longest), 1)
    yield from (low + int(number * (size / count)) for number in range(count))


def _spread(numbers: list[int]) -> list[int]:
    """Return numbers in an order in which every prefix is spread evenly over all of them."""
    if len(numbers) <= 2:
        return numbers
    middle = len(numbers) // 2
    halves = zip_longest(_spread(numbers[:middle]), _spread(numbers[middle:]))
    return [number for pair in halves for number in pair if number is not None]


class LeafDataset(Sharder, DatasetClass):
    """A dataset of a document, with its properties and samples.

    Args:
        opened: The dataset.
        encoder: Decodes and cooks its samples.
        worker_config: Rank and workers.
        training: Whether each pass is shuffled, or samples come in order.
        plan_leaf: How it is ordered; None for its own settings.
        among: All datasets of the document; None if this is the only one.

    Attributes:
        name: Name of the dataset folder.
        subflavors: Of the dataset and all documents that refer to it.
        primary: Its files by name, if cookers may need them; else None.
    """

    __class_getitem__: Any = classmethod(GenericAlias)
    opened: OpenedLeaf
    subflavors: Mapping[str, Any]
    worker_config: WorkerConfig
    training: bool
    _encoder: AnyTaskEncoder | None = None
    _given_plan_leaf: PlanLeaf | None = None
    _given_among: tuple[OpenedLeaf, ...] = ()

    def __init__(
        self,
        opened: OpenedLeaf,
        *,
        encoder: AnyTaskEncoder,
        worker_config: WorkerConfig,
        training: bool,
        plan_leaf: PlanLeaf | None = None,
        among: Sequence[OpenedLeaf] | None = None,
    ) -> None:
        self.opened = opened
        self.source = opened.source
        self.worker_config = worker_config
        self.training = training
        self.name = opened.name
        self.subflavors = opened.subflavors
        open_primary = opened.loading.primary
        self.primary: FileStore[Any] | None = None if open_primary is None else open_primary()
        self._encoder = encoder
        self._given_plan_leaf = plan_leaf
        self._given_among = tuple(among or ())

    def within(
        self,
        opened: OpenedLeaf,
        *,
        encoder: AnyTaskEncoder | None = None,
        plan_leaf: PlanLeaf | None = None,
        among: Sequence[OpenedLeaf] | None = None,
    ) -> Self:
        """Return the same dataset as a part of a document; arguments as in the constructor."""
        inner = copy.copy(self)
        inner.opened = opened
        inner.subflavors = opened.subflavors
        inner._encoder = encoder
        inner._given_plan_leaf = plan_leaf
        inner._given_among = tuple(among or ())
        return inner

    @property
    def builds_itself(self) -> bool:
        """Whether a program overrides how its samples become a pipeline."""
        return type(self).build is not LeafDataset.build

    @property
    def paths(self) -> list[AnyPath]:
        """The dataset folder, as a list of one; those of all datasets of a join."""
        return [EPath(path) for path in self.source.paths]

    @cached_property
    def path(self) -> AnyPath:
        """The dataset folder, the first one of a join; may be set by classes of programs."""
        return self.paths[0]

    @property
    def _plan_leaf(self) -> PlanLeaf:
        return self._given_plan_leaf or self.opened.plan_leaf

    @property
    def _among(self) -> tuple[OpenedLeaf, ...]:
        return self._given_among or (self.opened,)

    def __len__(self) -> int:
        return len(self.source)

    def build(self, worker_rotation_offset: int = 0) -> SampleDataset:
        """Return the samples, each once, decoded and cooked.

        Args:
            worker_rotation_offset: Has no effect: samples are always divided evenly among lanes.
        """
        leaf, config = self._plan_leaf, self.worker_config
        identity = {
            "uid": leaf.uid,
            **self.opened.source.fingerprint(),
            "slice": [leaf.slice_samples, leaf.parallel_slices],
            "shuffle_over_epochs": leaf.shuffle_over_epochs,
        }
        return SampleDataset(
            self._samples(), worker_config=config, leaf=identity, training=self.training
        )

    def _samples(self) -> Dataset[Any]:
        leaf = self._plan_leaf
        encoder = self._encoder or DecodingEncoder()
        reader = make_reader(encoder, self._among)
        number = next(n for n, each in enumerate(self._among) if each is self.opened)
        plan = LeafPlan(leaf, number, self.worker_config.seed_offset, self.training)
        hooks = HookMaker(
            encoder,
            reader,
            tuple(each.loading.name for each in self._among),
            self.worker_config.global_error_handler,
            seed_each=True,
        )
        samples = ReadDataset(plan, reader, hooks.make("read", raise_unreadable), leaf=number)
        stage = ReadPass(samples, leaf.num_samples) if self.training else samples
        own_hooks = leaf_hooks(hooks, self.opened)
        return MapStage(stage, (own_hooks,)) if own_hooks else stage

    def config(self) -> dict[str, Any]:
        """Return a description of the dataset as plain data."""
        return {"type": type(self).__qualname__, "_path": [str(path) for path in self.paths]}

    def __str__(self) -> str:
        return f"{type(self).__name__}(path={self.path})"

    def as_file_store(self) -> FileStore[Any]:
        """Return the files of the dataset by name."""
        if self.primary is None:
            raise TypeError(f"{self.name} returns its files by name only if it is crude")
        return self.primary


def opened_leaf(
    source: Source,
    loading: LeafLoading,
    *,
    split_part: str,
    max_samples_per_sequence: int | None,
    parallel_shard_iters: int | None,
    shuffle_over_epochs: int | None,
    dataset: DatasetClass | None = None,
) -> OpenedLeaf:
    """Return the dataset that a factory has opened; what is None is chosen as the getters do."""
    slice_samples = max_samples_per_sequence or choose_slice_samples(source.mean_sample_bytes)
    plan_leaf = PlanLeaf(
        uid=f"{source.path.name}/{split_part}",
        num_samples=len(source),
        slice_samples=slice_samples,
        parallel_slices=parallel_shard_iters or PARALLEL_SLICES,
        shuffle_over_epochs=shuffle_over_epochs,
    )
    return OpenedLeaf(source, loading, plan_leaf, DatasetConfig(), dataset)


class DecodingEncoder(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Only decodes samples, for programs that build the rest of their pipeline."""

    def __init__(self, decoder: SampleDecoder | None = DefaultTaskEncoder.decoder) -> None:
        super().__init__()
        self.decoder = decoder


class SampleDataset(WrapperDataset):
    """The samples of one dataset, each once; `RepeatDataset` reshuffles them for every pass."""

    item_hooks = ()

    def __init__(
        self,
        stage: Dataset[Any],
        *,
        worker_config: WorkerConfig,
        leaf: Mapping[str, Any],
        training: bool,
    ) -> None:
        super().__init__([], stage=stage, worker_config=worker_config, leaf=dict(leaf))
        self._training = training

    @property
    def is_drawn_again(self) -> bool:
        """Whether each pass is shuffled, as those over training data are."""
        return self._training


@dataclass(frozen=True)
class LeafPlan:
    """The order of a single leaf, which keeps its number among all leaves.

    Args:
        leaf: The leaf.
        number: Its number.
        seed: Seed of the run.
        training: Whether it is endless and shuffled, or yields each sample once, in order.
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
        return _Renumbered(plan, self.number)


@dataclass(frozen=True)
class _Renumbered(LanesAreStreams):
    """A plan with a single leaf, under another number."""

    plan: Plan
    number: int

    @cached_property
    def lanes(self) -> int:
        return self.plan.lanes

    def at(self, lane: int, rows: Ints, *, gaps: bool = False) -> Rows:
        return self._renumber(self.plan.at(lane, rows, gaps=gaps))

    def leaf_of(self, lane: int, rows: Ints) -> NDArray[np.int32]:
        return np.full(len(rows), self.number, np.int32)

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


@dataclass(frozen=True)
class ReadPass(Dataset[Any]):
    """Yield every sample of a leaf once, over all lanes together.

    The lane knows the number of the pass; each pass has a different order.

    Args:
        samples: The samples of the leaf without end: row k of lane v is draw k·V + v.
        num_samples: Number of samples of the leaf.
    """

    samples: ReadDataset
    num_samples: int

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _PassIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        return -(-self.num_samples // lanes)

    def first_row(self, number: int, lane: int, lanes: int) -> int:
        """Return the first row of a pass in a lane."""
        return -(-(number * self.num_samples - lane) // lanes)

    def read_again(self, lane: Lane, places: Sequence[ItemPlace]) -> list[Any]:
        return self.samples.read_again(lane, places)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        return self.samples.restore(lane, key)


class _PassIterator(ThroughIterator):
    def __init__(self, stage: ReadPass, lane: Lane) -> None:
        number = lane.pass_number
        self.inner = stage.samples.open(
            lane, {"row": stage.first_row(number, lane.number, lane.lanes)}
        )
        self.stop = stage.first_row(number + 1, lane.number, lane.lanes)

    def __next__(self) -> Any:
        samples, _ = self.take(1)
        if not samples:
            raise StopIteration
        return samples[0]

    def take(self, count: int, *, as_columns: bool = False) -> tuple[Any, Sequence[ItemPlace]]:
        left = self.stop - self.inner.row
        if left <= 0:
            return [], []
        samples, places = self.inner.take(min(count, left), as_columns=as_columns)
        own = bisect_left(places, self.stop)
        if own < len(places):
            # The last samples of the pass could not be read, so these are of the next one.
            self.inner.put_back(samples[own:], places[own:])
            return samples[:own], places[:own]
        return samples, places
