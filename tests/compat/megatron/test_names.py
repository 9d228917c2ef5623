"""The import paths that programs written for Megatron-Energon use."""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import energon
import megatron.energon
from energon.compat.megatron import names
from energon.compat.megatron.finder import stub_of, write_stubs
from energon.compat.megatron.names import HOMES, MODULES
from energon.samples.registry import sample_types

# What Megatron-Energon 7 exports, and names of older versions.
NAMES = re.findall(
    r"\w+",
    """
__version__
TaskEncoder DefaultTaskEncoder AugmentTaskEncoder Batch Cooker cooker basic_sample_keys stateless
generic_batch batch_list batch_stack batch_pad_stack
get_train_dataset get_val_dataset get_val_datasets get_loader get_savable_loader load_dataset
prepare_metadataset traverse_metadataset DatasetLoader DatasetLoaderInterface Metadataset
MetadatasetV2 SavableDataLoader SavableDataset WorkerConfig
BaseCoreDatasetFactory BaseWebdatasetFactory DefaultGenericWebdatasetFactory
DefaultDecoderWebdatasetFactory StandardWebdatasetFactory CrudeWebdataset JoinedWebdatasetFactory
CrudeJsonlDatasetFactory DefaultCrudeJsonlDatasetFactory
Sample CaptioningSample CrudeSample ImageSample ImageClassificationSample InterleavedSample
MultiChoiceVQASample OCRSample SimilarityInterleavedSample TextSample VidQASample VQASample
CaptioningWebdataset ImageWebdataset ImageClassificationWebdataset InterleavedWebdataset
MultiChoiceVQAWebdataset OCRWebdataset SimilarityInterleavedWebdataset TextWebdataset
VidQAWebdataset VQAOCRWebdataset VQAWebdataset
BatchDataset BlendDataset ConcatDataset EpochizeDataset FilterDataset GcDataset GroupBatchDataset
IterMapDataset LimitDataset LogSampleDataset MapDataset MixBatchDataset PackingDataset
RepeatDataset ShuffleBufferDataset concat_pad generic_concat homogeneous_concat_mix
FileStore SystemFileStore DecodeFileStore PrimaryFileStore FileStoreDecoder SampleDecoder
CachePool NoCachePool FileStoreCachePool Lazy DirectLazy FileCacheLazy MockLazy SourceInfo
SkipSample log_exception reraise_exception edataclass
""",
)
FORMER_NAMES = re.findall(
    r"\w+",
    """
BaseCoreDataset BaseWebdataset DefaultGenericWebdataset DefaultDecoderWebdataset
FatalSampleError VQAOCRSample BasicDataLoader
""",
)
# The sub-modules that its users touch, with the names that they find there.
MODULE_NAMES = {
    "av": "AVDecoder AVWebdatasetDecoder AVData get_clips_uniform get_single_frames_uniform",
    "cache": """FileStore SystemFileStore DecodeFileStore PrimaryFileStore FileStoreDecoder
        CachePool NoCachePool FileStoreCachePool Lazy DirectLazy FileCacheLazy MockLazy""",
    "cache.base": "CachePool FileStore FileStoreDecoder Lazy MockLazy PrimaryFileStore",
    "cli.main": "main",
    "dataset_config": "get_dataset_from_config load_config",
    "edataclass": "edataclass",
    "epathlib": "EPath DEFAULT_PROFILE_NAME",
    "errors": """SkipSample SampleException FatalSampleError SYSTEM_EXCEPTIONS ErrorContext
        handle_restore_errors log_exception reraise_exception""",
    "flavors": """CaptioningSample CrudeSample ImageSample ImageClassificationSample
        InterleavedSample MultiChoiceVQASample OCRSample SimilarityInterleavedSample TextSample
        VidQASample VQASample VQAOCRSample CaptioningWebdataset CrudeWebdataset ImageWebdataset
        ImageClassificationWebdataset InterleavedWebdataset MultiChoiceVQAWebdataset OCRWebdataset
        SimilarityInterleavedWebdataset TextWebdataset VidQAWebdataset VQAOCRWebdataset
        VQAWebdataset JoinedWebdatasetFactory StandardWebdatasetFactory BaseCoreDatasetFactory
        BaseWebdatasetFactory DefaultGenericWebdatasetFactory DefaultDecoderWebdatasetFactory
        CrudeJsonlDatasetFactory DefaultCrudeJsonlDatasetFactory Sample SavableDataset
        SampleDecoder AVData AVDecoder AVDecoderType ImageDecoderType PinMemoryMixin
        EmptyDatasetError WebdatasetMeta""",
    "flavors.base_dataset": "BaseCoreDatasetFactory Sample SavableDataset PinMemoryMixin",
    "flavors.vqa_and_ocr": "VQAOCRSample VQAOCRWebdataset",
    "flavors.webdataset": "JoinedWebdatasetFactory StandardWebdatasetFactory SampleDecoder",
    "flavors.webdataset.config": "MAIN_FOLDER_NAME INFO_JSON_FILENAME INFO_YAML_FILENAME",
    "flavors.webdataset.sample_decoder": "SampleDecoder AVDecoderType ImageDecoderType",
    "loader": "get_loader get_savable_loader",
    "media": """AVMetadata ImageMetadata MediaMetadataBase MediaMetadataType
        serialize_media_metadata deserialize_media_metadata""",
    "media.metadata": "AVMetadata ImageMetadata MediaMetadataBase MediaMetadataType",
    "metadataset": "Metadataset MetadatasetV2",
    "metadataset.loader": "load_dataset prepare_metadataset",
    "metadataset.loader_interface": """DatasetBlendMode DatasetLoaderInterface LoadedDataset
        LoadedDatasetList TraversedDatasetReference""",
    "savable_loader": """SavableDataLoader BasicDataLoader SavableDataLoaderState
        SavableDatasetCheckpoint SavableDatasetState""",
    "source_info": "SourceInfo add_source_info get_source_info",
    "task_encoder.base": "TaskEncoder DefaultTaskEncoder AugmentTaskEncoder Batch stateless",
    "task_encoder.cooking": "Cooker cooker basic_sample_keys",
    "task_encoder.loader": "get_train_dataset get_val_dataset get_val_datasets",
    "transforms": """TransformMapper ResizeMapper RandomResizedCropMapper CenterCropMapper
        RandomCropMapper RandomHorizontalFlipMapper RandomVerticalFlipMapper RandomRotationMapper
        RandomPerspectiveMapper MergeTransform CustomTransform""",
    "worker": "WorkerConfig",
    "wrappers": """BatchDataset BlendDataset ConcatDataset EpochizeDataset FilterDataset GcDataset
        GroupBatchDataset IterMapDataset LimitDataset LogSampleDataset MapDataset MixBatchDataset
        PackingDataset RepeatDataset ShuffleBufferDataset WatchdogDataset SkipSample concat_pad
        generic_concat homogeneous_concat_mix""",
    "wrappers.batch_dataset": "BatchDataset",
    "wrappers.blend_dataset": "BlendDataset",
    "wrappers.concat_dataset": "ConcatDataset",
    "wrappers.epochize_dataset": "EpochizeDataset",
    "wrappers.filter_dataset": "FilterDataset",
    "wrappers.gc_dataset": "GcDataset",
    "wrappers.group_batch_dataset": "GroupBatchDataset",
    "wrappers.iter_map_dataset": "IterMapDataset",
    "wrappers.limit_dataset": "LimitDataset",
    "wrappers.log_sample_dataset": "LogSampleDataset",
    "wrappers.map_dataset": "MapDataset",
    "wrappers.mix_batch_dataset": "MixBatchDataset",
    "wrappers.packing_dataset": "PackingDataset",
    "wrappers.repeat_dataset": "RepeatDataset",
    "wrappers.shuffle_buffer_dataset": "ShuffleBufferDataset",
    "wrappers.skip": "SkipSample",
    "wrappers.watchdog_dataset": "WatchdogDataset",
    **dict.fromkeys(
        (
            "tools.prepare",
            "tools.prepare_media",
            "tools.lint",
            "tools.info",
            "tools.mount",
            "tools.preview",
            "tools.analyze_debug",
            "tools.checkpoint",
        ),
        "command",
    ),
}

