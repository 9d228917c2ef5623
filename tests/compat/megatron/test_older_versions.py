"""Programs for Megatron-Energon 5 and 6: arguments and names that version 7 no longer has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import pytest

import energon
from energon import ConfigError, messages
from megatron.energon import (
    Batch,
    BatchDataset,
    BlendDataset,
    CaptioningSample,
    Cooker,
    CrudeWebdataset,
    DefaultTaskEncoder,
    GcDataset,
    JoinedWebdatasetFactory,
    MapDataset,
    RepeatDataset,
    Sample,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    load_dataset,
    traverse_metadataset,
)
from megatron.energon.dataset_config import load_config
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset import VideoData
from megatron.energon.media.extractor import MediaFilterConfig
from megatron.energon.media.filesystem_prepare import prepare_filesystem_dataset
from megatron.energon.savable_loader import SavableDataLoaderState
from megatron.energon.wrappers.map_dataset import MapState
from tests.datasets import make_crude

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("older") / "ds", [6, 4])


def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


class Texts(DefaultTaskEncoder):
    cookers = (Cooker(cook),)


def keys(path, encoder, **settings):
    dataset = get_val_dataset(
        path,
        split_part="train",
        worker_config=CONFIG,
        batch_size=1,
        task_encoder=encoder,
        **settings,
    )
    return [key for batch in get_loader(dataset) for key in batch.__key__]


@dataclass
class Own(Sample):
    """Declares all fields anew, as Megatron-LM does."""

    __key__: str
    __restore_key__: tuple
    __subflavor__: str
    __subflavors__: dict
    text: str


@pytest.mark.parametrize("kind", [TextSample, Own])
def test_samples_take_a_subflavor(kind):
    sample = kind(
        __key__="a", __restore_key__=(), __subflavor__="b", __subflavors__={"c": 1}, text="x"
    )
    assert (sample.__subflavor__, sample.__subflavors__) == ("b", {"c": 1})
    assert kind.derive_from(sample, text="y").__subflavor__ == "b"
    assert isinstance(sample, Sample)
    assert isinstance(sample, energon.Sample)


def test_samples_of_datasets_count_as_those_of_the_namespace():
    plain = energon.CaptioningSample(__key__="a", image=None, caption="")
    assert isinstance(plain, CaptioningSample)
    assert isinstance(plain, Sample)
    assert not isinstance(plain, TextSample)
    assert not isinstance(plain, Own)
    assert plain.__subflavor__ is None
    assert issubclass(energon.CaptioningSample, CaptioningSample)


def test_samples_have_the_subflavor_of_their_document(root):
    found = []

    class Encoder(Texts):
        def encode_sample(self, sample):
            found.append(sample.__subflavor__)
            return sample

    document = {
        "__module__": "megatron.energon",
        "__class__": "Metadataset",
        "splits": {"train": {"datasets": [{"path": str(root), "subflavor": "old"}]}},
    }
    assert len(keys(document, Encoder())) == len(found) == 10
    # Cookers copy the subflavors, of which it is one.
    assert set(found) == {None}
    energon_sample = energon.TextSample(__key__="a", text="", __subflavors__={"__subflavor__": "x"})
    assert energon_sample.__subflavor__ == "x"


def test_batches_need_no_keys_and_have_all_fields_in_vars():
    @dataclass
    class Texts(Batch):
        __keys__: list[str]
        texts: list[str]

    batch = Texts(__keys__=["a"], texts=["x"])
    assert vars(batch) == {
        "__key__": [],
        "__restore_key__": (),
        "__subflavors__": None,
        "__sources__": None,
        "__keys__": ["a"],
        "texts": ["x"],
    }
    assert isinstance(energon.Batch(__key__=["a"]), Batch)


def test_datasets_are_pairs_of_a_factory_and_its_weight(root):
    seen = []

    class Blends(Texts):
        def build_train_datasets(self, *, datasets, worker_config, batch_size, **settings):
            branches = []
            for dataset, weight in datasets:
                seen.append((dataset.path.name, weight))
                repeated = RepeatDataset(dataset.build(), worker_config=worker_config)
                branches.append((repeated, weight))
            blend = BlendDataset(*branches, worker_config=worker_config)
            return BatchDataset(blend, batch_size, list, worker_config=worker_config)

    entries = [{"path": str(root), "weight": weight} for weight in (1, 3)]
    dataset = get_train_dataset(
        {"splits": {"train": {"blend": entries}}},
        worker_config=CONFIG,
        batch_size=4,
        task_encoder=Blends(),
    )
    assert [len(batch) for batch in islice(get_loader(dataset), 3)] == [4] * 3
    assert seen == [("ds", 0.25), ("ds", 0.75)]
    mode, loaded = load_dataset(root).get_datasets(training=True, split_part="train")
    assert (mode.name, [weight for _, weight in loaded]) == ("NONE", [None])


def test_builders_and_cookers_of_version_5(root):
    called = []

    class Builds(Texts):
        def build_cook_crude_sample(self, dataset, *, worker_config):
            called.append("build")
            return super().build_cook_crude_sample(dataset, worker_config=worker_config)

        def cook_crude_sample(self, sample):
            called.append(sample["__key__"])
            return super().cook_crude_sample(sample)

    assert keys(root, Builds()) == keys(root, Texts())
    assert called[0] == "build"
    assert len(called) == 11


def test_a_cooker_for_a_subflavor(root):
    def fail(sample):
        raise AssertionError

    class Encoder(DefaultTaskEncoder):
        cookers = (Cooker(fail, is_subflavor="other"), Cooker(cook, is_subflavor="a"))

    document = {
        "__module__": "megatron.energon",
        "__class__": "Metadataset",
        "splits": {"train": {"datasets": [{"path": str(root), "subflavor": "a"}]}},
    }
    assert len(keys(document, Encoder())) == 10
    with pytest.raises(ConfigError, match="whose function decides"):
        Cooker(cook, condition=bool)


@pytest.mark.parametrize("with_sources", [False, True])
def test_wrappers_pass_failures_to_their_own_handler(root, with_sources):
    failures = []

    def two(error, sample):
        failures.append((str(error), sample.text))

    def three(error, sample, sources):
        failures.append((str(error), sample.text))

    def fail(sample):
        if sample.text == "text 3":
            raise ValueError("no")
        return sample

    samples = get_val_dataset(
        root, split_part="train", worker_config=CONFIG, batch_size=None, task_encoder=Texts()
    )
    handler = three if with_sources else two
    mapped = MapDataset(samples, fail, error_handler=handler, worker_config=CONFIG)
    assert len(list(mapped)) == 9
    assert failures == [("no", "text 3")]


def test_paths_are_absolute(tmp_path):
    path = EPath(tmp_path)
    assert path.absolute() == path
    assert path.is_absolute()
    assert str(path.internal_path) == str(tmp_path)
    assert path.protocol == "local"
    assert EPath("s3://bucket/a/b").protocol == "s3"
    path.fork_guard()
    EPath.prepare_forked_process()
    with pytest.raises(ConfigError, match="rclone"):
        EPath(tmp_path, config_override={})


def test_retired_names_say_what_takes_their_place():
    with pytest.raises(ConfigError, match="MapState of Megatron-Energon 5 and 6.*save_state_rank"):
        MapState(offset=3)
    with pytest.raises(ConfigError, match="save_state_rank"):
        type("Own", (MapState,), {})
    assert not isinstance({}, MapState)


def test_a_decoded_video_is_a_value():
    assert VideoData(frames=1, aframes=2, info={}).aframes == 2


def test_the_active_configuration_can_be_set_and_reset():
    assert WorkerConfig.active_worker_config is None
    WorkerConfig.active_worker_config = CONFIG
    try:
        assert WorkerConfig.active_worker_config is CONFIG
        assert CONFIG.active_worker_config is CONFIG
    finally:
        WorkerConfig.active_worker_config = None
    assert WorkerConfig.active_worker_config is None


def test_states_take_their_fields():
    state = SavableDataLoaderState(worker_states=[1])
    assert state.worker_states == [1]


def ignored(root, tmp_path):
    """Pass arguments that have no effect."""
    dataset = get_train_dataset(root, worker_config=CONFIG, batch_size=2, task_encoder=Texts())
    get_savable_loader(dataset, n_checkpoints=3, gc_freeze_at_start=False).close()
    get_loader(dataset, gc_collect_every_n_steps=5).close()
    GcDataset(dataset, worker_config=CONFIG, freeze=False)
    WorkerConfig(rank=0, world_size=1, num_workers=0, restore_error_handler=print)
    members = [CrudeWebdataset(root, worker_config=CONFIG, ignore_decoder_errors=True)] * 2
    JoinedWebdatasetFactory(
        members, joiner=lambda a, b: a, worker_config=CONFIG, join_index=tmp_path / "join"
    )
    (tmp_path / "media").mkdir(exist_ok=True)
    prepare_filesystem_dataset(
        tmp_path / "media",
        MediaFilterConfig.parse(None, False, True),
        progress=True,
        index_sqlite_tmp_path=tmp_path,
    )
    document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    traverse_metadataset(
        {**document, "splits": {"train": {"path": str(root)}}},
        split_part="train",
        worker_config=CONFIG,
    )
    load_config({}, default_type=lambda: None, parser=print)


def test_ignored_arguments_are_logged_once(root, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(messages, "_given", {})
    with caplog.at_level("INFO", "energon"):
        for _ in range(2):
            ignored(root, tmp_path)
    texts = [r.getMessage() for r in caplog.records if "no effect" in r.getMessage()]
    assert [text.partition(" ")[0] for text in texts] == [
        *("n_checkpoints", "gc_freeze_at_start", "gc_collect_every_n_steps", "freeze"),
        *("restore_error_handler", "ignore_decoder_errors", "join_index", "progress"),
        *("index_sqlite_tmp_path", "worker_config", "parser"),
    ]
