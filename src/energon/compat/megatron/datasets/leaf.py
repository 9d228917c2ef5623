"""One dataset of a document, for programs that compose pipelines themselves."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from types import GenericAlias, SimpleNamespace
from typing import Any, Self

from energon.compat.megatron.datasets.arguments import DatasetSubset
from energon.compat.megatron.wrappers.base import WrapperDataset
from energon.decode.sample_decoder import SampleDecoder
from energon.io.epath import AnyPath, EPath
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import BlendMode, LeafList
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe
from energon.samples.crude import RestoreKey
from energon.sources.files.store import FileStore
from energon.sources.source import Source
from energon.stages.base import Dataset, DatasetIterator, ItemState, ThroughIterator
from energon.stages.lane import Lane
from energon.stages.map import MapDataset as MapStage
from energon.stages.read import ReadDataset, raise_unreadable
from energon.task_encoder.encoder import AnyTaskEncoder, DefaultTaskEncoder
from energon.task_encoder.leaves import DatasetClass, OpenedLeaf
from energon.task_encoder.load import LeafLoading
from energon.task_encoder.recipe import Recipe, leaf_hooks, train_recipe, validation_recipe
from energon.task_encoder.train_plan import TrainSettings, ValidationSettings
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
        return cls.shard_workers(
            [SimpleNamespace(count=total_samples)],
            worker_config,
            max_samples_per_sequence=max_samples_per_sequence,
            subset=subset,
            rotation_offset=rotation_offset,
        )


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
        recipe: The recipe of a run over the datasets of the document.
        number: The number of the dataset among them.

    Attributes:
        name: Name of the dataset folder.
        subflavors: Of the dataset and all documents that refer to it.
        primary: Its files by name, if cookers may need them; else None.
    """

    __class_getitem__: Any = classmethod(GenericAlias)
    recipe: Recipe
    number: int = 0
    subflavors: Mapping[str, Any]
    worker_config: WorkerConfig
    training: bool

    def __init__(self, recipe: Recipe, number: int = 0) -> None:
        self.recipe = recipe
        self.number = number
        self.source = self.opened.source
        self.worker_config = recipe.worker_config
        self.training = recipe.training
        self.name = self.opened.name
        self.subflavors = self.opened.subflavors
        open_primary = self.opened.loading.primary
        self.primary: FileStore[Any] | None = None if open_primary is None else open_primary()

    @staticmethod
    def of(recipe: Recipe) -> list[Any]:
        """Return the datasets of a recipe: the objects of the program's classes, if it has any."""
        return [
            leaf.dataset.within(recipe, number)
            if isinstance(leaf.dataset, LeafDataset)
            else LeafDataset(recipe, number)
            for number, leaf in enumerate(recipe.opened)
        ]

    def within(self, recipe: Recipe, number: int) -> Self:
        """Return the same dataset as a part of a document; arguments as in the constructor."""
        inner = copy.copy(self)
        inner.recipe = recipe
        inner.number = number
        inner.subflavors = inner.opened.subflavors
        return inner

    @property
    def opened(self) -> OpenedLeaf:
        """The opened dataset."""
        return self.recipe.opened[self.number]

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

    def __len__(self) -> int:
        return len(self.source)

    def build(self, worker_rotation_offset: int = 0) -> SampleDataset:
        """Return the samples, each once, decoded and cooked.

        Args:
            worker_rotation_offset: Has no effect: samples are always divided evenly among lanes.
        """
        return SampleDataset(self)

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


