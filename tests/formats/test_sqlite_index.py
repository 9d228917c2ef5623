from __future__ import annotations

import sqlite3

import pytest

from energon.errors import DuplicateSampleKeyError
from energon.formats.part_table import PartTable
from energon.formats.sqlite_index import Shard, write_sqlite_index
from energon.formats.tar_scan import scan_tar
from tests.datasets import write_shard


def shard(path, keys):
    write_shard(path, [(key, {"json": b"{}", "txt": b"text"}) for key in keys])
    return Shard(path.name, PartTable.from_scan(scan_tar(path)))


def test_samples_and_parts_are_found_by_name(tmp_path):
    shards = [shard(tmp_path / "a.tar", ["x", "y"]), shard(tmp_path / "b.tar", ["z"])]
    path = tmp_path / "index.sqlite"
    write_sqlite_index(path, shards)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT * FROM samples ORDER BY sample_key").fetchall() == [
        (0, "x", 0, 0, 2048),
        (0, "y", 1, 2048, 2048),
        (1, "z", 0, 0, 2048),
    ]
    found = connection.execute(
        "SELECT content_byte_offset, content_byte_size FROM sample_parts JOIN samples USING "
        "(tar_file_id, sample_index) WHERE sample_key = 'y' AND part_name = 'txt'"
    ).fetchall()
    connection.close()
    assert found == [(3584, 4)]


@pytest.mark.parametrize("second", [["q", "x"], ["q", "r", "q"]])
def test_a_key_that_is_there_twice_is_named_with_both_places(tmp_path, second):
    shards = [shard(tmp_path / "a.tar", ["x", "y"]), shard(tmp_path / "b.tar", second)]
    with pytest.raises(DuplicateSampleKeyError, match=r"'[xq]' is in [ab]\.tar .* in b\.tar"):
        write_sqlite_index(tmp_path / "index.sqlite", shards)
