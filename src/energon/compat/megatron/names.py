"""Every name of `megatron.energon`, and the module that defines it.

`HOMES` lists each name once, under the module of `energon` that defines it; `NAME=ORIGINAL` if it
has another name there. `MODULES` lists the modules of Megatron-Energon, and the names that programs
import from each; `NAME=MODULE:ORIGINAL` is a name with a different meaning in every module, like
the commands.

To add a name, add it to both tables: no other file has to change.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from energon.errors import ConfigError

HOMES: dict[str, str] = {
    "cache.file_pool": "CacheFileLazy=KeptLazy FileCacheLazy FileStoreCachePool",
    "cache.pool": "CachePool DirectLazy Lazy MockLazy NoCachePool",
    "cli.main": "main",
    "compat.megatron.datasets.arguments": """
        DatasetSubset FilteredSample WebdatasetInfo WebdatasetSplits
    """,
    "compat.megatron.datasets.leaf": """
        BaseCoreDataset=LeafDataset BaseCoreDatasetFactory=LeafDataset Sharder
    """,
    "compat.megatron.datasets.others": """
        CaptioningWebdataset CrudeJsonlDatasetFactory=JsonlFactory
        DefaultCrudeJsonlDatasetFactory=JsonlFactory ImageClassificationWebdataset ImageWebdataset
        InterleavedWebdataset JoinedWebdatasetFactory MultiChoiceVQAWebdataset OCRWebdataset
        SimilarityInterleavedWebdataset TextWebdataset VQAOCRWebdataset VQAWebdataset
        VidQAWebdataset
    """,
    "compat.megatron.datasets.preparing": """
        EnergonDatasetType MediaFilterConfig MediaFilterStrategy ShardInfo WebdatasetMeta
        WebdatasetPreparator=PreparesShards check_dataset_info_present get_dataset_info
        get_dataset_type get_info_shard_files prepare_filesystem_dataset
    """,
    "compat.megatron.datasets.webdataset": """
        BaseWebdataset=WebdatasetFactory BaseWebdatasetFactory=WebdatasetFactory CrudeWebdataset
        DefaultDecoderWebdataset=DecoderWebdatasetFactory
        DefaultDecoderWebdatasetFactory=DecoderWebdatasetFactory
        DefaultGenericWebdataset=GenericWebdatasetFactory
        DefaultGenericWebdatasetFactory=GenericWebdatasetFactory StandardWebdatasetFactory
    """,
    "compat.megatron.objects": """
        IJSONL_SUFFIX IJsonlIndexReader IJsonlIndexWriter JsonParser JsonValueError load_config
        to_json_object
    """,
    "compat.megatron.load_dataset": """
        AuxDatasetReference AuxFilesystemReference BlendDatasetReference
        BlendEpochizedDatasetReference BlendEpochizedJoinDatasetReference BlendJoinDatasetReference
        DatasetLoader DatasetLoaderInterface=DatasetLoader DatasetReference JoinDatasetReference
        LoadedDatasetList Metadataset MetadatasetBlend MetadatasetBlendEpochized MetadatasetBlender
        MetadatasetJoin MetadatasetV2 Subset=SubsetRange load_dataset traverse_metadataset
    """,
    "compat.megatron.encoder": "AugmentTaskEncoder Cooker DefaultTaskEncoder TaskEncoder",
    "compat.megatron.getters": """
        get_dataset_from_config get_train_dataset get_val_dataset get_val_datasets
    """,
    "compat.megatron.helpers": """
        AVDecoderType AVWebdatasetDecoder EPath ErrorContext INDEX_SQLITE_FILENAME
        INDEX_UUID_FILENAME INFO_JSON_FILENAME INFO_YAML_FILENAME ImageDecoderType MAIN_FOLDER_NAME
        ModuleLoader NVDATASET_CACHE_DIR SPLIT_YAML_FILENAME add_sample_restore_key collapse
        dataclass_slots format_sample_compact format_sample_detailed get_cooker_need_cache
        get_cooker_need_primary
        get_failure_tolerance get_sample_restore_key get_stateless handle_restore_errors load_yaml
        set_sample_restore_key warn_deprecated
    """,
    "compat.megatron.loaders": "BasicDataLoader SavableDataLoader get_loader get_savable_loader",
    "compat.megatron.pipeline": "LoadedDataset",
    "compat.megatron.samples": """
        Batch CaptioningSample ImageClassificationSample ImageSample InterleavedSample
        MultiChoiceVQASample OCRSample Sample SimilarityInterleavedSample TextSample VQAOCRSample
        VQASample VidQASample VideoData
    """,
    "compat.megatron.worker": "WorkerConfig",
    "compat.megatron.wrappers.batches": """
        BatchDataset GroupBatchDataset MixBatchDataset PackingDataset
    """,
    "compat.megatron.wrappers.own": """
        BaseSingleWrapperDataset=BaseWrapperDataset BaseWrapperDataset FlexState SampleIndex Savable
        SavableDataLoaderState SavableDataset SavableDatasetCheckpoint=SavableDataLoaderState
        SavableDatasetState=SavableDataLoaderState SavableSampleBuffer SystemRng SystemRngState
        WorkerRng
    """,
    "compat.megatron.wrappers.streams": """
        BlendDataset ConcatDataset EpochizeDataset FilterDataset GcDataset IterMapDataset
        LimitDataset LogSampleDataset MapDataset RepeatDataset ShuffleBufferDataset WatchdogDataset
    """,
    "decode.av": "AVData AVDecoder get_clips_uniform get_single_frames_uniform",
    "decode.sample_decoder": "SampleDecoder",
    "errors": """
        DuplicateSampleKeyError EmptyDatasetError FatalSampleError FieldAccessError
        SYSTEM_EXCEPTIONS SampleException=SampleError SkipSample
    """,
    "formats.media": """
        AVMetadata ImageMetadata MediaMetadataBase MediaMetadataType deserialize_media_metadata
        serialize_media_metadata
    """,
    "io.epath": "DEFAULT_PROFILE_NAME",
    "metadataset.leaf": "DatasetBlendMode=BlendMode TraversedDatasetReference",
    "samples.collate": """
        batch_list batch_pad_stack batch_stack concat_pad generic_batch generic_concat
        homogeneous_concat_mix
    """,
    "samples.crude": "CrudeSample basic_sample_keys",
    "samples.provenance": "SourceInfo add_source_info get_source_info",
    "samples.sample": "PinMemoryMixin edataclass",
    "sources.files.open": "SystemFileStore",
    "sources.files.samples": "WebdatasetFileStore",
    "sources.files.store": "DecodeFileStore FileStore FileStoreDecoder PrimaryFileStore",
    "sources.tables.jsonl": "JsonlFileStore",
    "stages.hooks.failures": "log_exception reraise_exception",
    "stages.log_samples": "default_get_batch_keys=keys_of default_get_keys=keys_of",
    "task_encoder.cooker": "cooker stateless",
    "task_encoder.prepare_joins": "prepare_metadataset",
    "transforms": """
        CenterCropMapper CustomTransform MergeTransform RandomCropMapper RandomHorizontalFlipMapper
        RandomPerspectiveMapper RandomResizedCropMapper RandomRotationMapper
        RandomVerticalFlipMapper ResizeMapper TransformMapper
    """,
}

MODULES: dict[str, str] = {
    # The package itself has these in addition to all public names of energon, or in their place.
    "": """
        AugmentTaskEncoder BaseCoreDataset BaseCoreDatasetFactory BaseWebdataset
        BaseWebdatasetFactory BasicDataLoader Batch BatchDataset BlendDataset CaptioningSample
        CaptioningWebdataset ConcatDataset Cooker CrudeJsonlDatasetFactory CrudeWebdataset
        DatasetLoader DatasetLoaderInterface
        DefaultCrudeJsonlDatasetFactory DefaultDecoderWebdataset DefaultDecoderWebdatasetFactory
        DefaultGenericWebdataset DefaultGenericWebdatasetFactory DefaultTaskEncoder EpochizeDataset
        FilterDataset GcDataset GroupBatchDataset ImageClassificationSample
        ImageClassificationWebdataset ImageSample ImageWebdataset InterleavedSample
        InterleavedWebdataset IterMapDataset JoinedWebdatasetFactory LimitDataset LoadedDataset
        LoadedDatasetList LogSampleDataset MapDataset Metadataset MetadatasetV2 MixBatchDataset
        MultiChoiceVQASample MultiChoiceVQAWebdataset OCRSample OCRWebdataset PackingDataset
        RepeatDataset Sample SavableDataLoader SavableDataset ShuffleBufferDataset
        SimilarityInterleavedSample SimilarityInterleavedWebdataset StandardWebdatasetFactory
        TaskEncoder TextSample TextWebdataset VQAOCRSample VQAOCRWebdataset VQASample VQAWebdataset
        VidQASample VidQAWebdataset WatchdogDataset WorkerConfig
        __version__=compat.megatron:VERSION get_loader
        get_savable_loader get_train_dataset get_val_dataset get_val_datasets load_dataset
        traverse_metadataset
    """,
    "av": """
        AVData AVDecoder AVWebdatasetDecoder VideoData get_clips_uniform get_single_frames_uniform
    """,
    "av.av_data": "AVData",
    "av.av_decoder": "AVDecoder AVWebdatasetDecoder",
    "av.video_data": "VideoData",
    "av.utils": "get_clips_uniform get_single_frames_uniform",
    "bracecollapse": "collapse",
    "cache": """
        CachePool DecodeFileStore DirectLazy FileCacheLazy FileStore FileStoreCachePool
        FileStoreDecoder Lazy MockLazy NoCachePool PrimaryFileStore SystemFileStore
    """,
    "cache.base": "CachePool FileStore FileStoreDecoder Lazy MockLazy PrimaryFileStore",
    "cache.file_cache_pool": "CacheFileLazy FileCacheLazy FileStoreCachePool",
    "cache.file_store": "DecodeFileStore JsonlFileStore SystemFileStore WebdatasetFileStore",
    "cache.no_cache": "DirectLazy NoCachePool",
    "cli": "",
    "cli.main": """
        analyze_debug_command=cli.analyze_debug:command checkpoint_command=cli.checkpoint:command
        info_command=cli.info:command lint_command=cli.lint:command main
        mount_command=cli.mount:command prepare_command=cli.prepare:command
        prepare_media_command=cli.prepare_media:command preview_command=cli.preview:command
    """,
    "dataclass_slots": "dataclass_slots",
    "dataset_config": "get_dataset_from_config load_config load_yaml",
    "deprecation": "warn_deprecated",
    "edataclass": "edataclass",
    "epathlib": "DEFAULT_PROFILE_NAME EPath",
    "epathlib.epath": "DEFAULT_PROFILE_NAME EPath NVDATASET_CACHE_DIR",
    "errors": """
        ErrorContext FatalSampleError SYSTEM_EXCEPTIONS SampleException SkipSample
        format_sample_compact format_sample_detailed get_source_info handle_restore_errors
        log_exception reraise_exception
    """,
    "eyaml": "load_yaml",
    "flavors": """
        AVData AVDecoder AVDecoderType BaseCoreDatasetFactory BaseWebdatasetFactory CaptioningSample
        CaptioningWebdataset CrudeJsonlDatasetFactory CrudeSample CrudeWebdataset
        DefaultCrudeJsonlDatasetFactory DefaultDecoderWebdatasetFactory
        DefaultGenericWebdatasetFactory EmptyDatasetError ImageClassificationSample
        ImageClassificationWebdataset ImageDecoderType ImageSample ImageWebdataset InterleavedSample
        InterleavedWebdataset JoinedWebdatasetFactory MultiChoiceVQASample MultiChoiceVQAWebdataset
        OCRSample OCRWebdataset PinMemoryMixin Sample SampleDecoder SavableDataset
        SimilarityInterleavedSample SimilarityInterleavedWebdataset StandardWebdatasetFactory
        TextSample TextWebdataset VQAOCRSample VQAOCRWebdataset VQASample VQAWebdataset VidQASample
        VidQAWebdataset VideoData WebdatasetMeta
    """,
    "flavors.base_dataset": """
        BaseCoreDatasetFactory FlexState PinMemoryMixin Sample Savable SavableDataset
        add_sample_restore_key set_sample_restore_key
    """,
    "flavors.captioning": "CaptioningSample CaptioningWebdataset",
    "flavors.crude": "CrudeSample CrudeWebdataset",
    "flavors.image": "ImageSample ImageWebdataset",
    "flavors.image_classification": "ImageClassificationSample ImageClassificationWebdataset",
    "flavors.interleaved": "InterleavedSample InterleavedWebdataset",
    "flavors.jsonl": "CrudeJsonlDatasetFactory DefaultCrudeJsonlDatasetFactory",
    "flavors.jsonl.crude_jsonl_dataset": "CrudeJsonlDatasetFactory DefaultCrudeJsonlDatasetFactory",
    "flavors.jsonl.ijsonl": "IJSONL_SUFFIX IJsonlIndexReader IJsonlIndexWriter",
    "flavors.multichoice_vqa": "MultiChoiceVQASample MultiChoiceVQAWebdataset",
    "flavors.ocr": "OCRSample OCRWebdataset",
    "flavors.similarity_interleaved": "SimilarityInterleavedSample SimilarityInterleavedWebdataset",
    "flavors.text": "TextSample TextWebdataset",
    "flavors.vid_qa": "VidQASample VidQAWebdataset",
    "flavors.vqa": "VQASample VQAWebdataset",
    "flavors.vqa_and_ocr": "VQAOCRSample VQAOCRWebdataset",
    "flavors.webdataset": """
        AVData AVDecoder AVDecoderType BaseWebdatasetFactory DefaultDecoderWebdatasetFactory
        DefaultGenericWebdatasetFactory EmptyDatasetError ImageDecoderType JoinedWebdatasetFactory
        MAIN_FOLDER_NAME SampleDecoder StandardWebdatasetFactory VideoData WebdatasetMeta
    """,
    "flavors.webdataset.base_webdataset": "BaseWebdatasetFactory",
    "flavors.webdataset.config": """
        INDEX_SQLITE_FILENAME INDEX_UUID_FILENAME INFO_JSON_FILENAME INFO_YAML_FILENAME
        MAIN_FOLDER_NAME SPLIT_YAML_FILENAME
    """,
    "flavors.webdataset.default_decoder_webdataset": "DefaultDecoderWebdatasetFactory",
    "flavors.webdataset.default_generic_webdataset": "DefaultGenericWebdatasetFactory",
    "flavors.webdataset.empty_dataset_error": "EmptyDatasetError",
    "flavors.webdataset.field_access": "FieldAccessError",
    "flavors.webdataset.indexing": "DuplicateSampleKeyError",
    "flavors.webdataset.joined_webdataset": "JoinedWebdatasetFactory",
    "flavors.webdataset.metadata": """
        EnergonDatasetType WebdatasetMeta check_dataset_info_present get_dataset_info
        get_dataset_type get_info_shard_files load_yaml
    """,
    "flavors.webdataset.prepare": """
        DuplicateSampleKeyError EPath INDEX_SQLITE_FILENAME INDEX_UUID_FILENAME INFO_JSON_FILENAME
        INFO_YAML_FILENAME MAIN_FOLDER_NAME MediaFilterConfig ShardInfo WebdatasetInfo
        WebdatasetPreparator WebdatasetSplits collapse edataclass get_dataset_info load_yaml
        serialize_media_metadata to_json_object
    """,
    "flavors.webdataset.sample_decoder": "AVDecoderType ImageDecoderType SampleDecoder",
    "flavors.webdataset.sharder": "Sharder",
    "flavors.webdataset.standard_webdataset": "StandardWebdatasetFactory",
    "flavors.webdataset.structs": """
        DatasetSubset FilteredSample ShardInfo WebdatasetInfo WebdatasetSplits
    """,
    "flavors.webdataset.video_data": "VideoData",
    "loader": "get_loader get_savable_loader",
    "media": HOMES["formats.media"],
    "media.extractor": "MediaFilterConfig MediaFilterStrategy",
    "media.filesystem_prepare": "prepare_filesystem_dataset",
    "media.metadata": HOMES["formats.media"],
    "metadataset": """
        DatasetLoader DatasetLoaderInterface Metadataset MetadatasetV2 load_dataset
        prepare_metadataset traverse_metadataset
    """,
    "metadataset.dataset_loader": "DatasetLoader",
    "metadataset.loader": "load_dataset prepare_metadataset traverse_metadataset",
    "metadataset.loader_interface": """
        DatasetBlendMode DatasetLoaderInterface LoadedDataset LoadedDatasetList
        TraversedDatasetReference
    """,
    "metadataset.metadataset": """
        DatasetReference=compat.megatron.load_dataset:DatasetReferenceV1 Metadataset
        MetadatasetBlender
    """,
    "metadataset.metadataset_v2": """
        AuxDatasetReference AuxFilesystemReference BlendDatasetReference
        BlendEpochizedDatasetReference BlendEpochizedJoinDatasetReference BlendJoinDatasetReference
        DatasetReference JoinDatasetReference MetadatasetBlend MetadatasetBlendEpochized
        MetadatasetJoin MetadatasetV2 Subset
    """,
    "module_loader": "ModuleLoader",
    "rng": "SystemRng SystemRngState WorkerRng",
    "sample_utils": "default_get_batch_keys",
    "savable": "FlexState Savable",
    "savable_loader": """
        BasicDataLoader SavableDataLoader SavableDataLoaderState SavableDatasetCheckpoint
        SavableDatasetState
    """,
    "source_info": "SourceInfo add_source_info get_source_info",
    "state": "FlexState",
    "task_encoder": """
        AugmentTaskEncoder Batch Cooker DefaultTaskEncoder TaskEncoder basic_sample_keys batch_list
        batch_pad_stack batch_stack cooker generic_batch get_train_dataset get_val_dataset
        get_val_datasets stateless
    """,
    "task_encoder.base": """
        AugmentTaskEncoder Batch Cooker DefaultTaskEncoder TaskEncoder batch_list batch_pad_stack
        batch_stack generic_batch get_failure_tolerance get_stateless stateless
    """,
    "task_encoder.cooking": """
        Cooker basic_sample_keys cooker get_cooker_need_cache get_cooker_need_primary
    """,
    "task_encoder.loader": "get_train_dataset get_val_dataset get_val_datasets",
    "tools": "",
    "tools.analyze_debug": "command=cli.analyze_debug:command",
    "tools.checkpoint": """
        command=cli.checkpoint:command command_info=cli.checkpoint:info
        command_redist=cli.checkpoint:redist
    """,
    "tools.info": "command=cli.info:command",
    "tools.lint": "command=cli.lint:command",
    "tools.mount": "command=cli.mount:command",
    "tools.prepare": "command=cli.prepare:command",
    "tools.prepare_media": "command=cli.prepare_media:command",
    "tools.preview": "command=cli.preview:command",
    "transforms": HOMES["transforms"],
    "transforms.custom": "CustomTransform",
    "transforms.mappers": """
        CenterCropMapper RandomCropMapper RandomHorizontalFlipMapper RandomPerspectiveMapper
        RandomResizedCropMapper RandomRotationMapper RandomVerticalFlipMapper ResizeMapper
        TransformMapper
    """,
    "transforms.merge": "MergeTransform",
    "typed_converter": "JsonParser JsonValueError to_json_object",
    "worker": "WorkerConfig",
    "wrappers": """
        BatchDataset BlendDataset ConcatDataset EpochizeDataset FilterDataset GcDataset
        GroupBatchDataset IterMapDataset LimitDataset LogSampleDataset MapDataset MixBatchDataset
        PackingDataset RepeatDataset ShuffleBufferDataset SkipSample WatchdogDataset concat_pad
        generic_concat homogeneous_concat_mix
    """,
    "wrappers.base": """
        BaseSingleWrapperDataset BaseWrapperDataset SampleIndex get_sample_restore_key
    """,
    "wrappers.batch_dataset": "BatchDataset",
    "wrappers.blend_dataset": "BlendDataset",
    "wrappers.buffer": "SavableSampleBuffer",
    "wrappers.concat_dataset": "ConcatDataset",
    "wrappers.epochize_dataset": "EpochizeDataset",
    "wrappers.filter_dataset": "FilterDataset",
    "wrappers.gc_dataset": "GcDataset",
    "wrappers.group_batch_dataset": "GroupBatchDataset",
    "wrappers.iter_map_dataset": "IterMapDataset",
    "wrappers.limit_dataset": "LimitDataset",
    "wrappers.log_sample_dataset": "LogSampleDataset default_get_keys",
    "wrappers.map_dataset": "MapDataset",
    "wrappers.mix_batch_dataset": """
        MixBatchDataset concat_pad generic_concat homogeneous_concat_mix
    """,
    "wrappers.packing_dataset": "PackingDataset",
    "wrappers.repeat_dataset": "RepeatDataset",
    "wrappers.shuffle_buffer_dataset": "ShuffleBufferDataset",
    "wrappers.skip": "SkipSample",
    "wrappers.watchdog_dataset": "WatchdogDataset",
}

RETIRED: dict[str, str] = {
    "`loader.save_state_rank()`, whose result is a dict of JSON": """
        BaseSingleWrapperMergedState BaseSingleWrapperState BatchGeneratorMergedState
        BatchGeneratorState BatchMergedState BatchState BlendDatasetMergedState BlendDatasetState
        BucketMergedState BucketState ConcatMergedState ConcatState EpochizeMergedState
        EpochizeState FilterMergedState FilterState GroupBatchMergedState GroupBatchState
        IterMapMergedState IterMapState LimitMergedState LimitState LogSampleMergedState
        LogSampleState MapGeneratorMergedState MapGeneratorState MapMergedState MapState
        MergedState PackingMergedState PackingState RepeatMergedState RepeatState
        SampleBufferMergedState SampleBufferState SavableDatasetMergedCheckpoint
        SavableDatasetMergedState ShardState ShuffleBufferMergedState ShuffleBufferState
        SimpleSavableDatasetMergedState SimpleSavableDatasetState State WebdatasetMergedState
        WebdatasetState WorkerRngMergedState WorkerRngState
    """,
    "`AVDecoder`, which seeks and decodes": "Fastseek",
    "`JsonParser`": "override raw_to_instance raw_to_typed safe_call_function",
    "`WorkerConfig(global_error_handler=…)`": "ErrorHandler",
    "`format_sample_compact`": "compact_str",
    "`EPath`, which reads the configuration of rclone itself": "ConfigEntry read_rclone_config",
}
"""Names of Megatron-Energon 5 and 6 that have no meaning here, by the replacement.

