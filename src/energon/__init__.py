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
        SampleError,
        SecurityError,
        ShardChangedError,
        SkipSample,
        StateError,
        TruncatedError,
        UnknownArgumentError,
        WorkerError,
    )
    from energon.loader.getters import get_loader, get_savable_loader
    from energon.loader.loader import BasicDataLoader
    from energon.loader.savable import SavableDataLoader
    from energon.metadataset.resolve import traverse_metadataset
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
    from energon.stages.hook import log_exception, reraise_exception
    from energon.stages.quarantine import Quarantine
    from energon.task_encoder.augment import AugmentTaskEncoder
    from energon.task_encoder.cooker import Cooker, stateless
    from energon.task_encoder.dataset import SavableDataset
    from energon.task_encoder.encoder import DefaultTaskEncoder, TaskEncoder
    from energon.task_encoder.getters import get_train_dataset, get_val_dataset, get_val_datasets
    from energon.task_encoder.load_dataset import (
        DatasetLoader,
        LoadedDataset,
        LoadedDatasetList,
        load_dataset,
        prepare_metadataset,
    )
    from energon.version import __version__
    from energon.worker import WorkerConfig

_ROOMS = {
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
        "SampleError",
        "SecurityError",
        "ShardChangedError",
        "SkipSample",
        "StateError",
        "TruncatedError",
        "UnknownArgumentError",
        "WorkerError",
    ],
    "loader.getters": ["get_loader", "get_savable_loader"],
    "loader.loader": ["BasicDataLoader"],
    "loader.savable": ["SavableDataLoader"],
    "metadataset.resolve": ["traverse_metadataset"],
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
    "stages.hook": ["log_exception", "reraise_exception"],
    "stages.quarantine": ["Quarantine"],
    "task_encoder.augment": ["AugmentTaskEncoder"],
    "task_encoder.cooker": ["Cooker", "stateless"],
    "task_encoder.dataset": ["SavableDataset"],
    "task_encoder.encoder": ["DefaultTaskEncoder", "TaskEncoder"],
    "task_encoder.getters": ["get_train_dataset", "get_val_dataset", "get_val_datasets"],
    "task_encoder.load_dataset": [
        "DatasetLoader",
        "LoadedDataset",
        "LoadedDatasetList",
        "load_dataset",
        "prepare_metadataset",
    ],
    "version": ["__version__"],
    "worker": ["WorkerConfig"],
}
_HOME = {name: f"energon.{room}" for room, names in _ROOMS.items() for name in names}

__all__ = [
    "AugmentTaskEncoder",
    "BasicDataLoader",
    "Batch",
    "CaptioningSample",
    "ConfigError",
    "Cooker",
    "CrudeSample",
    "DatasetBusyError",
    "DatasetLoader",
    "DatasetNotFoundError",
    "DecodeError",
    "DefaultTaskEncoder",
    "DuplicateSampleKeyError",
    "EmptyDatasetError",
    "EnergonError",
    "FatalSampleError",
    "FieldAccessError",
    "FormatError",
    "ImageClassificationSample",
    "ImageSample",
    "InterleavedSample",
    "LoadedDataset",
    "LoadedDatasetList",
    "MissingExtraError",
    "MultiChoiceVQASample",
    "OCRSample",
    "Quarantine",
    "Sample",
    "SampleDecoder",
    "SampleError",
    "SavableDataLoader",
    "SavableDataset",
    "SecurityError",
    "ShardChangedError",
    "ShardWriter",
    "SimilarityInterleavedSample",
    "SkipSample",
    "SourceInfo",
    "StateError",
    "TarWriter",
    "TaskEncoder",
    "TextSample",
    "TruncatedError",
    "UnknownArgumentError",
    "VQAOCRSample",
    "VQASample",
    "VidQASample",
    "WorkerConfig",
    "WorkerError",
    "__version__",
    "basic_sample_keys",
    "batch_list",
    "batch_pad_stack",
    "batch_stack",
    "concat_pad",
    "edataclass",
    "generic_batch",
    "generic_concat",
    "get_loader",
    "get_savable_loader",
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
