"""Every public name of Megatron-Energon exists here, and takes the same arguments."""

from __future__ import annotations

from fnmatch import fnmatchcase

from megatron.energon import __version__
from tests.compat.names import differences, listed, listed_older
from tests.compat.peers import ROOT

DIFFERENCES = ROOT / "docs" / "migration.md"

# What is missing or incompatible on purpose: patterns for names below `megatron.energon`, by the
# beginning of the entry of docs/migration.md about them.
EXCEPTIONS = {
    "Internal modules": """
        fork_hook local_copy retry_stream watchdog av.av_init av.av_reader
        epathlib.rclone_config flavors.jsonl.ijsonl_reader flavors.jsonl.jsonl_prepare
        flavors.webdataset.aggregator_pool flavors.webdataset.itar
        flavors.webdataset.itar_reader
        flavors.webdataset.sample_loader flavors.webdataset.thread_local_sqlite
        metadataset.join_dataset_loader transforms.common
    """,
    "Readers and writers of indexes and shards": """
        *.ThreadLocalSqlite *.ensure_local_copy *.JoinIndex* *.SqliteIndex* *.SqliteITar*
        *.ITar* *.RawSampleData *.WebdatasetSampleLoaderDataset
        *.AggregatorPool *.BaseAggregator *.TarIndexWriter *.INDEX_BATCH_SIZE *.Index*
        *.JsonlPreparator *.IJsonlReader
        *.IJsonlFile *.IJsonlSamplePointer *.CacheEntry *.CachedIJsonl* *.JOIN_INDEX_FILENAME
        *.TYPE_CHECKING *.TarIndexReader *.AVIndexMode *.AVProbeIndex *.AVReader*
        *.AV_DECODE_AVAILABLE *.av_open
        *CrudeJsonlDatasetFactory.iter_dataset_content *.WebdatasetMeta *.get_info_shard_files
    """,
    "File stores": """
        *.JsonlFileStore *.JsonlFileStore.* *.WebdatasetFileStore.* *.FileStoreWrapper
    """,
    "Caches": "*.FileCacheLazy *.CacheFileLazy *.ForkMixin",
    "Nodes of metadatasets": """
        *Mixin *.Subset.as_dataset_subset *.Subset.merge *.JoinDatasetLoader *.JoinedDatasetInfo
        *.MockJsonParser
    """,
    "States": """
        savable_loader.Sav* savable_loader.Simple* *.State.extend *.ExtendableDataclassMixin
        wrappers.*Dataset.save_state wrappers.*Dataset.restore_state
        wrappers.buffer.SavableSampleBuffer.* wrappers.base.SampleIndex.actives
        wrappers.group_batch_dataset.*
    """,
    "Garbage collection and watchdogs": """
        *.GC_DEFAULT_EVERY_N_ITER *.GcFreezeError *.gc_init_worker *.Watchdog
        *.DEBUG_SHARD_PRINT
    """,
    "Modules of commands": """
        tools.*.* cli.main.print_version
    """,
    "Matrices of transforms": """
        transforms.*Mapper.* transforms.custom.CustomTransform.* transforms.merge.pil_modes_mapping
    """,
    "Media": """
        *.MediaFilterConfig.*
    """,
    "Helpers": """
        *.field_access *.split_field_access *.DEFAULT_DECODER *.GuessingHandlerWrapper
        *.legacy_handler *.load_yaml_json *.to_json_object *.deprecated
        *.RESERVED_POSIX_PROFILE_NAME
        *.JoinedWebdatasetFactory.load_sample *.JoinedWebdatasetFactory.shuffle_over_epochs
    """,
    "`JsonParser.override`": "typed_converter.JsonParser.*",
}

# The same for versions 5 and 6, by the beginning of the entry of docs/migration.md.
OLDER_EXCEPTIONS = {
    "Merging of states": "*State.extend *.merge_states *.SampleIndex.current_idx",
    "Keys for `restore_sample`": "*.restore_sample",
    "Handlers of datasets": """
        *.error_handler *.handler *.sample_error_handler *.reraise_exception
        *.IterMapDataset
    """,
    "`info_config`": """
        *.BaseWebdatasetFactory
    """,
    "Nodes of documents": """
        *.prepare *.post_initialize *.subflavor *.dataset_config *.shuffle_over_epochs_multiplier
        *.split_config *.split_part *.subflavors *.weight *.join_method *.repetitions
        metadataset.*DatasetReference metadataset.*.MetadatasetJoin *.Metadataset *.MetadatasetV2
        *.DatasetLoader
    """,
    "`Cooker(condition=)`": "*.Cooker *.Cooker.is_match",
    "Stores behind paths": "*.EPath.create_s3fs_from_rclone_remote *.EPath.relpath *.MSCFileSystem",
    "Structures of shards": """
        *.split_samples_to_workers *.ShardInfo *.ShardInfo.byte_offset *.ShardInfo.byte_size
        *.WebdatasetSplits *.single_shard_reader
    """,
    "Seeking in videos": "av.fastseek av.fastseek.* av.decode_av_frames",
    "Bases of wrappers": "*.BaseSingleWrapperDataset *.BaseWrapperDataset",
    "`dataclass_slots`": "dataclass_slots.dataclass_slots",
}


def differing(names):
    prefix = "megatron.energon."
    every = differences(names, "megatron.energon")
    return {name.removeprefix(prefix): problem for name, problem in every.items()}


def found():
    return differing(listed("megatron.energon"))


def patterns_of(exceptions):
    return [pattern for text in exceptions.values() for pattern in text.split()]


def unexpected(every, patterns):
    return {
        name: problem
        for name, problem in every.items()
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def test_every_public_name_is_there_with_compatible_parameters():
    every, patterns = found(), patterns_of(EXCEPTIONS)
    assert unexpected(every, patterns) == {}
    assert [each for each in patterns if not any(fnmatchcase(n, each) for n in every)] == []


def test_public_names_of_older_versions_are_there_with_compatible_parameters():
    older, patterns = listed_older(), patterns_of(OLDER_EXCEPTIONS)
    assert [names["version"] for names in older] == ["5.0.0", "5.2.0", "6.0.0"]
    every = {name: problem for names in older for name, problem in differing(names).items()}
    assert unexpected(every, [*patterns, *patterns_of(EXCEPTIONS)]) == {}
    assert [each for each in patterns if not any(fnmatchcase(n, each) for n in every)] == []


def test_all_names_of_the_package_itself_are_there():
    modules = listed("megatron.energon")["modules"]
    top = modules["megatron.energon"]
    assert len(top) > 100
    assert [name for name in found() if name in top and top[name]["kind"] != "module"] == []
    assert sum(map(len, modules.values())) > 800


def test_exceptions_are_listed_in_the_documentation():
    text = DIFFERENCES.read_text()
    assert [each for each in EXCEPTIONS if f"- **{each}**" not in text] == []
    assert [each for each in OLDER_EXCEPTIONS if f"- **{each}**" not in text] == []


def test_the_list_is_of_the_release_that_is_named():
    assert listed("megatron.energon")["version"] == __version__
