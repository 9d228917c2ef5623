from __future__ import annotations

import tarfile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energon.formats.tables.part_table import PartTable
from energon.formats.tar.scan import scan_tar
from energon.sources.files.key_index import KeyIndex, hash_key, hash_keys

KEYS = st.lists(
    st.text(st.characters(exclude_characters="./\0", exclude_categories=["Cs"]), min_size=1),
    min_size=1,
    max_size=20,
    unique=True,
)


def table_of(folder, keys):
    path = folder / "x.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for key in keys:
            tar.addfile(tarfile.TarInfo(f"{key}.txt"))
    return PartTable.from_scan(scan_tar(path))


@given(KEYS)
def test_hashes_of_a_table_are_those_of_its_keys(tmp_path_factory, keys):
    table = table_of(tmp_path_factory.mktemp("keys"), keys)
    assert hash_keys(table).tolist() == [hash_key(key.encode()) for key in keys]


def test_keys_of_one_length_hash_like_others(tmp_path):
    keys = [f"{number:09}" for number in range(50)]
    table = table_of(tmp_path, keys)
    assert table.key_length == 9
    assert hash_keys(table).tolist() == [hash_key(key.encode()) for key in keys]


def test_every_key_of_every_shard_is_found(tmp_path):
    shards = [[f"{shard}-{n}" for n in range(30)] for shard in range(4)]
    tables = [table_of(tmp_path, keys) for keys in shards]
    index = KeyIndex(tables)
    assert len(index) == 120
    for shard, keys in enumerate(shards):
        for number, key in enumerate(keys):
            assert (shard, number) in list(index.find(key.encode()))
    assert list(index.find(b"absent")) == []
    assert list(KeyIndex([]).find(b"absent")) == []


def test_hashes_of_counted_keys_do_not_collide():
    hashes = {hash_key(f"{n:08}".encode()) for n in range(100_000)}
    assert len(hashes) == 100_000
    bits = np.array(sorted(hashes), np.uint64)
    # Even in the highest bits, which the search by halves looks at first.
    counts = np.bincount((bits >> np.uint64(58)).astype(int), minlength=64)
    assert counts.min() > 1000
