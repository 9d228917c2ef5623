"""Make the modules of `megatron.energon` from a table of their names, and stubs for editors.

None of them exists as a file. Each looks its names up in `energon` when they are first used, so
importing one costs no more than what the program takes from it.

Modules of Megatron-Energon import from one another, its releases have moved names among them, and
programs import from any of them. So all modules have all names here, and those of `energon`.

To add a name, add it to `HOMES`; to add a module, to `MODULES`. No other file has to change.

Building a wheel, or installing a checkout in editable mode, writes the stubs beside the package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import energon
from energon.compat.megatron import VERSION
from energon.errors import ConfigError
from energon.version import __version__

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
    "compat.megatron.datasets.webdataset": """
        BaseWebdataset=WebdatasetFactory BaseWebdatasetFactory=WebdatasetFactory CrudeWebdataset
        DefaultDecoderWebdataset=DecoderWebdatasetFactory
        DefaultDecoderWebdatasetFactory=DecoderWebdatasetFactory
        DefaultGenericWebdataset=GenericWebdatasetFactory
        DefaultGenericWebdatasetFactory=GenericWebdatasetFactory ShardInfo
        StandardWebdatasetFactory WebdatasetPreparator=PreparesShards
    """,
    "compat.megatron.objects": """
        IJSONL_SUFFIX IJsonlIndexReader IJsonlIndexWriter JsonParser JsonValueError
    """,
    "compat.megatron.getters": """
        AuxDatasetReference AuxFilesystemReference BlendDatasetReference
        BlendEpochizedDatasetReference BlendEpochizedJoinDatasetReference BlendJoinDatasetReference
        DatasetLoader DatasetLoaderInterface=DatasetLoader DatasetReference JoinDatasetReference
        LoadedDatasetList Metadataset MetadatasetBlend MetadatasetBlendEpochized MetadatasetBlender
        MetadatasetJoin MetadatasetV2 Subset=SubsetRange get_dataset_from_config get_train_dataset
        get_val_dataset get_val_datasets load_dataset traverse_metadataset
    """,
    "compat.megatron.encoder": """
        AugmentTaskEncoder Cooker DefaultTaskEncoder LoadedDataset TaskEncoder
    """,
    "compat.megatron.helpers": """
        AVDecoderType AVWebdatasetDecoder EPath EnergonDatasetType ErrorContext
        INDEX_SQLITE_FILENAME INDEX_UUID_FILENAME INFO_JSON_FILENAME INFO_YAML_FILENAME
        ImageDecoderType MAIN_FOLDER_NAME MediaFilterConfig MediaFilterStrategy ModuleLoader
        NVDATASET_CACHE_DIR SPLIT_YAML_FILENAME add_sample_restore_key check_dataset_info_present
        collapse dataclass_slots format_sample_compact format_sample_detailed get_cooker_need_cache
        get_cooker_need_primary get_dataset_info get_dataset_type get_failure_tolerance
        get_sample_restore_key get_stateless handle_restore_errors load_yaml
        prepare_filesystem_dataset set_sample_restore_key warn_deprecated
    """,
    "compat.megatron.loaders": "BasicDataLoader SavableDataLoader get_loader get_savable_loader",
    "compat.megatron.samples": """
        Batch CaptioningSample ImageClassificationSample ImageSample InterleavedSample
        MultiChoiceVQASample OCRSample Sample SimilarityInterleavedSample TextSample VQAOCRSample
        VQASample VidQASample VideoData
    """,
    "compat.megatron.worker": "WorkerConfig",
    "compat.megatron.wrappers.base": "GcDataset LogSampleDataset WatchdogDataset",
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

_COMMANDS = {
    **{
        name: f"cli.{name}:command"
        for name in ["analyze_debug", "checkpoint", "info", "lint", "mount", "prepare", "preview"]
    },
    "prepare_media": "cli.prepare:media_command",
}
"""The commands of `energon` that Megatron-Energon has, by their homes."""

OWN: dict[str, str] = {
    "": "__version__=compat.megatron:VERSION",
    "cli.main": " ".join(
        (
            "main=cli.main:main",
            *(f"{name}_command={home}" for name, home in _COMMANDS.items()),
        )
    ),
    "metadataset.metadataset": "DatasetReference=compat.megatron.getters:DatasetReferenceV1",
    **{f"tools.{name}": f"command={home}" for name, home in _COMMANDS.items()},
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


ROOT = "megatron.energon"


class NameTableFinder(MetaPathFinder, Loader):
    """Finds and loads the modules below `megatron.energon`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = fullname.removeprefix(f"{ROOT}.")
        if module == fullname or module not in MODULES:
            return None
        # The table is what stands in these modules, so that is what `inspect` shows.
        return ModuleSpec(fullname, self, origin=__file__, is_package=is_package(module))

    def exec_module(self, module: ModuleType) -> None:
        """Give a new module its names, which are looked up when first used."""
        fill(module, module.__name__.removeprefix(f"{ROOT}."))
        module.__file__ = __file__


