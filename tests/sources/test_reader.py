from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from energon.plan.rows import Rows
from energon.sources.reader import LeafReader
from energon.sources.shards import ShardPool
from energon.sources.source import SampleSelection
from energon.sources.webdataset import WebdatasetSource
from tests.datasets import make_captions, make_crude


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    root = tmp_path_factory.mktemp("leaves")
    pool = ShardPool()
    return LeafReader(
        (
            WebdatasetSource(make_crude(root / "a", [4, 3], prefix="a"), pool=pool),
            WebdatasetSource(make_captions(root / "b", [2, 6], prefix="b"), pool=pool),
            WebdatasetSource(
                make_crude(root / "c", [5], prefix="c"),
                SampleSelection(subsets=[(1, 4)]),
                pool=pool,
            ),
        ),
        ({"of": "a"}, {}, {"of": "c"}),
    )


def rows(*triples):
    leaf, epoch, ordinal = zip(*triples, strict=True) if triples else ((), (), ())
    return Rows(np.array(leaf, np.int32), np.array(epoch, np.int64), np.array(ordinal, np.int64))


def read(reader, chosen):
    return reader.read(chosen).samples(0, len(chosen.leaf))


def everything(reader):
    return [(leaf, 0, n) for leaf, source in enumerate(reader.sources) for n in range(len(source))]


def test_rows_of_any_leaves_come_in_their_order(reader):
    triples = everything(reader) * 2
    random.Random(1).shuffle(triples)
    samples = read(reader, rows(*triples))
    assert [sample["__restore_key__"] for sample in samples] == triples
    first = {0: 0, 1: 0, 2: 1}
    assert [sample["__key__"] for sample in samples] == [
        f"{'abc'[leaf]}{ordinal + first[leaf]}" for leaf, _, ordinal in triples
    ]
    assert [sample["__subflavors__"] for sample in samples] == [
        reader.subflavors[leaf] for leaf, _, _ in triples
    ]
    assert {type(number) for sample in samples for number in sample["__restore_key__"]} == {int}
    assert read(reader, rows()) == []


def test_every_sample_is_found_again_by_its_restore_key(reader):
    for sample in read(reader, rows(*everything(reader))):
        (source,) = reader.locate(sample["__restore_key__"])
        leaf, _, ordinal = sample["__restore_key__"]
        path = reader.sources[leaf].path
        assert (source.dataset_path, source.index) == (str(path), ordinal)
        assert (source.shard_name, source.key) == (sample["__shard__"], sample["__key__"])
        shard = (path / source.shard_name).read_bytes()
        assert shard[source.offset :].startswith(source.file_names[0].encode() + b"\0")
        parts = [name for name in sample if not name.startswith("__")]
        assert source.file_names == tuple(f"{source.key}.{part}" for part in parts)


def test_sub_numbers_of_a_restore_key_do_not_matter(reader):
    assert reader.locate((1, 0, 3, 5)) == reader.locate((1, 9, 3))


def test_a_source_says_all_that_is_needed_to_look_at_the_sample(reader):
    (source,) = reader.locate((0, 2, 5))
    path = reader.sources[0].path
    assert str(source) == f"sample 'a5' of {path} (number 5; 001.tar at byte 1024)"


@pytest.mark.parametrize("key", [(3, 0, 0), (-1, 0, 0), (0, 0, 7), (0, 0, -1)])
def test_a_restore_key_of_no_sample_is_an_index_error(reader, key):
    with pytest.raises(IndexError):
        reader.locate(key)


def test_a_source_whose_shard_is_gone_says_what_is_known(tmp_path):
    root = make_crude(tmp_path / "ds", [3])
    reader = LeafReader((WebdatasetSource(root),), ({},))
    (root / "000.tar").unlink()
    (source,) = reader.locate((0, 4, 2))
    assert (source.dataset_path, source.index, source.shard_name) == (str(root), 2, None)
    assert str(source).startswith(f"sample number 2 of {root}, not located: ")
    assert "000.tar: no such file" in str(source)


def test_copies_in_other_processes_share_one_pool(reader):
    expected = read(reader, rows(*everything(reader)))
    again = pickle.loads(pickle.dumps(reader))
    assert read(again, rows(*everything(reader))) == expected
    assert len({id(source._pool) for source in again.sources}) == 1
