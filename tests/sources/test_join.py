from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from energon.errors import EmptyDatasetError
from energon.formats.tables.part_table import key_hashes
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe
from energon.prepare.dataset import prepare_dataset
from energon.samples.crude import JOINED
from energon.sources.join import JoinedSource, JoinIndex, hashed_keys
from energon.sources.reader import LeafReader
from energon.sources.source import SampleSelection
from energon.sources.webdataset import WebdatasetSource
from energon.stages.read import ReadDataset
from energon.testing import check_resume
from tests.datasets import CRUDE, make_crude, write_shard
from tests.sources.reads import read_samples

INDEX = JoinIndex(4, (np.array([5, 0, 3, 2]), np.array([1, -1, 4, 0])))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("join")
    return [
        WebdatasetSource(make_crude(root / name, sizes, prefix=name))
        for name, sizes in (("a", [4, 2]), ("b", [2, 3]))
    ]


def joined(sources, **settings):
    return JoinedSource(sources, INDEX, digest="x", **settings)


def test_gives_the_samples_that_the_index_puts_together(sources):
    source = joined(sources, subflavors=[{"which": "a"}, {"which": "b"}])
    found = read_samples(
        source,
        np.array([1, 0, 3]),
        restore_keys=[(7, 1, 1), (7, 1, 0), (7, 1, 3)],
        subflavors={"x": 1},
    )
    assert [sample["__key__"] for sample in found] == ["a0", "a5", "a2"]
    assert [sample["__restore_key__"] for sample in found] == [(7, 1, 1), (7, 1, 0), (7, 1, 3)]
    assert [[part and part["__key__"] for part in sample[JOINED]] for sample in found] == [
        ["a0", None],
        ["a5", "b1"],
        ["a2", "b0"],
    ]
    first, second = found[1][JOINED]
    assert (first["txt"], second["txt"]) == (b"text 5", b"text 1")
    assert (first["__restore_key__"], second["__restore_key__"]) == ((7, 1, 5), (7, 1, 1))
    assert second["__subflavors__"] == {"which": "b", "x": 1}


def test_knows_what_a_row_is_made_of(sources):
    source = joined(sources)
    assert len(source) == 4
    assert source.ordinals(1) == [0, -1]
    assert source.locate(0).key == "a5"
    assert source.paths == [each.path for each in sources]
    assert source.mean_sample_bytes == sum(each.mean_sample_bytes for each in sources)
    with pytest.raises(IndexError, match="samples 0 to 3, not 4"):
        read_samples(source, np.array([4]))
    reader = LeafReader((source,), ({},))
    assert [each.key for each in reader.locate((0, 0, 0))] == ["a5", "b1"]
    assert [each.key for each in reader.locate((0, 0, 1))] == ["a0"]


def test_says_which_bytes_will_be_read(sources):
    found = [
        (place, low, high)
        for extents in joined(sources).extents(np.array([3, 1]))
        for place, low, high in zip(*(e.tolist() for e in extents[1:]), strict=True)
    ]
    assert sorted(place for place, _, _ in found) == [0, 0, 1]
    assert all(low < high for _, low, high in found)


def test_a_subset_is_one_of_rows(sources):
    source = joined(sources, subsets=[(1, "end"), ("0%", "50%")])
    assert [sample["__key__"] for sample in read_samples(source, np.arange(len(source)))] == ["a0"]
    with pytest.raises(EmptyDatasetError, match="has 4 samples, of which the subset"):
        joined(sources, subsets=[(2, 2)])


def test_the_fingerprint_changes_with_members_index_and_subset(sources):
    one = joined(sources).fingerprint()
    assert json.loads(json.dumps(one)) == one
    others = [
        joined(sources[::-1]),
        joined(sources, subsets=[(0, 2)]),
        JoinedSource(sources, INDEX, digest="y"),
    ]
    assert all(other.fingerprint()["index"] != one["index"] for other in others)
    assert pickle.loads(pickle.dumps(joined(sources))).fingerprint() == one


def test_keys_are_those_of_the_samples_that_are_left(tmp_path):
    root = make_crude(tmp_path / "d", [4, 3])
    (root / ".nv-meta/split.yaml").write_text(
        "split_parts: {train: [000.tar, 001.tar]}\nexclude: [000.tar/s1, 001.tar/s6]\n"
    )
    for subsets in ([], [(1, 4)]):
        source = WebdatasetSource(root, SampleSelection(subsets=subsets))
        found = {}
        for read in hashed_keys(source):
            hashes, ordinals = read()
            found |= dict(zip(ordinals.tolist(), hashes.tolist(), strict=True))
        keys = source.keys(np.arange(len(source)))
        assert keys == [source.locate(n).key for n in range(len(source))]
        assert found == dict(enumerate(key_hashes(keys).tolist()))


def test_reading_a_join_resumes_at_any_row(sources):
    source = joined(sources)
    recipe = PlanRecipe("blend", (PlanLeaf("join", len(source)),), seed=3)
    stage = ReadDataset(recipe, LeafReader((source,), ({},)))
    assert len(check_resume(stage, limit=30, lanes=2)) == 30


def test_differently_sharded_samples_of_several_parts_are_read(tmp_path):
    for name, cuts in (("a", [3, 7]), ("b", [5, 2, 3])):
        start = 0
        for shard, count in enumerate(cuts):
            samples = [
                (f"k{n}", {f"{name}.bin": bytes([n]) * 50_000, f"{name}.txt": str(n).encode()})
                for n in range(start, start + count)
            ]
            write_shard(tmp_path / name / f"{shard}.tar", samples)
            start += count
        prepare_dataset(tmp_path / name, **CRUDE)
    sources = [WebdatasetSource(tmp_path / name) for name in "ab"]
    index = JoinIndex(10, (None, np.arange(10)))
    for sample in read_samples(JoinedSource(sources, index, digest=""), np.arange(10)[::-1]):
        first, second = sample[JOINED]
        assert first["__key__"] == second["__key__"] == f"k{first['a.txt'].decode()}"
        assert first["a.bin"] == second["b.bin"] == bytes([int(first["a.txt"])]) * 50_000