class DecodingEncoder(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Only decodes samples, for programs that build the rest of their pipeline."""

    def __init__(self, decoder: SampleDecoder | None = DefaultTaskEncoder.decoder) -> None:
        super().__init__()
        self.decoder = decoder


def recipe_of(
    opened: Sequence[OpenedLeaf],
    worker_config: WorkerConfig,
    *,
    training: bool,
    encoder: AnyTaskEncoder | None = None,
    shuffle_over_epochs: int | None = 1,
    parallel_shard_iters: int | None = None,
    max_samples_per_sequence: int | None = None,
) -> Recipe:
    """Return a recipe of single samples over datasets that a program builds on its own.

    Args:
        opened: The datasets.
        worker_config: Rank and workers.
        training: Whether each pass is shuffled, or samples come in order.
        encoder: Decodes and cooks samples; None only decodes them.
        shuffle_over_epochs: See `shuffle_over_epochs_multiplier` of `get_train_dataset`.
        parallel_shard_iters: See `get_train_dataset`.
        max_samples_per_sequence: See `get_train_dataset`.
    """
    encoder = encoder or DecodingEncoder()
    if not training:
        return validation_recipe(
            opened, encoder, ValidationSettings(batch_size=None), worker_config
        )
    settings = TrainSettings(
        batch_size=None,
        shuffle_over_epochs_multiplier=shuffle_over_epochs,
        parallel_shard_iters=parallel_shard_iters,
        max_samples_per_sequence=max_samples_per_sequence,
    )
    mode = LeafList(leaves=(), blend_mode=BlendMode.NONE)
    return train_recipe(mode, opened, encoder, settings, worker_config)


def opened_leaf(
    source: Source, loading: LeafLoading, split_part: str, dataset: DatasetClass | None = None
) -> OpenedLeaf:
    """Return a dataset that a factory has opened."""
    plan_leaf = PlanLeaf(uid=f"{source.path.name}/{split_part}", num_samples=len(source))
    config = DatasetConfig() if dataset is None else dataset.dataset_config()
    return OpenedLeaf(source, loading, plan_leaf, config, dataset)


class SampleDataset(WrapperDataset):
    """The samples of one dataset, each once; `RepeatDataset` reshuffles them for every pass.

    The lane knows the number of the pass. Row k of lane v of V lanes is draw k·V + v from the
    dataset.
    """

    item_hooks = ()

    def __init__(self, dataset: LeafDataset) -> None:
        recipe, number = dataset.recipe, dataset.number
        leaf = replace(recipe.plan.leaves[number], repetitions=1.0)
        if not dataset.training:
            leaf = replace(leaf, slice_samples=1, shuffle_over_epochs=None, blocks=None)
        leaves = (*recipe.plan.leaves[:number], leaf, *recipe.plan.leaves[number + 1 :])
        config = dataset.worker_config
        plan = PlanRecipe("blend", leaves, config.seed_offset, sources=((number,),))
        hooks = replace(recipe._hooks, seed_each=True)
        check = hooks.make("read", raise_unreadable)
        stage: Dataset[Any] = ReadPass(
            ReadDataset(plan, recipe.reader, check, leaf=number), leaf.num_samples
        )
        own_hooks = leaf_hooks(hooks, recipe.opened[number])
        super().__init__(
            [],
            stage=MapStage(stage, (own_hooks,)) if own_hooks else stage,
            worker_config=config,
            leaf={"uid": leaf.uid, **dataset.source.fingerprint(), **leaf.to_json()},
        )
        self._training = dataset.training

    @property
    def is_drawn_again(self) -> bool:
        """Whether each pass is shuffled, as those over training data are."""
        return self._training


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

    def read_again(self, lane: Lane, item_states: Sequence[ItemState]) -> list[Any]:
        return self.samples.read_again(lane, item_states)

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

    def take(self, count: int, *, as_columns: bool = False) -> tuple[Any, Sequence[ItemState]]:
        left = self.stop - self.inner.row
        if left <= 0:
            return [], []
        samples, item_states = self.inner.take(min(count, left), as_columns=as_columns)
        own = bisect_left(item_states, self.stop)
        if own < len(item_states):
            # The last samples of the pass could not be read, so these are of the next one.
            self.inner.put_back(samples[own:], item_states[own:])
            return samples[:own], item_states[:own]
        return samples, item_states
