"""Every name of `megatron.energon`, and the module that defines it.

Modules of Megatron-Energon import from one another, its releases have moved names among them, and
programs import from any of them. So all modules have all names here, and those of `energon`.

To add a name, add it to `HOMES`; to add a module, to `MODULES`. No other file has to change.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, NamedTuple

import energon
from energon.errors import ConfigError

HOMES: dict[str, str] = {
    "cache.file_pool": "CacheFileLazy=KeptLazy",
    "compat.megatron.datasets.arguments": """
        DatasetSubset FilteredSample WebdatasetInfo WebdatasetSplits load_config
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
        EnergonDatasetType MediaFilterConfig MediaFilterStrategy ShardInfo
        WebdatasetPreparator=PreparesShards check_dataset_info_present get_dataset_info
        get_dataset_type prepare_filesystem_dataset
    """,
    "compat.megatron.datasets.webdataset": """
        BaseWebdataset=WebdatasetFactory BaseWebdatasetFactory=WebdatasetFactory CrudeWebdataset
        DefaultDecoderWebdataset=DecoderWebdatasetFactory
        DefaultDecoderWebdatasetFactory=DecoderWebdatasetFactory
        DefaultGenericWebdataset=GenericWebdatasetFactory
        DefaultGenericWebdatasetFactory=GenericWebdatasetFactory StandardWebdatasetFactory
    """,
    "compat.megatron.objects": """
        IJSONL_SUFFIX IJsonlIndexReader IJsonlIndexWriter JsonParser JsonValueError
    """,
    "compat.megatron.load_dataset": """
        AuxDatasetReference AuxFilesystemReference BlendDatasetReference
        BlendEpochizedDatasetReference BlendEpochizedJoinDatasetReference BlendJoinDatasetReference
        DatasetLoader DatasetLoaderInterface=DatasetLoader DatasetReference JoinDatasetReference
        LoadedDatasetList Metadataset MetadatasetBlend MetadatasetBlendEpochized MetadatasetBlender
        MetadatasetJoin MetadatasetV2 Subset=SubsetRange load_dataset traverse_metadataset
    """,
    "compat.megatron.encoder": """
        AugmentTaskEncoder Cooker DefaultTaskEncoder LoadedDataset TaskEncoder
    """,
    "compat.megatron.getters": """
        get_dataset_from_config get_train_dataset get_val_dataset get_val_datasets
    """,
    "compat.megatron.helpers": """
        AVDecoderType AVWebdatasetDecoder EPath ErrorContext INDEX_SQLITE_FILENAME
        INDEX_UUID_FILENAME INFO_JSON_FILENAME INFO_YAML_FILENAME ImageDecoderType MAIN_FOLDER_NAME
        ModuleLoader NVDATASET_CACHE_DIR SPLIT_YAML_FILENAME add_sample_restore_key collapse
        dataclass_slots format_sample_compact format_sample_detailed get_cooker_need_cache
        get_cooker_need_primary get_failure_tolerance get_sample_restore_key get_stateless
        handle_restore_errors load_yaml set_sample_restore_key warn_deprecated
    """,
    "compat.megatron.loaders": "BasicDataLoader SavableDataLoader get_loader get_savable_loader",
    "compat.megatron.samples": """
        Batch CaptioningSample ImageClassificationSample ImageSample InterleavedSample
        MultiChoiceVQASample OCRSample Sample SimilarityInterleavedSample TextSample VQAOCRSample
        VQASample VidQASample VideoData
    """,
    "compat.megatron.worker": "WorkerConfig",
    "compat.megatron.wrappers.batches": """
        BatchDataset FilterDataset GroupBatchDataset MapDataset MixBatchDataset PackingDataset
    """,
    "compat.megatron.wrappers.own": """
        BaseSingleWrapperDataset=BaseWrapperDataset BaseWrapperDataset FlexState SampleIndex Savable
        SavableDataLoaderState SavableDataset SavableDatasetCheckpoint=SavableDataLoaderState
        SavableDatasetState=SavableDataLoaderState SavableSampleBuffer SystemRng SystemRngState
        WorkerRng
    """,
    "compat.megatron.wrappers.streams": """
        BlendDataset ConcatDataset EpochizeDataset IterMapDataset LimitDataset RepeatDataset
        ShuffleBufferDataset
    """,
    "compat.megatron.wrappers.watchers": "GcDataset LogSampleDataset WatchdogDataset",
    "errors": "SYSTEM_EXCEPTIONS SampleException=SampleError",
    "formats.media": """
        MediaMetadataBase MediaMetadataType deserialize_media_metadata serialize_media_metadata
    """,
    "io.epath": "DEFAULT_PROFILE_NAME",
    "metadataset.leaf": "DatasetBlendMode=BlendMode TraversedDatasetReference",
    "samples.provenance": "add_source_info get_source_info",
    "samples.sample": "PinMemoryMixin",
    "sources.files.samples": "WebdatasetFileStore",
    "sources.tables.jsonl": "JsonlFileStore",
    "stages.log_samples": "default_get_batch_keys=keys_of default_get_keys=keys_of",
    "transforms": """
        CenterCropMapper CustomTransform MergeTransform RandomCropMapper RandomHorizontalFlipMapper
        RandomPerspectiveMapper RandomResizedCropMapper RandomRotationMapper
        RandomVerticalFlipMapper ResizeMapper TransformMapper
    """,
}
"""The names that `energon` does not have, or with another meaning, by the module that defines them.

