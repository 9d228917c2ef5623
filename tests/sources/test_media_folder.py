from __future__ import annotations

import io
import json
import os
import pickle
import time
import wave

import numpy as np
import pytest

from energon import ConfigError, DatasetNotFoundError, EmptyDatasetError, get_train_dataset
from energon.errors import FormatError, ShardChangedError
from energon.io.address import join_address
from energon.io.files import write_bytes
from energon.metadataset.kind import dataset_kind
from energon.sources import media_folder, reader
from energon.sources.media_folder import FolderOptions, MediaFiles, MediaFolderSource
from energon.sources.open_tree import TreeOpener
from energon.sources.source import SampleSelection
from tests.commands import run
from tests.datasets import jpeg
from tests.sources.reads import read_samples
from tests.task_encoder.runs import config

N = 60


def put(folder, name, content=b"x"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def folder(tmp_path):
    """60 images of three classes."""
    for n in range(N):
        put(tmp_path / "data", f"{('cat', 'dog', 'emu')[n % 3]}/{n:03}.jpg", jpeg(n))
    put(tmp_path / "data", "README.md", "images")
    return tmp_path / "data"


def every(source):
    return read_samples(source, np.arange(len(source)))


def test_folders_are_classes(folder):
    assert dataset_kind(folder) == "folder"
    source = pickle.loads(pickle.dumps(MediaFolderSource(folder)))
    samples = every(source)
    assert [s["__key__"] for s in samples] == sorted(s["__key__"] for s in samples)
    assert len(samples) == N
    last = samples[-1]
    assert (last["__key__"], last["__shard__"]) == ("emu/059", "emu/059.jpg")
    assert (last["label"], last["label_name"], last["jpg"]) == (2, "emu", jpeg(59))
    assert source.find("emu/059") == [59]
    assert source.find("emu/059.jpg") == source.find("emu/060") == source.find("x") == []
    assert source.locate(59).parts == ("jpg", "label", "label_name")
    with pytest.raises(IndexError, match="0 to 59, not 60"):
        read_samples(source, np.array([60]))


def test_images_are_decoded_and_fields_mapped(folder):
    read = {
        "sample_type": "ImageClassificationSample",
        "field_map": {"image": "jpg", "label": "label", "label_name": "label_name"},
    }
    blend = {"splits": {"train": {"path": str(folder), "read": read}}}
    batch = next(iter(get_train_dataset(blend, worker_config=config(), batch_size=4)))
    assert batch.image.shape == (4, 3, 8, 12)
    assert {*batch.label_name} <= {"cat", "dog", "emu"}


def test_splits_are_folders_and_share_the_numbers_of_classes(tmp_path):
    for name in ("train/dog/0.jpg", "train/cat/1.jpg", "validation/emu/2.jpg"):
        put(tmp_path, name)
    assert [s["label"] for s in every(MediaFolderSource(tmp_path))] == [0, 1]
    (only,) = every(MediaFolderSource(tmp_path, SampleSelection("val")))
    assert (only["label"], only["label_name"]) == (2, "emu")
    with pytest.raises(ConfigError, match="no split 'test', only train, val, according to"):
        MediaFolderSource(tmp_path, SampleSelection("test"))


def test_a_ratio_gives_each_split_some_of_each_class(folder):
    options = FolderOptions(split="80,20")
    found = [
        every(MediaFolderSource(folder, SampleSelection(s), options=options))
        for s in ("train", "val")
    ]
    assert [len(samples) for samples in found] == [48, 12]
    assert len({s["__key__"] for samples in found for s in samples}) == N
    assert {s["label"] for s in found[1]} == {0, 1, 2}


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_tables_are_joined_by_the_names_of_files(tmp_path, ending):
    rows = [
        {"file_name": f"{n}.png", "mask_file_name": f"masks/{n}.png", "text": f"cäption {n}"}
        for n in (1, 0)
    ]
    for n in range(3):
        put(tmp_path, f"train/{n}.png", f"image {n}")
        put(tmp_path, f"train/masks/{n}.png", f"mask {n}")
    if ending == "csv":
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    else:
        lines = [json.dumps(row) for row in rows]
    put(tmp_path, f"train/metadata.{ending}", "\n".join(lines))
    samples = every(MediaFolderSource(tmp_path))
    assert [(s["__key__"], s["png"], s["mask.png"], s["text"]) for s in samples] == [
        (f"train/{n}", b"image %d" % n, b"mask %d" % n, f"cäption {n}") for n in (0, 1)
    ]
    assert "label" not in samples[0]
    columns = FolderOptions(columns=["text"])
    assert "png" not in every(MediaFolderSource(tmp_path, options=columns))[0]
    with pytest.raises(ConfigError, match="no part 'txt', only png, mask.png, text"):
        MediaFolderSource(tmp_path, options=FolderOptions(columns=["txt"]))


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("name\n0.png", r"metadata\.csv:2: has no 'file_name'.*there are name"),
        ("file_name\n7.png", r"csv:2: names '7\.png', which is not in .*add the file, or delete"),
        ("file_name\n0.png\n0.png", r"csv:3: '0\.png' is named twice"),
        ("file_name\nmetadata.csv", r"csv:2: 'metadata\.csv' is not a media file"),
        ("file_name,png\n0.png,x", r"csv:2: column 'png' has the same name as the file 0\.png"),
        ("file_name,a\n0.png", r"csv:2: found 1 field, expected 2, as in the first line"),
        ("file_name,a,a\n0.png,1,2", r"csv: columns 2 and 3 have the same name, 'a'"),
        ('file_name\n"0.png', r"csv:1: unexpected end of data"),
        (b"\xff\n", "UTF-8"),
    ],
)
def test_tables_that_make_no_sense_are_reported(tmp_path, table, problem):
    put(tmp_path, "0.png")
    put(tmp_path, "metadata.csv", table)
    with pytest.raises(FormatError, match=problem):
        MediaFolderSource(tmp_path)


