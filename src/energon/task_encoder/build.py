"""Pipelines put together of wrappers, for task encoders that want another order of the stages.

The dataset getters do without: `recipe.py` says the same with fewer stages, and shuffles and
blends numbers instead of samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from energon.errors import ConfigError
from energon.metadataset.leaf import BlendMode
from energon.stages.base import Dataset
from energon.worker import WorkerConfig
from energon.wrappers import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    GroupBatchDataset,
    LimitDataset,
    LogSampleDataset,
    MapDataset,
    PackingDataset,
    RepeatDataset,
    ShuffleBufferDataset,
    WrapperDataset,
)


@dataclass(frozen=True)
class LoadedDataset:
    """A dataset of a document, and how it takes part in a blend.

    Args:
        dataset: The dataset. In `build_train_datasets`, `dataset.build()` returns its samples;
            in what `load_dataset` gives, `dataset.source` has them by number.
        weight: Its share in a blend by weights at the beginning of a run; None if it is no such
            blend, or if weights come from sizes.
        repetitions: How often it comes in an epochized blend; None for once.
        aux: Auxiliary data by name.
    """

    dataset: Any
    weight: float | None = None
    repetitions: float | None = None
    aux: Mapping[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples, repeated without end, and the weight: as `BlendDataset` takes them."""
        samples = self.dataset.build()
        weight = 1.0 if self.weight is None else self.weight
        return iter((RepeatDataset(samples, worker_config=samples.worker_config), weight))


