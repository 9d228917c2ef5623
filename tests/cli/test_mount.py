from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.mounts import files_of, mounted
from tests.datasets import make_crude

pytestmark = pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="there is no /dev/fuse")


def test_shows_samples_of_all_shards_as_files(tmp_path):
    root = make_crude(tmp_path / "ds", [2, 1])
    with mounted(root, tmp_path / "mnt") as mnt:
        assert files_of(mnt) == {f"s{n}.txt": f"text {n}".encode() for n in range(3)}


def test_shows_samples_as_folders(tmp_path):
    root = make_crude(tmp_path / "ds", [2, 1])
    with mounted(root, tmp_path / "mnt", "--sample-folders") as mnt:
        assert files_of(mnt) == {f"s{n}/txt": f"text {n}".encode() for n in range(3)}
