from __future__ import annotations

import io
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from energon.io.files import write_bytes
from energon.prepare.dataset import prepare_dataset
from energon.prepare.jsonl import prepare_jsonl
from tests.cli.mounts import files_of, mounted
from tests.datasets import make_crude, write_shard
from tests.sources.distant import upload
from tests.sources.test_browse_dataset import index_as_it_is

pytestmark = pytest.mark.usefixtures("libfuse")


@pytest.mark.slow
def test_a_metadataset_is_mounted_with_its_auxiliary_data(tmp_path):
    make_crude(tmp_path / "ds", [1])
    make_crude(tmp_path / "media", [1], prefix="m")
    (tmp_path / "meta.yaml").write_text("splits: {train: {path: ds, aux: {media: media}}}")
    with mounted(tmp_path / "meta.yaml", tmp_path / "mnt") as mnt:
        assert files_of(mnt) == {
            "train/ds/s0.txt": b"text 0",
            "train/ds.aux/media/m0.txt": b"text 0",
        }


def test_names_from_hostile_shards_stay_inside(tmp_path):
    names = ["../../escape.txt", "/etc/passwd.txt", "a/../b.txt", "a//c.txt", "new\nline.txt"]
    shard = tmp_path / "ds" / "0.tar"
    shard.parent.mkdir()
    with tarfile.open(shard, "w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    with mounted(tmp_path / "ds", tmp_path / "mnt") as mnt:
        found = {path.read_bytes().decode(): path for path in mnt.rglob("*") if path.is_file()}
        assert set(found) == set(names)
        for path in found.values():
            assert path.resolve().is_relative_to(mnt)
            assert ".." not in path.parts
    assert not (tmp_path / "escape.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--sample-folders",)])
def test_every_part_of_every_sample_is_a_file_whatever_its_name(tmp_path, options):
    names = [
        *("x.jpg", "x.jpg/1.txt"),  # a file and a folder of one name
        *("n/m.0", "n/m/0.txt"),  # as samples are: a part and a folder of one name
        *("grüß.txt", "漢字/猫.txt", "emoji 🐈.txt", "\udcff.txt", "100%.txt", "%2E.txt"),
        *("l" * 300 + ".txt", "l" * 301 + ".txt", "猫" * 300 + ".txt", "d" * 300 + "/a.txt"),
        *(" .txt", "-rf.txt", "a\tb.txt", "'\".txt"),
    ]
    root = index_as_it_is(tmp_path / "ds", names, ["twice.txt"], ["twice.txt", "twice.jpg"])
    with mounted(root, tmp_path / "mnt", *options) as mnt:
        found = files_of(mnt)
    expected = [*names, "twice.txt", "twice.txt", "twice.jpg"]
    contents = [name.encode("utf-8", "surrogateescape") for name in expected]
    assert sorted(found.values()) == sorted(contents)
    for path in found:
        assert max(len(os.fsencode(step)) for step in path.split("/")) <= 255
    if not options:
        assert {"grüß.txt", "漢字/猫.txt", "x.jpg/1.txt", "100%25.txt"} <= set(found)


@pytest.mark.slow
def test_distant_datasets_and_auxiliary_data_are_mounted(s3, tmp_path):
    make_crude(tmp_path / "ds", [2])
    upload(tmp_path / "ds", s3.address)
    write_bytes(f"{s3.address}/files/deep/1.bin", b"one")
    (tmp_path / "meta.yaml").write_text(
        f"splits: {{train: {{path: '{s3.address}/ds', "
        f"aux: {{files: 'filesystem+{s3.address}/files', same: '{s3.address}/ds'}}}}}}"
    )
    with mounted(tmp_path / "meta.yaml", tmp_path / "mnt", "--sample-folders") as mnt:
        found = files_of(mnt)
    samples = {f"s{n}/txt": f"text {n}".encode() for n in range(2)}
    assert {path: found.pop(path) for path in list(found) if ".aux/" not in path} == {
        f"train/ds/{path}": content for path, content in samples.items()
    }
    assert found.pop("train/ds.aux/files/deep/1.bin") == b"one"
    assert sorted(found.values()) == [b"text 0", b"text 1"]


def test_lines_of_a_jsonl_file_are_mounted(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    prepare_jsonl(path)
    with mounted(path, tmp_path / "mnt") as mnt:
        assert files_of(mnt) == {"0.json": b'{"a": 1}\n', "1.json": b'{"a": 2}\n'}


def test_nothing_can_be_written(tmp_path):
    root = make_crude(tmp_path / "ds", [1])
    with mounted(root, tmp_path / "mnt") as mnt:
        for action in (
            lambda: (mnt / "s0.txt").write_text("other"),
            lambda: (mnt / "new.txt").touch(),
            lambda: (mnt / "s0.txt").unlink(),
            lambda: (mnt / "folder").mkdir(),
        ):
            with pytest.raises(OSError, match="Read-only file system"):
                action()


def test_many_programs_read_large_files_at_once(tmp_path):
    contents = {f"{n}.bin": os.urandom(700_000) for n in range(4)}
    write_shard(
        tmp_path / "ds" / "0.tar",
        [(name.partition(".")[0], {"bin": data}) for name, data in contents.items()],
    )
    prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    with mounted(tmp_path / "ds", tmp_path / "mnt") as mnt, ThreadPoolExecutor(8) as threads:
        names = list(contents) * 6
        read = threads.map(lambda name: (mnt / name).read_bytes(), names)
        assert list(read) == [contents[name] for name in names]
        with open(mnt / "2.bin", "rb") as file:
            file.seek(500_000)
            assert file.read(1000) == contents["2.bin"][500_000:501_000]