class PipelineBuilder:
    """How the stages of a task encoder are put together.

    Override `build_train_datasets` and `build_val_datasets`, or what they call. An encoder that
    overrides none of them gets the same pipeline with fewer stages, see `recipe.py`.
    """

    _hook: Callable[[str], Any]
    _overrides: Callable[[str], bool]

    def build_train_datasets(
        self,
        *,
        datasets: Sequence[LoadedDataset],
        worker_config: WorkerConfig,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        virtual_epoch_length: int = 0,
        shuffle_buffer_size: int | None = None,
        blend_mode: BlendMode = BlendMode.NONE,
        repeat: bool = True,
    ) -> Any:
        """Return the training pipeline over `datasets`. Override it to build another one."""
        loaded = [self._load_dataset(dataset, worker_config=worker_config) for dataset in datasets]
        samples = _blended(datasets, loaded, worker_config, blend_mode, repeat=repeat)
        if shuffle_buffer_size:
            samples = ShuffleBufferDataset(
                samples, shuffle_buffer_size, worker_config=worker_config
            )
        batches = self.build_batch(
            self.build_encode_sample(samples, worker_config=worker_config),
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            packing_buffer_size=packing_buffer_size,
            worker_config=worker_config,
        )
        if virtual_epoch_length:
            batches = EpochizeDataset(batches, virtual_epoch_length, worker_config)
        if worker_config.should_log(1):
            batches = LogSampleDataset(batches, "train", worker_config)
        return batches

    def build_val_datasets(
        self,
        *,
        datasets: Sequence[LoadedDataset],
        worker_config: WorkerConfig,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        limit: int | None = None,
    ) -> Any:
        """Return the validation pipeline over `datasets`. Override it to build another one."""
        samples = ConcatDataset(
            *(self._load_dataset(dataset, worker_config=worker_config) for dataset in datasets),
            worker_config=worker_config,
        )
        batches = self.build_batch(
            self.build_encode_sample(samples, worker_config=worker_config),
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            packing_buffer_size=packing_buffer_size,
            worker_config=worker_config,
        )
        if limit:
            batches = LimitDataset(
                batches, limit, reset_after_epoch=True, worker_config=worker_config
            )
        if worker_config.should_log(2):
            batches = LogSampleDataset(batches, "val", worker_config)
        return batches

    def build_encode_sample(self, dataset: Dataset[Any], *, worker_config: WorkerConfig) -> Any:
        """Return the items of `dataset` after `encode_sample` or `preencode_sample`."""
        for name in ("encode_sample", "preencode_sample"):
            if self._overrides(name):
                dataset = MapDataset(dataset, self._hook(name), worker_config=worker_config)
        return dataset

    def build_cook_crude_sample(
        self,
        dataset: Dataset[Any],
        *,
        worker_config: WorkerConfig,
        subflavors: Mapping[str, Any],
        get_primary_aux: Callable[[], Any] | None = None,
        aux: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return `dataset` as it is: the samples of `LoadedDataset.dataset` come cooked.

        An override is called for each crude dataset, and may wrap what it gets. Those of an
        encoder without cookers are crude samples.

        Args:
            dataset: The samples of one dataset.
            worker_config: Who loads them.
            subflavors: Of the dataset.
            get_primary_aux: Returns its files by name.
            aux: Its auxiliary data by name.
        """
        return dataset

    def build_batch(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig,
    ) -> Any:
        """Return batches of the items of `dataset`: packed, grouped and encoded as hooks say."""
        if packing_buffer_size:
            dataset = self._build_packs(dataset, packing_buffer_size, worker_config)
        elif self._overrides("postencode_sample"):
            post = self._hook("postencode_sample")
            dataset = MapDataset(dataset, post, worker_config=worker_config)
        if self._overrides("batch_group_criterion"):
            dataset = GroupBatchDataset(
                dataset,
                batch_size,
                self._hook("batch_group_criterion"),
                self._hook("batch"),
                drop_last=batch_drop_last,
                worker_config=worker_config,
            )
        elif batch_size is not None:
            dataset = BatchDataset(
                dataset,
                batch_size,
                self._hook("batch"),
                drop_last=batch_drop_last,
                worker_config=worker_config,
            )
        else:
            return dataset
        if self._overrides("encode_batch"):
            dataset = MapDataset(dataset, self._hook("encode_batch"), worker_config=worker_config)
        return dataset

    def _build_packs(
        self, dataset: Dataset[Any], buffer_size: int, worker_config: WorkerConfig
    ) -> Dataset[Any]:
        post = self._hook("postencode_sample") if self._overrides("postencode_sample") else None
        return PackingDataset(
            dataset,
            buffer_size,
            self._hook("select_samples_to_pack"),
            self._hook("pack_selected_samples"),
            sample_encoder=post,
            worker_config=worker_config,
        )

    def _load_dataset(
        self,
        dataset: LoadedDataset,
        worker_rotation_offset: int = 0,
        worker_config: WorkerConfig | None = None,
    ) -> Any:
        """Return the samples of one of the `datasets`, each once."""
        leaf = dataset.dataset
        samples = leaf.build()
        if leaf.primary is None or not self._overrides("build_cook_crude_sample"):
            return samples
        return self.build_cook_crude_sample(
            samples,
            worker_config=worker_config or samples.worker_config,
            subflavors=leaf.subflavors,
            get_primary_aux=leaf.as_file_store,
            aux=dataset.aux,
        )


BUILDERS = ("build_encode_sample", "build_batch", "build_cook_crude_sample", "_load_dataset")
"""What `build_train_datasets` and `build_val_datasets` call to build parts of a pipeline."""


def built(build: Callable[..., Any], **arguments: Any) -> WrapperDataset:
    """Return what `build_train_datasets` returns, if a loader can do anything with it.

    Overrides of former days do not know all arguments; they get those that they name.
    """
    parameters = inspect.signature(build).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    pipeline = build(**arguments)
    if not isinstance(pipeline, WrapperDataset):
        raise ConfigError(
            "build_train_datasets and build_val_datasets have to return a wrapper like "
            f"BatchDataset, found {type(pipeline).__name__}"
        )
    return pipeline


def _blended(
    datasets: Sequence[LoadedDataset],
    loaded: Sequence[Any],
    worker_config: WorkerConfig,
    blend_mode: BlendMode,
    *,
    repeat: bool,
) -> Any:
    """Return the samples of all datasets, repeated and blended as the document says.

    Args:
        datasets: The datasets.
        loaded: The samples of each, once.
        worker_config: Who loads them.
        blend_mode: What the document says.
        repeat: Whether the blend has no end.
    """
    if not datasets:
        raise ConfigError("there is no dataset to build a pipeline of")
    by_weight = blend_mode is BlendMode.DATASET_WEIGHT
    if by_weight and not repeat:
        raise ConfigError("a blend by weights has no end, so repeat=False makes no sense")
    epochized = not by_weight and (blend_mode is BlendMode.SAMPLE_REPETITIONS or not repeat)
    branches = []
    for dataset, samples in zip(datasets, loaded, strict=True):
        repetitions = dataset.repetitions or 1
        weight = repetitions * len(dataset.dataset) if epochized else dataset.weight
        branches.append(
            (
                RepeatDataset(
                    samples,
                    repeats=repetitions if epochized else None,
                    worker_config=worker_config,
                ),
                1.0 if weight is None else float(weight),
            )
        )
    blend = BlendDataset(*branches, worker_config=worker_config)
    return RepeatDataset(blend, worker_config=worker_config) if epochized and repeat else blend
