from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, DuplicateSampleKeyError, EmptyDatasetError
from energon.formats.tables.part_table import PartTable, key_hashes, table_hashes
from energon.formats.tar.scan import scan_tar
from energon.sources.join import MISSING, JoinIndex
from energon.task_encoder import open_join
from energon.task_encoder.open_join import KeyColumn, build_join_index
from tests.datasets import write_shard

KEYS = st.lists(
    st.text("ab/é01_-", min_size=1, max_size=20).filter(
        lambda key: key.strip("/") == key and not key.startswith("__")
    ),
    unique=True,
    max_size=30,
)


def column(folder, name, shards, nonmatch="error"):
    """The keys of a dataset with these shards."""
    blocks, keys, start = [], [], 0
    for number, shard in enumerate(shards):
        path = folder / f"{name}-{number}.tar"
        write_shard(path, [(key, {"txt": b"x"}) for key in shard])
        table = PartTable.from_scan(scan_tar(path))
        indices = np.arange(len(shard))
        hashes = table_hashes(table, indices)
        assert (key_hashes(shard) == hashes).all()
        blocks.append(partial(tuple, (hashes, indices + start)))
        keys += shard
        start += len(shard)
    return KeyColumn(name, len(keys), blocks, keys.__getitem__, nonmatch)


def build(path, *columns, partition_keys=open_join.PARTITION_KEYS):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_join, "PARTITION_KEYS", partition_keys)
        rows = build_join_index(path, columns)
    index = JoinIndex.open(path)
    assert index.num_rows == rows
    assert sorted(p.name for p in path.parent.glob("*")) == [path.name]
    return [index.ordinals(number, np.arange(rows)).tolist() for number in range(len(columns))]


def cut(keys, places):
    edges = [0, *sorted(place % (len(keys) + 1) for place in places), len(keys)]
    return [keys[a:b] for a, b in itertools.pairwise(edges) if a < b]


@given(
    keys=st.tuples(KEYS.filter(bool), KEYS.filter(bool), KEYS.filter(bool)),
    cuts=st.lists(st.integers(0, 99), max_size=3),
    modes=st.tuples(*[st.sampled_from(["skip", "none"])] * 2),
    partition_keys=st.sampled_from([1000, 3]),
)
@settings(max_examples=60, deadline=None)
def test_a_join_is_what_dictionaries_find(tmp_path_factory, keys, cuts, modes, partition_keys):
    folder = tmp_path_factory.mktemp("join")
    lookups = [{key: number for number, key in enumerate(each)} for each in keys]
    expected = [
        (number, *(lookup.get(key, MISSING) for lookup in lookups[1:]))
        for number, key in enumerate(keys[0])
    ]
    expected = [
        row
        for row in expected
        if all(mode == "none" or at >= 0 for mode, at in zip(modes, row[1:], strict=True))
    ]
    columns = [
        column(folder, f"d{number}", cut(each, cuts), nonmatch)
        for number, (each, nonmatch) in enumerate(zip(keys, ("error", *modes), strict=True))
    ]
    path = tmp_path_factory.mktemp("out") / "index.bin"
    if expected:
        found = build(path, *columns, partition_keys=partition_keys)
        assert [*zip(*found, strict=True)] == expected
    else:
        with pytest.raises(EmptyDatasetError, match="d0 has no sample whose key is in d1 and d2"):
            build(path, *columns, partition_keys=partition_keys)


def test_many_shards_are_dealt_to_partitions_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(open_join, "PARTITION_KEYS", 50)
    keys = [f"k{number:05}" for number in range(500)]
    folder = tmp_path / "data"
    first = column(folder, "first", [keys[i : i + 50] for i in range(0, 500, 50)])
    other = column(folder, "other", [keys[::-1][i : i + 125] for i in range(0, 500, 125)])
    found = build(tmp_path / "out" / "i.bin", first, other, partition_keys=50)
    assert found == [[*range(500)], [*range(499, -1, -1)]]


def test_names_what_has_no_match_in_all_datasets_at_once(tmp_path):
    first = column(tmp_path / "d", "first", [["a", "b", "c"]])
    others = [column(tmp_path / "d", name, [["b", name]]) for name in ("x", "y")]
    with pytest.raises(ConfigError) as info:
        build(tmp_path / "out" / "i.bin", first, *others)
    assert str(info.value).splitlines() == [
        "x lacks 2 of the 3 keys of first, e.g. 'a'",
        "y lacks 2 of the 3 keys of first, e.g. 'a'",
        "Write `nonmatch: skip` next to its path to skip such samples, or `nonmatch: none` to "
        "pass None to the joiner",
    ]
    assert not [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize("twice", [0, 1])
def test_a_key_that_is_there_twice_is_refused(tmp_path, twice):
    shards = [[["a", "b"], ["c"]], [["a", "b"], ["c"]]]
    shards[twice][1] = ["b"]
    columns = [column(tmp_path / "d", f"d{n}", each) for n, each in enumerate(shards)]
    with pytest.raises(DuplicateSampleKeyError, match=f"d{twice}: samples 1 and 2 .* key 'b'"):
        build(tmp_path / "out" / "i.bin", *columns)
