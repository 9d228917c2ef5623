"""A field map that names a part which no sample has is refused at once, wherever it is given."""

from __future__ import annotations

import pytest

from energon import WorkerConfig, get_train_dataset, get_val_dataset
from energon.errors import ConfigError
from energon.prepare.dataset import prepare_dataset
from energon.prepare.writers import pack
from energon.sources import webdataset_kind
from tests.commands import ok, run
from tests.datasets import jpeg, make_captions, write_shard
from tests.prepare.test_pack_recognition import lines, write

INLINE = WorkerConfig(rank=0, world_size=1, num_workers=0)
TYPE = ("--sample-type", "CaptioningSample", "--field-map")
WRONG = '{"image": "jpg", "caption": "text"}'
RIGHT = '{"image": "jpg", "caption": "TXT"}'
MESSAGE = (
    "the field_map maps 'caption' to text, but no sample has a part text; there are jpg, json, "
    "txt; did you mean 'txt'?"
)


def shards(root, count=3):
    """Some shards, of which only the last has a part `txt`."""
    for n in range(count):
        parts = {"jpg": jpeg(n), "json": b'{"caption": "x"}'}
        if n == count - 1:
            parts["txt"] = b"x"
        write_shard(root / f"{n}.tar", [(f"{n}", parts)])
    return root


def opened(root, **arguments):
    return get_val_dataset(root, worker_config=INLINE, batch_size=None, **arguments)


def test_prepare_refuses_it_and_writes_no_dataset(tmp_path):
    root = shards(tmp_path / "data")
    options = (root, "--non-interactive", "--split-ratio", "1", *TYPE)
    done = run("prepare", *options, WRONG)
    assert done.exit_code != 0
    assert MESSAGE in done.output
    assert not (root / ".nv-meta/dataset.yaml").exists()
    assert not (root / ".nv-meta/.info.json").exists()
    ok("prepare", *options, RIGHT)


def test_prepare_leaves_a_dataset_as_it_was(tmp_path):
    root = make_captions(tmp_path / "data", [2, 2])
    before = (root / ".nv-meta/dataset.yaml").read_text()
    with pytest.raises(ConfigError, match="no sample has a part png"):
        prepare_dataset(
            root,
            split_parts=["train:.*"],
            sample_type="CaptioningSample",
            field_map={"image": "png", "caption": "txt"},
        )
    assert (root / ".nv-meta/dataset.yaml").read_text() == before
    assert len(list(opened(root))) == 4


def test_prepare_refuses_it_for_a_store(s3, tmp_path):
    from tests.sources.distant import upload

    there = upload(shards(tmp_path / "data"), s3.address)
    options = (there, "--non-interactive", "--split-ratio", "1", *TYPE)
    done = run("prepare", *options, WRONG)
    assert done.exit_code != 0
    assert f"{there}: the field_map maps" in done.output
    ok("prepare", *options, RIGHT)
    with pytest.raises(ConfigError, match="there is no split"):
        opened(there, split_part="none")
    opened(there, split_part="train")


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_pack_refuses_it_before_it_writes_a_shard(tmp_path, kind):
    for n in range(3):
        write(tmp_path / "in", {f"{n}.jpg": jpeg(n), f"{n}.txt": "x", f"{n}.json": "{}"})
    source = tmp_path / "in"
    options = []
    if kind == "table":
        source = tmp_path / "t.jsonl"
        source.write_text(lines([{"f": f"in/{n}.jpg", "t": "x", "n": 1} for n in range(3)]))
        options = ["--part", "t:txt"]
    done = run("pack", source, tmp_path / "out", *options, *TYPE, WRONG)
    assert done.exit_code != 0
    assert MESSAGE in done.output
    assert not (tmp_path / "out").exists()
    done = ok("pack", source, tmp_path / "out", *options, *TYPE, RIGHT)


def test_what_pack_only_finds_out_in_the_end_is_corrected_without_writing_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(pack, "PEEKED_SAMPLES", 3)
    rows = [{"t": "x", "u": None} for _ in range(5)] + [{"t": "y", "u": "late"}]
    (tmp_path / "t.jsonl").write_text(lines(rows))
    kind = ("--sample-type", "TextSample", "--field-map")
    options = (tmp_path / "t.jsonl", tmp_path / "out", "--part", "t:txt", "--part", "u:late.txt")
    done = run("pack", *options, *kind, '{"text": "tx"}')
    assert "none of the first 3 samples has a part for 'text'" in done.output
    assert "no sample has a part tx; there are late.txt, txt; did you mean 'txt'?" in done.output
    shard = tmp_path / "out/shards/00000.tar"
    written = shard.stat().st_mtime_ns
    done = ok("pack", *options, *kind, '{"text": "late.txt,txt"}')
    assert shard.stat().st_mtime_ns == written
    assert [each.text for each in opened(tmp_path / "out", split_part="train")][-1] == "late"


def with_field_map(root, text):
    (root / ".nv-meta/dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\n"
        f"field_map: {text}\n"
    )
    return root


@pytest.mark.parametrize("tables", [True, False])
def test_loaders_refuse_it_when_they_open_the_dataset(tmp_path, tables):
    root = with_field_map(make_captions(tmp_path / "data", [2, 1, 2]), WRONG)
    if not tables:
        for path in root.rglob("*.parts"):
            path.unlink()
    for read in (get_train_dataset, get_val_dataset):
        with pytest.raises(ConfigError, match="did you mean 'txt'"):
            read(root, worker_config=INLINE, batch_size=2)
    done = run("lint", root, "--num-workers", 1)
    assert done.exit_code == 2
    assert "did you mean 'txt'?" in done.output


def test_a_part_that_some_samples_have_is_enough(tmp_path):
    root = shards(tmp_path / "data")
    prepare_dataset(
        root,
        split_parts=["train:.*", "val:.*"],
        sample_type="CaptioningSample",
        field_map={"image": "png,jpg", "caption": "txt,json[caption]"},
    )
    assert [each.caption for each in opened(root)] == ["x"] * 3
    with_field_map(root, '{"image": "jpg", "caption": "txt"}')
    opened(root)


def test_a_split_of_which_no_sample_has_the_part_is_refused_alone(tmp_path):
    root = shards(tmp_path / "data")
    prepare_dataset(
        root,
        split_parts=["train:[01].tar", "val:2.tar"],
        sample_type="CaptioningSample",
        field_map={"image": "jpg", "caption": "txt"},
    )
    opened(root)
    with pytest.raises(ConfigError, match=r"there are jpg, json; a value in a JSON part"):
        opened(root, split_part="train")


def test_nothing_is_refused_where_shards_cannot_be_looked_at(tmp_path, monkeypatch):
    root = with_field_map(make_captions(tmp_path / "data", [1] * 6), WRONG)
    (root / "shards/003.tar").rename(root / "3")
    opened(root)
    (root / "3").rename(root / "shards/003.tar")
    monkeypatch.setattr(webdataset_kind, "MAX_PROBED_SHARDS", 3)
    opened(root)
    monkeypatch.undo()
    for path in root.rglob("*.parts"):
        path.unlink()
    opened(root)
