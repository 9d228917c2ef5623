"""energon: training data from sharded tar files, in one order on any topology.

Prepare a folder of WebDataset shards once (`energon prepare PATH`), then

    from energon import WorkerConfig, get_savable_loader, get_train_dataset

    config = WorkerConfig.default_worker_config(num_workers=4)
    dataset = get_train_dataset(PATH, worker_config=config, batch_size=32)
    loader = get_savable_loader(dataset)

All public names are importable from here. They are looked up when first used, so importing
energon costs next to nothing and never imports torch. Type checkers read `__init__.pyi`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

try:
    import fcntl  # noqa: F401 - locks files; systems without it lack more that is needed
except ImportError:
    raise ImportError("energon runs on Linux and macOS; on Windows, run it in WSL") from None
from energon.installation import say_what_is_wrong

say_what_is_wrong()

_MODULES = {
    "cache.file_pool": ["FileCacheLazy", "FileStoreCachePool"],
    "cache.pool": [
        "CachePool",
        "DirectLazy",
        "Lazy",
        "MockLazy",
        "NoCachePool",
    ],
    "decode.av": ["AVData", "AVDecoder", "get_clips_uniform", "get_single_frames_uniform"],
    "decode.images": ["RandomResizedCrop"],
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
        "ObjectChangedError",
        "RangesNotSupportedError",
        "SampleError",
        "SecurityError",
        "ShardChangedError",
        "SkipSample",
        "StateError",
        "StorageAccessError",
        "StorageError",
        "StorageFullError",
        "StorageTimeoutError",
        "TruncatedError",
        "UnknownArgumentError",
        "WorkerError",
        "WorkerTimeoutError",
    ],
    "formats.media": ["AVMetadata", "ImageMetadata"],
    "io.epath": ["EPath"],
    "loader.replicas.context_parallel": ["ContextParallel"],
    "loader.loader": ["BasicDataLoader", "loop"],
    "loader.monitoring.exporters": ["export_to_opentelemetry", "export_to_prometheus"],
    "loader.options": ["RayWorkers"],
    "loader.savable": ["SavableDataLoader", "get_loader", "get_savable_loader"],
    "loader.state_files": ["load_rank_files", "save_rank_file"],
    "metadataset.resolve": ["traverse_metadataset"],
    "packing.packer": ["Packer", "Selection"],
    "plan.balance": ["Balance"],
    "plan.packs": ["PlannedPacks"],
    "prepare.dataset": ["prepare_dataset"],
    "prepare.jsonl": ["prepare_jsonl"],
    "prepare.writers.shard_writer": ["ShardWriter", "TarWriter"],
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
    "samples.provenance": ["SourceInfo"],
    "samples.display": ["short_text"],
    "samples.sample": ["Batch", "Sample", "edataclass"],
    "samples.sample_types": [
        "CaptioningSample",
        "ImageClassificationSample",
        "ImageSample",
        "InterleavedSample",
        "MultiChoiceVQASample",
        "OCRSample",
        "SimilarityInterleavedSample",
        "TextSample",
        "TokensSample",
        "VQAOCRSample",
        "VQASample",
        "VidQASample",
    ],
    "sources.files.open": ["SystemFileStore", "open_file_store"],
    "sources.files.store": ["DecodeFileStore", "FileStore", "FileStoreDecoder", "PrimaryFileStore"],
    "stages.hooks.failures": ["log_exception", "reraise_exception"],
    "stages.hooks.quarantine": ["Quarantine"],
    "task_encoder.cooker": ["Cooker", "cooker", "stateless"],
    "task_encoder.dataset": ["SavableDataset"],
    "task_encoder.encoder": ["DefaultTaskEncoder", "TaskEncoder"],
    "task_encoder.getters": ["get_train_dataset", "get_val_dataset", "get_val_datasets"],
    "task_encoder.prepare_joins": ["prepare_metadataset"],
    "task_encoder.recipe": ["Recipe"],
    "version": ["__version__"],
    "worker": ["WorkerConfig"],
}
_HOME = {name: f"energon.{module}" for module, names in _MODULES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
