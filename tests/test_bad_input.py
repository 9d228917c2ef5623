"""Bad input of any kind gets a clear error that names the place and the next step."""

from __future__ import annotations

import json
import os

import pytest

from energon import (
    ConfigError,
    DatasetNotFoundError,
    DefaultTaskEncoder,
    EmptyDatasetError,
    FatalSampleError,
    FormatError,
    SecurityError,
    ShardChangedError,
    StateError,
    TruncatedError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon.formats.meta import yaml
from energon.formats.meta.yaml import dump_yaml
from tests.datasets import make_captions, make_crude, write_shard


class Raw(DefaultTaskEncoder):
    decoder = None

    def batch(self, samples):
        return [sample["__key__"] for sample in samples]


def config(num_workers=0, **settings):
    return WorkerConfig(**{"rank": 0, "world_size": 1, "num_workers": num_workers, **settings})


def read_all(path, *, num_workers=0, batch_size=4, **settings):
    dataset = get_val_dataset(
        path, worker_config=config(num_workers), batch_size=batch_size, **settings
    )
    loader = get_savable_loader(dataset)
    try:
        return list(loader)
    finally:
        loader.close()


def edit(path, change):
    document = yaml.load(path.read_text(), origin=str(path))
    change(document)
    path.write_text(dump_yaml(document))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_missing_shard(tmp_path, num_workers):
    root = make_crude(tmp_path / "ds", [5, 5, 5])
    (root / "001.tar").unlink()
    with pytest.raises(DatasetNotFoundError, match=r"001\.tar: no such file.*energon prepare"):
        read_all(root, num_workers=num_workers, task_encoder=Raw())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_truncated_shard(tmp_path, num_workers):
    root = make_crude(tmp_path / "ds", [50, 5])
    os.truncate(root / "000.tar", 20_000)
    with pytest.raises(TruncatedError, match=r"000\.tar: has 20000 bytes, had \d+ when"):
        read_all(root, num_workers=num_workers, task_encoder=Raw())


def test_a_truncated_shard_that_was_prepared_elsewhere(tmp_path):
    root = make_crude(tmp_path / "ds", [50])
    (root / "000.tar.parts").unlink()
    assert sum(map(len, read_all(root, task_encoder=Raw()))) == 50
    os.truncate(root / "000.tar", 20_000)
    with pytest.raises(FormatError, match=r"000\.tar"):
        read_all(root, task_encoder=Raw())


def test_a_shard_that_was_changed_after_it_was_indexed(tmp_path):
    root = make_crude(tmp_path / "ds", [50, 5])
    write_shard(root / "000.tar", [(f"other{i}", {"txt": b"x" * 700}) for i in range(50)])
    with pytest.raises(ShardChangedError, match=r"000\.tar.*energon index"):
        read_all(root, task_encoder=Raw())


def test_a_field_map_with_an_unknown_field(tmp_path):
    root = make_captions(tmp_path / "ds", [3])
    edit(root / ".nv-meta/dataset.yaml", lambda d: d["field_map"].update(captoin="txt"))
    with pytest.raises(ConfigError, match="no field 'captoin'; did you mean 'caption'"):
        read_all(root)


def test_a_field_map_without_a_required_field(tmp_path):
    root = make_captions(tmp_path / "ds", [3])
    edit(root / ".nv-meta/dataset.yaml", lambda d: d["field_map"].pop("image"))
    with pytest.raises(ConfigError, match="needs the field 'image'"):
        read_all(root)


def test_a_field_map_to_a_part_that_samples_do_not_have(tmp_path):
    root = make_captions(tmp_path / "ds", [3])
    edit(root / ".nv-meta/dataset.yaml", lambda d: d["field_map"].update(image="png,webp"))
    with pytest.raises(ConfigError, match=r"'image' to png, webp.*there are jpg, json, txt"):
        read_all(root)


def test_settings_of_a_dataset_that_would_have_no_effect(tmp_path):
    root = make_crude(tmp_path / "ds", [3])
    edit(root / ".nv-meta/dataset.yaml", lambda d: d.update(part_filter="code.py:choose"))
    with pytest.raises(SecurityError, match=r"dataset\.yaml: part_filter.*allow it with"):
        read_all(root)
    edit(root / ".nv-meta/dataset.yaml", lambda d: d.update(part_filter=["json"]))
    dataset = get_val_dataset(root, worker_config=config(), batch_size=None)
    assert [part for part in next(iter(get_savable_loader(dataset))) if part[0] != "_"] == []
    edit(root / ".nv-meta/dataset.yaml", lambda d: d.update(decoder={"image_decoder": "pil"}))
    with pytest.raises(ConfigError, match=r"dataset\.yaml: decoder has no setting 'image_decoder'"):
        read_all(root)


def test_a_file_of_lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(
        DatasetNotFoundError, match=r"lines\.jsonl\.idx is missing; run .energon prep"
    ):
        read_all(path)


def test_unknown_keys_in_a_metadataset(tmp_path):
    path = tmp_path / "meta.yaml"
    path.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\n"
        "splits:\n  val:\n    path: ds\n    subflavor: {a: 1}\n"
    )
    with pytest.raises(ConfigError, match=r"meta\.yaml:6.*subflavor.*subflavors"):
        read_all(path)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_corrupt_image_is_left_out_with_its_place_in_the_log(tmp_path, caplog, num_workers):
    root = tmp_path / "ds"
    make_captions(root, [6])
    shard = root / "shards/000.tar"
    content = bytearray(shard.read_bytes())
    at = content.index(b"\xff\xd8", content.index(b"s2.jpg"))
    content[at : at + 300] = os.urandom(300)
    about = os.stat(shard)
    shard.write_bytes(content)
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns))
    batches = read_all(root, num_workers=num_workers, batch_size=6)
    assert [key for batch in batches for key in batch.__key__] == ["s0", "s1", "s3", "s4", "s5"]
    if num_workers == 0:
        assert "s2.jpg" in caplog.text
        assert "shards/000.tar at byte" in caplog.text


