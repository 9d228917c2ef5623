from __future__ import annotations

import io
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import energon.webdataset as wds
from energon.errors import ConfigError, DuplicateSampleKeyError, FormatError, SecurityError
from energon.prepare.index import index_shard
from energon.webdataset import wids
from tests.datasets import jpeg
from tests.servers.web import web_server
from tests.webdataset.shards import make_shards, tar_bytes


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wids")
    paths = make_shards(folder, [3, 1, 5])
    descriptor = wids.create_descriptor(paths, name="numbers", checksum=True)
    wids.save_descriptor(descriptor, folder / "index.json")
    return folder / "index.json"


def test_the_list_of_shards_is_json_with_relative_addresses(index):
    document = json.loads(index.read_text())
    assert document["__kind__"] == "wids-shard-index-v1"
    assert document["wids_version"] == 1
    first = document["shardlist"][0]
    assert (first["url"], first["nsamples"]) == ("shard-000000.tar", 3)
    assert len(first["md5sum"]) == 32
    assert wids.load_descriptor(index).shards[0].url == str(index.parent / "shard-000000.tar")


def test_samples_by_number(index):
    dataset = wids.ShardListDataset(index)
    assert len(dataset) == 9
    sample = dataset[4]
    assert sample == {
        ".json": {"n": 4},
        ".txt": "text 4",
        "__key__": "000004",
        "__dataset__": "numbers",
        "__index__": 4,
        "__shard__": str(index.parent / "shard-000002.tar"),
        "__shardindex__": 0,
    }
    assert dataset[-1] == dataset[8]
    assert dataset.get_shard(-1).url.endswith("shard-000002.tar")
    assert [s["__index__"] for s in dataset.__getitems__([8, 0, 8])] == [8, 0, 8]
    for wrong in (9, -10):
        with pytest.raises(IndexError, match="expected 0 to 8"):
            dataset[wrong]


def test_samples_are_copied_with_the_dataset_to_workers(index):
    dataset = pickle.loads(pickle.dumps(wids.ShardListDataset(index)))
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        sampler=wids.ShardedSampler(dataset, shufflefirst=True),
        collate_fn=wds.utils.identity,
    )
    assert sorted(s["__index__"] for batch in loader for s in batch) == [*range(9)]


def test_fields_are_streams_without_transformations(index):
    dataset = wids.ShardListDataset(index, transformations=None)
    assert isinstance(dataset[0][".txt"], io.BytesIO)
    dataset.add_transform(lambda sample: sample[".txt"].read())
    assert dataset[1] == dataset[1] == b"text 1"


def test_images_as_pillow_or_numpy_has_them(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes([("a.jpg", jpeg(1)), ("a.pyd", pickle.dumps(1))]))
    shards = [{"url": str(path), "nsamples": 1}]
    with pytest.raises(SecurityError):
        wids.ShardListDataset(shards)[0]
    assert wids.ShardListDataset(shards, allow=("pickle",))[0][".jpg"].size == (12, 8)
    arrays = wids.ShardListDataset(shards, transformations="numpy", allow=("pickle",))[0]
    assert arrays[".jpg"].shape == (8, 12, 3)
    assert arrays[".jpg"].dtype == np.uint8
    with pytest.raises(ConfigError, match="transformations"):
        wids.ShardListDataset(shards, transformations="torch")


def test_samples_of_a_server_are_read_in_parts(index):
    for path in index.parent.glob("*.tar"):
        index_shard(str(path))
    with web_server(index.parent) as server:
        dataset = wids.ShardListDataset(f"{server.url}/index.json")
        assert [dataset[n][".txt"] for n in (0, 5, 3)] == ["text 0", "text 5", "text 3"]


def test_few_shards_are_open_at_a_time(index):
    dataset = wids.ShardListDataset(index, lru_size=1)
    for _ in range(60):
        for number in (0, 3, 4):
            dataset[number]
    accesses, misses = dataset.get_stats()
    assert accesses == misses == 180
    assert dataset.check_cache_misses()


def test_a_sample_that_has_a_field_twice_is_an_error(tmp_path):
    members = [("0.a", b"0"), ("1.a", b"1"), ("1.b", b"2"), ("1.A", b"3")]
    (tmp_path / "x.tar").write_bytes(tar_bytes(members))
    wids.save_descriptor(
        wids.create_descriptor([str(tmp_path / "x.tar")], name="x"), tmp_path / "x.json"
    )
    dataset = wids.ShardListDataset(str(tmp_path / "x.json"), transformations=None)
    assert dataset[0][".a"].read() == b"0"
    with pytest.raises(DuplicateSampleKeyError, match=r"x\.tar: sample '1' has a field twice"):
        dataset[1]


def test_lists_of_lists(index, tmp_path):
    outer = {
        "wids_version": 1,
        "datasets": [
            {"source_url": str(index)},
            {"name": "x", "shardlist": [{"url": "a.tar", "nsamples": 2}]},
        ],
    }
    (tmp_path / "outer.json").write_text(json.dumps(outer))
    found = wids.load_descriptor(tmp_path / "outer.json")
    assert [shard.nsamples for shard in found.shards] == [3, 1, 5, 2]
    assert found.shards[3] == wids.ShardInfo(str(tmp_path / "a.tar"), 2, dataset="x")
    assert len(list(wds.WebDataset(str(index)))) == 9


@pytest.mark.parametrize(
    "document",
    ["{", "[]", "{}", '{"shardlist": []}', '{"wids_version": 1, "shardlist": [{"url": "a"}]}'],
)
def test_what_is_no_list_of_shards(tmp_path, document):
    path = tmp_path / "x.json"
    path.write_text(document)
    with pytest.raises(FormatError, match=r"x\.json"):
        wids.load_descriptor(path)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(0, 5))
def test_samplers_of_shards_give_every_sample_once(lengths, seed):
    sampler = wids.ShardListSampler(None, lengths=lengths, seed=seed)
    epochs = [list(sampler) for _ in range(3)]
    assert all(sorted(epoch) == [*range(sum(lengths))] for epoch in epochs)


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 7), st.booleans())
def test_samplers_of_ranks_are_equally_long_and_miss_nothing(size, chunk, ranks, drop):
    def sampler(rank):
        return wids.DistributedChunkedSampler(
            range(size), num_replicas=ranks, rank=rank, chunksize=chunk, drop_last=drop
        )

    found = [list(sampler(rank)) for rank in range(ranks)]
    assert {len(each) for each in found} == {len(sampler(0))}
    together = [n for each in found for n in each]
    if drop:
        assert len(set(together)) == len(together) == size // ranks * ranks
    elif size >= ranks:
        assert set(together) == set(range(size))


def test_chunks_in_another_order_each_epoch():
    sampler = wids.ChunkedSampler(range(100), chunksize=10, num_samples=(20, 80))
    epochs = [list(sampler) for _ in range(3)]
    assert epochs[0] == [*range(20, 80)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(sorted(epoch) == epochs[0] for epoch in epochs)
    assert len(sampler) == 60
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]
    with pytest.raises(ConfigError, match="num_samples"):
        wids.ChunkedSampler(range(5), num_samples=6)