IMPORTS = """
from megatron.energon.av import AVDecoder, AVData, get_clips_uniform, get_single_frames_uniform
from megatron.energon.cache import FileStore, FileStoreCachePool
from megatron.energon.cache.base import CachePool, Lazy
from megatron.energon.cache.file_store import SystemFileStore, WebdatasetFileStore
from megatron.energon.cli.main import main
from megatron.energon.dataset_config import get_dataset_from_config
from megatron.energon.edataclass import edataclass
from megatron.energon.epathlib import EPath
from megatron.energon.epathlib.epath import EPath
from megatron.energon.errors import FatalSampleError, SampleException, SkipSample
from megatron.energon.errors import SYSTEM_EXCEPTIONS, log_exception, reraise_exception
from megatron.energon.flavors import CaptioningSample, CrudeWebdataset, SavableDataset
from megatron.energon.flavors.base_dataset import Sample, SavableDataset, BaseCoreDatasetFactory
from megatron.energon.flavors.captioning import CaptioningSample
from megatron.energon.flavors.crude import CrudeSample
from megatron.energon.flavors.vqa_and_ocr import VQAOCRSample
from megatron.energon.flavors.webdataset import StandardWebdatasetFactory, SampleDecoder
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME
from megatron.energon.flavors.webdataset.sample_decoder import SampleDecoder
from megatron.energon.loader import get_loader, get_savable_loader
from megatron.energon.media import AVMetadata, ImageMetadata, MediaMetadataType
from megatron.energon.media.metadata import deserialize_media_metadata
from megatron.energon.metadataset import Metadataset, MetadatasetV2
from megatron.energon.metadataset.loader import load_dataset, prepare_metadataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset
from megatron.energon.metadataset.loader_interface import TraversedDatasetReference
from megatron.energon.savable_loader import BasicDataLoader, SavableDataLoader
from megatron.energon.source_info import SourceInfo, add_source_info
from megatron.energon.task_encoder import DefaultTaskEncoder
from megatron.energon.task_encoder.base import Batch, TaskEncoder, stateless
from megatron.energon.task_encoder.cooking import Cooker, basic_sample_keys, cooker
from megatron.energon.task_encoder.loader import get_train_dataset
from megatron.energon.tools.info import command
from megatron.energon.tools.lint import command
from megatron.energon.tools.prepare import command
from megatron.energon.worker import WorkerConfig
from megatron.energon.wrappers import BatchDataset, SkipSample, WatchdogDataset
from megatron.energon.wrappers.group_batch_dataset import GroupBatchDataset
from megatron.energon.wrappers.watchdog_dataset import WatchdogDataset
""".strip().splitlines()


