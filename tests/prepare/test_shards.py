from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import FormatError
from energon.formats.tables.part_table import PartTable, part_table_path
from energon.prepare import index
from energon.prepare.engines import Engine
from energon.prepare.index import IndexOptions, find_shards, index_batch, index_shards
from tests.datasets import write_shard


@given(st.lists(st.integers(0, 100), min_size=1, max_size=200), st.integers(1, 16))
@settings(max_examples=50, deadline=None)
def test_batches_are_all_shards_in_their_order(tmp_path_factory, sizes, workers):
    folder = tmp_path_factory.mktemp("s")
    names = [f"{number:03}.tar" for number in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        (folder / name).write_bytes(bytes(size))
    before, index.MIN_BATCH_BYTES = index.MIN_BATCH_BYTES, 120
    try:
        batches = index._batches(folder, names, Engine(num_workers=workers))
    finally:
        index.MIN_BATCH_BYTES = before
    assert [name for batch in batches for name in batch] == names
    assert max(map(len, batches)) <= index.MAX_BATCH_SHARDS


@pytest.mark.parametrize("seconds", [0, 10])
def test_shards_come_in_order_whoever_indexes_them(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(index, "ALONE_SECONDS", seconds)
    monkeypatch.setattr(index, "MIN_BATCH_BYTES", 1)
    for number in range(30):
        write_shard(tmp_path / f"{number:02}.tar", [(f"{number}", {"txt": b"x"})])
    names = find_shards(tmp_path)
    done = []
    found = index_shards(
        tmp_path,
        names,
        engine=Engine(num_workers=2),
        options=IndexOptions(),
        progress=lambda *about: done.append(about),
    )
    assert [shard.name for shard in found] == names
    assert done[-1] == (30, 30)
    assert [count for count, _ in done] == sorted(count for count, _ in done)


def test_what_was_indexed_before_an_error_is_kept(tmp_path):
    for number in range(3):
        write_shard(tmp_path / f"{number}.tar", [(f"{number}", {"txt": b"x"})])
    (tmp_path / "2.tar").write_bytes(b"x" * 2000)
    with pytest.raises(FormatError, match=r"2\.tar"):
        list(
            index_shards(
                tmp_path,
                find_shards(tmp_path),
                engine=Engine(num_workers=1),
                options=IndexOptions(),
            )
        )
    assert [part_table_path(tmp_path / f"{n}.tar").exists() for n in range(3)] == [
        True,
        True,
        False,
    ]


def test_no_table_is_looked_for_in_vain(tmp_path, monkeypatch):
    for number in range(4):
        write_shard(tmp_path / f"{number}.tar", [(f"{number}", {"txt": b"x"})])
    opened = []
    open_table = PartTable.open

    def record(path, **settings):
        opened.append(path.name)
        return open_table(path, **settings)

    monkeypatch.setattr(PartTable, "open", record)
    names = find_shards(tmp_path)
    index_batch(str(tmp_path), names, IndexOptions())
    assert opened == []
    index_batch(str(tmp_path), names, IndexOptions())
    assert opened == [f"{name}.parts" for name in names]
