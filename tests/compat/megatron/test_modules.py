"""Modules that programs import beside what is documented, and classes that they build by hand."""

from __future__ import annotations

import json
import logging
import pickle
import random
import re
import shutil
import time
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import energon
import megatron.energon.dataset_config as dataset_config
from megatron.energon import (
    BasicDataLoader,
    ConfigError,
    DecodeFileStore,
    DefaultTaskEncoder,
    FileStore,
    MetadatasetV2,
    Sample,
    SampleDecoder,
    SavableDataLoader,
    SecurityError,
    SkipSample,
    SourceInfo,
    StandardWebdatasetFactory,
    WatchdogDataset,
    WorkerConfig,
    edataclass,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
    traverse_metadataset,
)
from megatron.energon.bracecollapse import collapse
from megatron.energon.cli import main
from megatron.energon.errors import FatalSampleError, format_sample_compact
from megatron.energon.eyaml import load_yaml
from megatron.energon.flavors.base_dataset import add_sample_restore_key, set_sample_restore_key
from megatron.energon.flavors.captioning import CaptioningSample, EPath
from megatron.energon.flavors.jsonl.ijsonl import IJsonlIndexReader, IJsonlIndexWriter
from megatron.energon.flavors.webdataset.metadata import (
    EnergonDatasetType,
    check_dataset_info_present,
    get_dataset_info,
    get_dataset_type,
)
from megatron.energon.flavors.webdataset.sharder import Sharder
from megatron.energon.flavors.webdataset.structs import DatasetSubset
from megatron.energon.media.extractor import MediaFilterConfig, MediaFilterStrategy
from megatron.energon.media.metadata import ImageMetadata, MediaMetadataBase, MediaMetadataType
from megatron.energon.module_loader import ModuleLoader
from megatron.energon.rng import SystemRng, WorkerRng
from megatron.energon.savable_loader import SavableDataLoaderState
from megatron.energon.state import FlexState
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless
from megatron.energon.task_encoder.cooking import (
    cooker,
    get_cooker_need_cache,
    get_cooker_need_primary,
)
from megatron.energon.tools.checkpoint import command_info, command_redist
from megatron.energon.typed_converter import JsonParser, JsonValueError
from megatron.energon.wrappers.base import SampleIndex, get_sample_restore_key
from megatron.energon.wrappers.buffer import SavableSampleBuffer
from tests.commands import run_python
from tests.datasets import CAPTIONING, make_captions, make_crude


class Texts(DefaultTaskEncoder):
    decoder = SampleDecoder()

    def batch(self, samples):
        return [sample["__key__"] for sample in samples]


def config(num_workers=0, **more):
    return WorkerConfig(rank=0, world_size=1, num_workers=num_workers, **more)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("texts") / "ds", [9, 8])


def train(root, **settings):
    defaults = {"worker_config": config(), "batch_size": 3, "task_encoder": Texts()}
    return get_train_dataset(root, **{**defaults, **settings})


class Color(Enum):
    RED = 1


@dataclass
class Inner:
    size: int


@dataclass
class Settings:
    path: EPath
    ratio: float = 1.0
    color: Color = Color.RED
    sizes: list[int] | None = None
    inner: Inner | None = None
    kind: type[Sample] | None = None


def test_documents_become_objects_of_types():
    parser = JsonParser(strict=True)
    document = {
        "path": "/data",
        "ratio": 2,
        "color": "red",
        "sizes": [1, 2],
        "inner": {"size": 3},
        "kind": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
    }
    found = parser.raw_to_typed(document, Settings)
    assert found == Settings(EPath("/data"), 2.0, Color.RED, [1, 2], Inner(3), CaptioningSample)
    assert parser.raw_to_instance(document, Settings) == found
    with pytest.raises(JsonValueError, match="expected int, found 'x'"):
        parser.raw_to_typed({"path": "/data", "sizes": ["x"]}, Settings)
    with pytest.raises(JsonValueError, match="colour"):
        parser.raw_to_typed({"path": "/data", "colour": 1}, Settings)
    assert JsonParser(strict=False).raw_to_typed({"path": "/a", "colour": 1}, Settings).ratio == 1


@pytest.mark.parametrize("kind", [object, dict, Settings])
def test_documents_cannot_name_what_was_not_asked_for(kind):
    with pytest.raises(SecurityError):
        JsonParser().raw_to_instance({"__module__": "subprocess", "__class__": "Popen"}, kind)
    with pytest.raises(SecurityError):
        JsonParser().raw_to_instance({"__module__": "os", "__function__": "system"}, kind)