`NAME=ORIGINAL` if the name is different there.
"""

_MODULES = """
    av av.av_data av.av_decoder av.video_data av.utils bracecollapse cache cache.base
    cache.file_cache_pool cache.file_store cache.no_cache cli cli.main dataclass_slots
    dataset_config deprecation edataclass epathlib epathlib.epath errors eyaml flavors
    flavors.base_dataset flavors.captioning flavors.crude flavors.image flavors.image_classification
    flavors.interleaved flavors.jsonl flavors.jsonl.crude_jsonl_dataset flavors.jsonl.ijsonl
    flavors.multichoice_vqa flavors.ocr flavors.similarity_interleaved flavors.text flavors.vid_qa
    flavors.vqa flavors.vqa_and_ocr flavors.webdataset flavors.webdataset.base_webdataset
    flavors.webdataset.config flavors.webdataset.default_decoder_webdataset
    flavors.webdataset.default_generic_webdataset flavors.webdataset.empty_dataset_error
    flavors.webdataset.field_access flavors.webdataset.indexing flavors.webdataset.joined_webdataset
    flavors.webdataset.metadata flavors.webdataset.prepare flavors.webdataset.sample_decoder
    flavors.webdataset.sharder flavors.webdataset.standard_webdataset flavors.webdataset.structs
    flavors.webdataset.video_data loader media media.extractor media.filesystem_prepare
    media.metadata metadataset metadataset.dataset_loader metadataset.loader
    metadataset.loader_interface metadataset.metadataset metadataset.metadataset_v2 module_loader
    rng sample_utils savable savable_loader source_info state task_encoder task_encoder.base
    task_encoder.cooking task_encoder.loader tools tools.analyze_debug tools.checkpoint tools.info
    tools.lint tools.mount tools.prepare tools.prepare_media tools.preview transforms
    transforms.custom transforms.mappers transforms.merge typed_converter worker wrappers
    wrappers.base wrappers.batch_dataset wrappers.blend_dataset wrappers.buffer
    wrappers.concat_dataset wrappers.epochize_dataset wrappers.filter_dataset wrappers.gc_dataset
    wrappers.group_batch_dataset wrappers.iter_map_dataset wrappers.limit_dataset
    wrappers.log_sample_dataset wrappers.map_dataset wrappers.mix_batch_dataset
    wrappers.packing_dataset wrappers.repeat_dataset wrappers.shuffle_buffer_dataset wrappers.skip
    wrappers.watchdog_dataset
