from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import DuplicateSampleKeyError
from energon.formats.part_table import PartTable
from energon.formats.split import load_split
from energon.formats.tar_scan import scan_tar
from energon.prepare import duplicates
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.duplicates import check_unique, shards_with_known_keys
from energon.prepare.engines import Engine
from energon.prepare.index import summarize
from energon.sources.webdataset import WebdatasetSource
from tests.datasets import write_shard

ALL = {"split_parts": ["train:.*"], "sample_type": "CrudeWebdataset"}
FIX = Indexing(Engine(num_workers=1), fix_duplicates=True)
keys = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=12, unique=True)


def indexed(folder, shards):
    tables = {}
    for number, names in enumerate(shards):
        path = folder / f"{number}.tar"
        write_shard(path, [(name, {"txt": b"x"}) for name in names])
        tables[path.name] = PartTable.from_scan(scan_tar(path))
    found = [summarize(name, table, was_read=True) for name, table in tables.items()]
    return found, tables.__getitem__


@given(st.lists(keys, min_size=1, max_size=5), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_keys_that_shards_share_are_found_a_range_at_a_time(tmp_path_factory, shards, most):
    found, open_table = indexed(tmp_path_factory.mktemp("d"), shards)
    seen, sharing = set(), []
    for number, names in enumerate(shards):
        if seen & set(names):
            sharing.append(f"{number}.tar")
        seen |= set(names)
    before, duplicates.MAX_KEYS = duplicates.MAX_KEYS, most
    try:
        assert sorted(set(shards_with_known_keys(found, open_table))) == sharing
        if sharing:
            with pytest.raises(DuplicateSampleKeyError, match="in a dataset"):
                check_unique(found, open_table)
        else:
            check_unique(found, open_table)
    finally:
        duplicates.MAX_KEYS = before


def test_shards_whose_keys_do_not_overlap_are_not_opened(tmp_path):
    found, _ = indexed(tmp_path, [["a", "b"], ["c", "d"], ["e"]])

    def refuse(name):
        raise AssertionError(name)

    check_unique(found, refuse)


def test_a_key_that_a_shard_has_twice_is_named(tmp_path):
    write_shard(tmp_path / "a.tar", [("a", {"txt": b"1"}), ("b", {"txt": b"2"}), ("a", {"j": b""})])
    with pytest.raises(DuplicateSampleKeyError, match=r"'a' comes twice in a\.tar.*--fix-dup"):
        prepare_dataset(tmp_path, **ALL)


def content(root):
    source = WebdatasetSource(root)
    return [
        (sample["__key__"], {k: v for k, v in sample.items() if not k.startswith("__")})
        for sample in source.read(np.arange(len(source)))
    ]


def test_shards_with_known_keys_are_written_anew_with_their_path_before_each_key(tmp_path):
    first = [("0", {"txt": b"a"}), ("1", {"txt": b"b", "jpg": b"c"})]
    second = [("1", {"txt": b"d"}), ("2", {"txt": b"e" * 1000})]
    write_shard(tmp_path / "s/0.tar", first)
    write_shard(tmp_path / "s/1.tar", second)
    write_shard(tmp_path / "s/2.tar", [("3", {"txt": b"f"})])
    before = {name: (tmp_path / name).read_bytes() for name in ("s/0.tar", "s/2.tar")}
    info = prepare_dataset(tmp_path, **ALL, indexing=FIX)
    assert info.shard_counts == {"s/0.tar": 2, "s/1.tar": 2, "s/2.tar": 1}
    assert content(tmp_path) == [
        *first,
        ("s/1/1", {"txt": b"d"}),
        ("s/1/2", {"txt": b"e" * 1000}),
        ("3", {"txt": b"f"}),
    ]
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert load_split(tmp_path).shards("train") == list(info.shard_counts)


def test_parts_that_are_apart_are_brought_together(tmp_path, caplog):
    path = tmp_path / "a.tar"
    names = ["a.jpg", "a_2.jpg", "a.txt", "a_2.txt", "README", "a.txt"]
    from energon.formats.tar_header import END, encode_header, padded

    data = [encode_header(name, 1) + padded(b"%d" % n) for n, name in enumerate(names)]
    path.write_bytes(b"".join(data) + END)
    prepare_dataset(tmp_path, **ALL, indexing=FIX)
    assert content(tmp_path) == [
        ("a", {"jpg": b"0", "txt": b"2"}),
        ("a_2", {"jpg": b"1", "txt": b"3"}),
        ("a_3", {"txt": b"5"}),
    ]
    assert "1 members that belong to no sample are left out" in caplog.text
