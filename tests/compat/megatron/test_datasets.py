from __future__ import annotations

import json

import pytest

from energon.compat.megatron.datasets.leaf import LeafDataset
from energon.compat.megatron.datasets.others import CaptioningWebdataset
from energon.compat.megatron.datasets.webdataset import (
    CrudeWebdataset,
    StandardWebdatasetFactory,
    WebdatasetFactory,
)
from energon.formats.meta.info import load_info, load_split
from energon.prepare.media import MediaFilter
from megatron.energon import (
    BatchDataset,
    CaptioningSample,
    ConfigError,
    CrudeSample,
    RepeatDataset,
    get_savable_loader,
    get_val_datasets,
)
from megatron.energon.epathlib import EPath
from tests.datasets import CAPTIONING, make_captions, write_shard
from tests.sources.distant import upload
from tests.task_encoder.runs import config


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_captions(tmp_path_factory.mktemp("captions") / "ds", [6, 5])


def samples(dataset):
    batches = BatchDataset(dataset.build(), 3, list, worker_config=config())
    with get_savable_loader(batches) as loader:
        return [sample for batch in loader for sample in batch]


def standard(root, **settings):
    return StandardWebdatasetFactory(
        root,
        worker_config=config(),
        **{"sample_type": CaptioningSample, "field_map": CAPTIONING, "split_part": "val"}
        | settings,
    )


def test_a_factory_says_what_it_is(root):
    dataset = standard(root, subflavors={"kind": "pictures"})
    assert isinstance(dataset, LeafDataset)
    assert dataset.paths == [EPath(root)]
    assert dataset.subflavors == {"kind": "pictures"}
    assert len(dataset) == 11
    assert dataset.__sample_type__ is CaptioningSample
    assert [each.name for each in dataset.shards] == ["shards/000.tar", "shards/001.tar"]
    assert dataset.as_file_store().get("s3.txt") == b"caption 3"


def test_validation_gives_each_sample_once_in_order(root):
    found = samples(standard(root, training=False))
    assert [sample.caption for sample in found] == [f"caption {n}" for n in range(11)]
    assert found[0].image.shape == (3, 8, 12)
    assert found[0].__sources__[0].file_names == ("s0.jpg", "s0.txt")


def test_training_shuffles_every_pass_anew(root):
    dataset = standard(root, training=True, max_samples_per_sequence=1)
    twice = RepeatDataset(dataset.build(), repeats=2, worker_config=config())
    with get_savable_loader(twice) as loader:
        keys = [sample.__key__ for sample in loader]
    first, second = keys[:11], keys[11:]
    assert sorted(first) == sorted(second) == sorted(f"s{n}" for n in range(11))
    assert first != second != sorted(second)


def test_a_subset_and_a_split_narrow_it(root):
    assert len(standard(root, subset=(2, 7))) == 5
    with pytest.raises(ConfigError, match="no split 'test'"):
        standard(root, split_part="test")


def test_a_function_may_make_the_fields(root):
    def loader(parts):
        assert parts["txt"].startswith("caption")
        return {"__key__": "mine", "image": None, "caption": parts["txt"].upper()}

    found = samples(standard(root, training=False, field_map=None, sample_loader=loader))
    assert [sample.caption for sample in found] == [f"CAPTION {n}" for n in range(11)]
    assert {sample.__key__ for sample in found} == {"mine"}


def test_crude_samples_are_dicts_of_parts(root):
    dataset = CrudeWebdataset(
        root, worker_config=config(), training=False, split_part="val", part_filter=["txt"]
    )
    found = samples(dataset)
    assert isinstance(found[0], CrudeSample)
    assert found[4]["txt"] == "caption 4"
    assert "jpg" not in found[4]
    raw = CrudeWebdataset(
        root, worker_config=config(), training=False, split_part="val", decoder=None
    )
    assert samples(raw)[4]["txt"] == b"caption 4"


def test_classes_of_former_days_work_with_a_warning(root):
    with pytest.warns(FutureWarning, match="sample_type=CaptioningSample"):
        dataset = CaptioningWebdataset(
            root, worker_config=config(), split_part="val", field_map=CAPTIONING, training=False
        )
    assert isinstance(samples(dataset)[0], CaptioningSample)


