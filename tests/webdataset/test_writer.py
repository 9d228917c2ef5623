from __future__ import annotations

import gzip
import io
import os
import pickle
import signal
import subprocess
import sys
import tarfile

import msgpack
import numpy as np
import pytest
import torch
from PIL import Image

import energon.webdataset as wds
from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    DuplicateSampleKeyError,
    StorageError,
)
from energon.webdataset import descriptor
from energon.webdataset.gopen import gopen
from tests.small_disks import LITTLE_ROOM


def members(path):
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def write(path, *samples, **options):
    with wds.TarWriter(str(path), **options) as sink:
        for sample in samples:
            sink.write(sample)
    return {} if str(path).endswith("zst") else members(path)


def image(mode="RGB"):
    return Image.new(mode, (4, 3), 7 if mode == "L" else (7,) * len(mode))


@pytest.mark.parametrize(
    ("field", "value", "decoded"),
    [
        ("txt", "ü", "ü"),
        ("html", "<p>", b"<p>"),
        ("cls", 7, 7),
        ("index", np.int64(3), 3),
        ("count", 2, 2),
        ("json", {"a": [1, None]}, {"a": [1, None]}),
        ("json", None, None),
        ("mp", {"a": b"x"}, {"a": b"x"}),
        ("cbor", [1, "a"], [1, "a"]),
        ("json.gz", {"a": 1}, {"a": 1}),
        ("bin", b"raw", b"raw"),
    ],
)
def test_what_is_written_by_extension_is_read_back(tmp_path, field, value, decoded):
    write(tmp_path / "x.tar", {"__key__": "a", field: value})
    (sample,) = wds.WebDataset(str(tmp_path / "x.tar")).decode()
    assert sample[field] == decoded


@pytest.mark.parametrize("field", ["npy", "ten", "tb", "tenbin", "npz"])
def test_arrays(tmp_path, field):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    value = {"a": array} if field == "npz" else array
    write(tmp_path / "x.tar", {"__key__": "a", field: value})
    if field == "tenbin":
        return
    (sample,) = wds.WebDataset(str(tmp_path / "x.tar")).decode()
    found = sample[field]["a"] if field == "npz" else sample[field]
    assert np.array_equal(found[0] if field in ("ten", "tb") else found, array)


@pytest.mark.parametrize("field", ["png", "jpg", "jpeg", "img", "ppm", "pgm", "tiff", "webp"])
def test_images(tmp_path, field):
    value = image("L") if field == "pgm" else image()
    content = write(tmp_path / "x.tar", {"__key__": "a", field: value})[f"a.{field}"]
    assert Image.open(io.BytesIO(content)).size == (4, 3)


@pytest.mark.parametrize(
    "value",
    [
        np.full((3, 4, 3), 7, np.uint8),
        np.full((3, 4, 3), 7 / 255, np.float32),
        torch.full((3, 3, 4), 7 / 255),
        torch.full((5, 4, 3), 7, dtype=torch.uint8)[:3].contiguous().permute(2, 0, 1),
    ],
)
def test_arrays_and_tensors_are_images_where_the_extension_says_so(tmp_path, value):
    write(tmp_path / "x.tar", {"__key__": "a", "png": value})
    (sample,) = wds.WebDataset(str(tmp_path / "x.tar")).decode("rgb8")
    assert sample["png"].shape == (3, 4, 3)
    assert (sample["png"] == 7).all()


def test_pickles_are_written_and_tensors_need_no_permission(tmp_path):
    path = tmp_path / "x.tar"
    content = write(path, {"__key__": "a", "pyd": {1, 2}, "pth": torch.ones(2)})
    assert pickle.loads(content["a.pyd"]) == {1, 2}
    (sample,) = wds.WebDataset(str(path)).decode(only="pth")
    assert torch.equal(sample["pth"], torch.ones(2))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"txt": "a"}, "__key__"),
        ({"__key__": 3, "txt": "a"}, "is a str"),
        ({"__key__": "a.b", "txt": "a"}, "read back as another"),
        ({"__key__": "a", "x/y": b""}, "read back as another"),
        ({"__key__": "../a", "txt": "a"}, "leads out"),
        ({"__key__": "a"}, "no parts"),
        ({"__key__": "a", "foo": 1.5}, "'foo'"),
        ({"__key__": "a", "cls": 1.5}, "whole number"),
        ({"__key__": "a", "txt": 5}, "expected text"),
        ({"__key__": "a", "png": np.full((2, 2, 3), 7.0)}, "between 0 and 1"),
    ],
)
def test_samples_that_cannot_be_written_are_errors(tmp_path, sample, message):
    with pytest.raises(ConfigError, match=message), wds.TarWriter(str(tmp_path / "x.tar")) as sink:
        sink.write(sample)
    assert os.listdir(tmp_path) == []


