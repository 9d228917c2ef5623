from __future__ import annotations

import pytest

from energon.errors import DatasetNotFoundError, FormatError, StorageError
from energon.formats.tables.part_table import part_table_path
from energon.prepare import index
from energon.prepare.engines import Engine
from energon.prepare.index import IndexOptions, find_shards, index_batch, run_on_shards
from tests.datasets import write_shard


@pytest.mark.parametrize("seconds", [0, 10])
def test_shards_come_in_order_whoever_indexes_them(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(index, "ALONE_SECONDS", seconds)
    monkeypatch.setattr(index, "MIN_BATCH_BYTES", 1)
    for number in range(30):
        write_shard(tmp_path / f"{number:02}.tar", [(f"{number}", {"txt": b"x"})])
    names = find_shards(tmp_path)
    done = []
    indexed = run_on_shards(
        index_batch,
        tmp_path,
        names,
        IndexOptions(),
        engine=Engine(num_workers=2),
        progress=lambda *counts: done.append(counts),
    )
    assert [shard.name for shard in indexed] == names
    assert done[-1] == (30, 30)
    assert [count for count, _ in done] == sorted(count for count, _ in done)


@pytest.mark.parametrize(
    ("name", "error"), [("missing.tar", DatasetNotFoundError), ("x" * 300, StorageError)]
)
def test_shards_that_cannot_be_looked_at_are_named(tmp_path, name, error):
    engine = Engine(num_workers=1)
    with pytest.raises(error, match=name):
        list(run_on_shards(index_batch, tmp_path, [name], IndexOptions(), engine=engine))


def test_what_was_indexed_before_an_error_is_kept(tmp_path):
    for number in range(3):
        write_shard(tmp_path / f"{number}.tar", [(f"{number}", {"txt": b"x"})])
    (tmp_path / "2.tar").write_bytes(b"x" * 2000)
    names = find_shards(tmp_path)
    with pytest.raises(FormatError, match=r"2\.tar"):
        list(run_on_shards(index_batch, tmp_path, names, IndexOptions(), engine=Engine()))
    assert [part_table_path(tmp_path / f"{n}.tar").exists() for n in range(3)] == [
        True,
        True,
        False,
    ]