def test_samples_are_divided_among_workers():
    @dataclass
    class Shard:
        count: int

    shards = [Shard(10), Shard(3), Shard(12)]
    found = []
    for rank in range(2):
        mine = WorkerConfig(rank=rank, world_size=2, num_workers=2)
        found += Sharder.shard_workers(shards, mine, max_samples_per_sequence=4)
    assert [each[0] for each in found] == [0, 7, 13, 19]
    assert found[0] == (0, 3, 7)
    assert found[1] == (7, 10, 13)
    subset = DatasetSubset(range=(0.0, 0.5), absolute_range=(5, None))
    one = WorkerConfig(rank=0, world_size=1, num_workers=1)
    assert Sharder.slice_workers(25, one, max_samples_per_sequence=None, subset=subset) == (
        (5, 15),
    )
    assert Sharder.split_samples_to_workers(0, 7, config(4), rotation_offset=1) == [0, 1, 3, 5, 7]


def test_random_numbers_of_workers_are_saved_and_restored():
    rng = WorkerRng(config())
    numbers = [rng.randbelow(1000) for _ in range(5)]
    state = rng.save_state()
    more = [rng.randbelow(1000), *rng.shuffle([1, 2, 3]), rng.choice_idx(torch.tensor([0.5, 0.5]))]
    again = WorkerRng(config())
    assert [again.randbelow(1000) for _ in range(5)] == numbers
    again.restore_state(FlexState(state))
    assert more == [
        again.randbelow(1000),
        *again.shuffle([1, 2, 3]),
        again.choice_idx(torch.tensor([0.5, 0.5])),
    ]
    saved = SystemRng.save_state()
    first = random.random(), torch.rand(1)
    SystemRng.restore_state(saved)
    assert (random.random(), torch.rand(1)) == first
    SystemRng.seed_args("a", 1)
    first = random.random()
    SystemRng.seed_args("a", 1)
    assert random.random() == first


