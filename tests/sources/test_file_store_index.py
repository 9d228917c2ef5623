from __future__ import annotations

import tarfile

from hypothesis import strategies as st

from energon.formats.tables.part_table import PartTable
from energon.formats.tar.scan import scan_tar
from energon.sources.files.locate import KeyIndex

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
