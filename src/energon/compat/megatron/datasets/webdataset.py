"""Datasets described in a program instead of a `dataset.yaml`, under their former names.

A factory opens the prepared dataset at a path; `build()` returns its samples, to be wrapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from energon.compat.megatron.datasets.leaf import LeafDataset, decoding_encoder, plan_leaf_of
from energon.compat.megatron.datasets.preparing import PreparesShards
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError
from energon.metadataset.dataset_config import DatasetConfig
from energon.samples.crude import CrudeSample
from energon.samples.field_map import FieldMap
from energon.sources.files.webdataset import WebdatasetFileStore
from energon.sources.part_filter import PartFilter
from energon.sources.webdataset import WebdatasetSource
from energon.task_encoder.leaves import OpenedLeaf
from energon.task_encoder.load import OpenLeaf
from energon.task_encoder.user_dataset import CodeFields
from energon.worker import WorkerConfig


class WebdatasetFactory(PreparesShards, LeafDataset):
    """The samples of a prepared dataset of tar shards.

    Args:
        path: Its folder.
        split_part: Which split.
        training: Whether each pass is shuffled, or samples come in order.
        worker_config: Who loads it.
        sample_type: What samples become; None leaves them as crude samples.
        field_map: How parts become the fields of the type; None for parts of the names of fields.
        sample_loader: Instead of it, a function from the parts of a sample to its fields.
        part_filter: The names of the parts to read, or a function that says for a name whether
            it is read; None for all that are needed.
        subflavors: What the samples carry in `__subflavors__`.
        decoder: Decodes the parts; None leaves them as bytes.
        shuffle_over_epochs: See `shuffle_over_epochs_multiplier` of `get_train_dataset`.
        parallel_shard_iters: See `get_train_dataset`.
        max_samples_per_sequence: See `get_train_dataset`.
        subset: A range of samples, as (first, behind the last) or in percent.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.

    Raises:
        ConfigError: If the arguments make no sense.
        DatasetNotFoundError: If there is no prepared dataset.
        EmptyDatasetError: If there are no samples.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split_part: str = "train",
        training: bool = True,
        worker_config: WorkerConfig,
        sample_type: type | None = None,
        field_map: Mapping[str, str] | None = None,
        sample_loader: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        part_filter: Collection[str] | Callable[[str], bool] | None = None,
        subflavors: Mapping[str, Any] | None = None,
        decoder: SampleDecoder | None = SampleDecoder(),  # noqa: B008 - immutable
        shuffle_over_epochs: int | None = 1,
        parallel_shard_iters: int | None = None,
        max_samples_per_sequence: int | None = None,
        subset: Any = None,
        split_config: str | None = None,
    ) -> None:
        if sample_loader is not None and field_map is not None:
            raise ConfigError("give a field_map or a sample_loader, not both")
        if isinstance(part_filter, str):
            raise ConfigError("part_filter: list the names of the parts to read")
        chosen = PartFilter(part_filter) if callable(part_filter) else part_filter
        fields = _fields(sample_type, field_map, sample_loader)
        source = WebdatasetSource(
            path,
            split_part=split_part,
            split_config=split_config or "split.yaml",
            subsets=() if subset is None else (subset,),
            parts=fields.parts if chosen is None and isinstance(fields, FieldMap) else chosen,
        )
        if isinstance(fields, FieldMap):
            source.check_field_map(fields)
        opened = OpenedLeaf(
            source,
            OpenLeaf(
                name=source.path.name,
                dataset_path=str(source.path),
                subflavors=dict(subflavors or {}),
                sample_type=sample_type,
                field_map=fields,
                primary=WebdatasetFileStore(source.path),
            ),
            plan_leaf_of(
                source,
                split_part=split_part,
                slice_samples=max_samples_per_sequence,
                parallel_slices=parallel_shard_iters,
                shuffle_over_epochs=shuffle_over_epochs,
            ),
            DatasetConfig(),
        )
        super().__init__(
            opened,
            encoder=decoding_encoder(decoder),
            worker_config=worker_config,
            training=training,
        )
        self.source = source
        self.path = source.path
        self.split_part = split_part
        self.shards = source.shards
        self.__sample_type__ = sample_type


class StandardWebdatasetFactory(WebdatasetFactory):
    """The samples of a prepared dataset, as a sample type: what a plain dataset.yaml describes."""

    def __init__(self, path: str | os.PathLike[str], *, sample_type: type, **settings: Any) -> None:
        super().__init__(path, sample_type=sample_type, **settings)


class CrudeWebdataset(WebdatasetFactory):
    """The samples of a prepared dataset as they are: dicts of parts, for cookers."""

    __sample_type__ = CrudeSample

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        super().__init__(path, **settings)


def _fields(
    sample_type: type | None,
    field_map: Mapping[str, str] | None,
    sample_loader: Callable[[Any], Mapping[str, Any]] | None,
) -> FieldMap | CodeFields | None:
    """Return what makes the fields of `sample_type`; None without a type."""
    if sample_type is None:
        return None
    if sample_loader is not None:
        return CodeFields(sample_loader, sample_type, ())
    if field_map is None:
        raise ConfigError(
            f"{sample_type.__name__}: which parts its fields are made of is not said; give a "
            "field_map or a sample_loader"
        )
    fields = FieldMap.parse(dict(field_map))
    fields.check(sample_type)
    return fields