def test_preparing_returns_the_names_of_parts(root, tmp_path):
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "0.tar").write_bytes((root / "shards/000.tar").read_bytes())
    (tmp_path / "ds" / "1.tar").write_bytes((root / "shards/001.tar").read_bytes())
    shown = []

    def progress(shards, length):
        assert length == 2
        for shard in shards:
            shown.append(shard)
            yield shard
        shown.append("end")

    parts = WebdatasetFactory.prepare_dataset(
        tmp_path / "ds",
        ["{0..1}.tar"],
        split_parts_ratio=[("train", 1), ("val", 1), ("test", 0)],
        split_parts_patterns=None,
        progress_fn=progress,
        tar_index_only=False,
        shuffle_seed=None,
        workers=1,
    )
    assert parts == {"jpg", "txt", "json"}
    assert shown == [0, 1, "end"]
    media = MediaFilter("EXTENSION")
    assert WebdatasetFactory.add_media_metadata(tmp_path / "ds", media_filter=media) == 11
    content = list(WebdatasetFactory.iter_dataset_content(tmp_path / "ds/1.tar", ("txt",)))
    assert content[0] == {"jpg": None, "txt": b"caption 6", "json": None}
    assert len(content) == 5
    assert len(standard(tmp_path / "ds")) in (5, 6)


def test_some_of_the_shards_are_prepared_and_splits_may_stay_or_be_elsewhere(tmp_path):
    for number in range(3):
        write_shard(tmp_path / f"{number}.tar", [(f"{number}", {"txt": b"a"})])
    prepare, meta = WebdatasetFactory.prepare_dataset, tmp_path / ".nv-meta"
    assert prepare(
        tmp_path, ["{0..1}.tar"], split_parts_ratio=[("train", 1)], shuffle_seed=None
    ) == {"txt"}
    assert load_split(tmp_path, "split.yaml").shards("train") == ["0.tar", "1.tar"]
    before = (meta / "split.yaml").read_text()
    prepare(tmp_path, tar_index_only=True)
    for name in ("other.yaml", "other.json"):
        prepare(tmp_path, split_config=name, split_parts_patterns=[("val", "2.tar")])
        assert load_split(tmp_path, name).shards("val") == ["2.tar"]
    assert json.loads((meta / "other.json").read_text())["split_parts"]["val"] == ["2.tar"]
    assert (meta / "split.yaml").read_text() == before
    assert list(load_info(tmp_path).shard_counts) == ["0.tar", "1.tar", "2.tar"]
    with pytest.raises(ConfigError, match="no shard 3.tar"):
        prepare(tmp_path, ["3.tar"], split_parts_ratio=[("train", 1)])


def test_validation_datasets_come_with_factories(root):
    ((_, dataset),) = get_val_datasets(root, worker_config=config(), batch_size=2)
    assert [sample.caption for sample in samples(dataset)] == [f"caption {n}" for n in range(11)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"field_map": None}, "pass a field_map or a sample_loader"),
        ({"sample_loader": dict}, "not both"),
        ({"part_filter": "txt"}, "expected a list of part names"),
        ({"field_map": {"image": "jpg"}}, "caption"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(root, settings, message):
    with pytest.raises(ConfigError, match=message):
        standard(root, **settings)


def test_programs_prepare_datasets_in_object_stores(s3, tmp_path):
    for number in range(2):
        write_shard(tmp_path / f"ds/{number}.tar", [(f"k{number}", {"txt": b"a %d" % number})])
    remote = EPath(upload(tmp_path / "ds", s3.address))
    parts = WebdatasetFactory.prepare_dataset(
        remote, ["{0..1}.tar"], split_parts_ratio=[("train", 1.0)], workers=1
    )
    assert parts == {"txt"}
    assert load_info(remote).shard_counts == {"0.tar": 1, "1.tar": 1}
    assert sorted(load_split(remote, "split.yaml").shards("train")) == ["0.tar", "1.tar"]
    with pytest.raises(ConfigError, match="prepare a local copy"):
        WebdatasetFactory.prepare_dataset(remote, fix_duplicates=True)