def test_rows_of_json_have_to_be_objects(tmp_path):
    put(tmp_path, "0.png")
    put(tmp_path, "metadata.jsonl", "[]")
    with pytest.raises(FormatError, match=r"metadata\.jsonl:1: expected an object, found \[\]"):
        MediaFolderSource(tmp_path)


@pytest.mark.parametrize("table", ["metadata.jsonl", "a/metadata.jsonl"])
def test_tables_may_name_files_of_the_folder_by_absolute_paths(tmp_path, monkeypatch, table):
    image = put(tmp_path / "data", "a/1.jpg", jpeg(1))
    put(tmp_path / "data", table, json.dumps({"file_name": str(image), "text": "one"}))
    monkeypatch.chdir(tmp_path)
    for address in (tmp_path / "data", "data"):
        (sample,) = every(MediaFolderSource(address))
        assert (sample["__key__"], sample["text"]) == ("a/1", "one")
    elsewhere = put(tmp_path, "2.jpg", jpeg(2))
    put(tmp_path / "data", table, json.dumps({"file_name": str(elsewhere), "text": "two"}))
    with pytest.raises(FormatError, match=r"2\.jpg', which is not in "):
        MediaFolderSource(tmp_path / "data")


def test_files_of_one_name_are_a_sample(tmp_path, caplog):
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(1600))
    for n in range(4):
        put(tmp_path, f"talk/{n}.wav", sound.getvalue())
        put(tmp_path, f"talk/{n}.txt", f"spoken {n}")
    put(tmp_path, "talk/9.txt", "alone")
    put(tmp_path, "notes.txt", "about all")
    samples = every(MediaFolderSource(tmp_path))
    assert [(s["__key__"], s["txt"]) for s in samples] == [
        (f"talk/{n}", b"spoken %d" % n) for n in range(4)
    ]
    assert "label" not in samples[0]
    assert "skipped 1 files that belong to no media file of the same name" in caplog.text
    batch = next(iter(get_train_dataset(tmp_path, worker_config=config(), batch_size=2)))
    assert [text.startswith("spoken") for text in batch["txt"]] == [True, True]


def test_a_table_that_is_not_read_is_said(tmp_path, caplog):
    for name in ("photos/a.jpg", "photos/a.csv"):
        put(tmp_path, name)
    MediaFolderSource(tmp_path / "photos")
    assert "is not read" not in caplog.text
    put(tmp_path, "photos/captions.csv", b"file,caption\n")
    MediaFolderSource(tmp_path / "photos")
    said = f"captions.csv is not read; `energon pack {tmp_path}/photos {tmp_path}/photos_packed`"
    assert said in caplog.text