They can be imported, and raise an error when they are used.
"""


class Home(NamedTuple):
    """The definition of a name: a module of energon, and the name there."""

    module: str
    name: str


def _homes() -> dict[str, Home]:
    homes = {}
    for module, names in HOMES.items():
        for entry in names.split():
            name, _, original = entry.partition("=")
            homes[name] = Home(f"energon.{module}", original or name)
    return homes


_HOMES = _homes()


def home_of(name: str) -> Home | None:
    """Return the home of a name of any module; None if there is none."""
    return _HOMES.get(name)


def stand_in_for(name: str) -> type | None:
    """Return a class for a retired name, which raises when it is used; None for other names."""
    replacement = next((new for new, names in RETIRED.items() if name in names.split()), None)
    if replacement is None:
        return None

    def refuse(*arguments: Any, **settings: Any) -> Any:
        raise ConfigError(f"{name} of Megatron-Energon 5 and 6 is not supported; use {replacement}")

    return type(name, (), {"__new__": refuse, "__init_subclass__": refuse})


def names_of(module: str) -> dict[str, Home]:
    """Return the names of a module of `megatron.energon`, sorted, with their homes.

    Args:
        module: Its path below `megatron.energon`; "" for the package itself.

    Raises:
        KeyError: If there is no such module.
    """
    names = {}
    for entry in sorted(MODULES[module].split()):
        name, _, home = entry.partition("=")
        where, _, original = home.partition(":")
        names[name] = Home(f"energon.{where}", original) if home else _HOMES[name]
    return names


def class_of(name: str, base: type) -> type | None:
    """Return the class of energon with a name in `megatron.energon`, if it derives from `base`.

    Only our own modules are imported for it.
    """
    home = _HOMES.get(name)
    kind = None if home is None else getattr(import_module(home.module), home.name)
    return kind if isinstance(kind, type) and issubclass(kind, base) else None


def is_package(module: str) -> bool:
    """Return whether a module of `megatron.energon` has modules below it."""
    return any(each.startswith(f"{module}.") for each in MODULES)