def test_indexes_of_json_lines_are_read_and_written(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n')
    with IJsonlIndexWriter(EPath(file)) as writer:
        for offset in (0, 9, 18):
            writer.append(offset)
    with IJsonlIndexReader(EPath(file)) as reader:
        assert list(reader) == [0, 9, 18]
        assert reader[1] == 9
    assert IJsonlIndexReader.count_samples(file) == 2
    assert IJsonlIndexReader.size(file) == 18
    assert len(get_val_dataset(file, worker_config=config(), batch_size=1)) == 2
    assert get_dataset_type(file) is EnergonDatasetType.JSONL


def test_what_lies_at_a_path_is_told(root, tmp_path):
    assert get_dataset_type(EPath(root)) is EnergonDatasetType.WEBDATASET
    assert get_dataset_type(tmp_path) is EnergonDatasetType.INVALID
    assert check_dataset_info_present(root)
    assert not check_dataset_info_present(tmp_path)
    assert get_dataset_info(root)["shard_counts"] == {"000.tar": 9, "001.tar": 8}


def test_small_functions(tmp_path):
    assert load_yaml(b"a: [1, {b: c}]") == {"a": [1, {"b": "c"}]}
    with (tmp_path / "a.yaml").open("w+") as file:
        file.write("a: 1")
        file.seek(0)
        assert dataset_config.load_yaml(file) == {"a": 1}
    assert collapse(["a/x_2.tar", "a/x_1.tar"], keep_order=False) == ["a/x_{1..2}.tar"]
    sample = set_sample_restore_key({"__restore_key__": ()}, 1, 2, src=None)
    assert get_sample_restore_key(add_sample_restore_key(sample, "x")) == ("x", 1, 2)
    with pytest.raises(ConfigError, match="carries no restore key"):
        set_sample_restore_key({}, 1, fail_otherwise=True)
    text = format_sample_compact({"image": torch.zeros(2, 3), "text": "x" * 99})
    assert "(2, 3)" in text
    assert "..." in text
    with pytest.raises(SecurityError, match="code of a dataset"):
        ModuleLoader().get_function("a.py:f", relative_path=tmp_path)
    (tmp_path / "a.py").write_text("def f(): return 3")
    assert ModuleLoader(allow=("code",)).get_function("a.py:f", relative_path=tmp_path)() == 3


def test_marks_of_hooks_are_told():
    @stateless(failure_tolerance=7)
    def hook(sample):
        return sample

    assert get_stateless(hook)
    assert not get_stateless(print)
    assert get_failure_tolerance(hook, 3) == 7
    assert get_failure_tolerance(print, 3) == 3


def test_commands_are_objects():
    assert command_info.name == "info"
    assert command_redist.name == "redist"
    names = "analyze_debug checkpoint info lint mount prepare prepare_media preview"
    for name in names.split():
        assert getattr(main, f"{name}_command").callback is not None or name == "checkpoint"


def test_media_filters_are_made_of_options(tmp_path):
    assert MediaFilterConfig.parse("*.jpg, *.png", False, False) == MediaFilterConfig(
        MediaFilterStrategy.GLOB, ["*.jpg", "*.png"]
    )
    with pytest.raises(ValueError, match="exactly one"):
        MediaFilterConfig.parse("*.jpg", True, False)


def test_a_program_may_stand_between_getters_and_load_config(tmp_path, monkeypatch):
    captions = make_captions(tmp_path / "captions", [4, 3])
    seen = []
    original = dataset_config.load_config

    def guarded(path, *, default_type, default_kwargs=None, **more):
        seen.append((path.name, default_type, default_kwargs["split_part"]))
        return original(path, default_type=default_type, default_kwargs=default_kwargs, **more)

    plain = train(captions, task_encoder=None, max_samples_per_sequence=1)
    before = [batch.__key__ for batch in islice(get_loader(plain), 6)]
    monkeypatch.setattr(dataset_config, "load_config", guarded)
    dataset = train(captions, task_encoder=None, max_samples_per_sequence=1)
    assert [batch.__key__ for batch in islice(get_loader(dataset), 6)] == before
    assert seen == [("dataset.yaml", StandardWebdatasetFactory, "train")]

    def refuse(path, **arguments):
        raise PermissionError(path)

    monkeypatch.setattr(dataset_config, "load_config", refuse)
    with pytest.raises(PermissionError):
        train(captions)


def test_arguments_that_getters_do_not_know_are_for_the_datasets(tmp_path):
    captions = make_captions(tmp_path / "captions", [6, 5])
    settings = {"split_part": "train", "worker_config": config(), "batch_size": 1}
    assert len(get_val_dataset(captions, subset=(2, 5), **settings)) == 3
    assert len(get_val_dataset(captions, sample_type=CaptioningSample, **settings)) == 11
    with pytest.raises(AssertionError, match="CaptioningSample"):
        get_val_dataset(captions, sample_type=torch.Tensor, **settings)
    with pytest.raises(ConfigError, match="subfield"):
        get_val_dataset(captions, subfield=1, **settings)
    with pytest.raises(TypeError, match="did you mean 'batch_size'"):
        get_val_dataset(captions, batchsize=1, **settings)
    opened = dataset_config.get_dataset_from_config(
        captions, worker_config=config(), part_filter=None, subset=(0, 4)
    )
    assert len(opened) == 4
    assert CAPTIONING["caption"] == "txt"


def test_worker_configs_may_change_and_are_compared_by_their_place():
    first = config(2)
    first.seed_offset = 5
    assert first == config(2)
    assert first != config(1)
    assert first.seed_offset == 5
    assert first.global_error_handler is not None
    known = {"rank": 0, "world_size": 1, "num_workers": 2, "data_parallel_group": None}
    assert config(2).config() == known
    assert config(2, lanes=4).config() == {**known, "lanes": 4}
    assert WorkerConfig.default_worker_config(0) == config()
    assert config(2).worker_seed(1) != config(2).worker_seed(0)
    first.worker_activate(7)
    try:
        assert WorkerConfig.active_worker_config is first
        assert first.active_worker_sample_index == 7
        with SampleIndex(first, src=None).ctx(9) as number:
            assert first.active_worker_sample_index == number == 9
            assert first.active_worker_batch_index == 7
    finally:
        first.worker_deactivate()


class Seeded(DefaultTaskEncoder):
    def encode_sample(self, sample):
        active = WorkerConfig.active_worker_config
        assert active.seed_offset == 3
        return {
            "__key__": sample["__key__"],
            "seed": active.worker_seed(),
            "worker": active.rank_worker_id(),
            "number": active.active_worker_sample_index == self.current_sample_index,
        }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_hooks_ask_where_they_run(root, num_workers):
    dataset = train(
        root, worker_config=config(num_workers, seed_offset=3, lanes=2), task_encoder=Seeded()
    )
    with get_savable_loader(dataset) as loader:
        batches = list(islice(loader, 4))
    assert all(all(batch["number"]) for batch in batches)
    seeds = [batch["seed"] for batch in batches]
    assert seeds[0] == seeds[2]
    assert seeds[0] != seeds[1]
    assert {worker for batch in batches for worker in batch["worker"]} <= {0, 1}


def test_loaders_are_built_by_their_classes_and_are_those_of_torch(root):
    dataset = train(root)
    loader = SavableDataLoader(
        dataset, checkpoint_every_sec=60, n_checkpoints=3, gc_freeze_at_start=True
    )
    assert isinstance(loader, DataLoader)
    assert isinstance(get_loader(dataset), DataLoader)
    assert loader.num_workers == 0
    assert loader.batch_size is None
    assert loader.prefetch_factor is None
    assert loader.id != BasicDataLoader(dataset).next_id()
    batches = list(islice(loader, 3))
    state = loader.save_state_rank()
    loader.restore_state_rank(None)
    more = list(islice(loader, 2))
    with SavableDataLoader[int](dataset) as other:
        other.restore_state_rank(state)
        assert list(islice(other, 2)) == more
    assert batches[0] != more[0]


class Slow(DefaultTaskEncoder):
    def encode_sample(self, sample):
        if sample["__key__"] == "s3":
            for _ in range(16):
                time.sleep(0.05)
        return sample


@pytest.mark.parametrize("fail", [False, True])
def test_hanging_in_the_training_process_is_noticed(root, caplog, fail):
    dataset = get_val_dataset(
        root, worker_config=config(), batch_size=1, task_encoder=Slow(), split_part="train"
    )
    loader = get_loader(dataset, watchdog_timeout_seconds=0.3, fail_on_timeout=fail)
    with caplog.at_level(logging.WARNING):
        if fail:
            with pytest.raises(TimeoutError, match="a batch takes longer"):
                list(loader)
        else:
            assert len(list(loader)) == 17
    triggered = next(each for each in caplog.messages if "Watchdog triggered" in each)
    assert re.search(r"^  File .*, in encode_sample$", triggered, re.MULTILINE)


def test_a_watchdog_of_a_program_calls_its_trigger(root, caplog):
    triggered = []

    class Mine(WatchdogDataset):
        def _watchdog_trigger(self):
            triggered.append(self.timeout_seconds)

    dataset = get_val_dataset(
        root, worker_config=config(), batch_size=1, task_encoder=Slow(), split_part="train"
    )
    watched = Mine(dataset, worker_config=config(), timeout_seconds=0.3)
    assert len(list(get_loader(watched, watchdog_timeout_seconds=None))) == 17
    assert triggered == [0.3]


class Upper(FileStore):
    def __getitem__(self, key):
        return key.encode().upper(), SourceInfo("store", key, None, (key,))


def test_a_store_of_a_program_needs_only_getitem():
    sample = {"__sources__": ()}
    assert Upper().get(key="a.txt", sample=sample) == b"A.TXT"
    assert sample["__sources__"][0].index == "a.txt"
    assert Upper().get_raw("a")[0] == b"A"
    assert DecodeFileStore(Upper(), decoder=SampleDecoder()).get("a.txt") == "A.TXT"
    assert Upper().get_path().endswith("Upper")
    with pytest.raises(NotImplementedError, match="has neither __getitem__"):
        FileStore().get("a")


def test_buffers_hold_items(root):
    dataset = train(root)
    buffer = SavableSampleBuffer(dataset, config())
    buffer.extend([1, 2])
    assert [*islice(buffer.append_iter(), 1)]
    assert len(buffer) == 3
    assert buffer.pop(0) == 1
    assert buffer.flush()[0][0] == 2
    assert not len(buffer)


@edataclass
class Bare(Sample):
    pass


def test_errors_of_hooks_are_those_of_programs():
    assert issubclass(FatalSampleError, ValueError)
    assert issubclass(SkipSample, Exception)
    assert issubclass(Bare, Sample)


VERSIONS = """
import importlib.metadata, site, sys
site.addsitedir(sys.argv[1])  # which runs its .pth files, as those of an installation are
before = importlib.metadata.version("megatron-energon")
import megatron.energon
after = importlib.metadata.version("megatron_energon")
assert before == after == megatron.energon.__version__, (before, after)
assert "energon-loader" in importlib.metadata.metadata("Megatron-Energon")["Summary"]
assert "megatron-energon" not in {each.name for each in importlib.metadata.distributions()}
try:
    importlib.metadata.version("megatron-energons")
except importlib.metadata.PackageNotFoundError:
    print(before)
"""


def test_versions_are_those_of_the_release_whose_programs_run():
    source = Path(energon.__file__).parents[1]
    done = run_python(VERSIONS, source)
    assert done.stdout.startswith("7."), done.stderr


def test_metadatasets_are_given_as_splits(root, tmp_path):
    blend = {"blend": [{"path": str(root), "weight": 2, "aux": {"media": "filesystem:///data"}}]}
    (tmp_path / "blend.yaml").write_text(
        json.dumps(
            {
                "__module__": "megatron.energon",
                "__class__": "MetadatasetV2",
                "splits": {"train": blend},
            }
        )
    )
    (found,) = traverse_metadataset(tmp_path / "blend.yaml", split_part="train")
    assert found.path == EPath(root)
    assert found.path.name == "ds"
    assert found.aux == {"media": EPath("/data")}
    splits = {"train": {"blend": [{"path": root.name, "weight": 1}]}}
    loader = MetadatasetV2(path=EPath(root.parent / "a.yaml"), splits=splits)
    loader.post_initialize()
    dataset = loader.get_dataset(split_part="train", training=False, worker_config=config())
    assert dataset.paths == [EPath(root)]
    (reference,) = loader.traverse(split_part="train")
    assert reference.path == EPath(root)


def test_the_subflavor_of_old_documents_comes_first_and_an_explicit_one_wins(root):
    entry = {"path": str(root), "subflavor": "x", "subflavors": {"b": 1}}
    document = {
        "__module__": "megatron.energon",
        "__class__": "Metadataset",
        "splits": {"train": {"datasets": [entry]}},
    }

    def subflavors():
        batch = next(iter(get_loader(train(document, task_encoder=None))))
        return batch["__subflavors__"][0]

    assert list(subflavors().items())[-2:] == [("__subflavor__", "x"), ("b", 1)]
    entry["subflavors"]["__subflavor__"] = "y"
    assert subflavors()["__subflavor__"] == "y"


def test_states_are_told_from_other_dicts(root):
    assert isinstance(get_savable_loader(train(root)).save_state_rank(), SavableDataLoaderState)
    assert not isinstance({}, SavableDataLoaderState)


def test_media_metadata_are_plain_data():
    image = ImageMetadata(width=3, height=2, format="PNG", mode="RGB")
    assert ImageMetadata.from_dict({**image.to_dict(), "later": 1}) == image
    assert image.metadata_type is MediaMetadataType.IMAGE
    assert isinstance(image, MediaMetadataBase)
    assert SampleDecoder().config()["image_decode"] == "torchrgb"


def test_a_key_may_be_there_twice_where_people_append_to_files(root, tmp_path, caplog):
    copy = tmp_path / "ds"
    shutil.copytree(root, copy)
    split = copy / ".nv-meta/split.yaml"
    split.write_text(split.read_text() + "\nexclude:\n  - 000.tar\n")
    assert "exclude" in split.read_text()
    with caplog.at_level(logging.WARNING):
        found = get_val_dataset(
            copy, split_part="train", worker_config=config(), batch_size=1, task_encoder=Texts()
        )
    assert len(found) == 8
    assert "the last one is used" in caplog.text


def test_smaller_batches_continue_with_the_samples_of_each_global_batch(root):
    def ranks(size):
        placed = [WorkerConfig(rank=n, world_size=2, num_workers=0, lanes=4) for n in range(2)]
        return [
            get_savable_loader(train(root, worker_config=place, batch_size=size))
            for place in placed
        ]

    def global_batches(loaders, size):
        steps = 8 // size // 2  # of each rank for a global batch of 8
        return [
            sorted(key for each in loaders for keys in islice(each, steps) for key in keys)
            for _ in range(3)
        ]

    first = ranks(2)
    for each in first:
        list(islice(each, 2))
    states = [each.save_state_rank() for each in first]
    smaller = ranks(1)
    for each, state in zip(smaller, states, strict=True):
        each.restore_state_rank(state)
    assert global_batches(smaller, 1) == global_batches(first, 2)


def test_paths_stay_those_of_programs_from_step_to_step():
    path = EPath("s3://bucket/coco") / "shards" / "a.tar"
    assert [path.display_name, path.parent.display_name] == ["a.tar", "shards"]
    assert pickle.loads(pickle.dumps(path)).display_name == "a.tar"
    assert path == energon.EPath("s3://bucket/coco/shards/a.tar")
    assert isinstance(energon.EPath("coco"), EPath)


def test_marks_of_cookers_are_read_back():
    @cooker(need_cache=True)
    def with_cache(sample, cache):
        return sample

    @cooker(need_primary=True)
    def with_primary(sample, primary):
        return sample

    assert [get_cooker_need_cache(each) for each in (with_cache, with_primary)] == [True, False]
    assert [get_cooker_need_primary(each) for each in (with_cache, with_primary)] == [False, True]
