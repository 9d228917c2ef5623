from __future__ import annotations

import sqlite3

import pytest

from energon.errors import DuplicateSampleKeyError
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.sqlite_index import (
    ShardState,
    ShardToIndex,
    extend_sqlite_index,
    indexed_shards,
    write_sqlite_index,
)
from energon.formats.tar.scan import scan_tar
from tests.datasets import write_shard


def shard(path, keys):
    write_shard(path, [(key, {"json": b"{}", "txt": b"text"}) for key in keys])
    return ShardToIndex(path.name, PartTable.from_scan(scan_tar(path)))


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


def content(path):
    connection = sqlite3.connect(path)
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema ORDER BY name")]
    rows = [
        sorted(connection.execute(f"SELECT * FROM {table}"))
        for table in ("samples", "sample_parts", "energon_shards")
    ]
    connection.close()
    return names, rows


def test_an_index_that_was_extended_is_one_that_was_written_at_once(tmp_path):
    shards = [
        shard(tmp_path / f"{n}.tar", [f"{n}_{k}" for k in range(n * 70)]) for n in range(1, 4)
    ]
    write_sqlite_index(tmp_path / "whole.sqlite", shards)
    write_sqlite_index(tmp_path / "parts.sqlite", shards[:1])
    extend_sqlite_index(tmp_path / "parts.sqlite", shards[1:])
    assert content(tmp_path / "parts.sqlite") == content(tmp_path / "whole.sqlite")
    assert len(content(tmp_path / "whole.sqlite")[1][1]) == 2 * 70 * 6


def test_extending_with_a_key_that_is_there_is_an_error(tmp_path):
    write_sqlite_index(tmp_path / "x.sqlite", [shard(tmp_path / "a.tar", ["x"])])
    with pytest.raises(DuplicateSampleKeyError, match="occurs twice"):
        extend_sqlite_index(tmp_path / "x.sqlite", [shard(tmp_path / "b.tar", ["x"])])


def test_an_index_says_of_which_shards_it_is(tmp_path):
    path = tmp_path / "x.sqlite"
    assert indexed_shards(path) is None
    one = shard(tmp_path / "a.tar", ["x"])
    write_sqlite_index(path, [one])
    assert indexed_shards(path) == [ShardState("a.tar", one.table.shard_size, 0)]
    path.write_bytes(b"no database, but long enough to be taken for one" * 100)
    assert indexed_shards(path) is None