def test_a_key_is_written_once(tmp_path):
    with wds.TarWriter(str(tmp_path / "x.tar")) as sink:
        sink.write({"__key__": "a", "txt": "text"})
        with pytest.raises(DuplicateSampleKeyError, match=r"x\.tar: already has .* 'a'"):
            sink.write({"__key__": "a", "cls": 1})
        sink.write({"__key__": "b", "txt": "text"})
    assert list(members(tmp_path / "x.tar")) == ["a.txt", "b.txt"]


def test_the_same_samples_give_the_same_bytes(tmp_path):
    sample = {"__key__": "a", "txt": "x", "json": {"a": 1}, "npz": {"a": np.ones(3)}}
    backwards = dict(reversed(sample.items()))
    for name in ("1", "2"):
        write(tmp_path / f"{name}.tar", sample if name == "1" else backwards)
        write(tmp_path / f"{name}.tar.gz", sample)
        write(tmp_path / f"{name}.tar.zst", sample)
    for suffix in ("tar", "tar.gz", "tar.zst"):
        assert (tmp_path / f"1.{suffix}").read_bytes() == (tmp_path / f"2.{suffix}").read_bytes()


def test_archives_have_no_more_than_they_need(tmp_path):
    samples = [{"__key__": str(n), "cls": n, "txt": "x"} for n in range(100)]
    write(tmp_path / "x.tar", *samples)
    assert (tmp_path / "x.tar").stat().st_size <= 100 * 2 * 1024 + 10240


def test_owner_mode_and_time(tmp_path):
    write(tmp_path / "x.tar", {"__key__": "a", "txt": "x"}, user="me", mode=0o600, mtime=7.9)
    with tarfile.open(tmp_path / "x.tar") as tar:
        (member,) = tar.getmembers()
    assert (member.uname, member.gname, member.mode, member.mtime) == ("me", "bigdata", 0o600, 7)


def test_encoders_of_ones_own(tmp_path):
    table = {"x": lambda value: value.encode() + b"!"}
    assert write(
        tmp_path / "1.tar", {"__key__": "a", "x": 5, "b.x": 6}, encoder={"x": lambda v: b"%d" % v}
    ) == {
        "a.b.x": b"6",
        "a.x": b"5",
    }
    with pytest.raises(ConfigError, match="knows x only"):
        write(tmp_path / "2.tar", {"__key__": "a", "y": 5}, encoder=table)
    whole = {"__key__": "a", "n": 5}
    made = write(tmp_path / "3.tar", whole, encoder=lambda s: {**s, "n": msgpack.packb(s["n"])})
    assert made == {"a.n": b"\x05"}
    with pytest.raises(ConfigError, match="encoder=False"):
        write(tmp_path / "4.tar", {"__key__": "a", "txt": "x"}, encoder=False)
    handlers = {**wds.writer.default_handlers, "txt": lambda value: value.upper().encode()}
    assert write(tmp_path / "5.tar", {"__key__": "a", "cls": 3}, encoder=handlers) == {
        "a.cls": b"3"
    }


def test_names_with_underscores_are_written_if_wanted_and_read_back(tmp_path):
    sample = {"__key__": "a", "__url__": "u", "__index__": b"4", "_x": b"1", "txt": b"2"}
    assert list(write(tmp_path / "1.tar", sample)) == ["a.txt"]
    assert list(write(tmp_path / "2.tar", sample, keep_meta=True)) == [
        "a.__index__",
        "a._x",
        "a.txt",
    ]
    (found,) = wds.WebDataset(str(tmp_path / "2.tar"))
    assert found["__index__"] == b"4"