class StandIn(Distribution):
    """Names the release of Megatron-Energon that this package stands for.

    `energon_loader.pth` has every interpreter find it, since programs ask for the version of
    `megatron-energon` before and after they import it. A Megatron-Energon that is installed is
    found first.
    """

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return (
            f"Metadata-Version: 2.1\nName: megatron-energon\nVersion: {VERSION}\n"
            f"Summary: Stands for Megatron-Energon: energon-loader {__version__}\n"
        )

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent.joinpath(path)


def fill(module: ModuleType, path: str) -> None:
    """Give a module `__getattr__`, `__dir__` and `__all__` as the table has them.

    Args:
        module: The module.
        path: Its path below `megatron.energon`; "" for the package itself.
    """
    homes = names_of(path)
    below = {
        name.removeprefix(f"{path}.").partition(".")[0]
        for name in MODULES
        if name.startswith(f"{path}." if path else "") and name != path
    } - homes.keys()

    def look_up(name: str) -> Any:
        if name in below:
            return import_module(f"{module.__name__}.{name}")
        if name in homes:
            value = homes[name].look_up()
        elif (value := stand_in_for(name)) is None:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        setattr(module, name, value)
        return value

    everything = sorted(homes)
    vars(module).update(
        __doc__=module.__doc__ or f"Names of `{module.__name__}`, all at home in `energon`.",
        __all__=everything,
        __getattr__=look_up,
        __dir__=lambda: sorted({*vars(module), *everything, *below}),
    )


def install(root: ModuleType) -> None:
    """Make `megatron.energon` and all modules below it importable.

    Args:
        root: The package `megatron.energon`.
    """
    if not any(isinstance(each, NameTableFinder) for each in sys.meta_path):
        # First, since folders that hold only stubs would pass for namespace packages.
        sys.meta_path.insert(0, NameTableFinder())
    fill(root, "")
    # `edataclass` is a function of the package and a module below it. Importing a module binds it
    # in its package, so do that first: programs ask the package for the function.
    import_module(f"{ROOT}.edataclass")
    vars(root).pop("edataclass", None)


def write_stubs(folder: Path) -> list[Path]:
    """Write one `.pyi` file for each module of `megatron.energon`.

    Args:
        folder: Where the package `megatron.energon` lies.

    Returns:
        The files, sorted.
    """
    written = []
    for module in MODULES:
        target = folder.joinpath(*module.split(".")) if module else folder
        file = target / "__init__.pyi" if is_package(module) else target.with_suffix(".pyi")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(stub_of(module))
        written.append(file)
    return sorted(written)


def stub_of(module: str) -> str:
    """Return the stub of a module, by its path below `megatron.energon`; "" for the package."""
    homes, shared = names_of(module), names_of("")
    lines = [
        f"from {home.module} import {home.name} as {name}"
        for name, home in sorted(homes.items())
        if not module or shared.get(name) != home
    ]
    if module:
        lines.insert(0, f"from {ROOT} import *")
    return "\n".join((*lines, f"\n__all__ = {sorted(homes)!r}", ""))