def modules():
    return [f"megatron.energon.{module}" for module in MODULES if module]


def test_there_are_96_names():
    assert len(set(NAMES)) == len(NAMES) == 96


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in MODULE_NAMES.items() for name in names.split()],
)
def test_names_are_found_where_its_modules_have_them(module, name):
    found = getattr(import_module(f"megatron.energon.{module}"), name)
    assert found is not None


@pytest.mark.parametrize("name", NAMES + FORMER_NAMES)
def test_names_of_megatron_energon_are_there(name):
    assert name in megatron.energon.__all__
    assert getattr(megatron.energon, name) is not None


@pytest.mark.parametrize("line", IMPORTS)
def test_imports_of_its_documentation_work(line):
    exec(line, {})


@pytest.mark.parametrize("module", modules())
def test_every_name_of_every_module_resolves_to_the_same_object(module):
    found = import_module(module)
    for name in getattr(found, "__all__", ()):
        value = getattr(found, name)
        assert name in dir(found)
        if name in energon.__all__ and name not in OTHERS | OTHER_CACHES | {"EPath"}:
            assert value is getattr(energon, name)


@pytest.mark.parametrize("module", modules())
def test_names_that_do_not_exist_are_attribute_errors(module):
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        import_module(module).nothing  # noqa: B018 - the access is the point


def test_modules_are_there_without_being_imported_first():
    for module in (name for name in modules() if name.count(".") == 2):
        short = module.rpartition(".")[2]
        if not short.startswith("_"):
            assert short in dir(megatron.energon)
    run = "import megatron.energon as e; print(e.wrappers.BatchDataset, e.errors.SkipSample)"
    subprocess.run([sys.executable, "-c", run], check=True, capture_output=True)


@pytest.mark.parametrize("first", ["import megatron.energon.edataclass", "pass"])
def test_the_function_of_the_same_name_as_a_module_wins(first):
    run = f"{first}\nfrom megatron.energon import edataclass\n@edataclass\nclass A: x: int\nA(x=3)"
    subprocess.run([sys.executable, "-c", run], check=True)


def test_only_the_package_itself_is_a_file():
    folder = Path(megatron.energon.__file__).parent
    assert [file.name for file in folder.rglob("*.py")] == ["__init__.py"]


def test_every_name_of_the_table_is_used():
    at_home = {entry.partition("=")[0] for names in HOMES.values() for entry in names.split()}
    used = {entry.partition("=")[0] for names in MODULES.values() for entry in names.split()}
    commands = {"__version__"} | {
        name for name in used if name.startswith("command") or name.endswith("_command")
    }
    assert at_home == used - commands