def test_what_cannot_be_samples_is_reported(tmp_path):
    put(tmp_path, "a.jpg")
    put(tmp_path, "a.JPG")
    with pytest.raises(FormatError, match=r"a\.JPG and a\.jpg would be the same part"):
        MediaFolderSource(tmp_path)
    (tmp_path / "a.JPG").unlink()
    with pytest.raises(ConfigError, match="'a' is in no folder that could be its class"):
        MediaFolderSource(tmp_path, options=FolderOptions(labels=True))
    with pytest.raises(ConfigError, match="labels is 'yes'; expected true or false"):
        FolderOptions(labels="yes")
    with pytest.raises(EmptyDatasetError, match="has 1 sample, but subset and exclude leave none"):
        MediaFolderSource(tmp_path, SampleSelection(exclude=["a.jpg"]))
    with pytest.raises(ConfigError, match="no split 'val', only train"):
        MediaFolderSource(tmp_path, SampleSelection("val"))
    with pytest.raises(DatasetNotFoundError, match="no such folder"):
        MediaFolderSource(tmp_path / "gone")
    put(tmp_path / "texts", "a.txt")
    with pytest.raises(DatasetNotFoundError, match="no images, audio or video"):
        MediaFolderSource(tmp_path / "texts")
    source = MediaFolderSource(tmp_path)
    (tmp_path / "a.jpg").unlink()
    with pytest.raises(ShardChangedError, match="existed when the folder was listed"):
        read_samples(source, np.array([0]))


def test_info_tells_classes_and_lint_damage(folder):
    about = run("info", folder).output
    assert "samples: 60" in about
    assert "classes: 0 cat, 1 dog, 2 emu" in about
    assert "`energon pack` writes them to tar shards" in about
    put(folder, "cat/bad.jpg", jpeg(0)[:60])
    result = run("lint", folder, "--num-workers", 1)
    assert result.exit_code == 1
    assert "cat/bad" in result.output
    with pytest.raises(ConfigError, match="is a folder already and needs no mounting"):
        TreeOpener().open(str(folder))


def test_a_prepared_folder_lists_only_what_was_changed(folder, monkeypatch):
    for path in (folder, *folder.iterdir()):
        os.utime(path, ns=(0, time.time_ns() - 10**10))
    assert run("prepare", folder).stdout == "Done. Found 60 samples.\n"
    looked_into = []
    look = media_folder._look_into
    monkeypatch.setattr(
        media_folder, "_look_into", lambda path, at: looked_into.append(path) or look(path, at)
    )
    assert len(MediaFiles(str(folder)).keys) == N
    assert [os.path.basename(path.rstrip("/")) for path in looked_into] in ([], ["data"])
    looked_into.clear()
    put(folder, "dog/new.jpg")
    assert len(MediaFiles(str(folder)).keys) == N + 1
    assert os.path.basename(looked_into[-1]) == "dog"
    listing = folder / ".nv-meta" / "folder.listing"
    for content in (b"", b"ENLIST01\n[]", b"ENLIST01\n{", listing.read_bytes()[:-9]):
        listing.write_bytes(content)
        assert len(MediaFiles(str(folder)).keys) == N + 1


def test_links_that_lead_back_end(folder):
    (folder / "cat" / "again").symlink_to(folder)
    (folder / "gone").symlink_to(folder / "nowhere")
    assert len(MediaFiles(str(folder)).keys) == N


@pytest.fixture
def distant(folder, s3):
    """The folder in a bucket."""
    for path in folder.rglob("*.jpg"):
        name = f"data/{path.relative_to(folder)}"
        write_bytes(join_address(s3.address, name), path.read_bytes())
    return join_address(s3.address, "data")


@pytest.mark.slow
def test_folders_in_stores_are_read_file_by_file(folder, distant):
    assert dataset_kind(distant) == "folder"
    batches = []
    for place in (folder, distant):
        dataset = get_train_dataset(place, worker_config=config(), batch_size=4)
        found = iter(dataset)
        batches.append([next(found)["jpg"].numpy().tobytes() for _ in range(20)])
    assert batches[0] == batches[1]
    assert run("prepare", distant).stdout == "Done. Found 60 samples.\n"
    assert len(MediaFolderSource(distant)) == N


def test_small_files_are_not_requested_long_before_they_are_read(distant, s3, monkeypatch):
    monkeypatch.setattr(reader, "MAX_SPANS_AHEAD", 8)
    found = iter(get_train_dataset(distant, worker_config=config(), batch_size=4))
    before = len(s3.proxy.requests)
    for _ in range(5):
        next(found)
    assert len(s3.proxy.requests) - before <= 3 * (5 * 4 + 8)


def test_tables_do_not_outvote_the_few_images_that_they_describe(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "0.jpg").write_bytes(jpeg(0))
        (tmp_path / split / "metadata.csv").write_text("file_name,text\n0.jpg,a cat\n")
    assert dataset_kind(tmp_path) == "folder"
    assert len(MediaFolderSource(tmp_path, SampleSelection("test"))) == 1