def test_a_corrupt_image_ends_the_run_where_nothing_is_tolerated(tmp_path):
    root = tmp_path / "ds"
    write_shard(root / "0.tar", [("a", {"jpg": b"\xff\xd8no image", "txt": b"x"})])
    make_captions(root, [])

    class Strict(DefaultTaskEncoder):
        __default_failure_tolerance__ = 1

    with pytest.raises(FatalSampleError, match=r"sample 'a' of .*0\.tar at byte 0\).*a\.jpg"):
        read_all(root, task_encoder=Strict())


def test_an_empty_split(tmp_path):
    root = make_crude(tmp_path / "ds", [5])
    edit(root / ".nv-meta/split.yaml", lambda d: d["split_parts"].update(val=[]))
    with pytest.raises(EmptyDatasetError, match="split 'val' has no samples"):
        read_all(root, task_encoder=Raw())


def test_a_split_that_does_not_exist(tmp_path):
    root = make_crude(tmp_path / "ds", [5])
    with pytest.raises(ConfigError, match="no split 'vall'.*did you mean 'val'"):
        read_all(root, split_part="vall", task_encoder=Raw())


def test_a_folder_that_is_not_prepared(tmp_path):
    (tmp_path / "ds").mkdir()
    with pytest.raises((DatasetNotFoundError, ConfigError), match="energon prepare"):
        read_all(tmp_path / "ds")


def test_a_world_size_that_does_not_divide_the_lanes():
    with pytest.raises(ConfigError, match="8 lanes can't be divided evenly among 3 ranks.*lanes=9"):
        config(world_size=3, lanes=8)


def test_a_state_of_other_data_names_the_difference(tmp_path):
    def loader_of(root):
        dataset = get_train_dataset(root, worker_config=config(), batch_size=2, task_encoder=Raw())
        return get_savable_loader(dataset)

    first = loader_of(make_crude(tmp_path / "a/ds", [50]))
    next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    other = loader_of(make_crude(tmp_path / "b/ds", [51]))
    with pytest.raises(StateError, match="samples.*50.*51"):
        other.load_state_dict(state)


def test_a_state_that_does_not_cover_all_lanes(tmp_path):
    root = make_crude(tmp_path / "ds", [50])

    def rank(number, world_size):
        dataset = get_train_dataset(
            root,
            worker_config=config(rank=number, world_size=world_size, lanes=4),
            batch_size=2,
            task_encoder=Raw(),
            # Of endless data, the state of one rank tells where all are.
            repeat=False,
        )
        return get_savable_loader(dataset)

    part = rank(0, 2)
    next(iter(part))
    with pytest.raises(StateError, match=r"lanes? .*1.*3"):
        rank(0, 1).load_state_dict(part.state_dict())
