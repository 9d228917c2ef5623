"""energon: training data from sharded tar files, in one order on any topology.

Prepare a folder of WebDataset shards once (`energon prepare PATH`), then

    from energon import WorkerConfig, get_savable_loader, get_train_dataset

    config = WorkerConfig.default_worker_config(num_workers=4)
    dataset = get_train_dataset(PATH, worker_config=config, batch_size=32)
    loader = get_savable_loader(dataset)

All public names are importable from here. They are looked up when first used, so importing
energon costs next to nothing and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energon.cache.file_pool import FileCacheLazy, FileStoreCachePool
    from energon.cache.lazy import DirectLazy, Lazy, MockLazy
    from energon.cache.pool import CachePool, NoCachePool
    from energon.decode.av import AVData, AVDecoder
    from energon.decode.av_uniform import get_clips_uniform, get_single_frames_uniform
    from energon.decode.sample_decoder import SampleDecoder
    from energon.errors import (
        ConfigError,
        DatasetBusyError,
        DatasetNotFoundError,
        DecodeError,
        DuplicateSampleKeyError,
        EmptyDatasetError,
        EnergonError,
        FatalSampleError,
        FieldAccessError,
        FormatError,
        MissingExtraError,
        NoSuchFileError,
        SampleError,
        SecurityError,
        ShardChangedError,
        SkipSample,
        StateError,
        TruncatedError,
        UnknownArgumentError,
        WorkerError,
    )
    from energon.formats.media import AVMetadata, ImageMetadata
    from energon.io.epath import EPath
    from energon.loader.getters import get_loader, get_savable_loader
    from energon.loader.loader import BasicDataLoader
    from energon.loader.savable import SavableDataLoader
    from energon.metadataset.resolve import traverse_metadataset
    from energon.packing.packer import Packer
    from energon.packing.selection import Selection
    from energon.prepare.shard_writer import ShardWriter
    from energon.prepare.tar_writer import TarWriter
    from energon.samples.collate import (
        batch_list,
        batch_pad_stack,
        batch_stack,
        concat_pad,
        generic_batch,
        generic_concat,
        homogeneous_concat_mix,
    )
    from energon.samples.crude import CrudeSample, basic_sample_keys
    from energon.samples.sample import Batch, Sample, edataclass
    from energon.samples.source_info import SourceInfo
    from energon.samples.types import (
        CaptioningSample,
        ImageClassificationSample,
        ImageSample,
        InterleavedSample,
        MultiChoiceVQASample,
        OCRSample,
        SimilarityInterleavedSample,
        TextSample,
        VidQASample,
        VQAOCRSample,
        VQASample,
    )
    from energon.sources.file_store import (
        DecodeFileStore,
        FileStore,
        FileStoreDecoder,
        PrimaryFileStore,
    )
    from energon.sources.file_store_folder import SystemFileStore
    from energon.stages.hook import log_exception, reraise_exception
    from energon.stages.quarantine import Quarantine
    from energon.task_encoder.augment import AugmentTaskEncoder
    from energon.task_encoder.build import LoadedDataset
    from energon.task_encoder.cooker import Cooker, cooker, stateless
    from energon.task_encoder.dataset import SavableDataset
    from energon.task_encoder.encoder import DefaultTaskEncoder, TaskEncoder
    from energon.task_encoder.getters import get_train_dataset, get_val_dataset, get_val_datasets
    from energon.task_encoder.load_dataset import (
        DatasetLoader,
        LoadedDatasetList,
        load_dataset,
        prepare_metadataset,
    )
    from energon.version import __version__
    from energon.worker import WorkerConfig
    from energon.wrappers.batches import (
        BatchDataset,
        GroupBatchDataset,
        MixBatchDataset,
        PackingDataset,
    )
    from energon.wrappers.items import FilterDataset, IterMapDataset, MapDataset
    from energon.wrappers.streams import (
        BlendDataset,
        ConcatDataset,
        EpochizeDataset,
        LimitDataset,
        RepeatDataset,
        ShuffleBufferDataset,
    )
    from energon.wrappers.watching import GcDataset, LogSampleDataset, WatchdogDataset

_ROOMS = {
    "cache.file_pool": ["FileCacheLazy", "FileStoreCachePool"],
    "cache.lazy": ["DirectLazy", "Lazy", "MockLazy"],
    "cache.pool": ["CachePool", "NoCachePool"],
    "decode.av": ["AVData", "AVDecoder"],
    "decode.av_uniform": ["get_clips_uniform", "get_single_frames_uniform"],
    "decode.sample_decoder": ["SampleDecoder"],
    "errors": [
        "ConfigError",
        "DatasetBusyError",
        "DatasetNotFoundError",
        "DecodeError",
        "DuplicateSampleKeyError",
        "EmptyDatasetError",
        "EnergonError",
        "FatalSampleError",
        "FieldAccessError",
        "FormatError",
        "MissingExtraError",
        "NoSuchFileError",
        "SampleError",
        "SecurityError",
        "ShardChangedError",
        "SkipSample",
        "StateError",
        "TruncatedError",
        "UnknownArgumentError",
        "WorkerError",
    ],
    "formats.media": ["AVMetadata", "ImageMetadata"],
    "io.epath": ["EPath"],
    "loader.getters": ["get_loader", "get_savable_loader"],
    "loader.loader": ["BasicDataLoader"],
    "loader.savable": ["SavableDataLoader"],
    "metadataset.resolve": ["traverse_metadataset"],
    "packing.packer": ["Packer"],
    "packing.selection": ["Selection"],
    "prepare.shard_writer": ["ShardWriter"],
    "prepare.tar_writer": ["TarWriter"],
    "samples.collate": [
        "batch_list",
        "batch_pad_stack",
        "batch_stack",
        "concat_pad",
        "generic_batch",
        "generic_concat",
        "homogeneous_concat_mix",
    ],
    "samples.crude": ["CrudeSample", "basic_sample_keys"],
    "samples.sample": ["Batch", "Sample", "edataclass"],
    "samples.source_info": ["SourceInfo"],
    "samples.types": [
        "CaptioningSample",
        "ImageClassificationSample",
        "ImageSample",
        "InterleavedSample",
        "MultiChoiceVQASample",
        "OCRSample",
        "SimilarityInterleavedSample",
        "TextSample",
        "VQAOCRSample",
        "VQASample",
        "VidQASample",
    ],
    "sources.file_store": ["DecodeFileStore", "FileStore", "FileStoreDecoder", "PrimaryFileStore"],
    "sources.file_store_folder": ["SystemFileStore"],
    "stages.hook": ["log_exception", "reraise_exception"],
    "stages.quarantine": ["Quarantine"],
    "task_encoder.augment": ["AugmentTaskEncoder"],
    "task_encoder.build": ["LoadedDataset"],
    "task_encoder.cooker": ["Cooker", "cooker", "stateless"],
    "task_encoder.dataset": ["SavableDataset"],
    "task_encoder.encoder": ["DefaultTaskEncoder", "TaskEncoder"],
    "task_encoder.getters": ["get_train_dataset", "get_val_dataset", "get_val_datasets"],
    "task_encoder.load_dataset": [
        "DatasetLoader",
        "LoadedDatasetList",
        "load_dataset",
        "prepare_metadataset",
    ],
    "version": ["__version__"],
    "worker": ["WorkerConfig"],
    "wrappers.batches": ["BatchDataset", "GroupBatchDataset", "MixBatchDataset", "PackingDataset"],
    "wrappers.items": ["FilterDataset", "IterMapDataset", "MapDataset"],
    "wrappers.streams": [
        "BlendDataset",
        "ConcatDataset",
        "EpochizeDataset",
        "LimitDataset",
        "RepeatDataset",
        "ShuffleBufferDataset",
    ],
    "wrappers.watching": ["GcDataset", "LogSampleDataset", "WatchdogDataset"],
}
_HOME = {name: f"energon.{room}" for room, names in _ROOMS.items() for name in names}

__all__ = [
    "AVData",
    "AVDecoder",
    "AVMetadata",
    "AugmentTaskEncoder",
    "BasicDataLoader",
    "Batch",
    "BatchDataset",
    "BlendDataset",
    "CachePool",
    "CaptioningSample",
    "ConcatDataset",
    "ConfigError",
    "Cooker",
    "CrudeSample",
    "DatasetBusyError",
    "DatasetLoader",
    "DatasetNotFoundError",
    "DecodeError",
    "DecodeFileStore",
    "DefaultTaskEncoder",
    "DirectLazy",
    "DuplicateSampleKeyError",
    "EPath",
    "EmptyDatasetError",
    "EnergonError",
    "EpochizeDataset",
    "FatalSampleError",
    "FieldAccessError",
    "FileCacheLazy",
    "FileStore",
    "FileStoreCachePool",
    "FileStoreDecoder",
    "FilterDataset",
    "FormatError",
    "GcDataset",
    "GroupBatchDataset",
    "ImageClassificationSample",
    "ImageMetadata",
    "ImageSample",
    "InterleavedSample",
    "IterMapDataset",
    "Lazy",
    "LimitDataset",
    "LoadedDataset",
    "LoadedDatasetList",
    "LogSampleDataset",
    "MapDataset",
    "MissingExtraError",
    "MixBatchDataset",
    "MockLazy",
    "MultiChoiceVQASample",
    "NoCachePool",
    "NoSuchFileError",
    "OCRSample",
    "Packer",
    "PackingDataset",
    "PrimaryFileStore",
    "Quarantine",
    "RepeatDataset",
    "Sample",
    "SampleDecoder",
    "SampleError",
    "SavableDataLoader",
    "SavableDataset",
    "SecurityError",
    "Selection",
    "ShardChangedError",
    "ShardWriter",
    "ShuffleBufferDataset",
    "SimilarityInterleavedSample",
    "SkipSample",
    "SourceInfo",
    "StateError",
    "SystemFileStore",
    "TarWriter",
    "TaskEncoder",
    "TextSample",
    "TruncatedError",
    "UnknownArgumentError",
    "VQAOCRSample",
    "VQASample",
    "VidQASample",
    "WatchdogDataset",
    "WorkerConfig",
    "WorkerError",
    "__version__",
    "basic_sample_keys",
    "batch_list",
    "batch_pad_stack",
    "batch_stack",
    "concat_pad",
    "cooker",
    "edataclass",
    "generic_batch",
    "generic_concat",
    "get_clips_uniform",
    "get_loader",
    "get_savable_loader",
    "get_single_frames_uniform",
    "get_train_dataset",
    "get_val_dataset",
    "get_val_datasets",
    "homogeneous_concat_mix",
    "load_dataset",
    "log_exception",
    "prepare_metadataset",
    "reraise_exception",
    "stateless",
    "traverse_metadataset",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
