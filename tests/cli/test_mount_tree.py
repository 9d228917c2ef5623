from __future__ import annotations

import os

import pytest

from energon.io.files import write_bytes
from tests.cli.mounts import files_of, mounted
from tests.datasets import make_crude
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


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--sample-folders",)])
def test_every_part_of_every_sample_is_a_file_whatever_its_name(tmp_path, options):
    names = [
        *("x.jpg", "x.jpg/1.txt"),  # a file and a folder of one name
        *("n/m.0", "n/m/0.txt"),  # as samples are: a part and a folder of one name
        *("grüß.txt", "漢字/猫.txt", "emoji 🐈.txt", "\udcff.txt", "100%.txt", "%2E.txt"),
        *("l" * 300 + ".txt", "l" * 301 + ".txt", "猫" * 300 + ".txt", "d" * 300 + "/a.txt"),
        *(" .txt", "-rf.txt", "a\tb.txt", "'\".txt", "new\nline.txt"),
        *("../../escape.txt", "/etc/passwd.txt", "a/../b.txt", "a//c.txt"),  # which stay inside
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