def test_modes_of_archives_never_fail():
    mode = wds.TarWriter.tarmode
    assert [mode("a.tar", compress) for compress in (1, 0, "gz", "zst")] == [
        *("w|gz", "w|", "w|gz", "w|")
    ]
    assert [mode("a.tar.gz", compress) for compress in ("", None, False)] == [
        *("w|gz", "w|gz", "w|")
    ]


def test_what_cannot_be_written_to_is_an_error(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="no such folder"):
        wds.TarWriter(str(tmp_path / "no/x.tar"))
    (tmp_path / "file").touch()
    with pytest.raises(DatasetNotFoundError, match="no such folder to write to"):
        gopen(tmp_path / "file/x.tar", "wb")
    for mode in ("rb", "wb"):
        with pytest.raises(StorageError, match="Is a directory"):
            gopen(tmp_path, mode)
    with pytest.raises(ConfigError, match="expected a path"):
        wds.TarWriter(3)
    with pytest.raises(ConfigError, match="compress='rar'"):
        wds.TarWriter(str(tmp_path / "x.tar"), compress="rar")


def test_compression_is_told_by_the_name_or_by_hand(tmp_path):
    write(tmp_path / "x.tgz", {"__key__": "a", "txt": "x"})
    assert gzip.decompress((tmp_path / "x.tgz").read_bytes())[:5] == b"a.txt"
    write(tmp_path / "x.tar", {"__key__": "a", "txt": "x"}, compress="gz")
    assert (tmp_path / "x.tar").read_bytes()[:2] == b"\x1f\x8b"


def test_shards_are_as_large_as_they_may_be(tmp_path):
    done = []
    with wds.ShardWriter(f"{tmp_path}/x-%03d.tar", maxcount=4, post=done.append) as sink:
        for number in range(10):
            sink.write({"__key__": str(number), "cls": number})
        assert (sink.total, sink.shard, sink.count) == (10, 3, 2)
    assert done == [f"{tmp_path}/x-{n:03}.tar" for n in range(3)]
    assert descriptor.shard_counts(done) == [4, 4, 2]
    with wds.ShardWriter(f"{tmp_path}/y-%03d.tar", maxsize=30_000) as sink:
        for number in range(100):
            sink.write({"__key__": str(number), "bin": bytes(1000)})
    sizes = [path.stat().st_size for path in tmp_path.glob("y-*.tar")]
    assert max(sizes) <= 30_000
    assert sum(descriptor.shard_counts(sink.shards)) == 100


def test_a_writer_without_samples_writes_no_shard(tmp_path):
    wds.ShardWriter(f"{tmp_path}/x-%03d.tar").close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("pattern", ["x.tar", "x-%s-%s.tar"])
def test_patterns_need_one_place_for_a_number(tmp_path, pattern):
    with pytest.raises(ConfigError, match=r"%05d"):
        wds.ShardWriter(str(tmp_path / pattern))


def test_a_killed_writer_leaves_whole_shards_only(tmp_path):
    program = (
        "import sys, os, signal, energon.webdataset as wds\n"
        "with wds.ShardWriter(sys.argv[1] + '/x-%03d.tar', maxcount=3) as sink:\n"
        "    for n in range(8):\n"
        "        sink.write({'__key__': str(n), 'bin': bytes(100_000)})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    names = sorted(path.name for path in tmp_path.glob("x-*.tar"))
    assert names == ["x-000.tar", "x-001.tar"]
    assert len(list(wds.WebDataset(str(tmp_path)))) == 6


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz"])
@pytest.mark.parametrize(("little_room", "problem"), LITTLE_ROOM)
def test_an_error_of_a_full_disk_names_the_archive(tmp_path, name, little_room, problem):
    with little_room(tmp_path / "disk", 64) as disk:
        noise = np.random.default_rng(0).bytes(2_000_000)
        with pytest.raises(OSError, match=f"{problem}: '.*{name}'$"):
            write(disk / name, {"__key__": "a", "bin": noise})
        assert os.listdir(disk) == []
