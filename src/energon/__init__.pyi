"""What type checkers see: the public names, where they are at home."""

# ruff: noqa: I001 - one statement for each home

from energon.cache.file_pool import (
    FileCacheLazy as FileCacheLazy,
    FileStoreCachePool as FileStoreCachePool,
)
from energon.cache.pool import DirectLazy as DirectLazy, Lazy as Lazy, MockLazy as MockLazy
from energon.cache.pool import CachePool as CachePool, NoCachePool as NoCachePool
from energon.decode.av import AVData as AVData, AVDecoder as AVDecoder
from energon.decode.av import (
    get_clips_uniform as get_clips_uniform,
    get_single_frames_uniform as get_single_frames_uniform,
)
from energon.decode.images import RandomResizedCrop as RandomResizedCrop
from energon.decode.sample_decoder import SampleDecoder as SampleDecoder
from energon.errors import (
    ConfigError as ConfigError,
    DatasetBusyError as DatasetBusyError,
    DatasetNotFoundError as DatasetNotFoundError,
    DecodeError as DecodeError,
    DuplicateSampleKeyError as DuplicateSampleKeyError,
    EmptyDatasetError as EmptyDatasetError,
    EnergonError as EnergonError,
    FatalSampleError as FatalSampleError,
    FieldAccessError as FieldAccessError,
    FormatError as FormatError,
    MissingExtraError as MissingExtraError,
    NoSuchFileError as NoSuchFileError,
    ObjectChangedError as ObjectChangedError,
    RangesNotSupportedError as RangesNotSupportedError,
    SampleError as SampleError,
    SecurityError as SecurityError,
    ShardChangedError as ShardChangedError,
    SkipSample as SkipSample,
    StateError as StateError,
    StorageAccessError as StorageAccessError,
    StorageError as StorageError,
    StorageFullError as StorageFullError,
    StorageTimeoutError as StorageTimeoutError,
    TruncatedError as TruncatedError,
    UnknownArgumentError as UnknownArgumentError,
    WorkerError as WorkerError,
    WorkerTimeoutError as WorkerTimeoutError,
)
from energon.formats.media import AVMetadata as AVMetadata, ImageMetadata as ImageMetadata
from energon.io.epath import EPath as EPath
from energon.loader.replicas.context_parallel import ContextParallel as ContextParallel
from energon.loader.savable import (
    get_loader as get_loader,
    get_savable_loader as get_savable_loader,
)
from energon.loader.loader import BasicDataLoader as BasicDataLoader, loop as loop
from energon.loader.monitoring.exporters import (
    export_to_opentelemetry as export_to_opentelemetry,
)
from energon.loader.monitoring.exporters import (
    export_to_prometheus as export_to_prometheus,
)
from energon.loader.options import RayWorkers as RayWorkers
from energon.loader.savable import SavableDataLoader as SavableDataLoader
from energon.loader.state_files import (
    load_rank_files as load_rank_files,
    save_rank_file as save_rank_file,
)
from energon.metadataset.resolve import traverse_metadataset as traverse_metadataset
from energon.packing.packer import Packer as Packer
from energon.packing.packer import Selection as Selection
from energon.plan.balance import Balance as Balance
from energon.plan.packs import PlannedPacks as PlannedPacks
from energon.prepare.dataset import prepare_dataset as prepare_dataset
from energon.prepare.jsonl import prepare_jsonl as prepare_jsonl
from energon.prepare.writers.shard_writer import ShardWriter as ShardWriter, TarWriter as TarWriter
from energon.samples.collate import (
    batch_list as batch_list,
    batch_pad_stack as batch_pad_stack,
    batch_stack as batch_stack,
    concat_pad as concat_pad,
    generic_batch as generic_batch,
    generic_concat as generic_concat,
    homogeneous_concat_mix as homogeneous_concat_mix,
)
from energon.samples.crude import CrudeSample as CrudeSample, basic_sample_keys as basic_sample_keys
from energon.samples.display import short_text as short_text
from energon.samples.provenance import SourceInfo as SourceInfo
from energon.samples.sample import (
    Batch as Batch,
    Sample as Sample,
    edataclass as edataclass,
)
from energon.samples.sample_types import (
    CaptioningSample as CaptioningSample,
    ImageClassificationSample as ImageClassificationSample,
    ImageSample as ImageSample,
    InterleavedSample as InterleavedSample,
    MultiChoiceVQASample as MultiChoiceVQASample,
    OCRSample as OCRSample,
    SimilarityInterleavedSample as SimilarityInterleavedSample,
    TextSample as TextSample,
    TokensSample as TokensSample,
    VQAOCRSample as VQAOCRSample,
    VQASample as VQASample,
    VidQASample as VidQASample,
)
from energon.sources.files.open import (
    SystemFileStore as SystemFileStore,
    open_file_store as open_file_store,
)
from energon.sources.files.store import (
    DecodeFileStore as DecodeFileStore,
    FileStore as FileStore,
    FileStoreDecoder as FileStoreDecoder,
    PrimaryFileStore as PrimaryFileStore,
)
from energon.stages.hooks.failures import (
    Quarantine as Quarantine,
    log_exception as log_exception,
    reraise_exception as reraise_exception,
)
from energon.task_encoder.cooker import Cooker as Cooker, cooker as cooker, stateless as stateless
from energon.task_encoder.dataset import SavableDataset as SavableDataset
from energon.task_encoder.encoder import (
    DefaultTaskEncoder as DefaultTaskEncoder,
    TaskEncoder as TaskEncoder,
)
from energon.task_encoder.getters import (
    get_train_dataset as get_train_dataset,
    get_val_dataset as get_val_dataset,
    get_val_datasets as get_val_datasets,
)
from energon.task_encoder.leaves import prepare_metadataset as prepare_metadataset
from energon.task_encoder.recipe import Recipe as Recipe
from energon.version import __version__ as __version__
from energon.worker import WorkerConfig as WorkerConfig

__all__: list[str]