"""

MODULES: tuple[str, ...] = ("", *_MODULES.split())
"""The modules below `megatron.energon`, after the package itself."""

_COMMANDS = "analyze_debug checkpoint info lint mount prepare prepare_media preview"

OWN: dict[str, str] = {
    "": "__version__=compat.megatron:VERSION",
    "cli.main": " ".join(
        (
            "main=cli.main:main",
            *(f"{name}_command=cli.{name}:command" for name in _COMMANDS.split()),
        )
    ),
    "metadataset.metadataset": "DatasetReference=compat.megatron.load_dataset:DatasetReferenceV1",
    **{f"tools.{name}": f"command=cli.{name}:command" for name in _COMMANDS.split()},
    "tools.checkpoint": """
        command=cli.checkpoint:command command_info=cli.checkpoint:info
        command_redist=cli.checkpoint:redist
    """,
}
"""The names that only one module has, or has with another meaning, by their homes."""

RETIRED: dict[str, str] = {
    "`loader.save_state_rank()`, whose result is a dict of JSON": "*State *MergedCheckpoint",
    "`AVDecoder`, which seeks and decodes": "Fastseek",
    "`JsonParser`": "override raw_to_instance raw_to_typed safe_call_function",
    "`WorkerConfig(global_error_handler=…)`": "ErrorHandler",
    "`format_sample_compact`": "compact_str",
    "`EPath`, which reads the configuration of rclone itself": "ConfigEntry read_rclone_config",
}
"""Patterns for names of Megatron-Energon 5 and 6 that have no meaning here, by the replacement.

They can be imported, and raise an error when they are used.
"""


class Home(NamedTuple):
    """The definition of a name: a module of energon, and the name there."""

    module: str
    name: str

    def look_up(self) -> Any:
        """Return the value."""
        return getattr(import_module(self.module), self.name)


def _homes() -> dict[str, Home]:
    homes = {name: Home("energon", name) for name in energon.__all__}
    for module, names in HOMES.items():
        for entry in names.split():
            name, _, original = entry.partition("=")
            homes[name] = Home(f"energon.{module}", original or name)
    return homes


_HOMES = _homes()


def names_of(module: str) -> dict[str, Home]:
    """Return the names of a module of `megatron.energon`, with their homes.

    Args:
        module: Its path below `megatron.energon`; "" for the package itself.
    """
    names = dict(_HOMES)
    for entry in OWN.get(module, "").split():
        name, _, home = entry.partition("=")
        where, _, original = home.partition(":")
        names[name] = Home(f"energon.{where}", original)
    return names


def stand_in_for(name: str) -> type | None:
    """Return a class for a retired name, which raises when it is used; None for other names."""
    replacement = next(
        (
            new
            for new, patterns in RETIRED.items()
            if any(fnmatchcase(name, pattern) for pattern in patterns.split())
        ),
        None,
    )
    if replacement is None:
        return None

    def refuse(*arguments: Any, **settings: Any) -> Any:
        raise ConfigError(f"{name} of Megatron-Energon 5 and 6 is not supported; use {replacement}")

    return type(name, (), {"__new__": refuse, "__init_subclass__": refuse})


def class_of(name: str, kinds: tuple[type, ...]) -> type | None:
    """Return the class of energon with a name in `megatron.energon`, if it is one of `kinds`.

    Only our own modules are imported for it.
    """
    kind = _HOMES[name].look_up() if name in _HOMES else None
    return kind if isinstance(kind, type) and issubclass(kind, kinds) else None


def is_package(module: str) -> bool:
    """Return whether a module of `megatron.energon` has modules below it."""
    return not module or any(each.startswith(f"{module}.") for each in MODULES)
