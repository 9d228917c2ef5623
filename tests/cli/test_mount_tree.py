from __future__ import annotations

import io
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from energon.prepare.dataset import prepare_dataset
from tests.cli.mounts import files_of, mounted
from tests.datasets import make_crude, write_shard

pytestmark = pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="there is no /dev/fuse")


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