# What programs of Megatron-Energon may do more with than programs of ours.
OTHERS = {
    *("TaskEncoder", "DefaultTaskEncoder"),
    *("get_train_dataset", "get_val_dataset", "get_val_datasets"),
    *("SavableDataset", "traverse_metadataset", "__version__"),
    *("BasicDataLoader", "SavableDataLoader", "get_loader", "get_savable_loader", "WorkerConfig"),
    *("Batch", "Cooker", "Sample"),
    *(name for name in sample_types() if name != "TokensSample"),
}


OTHER_CACHES = {"FileCacheLazy", "FileStoreCachePool"}


def test_names_of_energon_are_the_same_objects_but_for_a_few():
    own = {entry.partition("=")[0] for entry in MODULES[""].split()}
    assert own & set(energon.__all__) == OTHERS
    for name in sorted(OTHERS - {"SavableDataset", "__version__"}):
        ours, theirs = getattr(energon, name), getattr(megatron.energon, name)
        assert ours is not theirs
        assert not inspect.isclass(ours) or issubclass(theirs, ours)
        assert inspect.isclass(ours) or takes_as_much(theirs, ours)


def takes_as_much(theirs, ours):
    known = inspect.signature(theirs).parameters
    return all(
        known[name].default == each.default and known[name].kind is each.kind
        for name, each in inspect.signature(ours).parameters.items()
        if name not in ("must_exist", "verdict_seconds", "context_parallel")
        and not name.startswith("trace")
    )


@pytest.mark.parametrize("module", modules())
def test_inspect_knows_modules_and_what_is_in_them(module):
    found = sys.modules.get(module) or import_module(module)
    assert inspect.getsource(found) == Path(names.__file__).read_text()
    for name in found.__all__:
        if inspect.isclass(kind := getattr(found, name)):
            assert inspect.getmodule(kind).__name__.startswith("energon")


def test_objects_are_pickled_and_modules_reloaded_in_a_fresh_process(tmp_path):
    from megatron.energon.flavors.captioning import CaptioningSample

    sample = CaptioningSample(__key__="a", __restore_key__=(), image=1, caption="b")
    (tmp_path / "sample").write_bytes(pickle.dumps(sample))
    run = (
        "import pickle, sys, importlib\n"
        "import megatron.energon.flavors.captioning as module\n"
        "sample = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert type(sample) is module.CaptioningSample, sample\n"
        "assert importlib.reload(module).CaptioningSample is type(sample)\n"
    )
    subprocess.run([sys.executable, "-c", run, str(tmp_path / "sample")], check=True)


def test_old_pickles_name_classes_by_the_path_of_megatron_energon():
    data = b"cmegatron.energon.flavors.captioning\nCaptioningSample\n."
    assert issubclass(pickle.loads(data), energon.CaptioningSample)


@pytest.mark.parametrize(
    "module", ["", *(name.removeprefix("megatron.energon.") for name in modules())]
)
def test_stubs_have_the_names_of_the_module(module):
    tree = ast.parse(stub_of(module))
    imported = {
        alias.asname: getattr(import_module(node.module), alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = import_module(f"megatron.energon.{module}".rstrip("."))
    assert imported == {name: getattr(found, name) for name in found.__all__}


@pytest.mark.slow
def test_type_checkers_read_the_stubs(tmp_path):
    write_stubs(tmp_path / "megatron" / "energon")
    program = tmp_path / "program.py"
    program.write_text(
        "from megatron.energon.task_encoder.base import DefaultTaskEncoder\n"
        "from megatron.energon import WorkerConfig, nothing\n"
        "reveal_type(WorkerConfig)\n"
        "class Mine(DefaultTaskEncoder[int, int, int, int]): ...\n"
    )
    (tmp_path / "energon").symlink_to(Path(energon.__file__).parent)
    # Without site-packages, where an editable installation of this checkout would come first.
    options = "--no-incremental --no-site-packages --follow-imports=silent"
    options += " --ignore-missing-imports --explicit-package-bases --namespace-packages"
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options.split(), str(program)],
        env={**os.environ, "MYPYPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert "Revealed type is" in checked.stdout
    assert "WorkerConfig" in checked.stdout
    errors = [line for line in checked.stdout.splitlines() if " error: " in line]
    assert len(errors) == 1
    assert 'has no attribute "nothing"' in errors[0]
