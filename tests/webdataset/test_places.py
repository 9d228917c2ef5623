"""What ranks and workers together read, for any pipeline: each sample once, and equal numbers."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import energon.webdataset as wds
from energon.errors import EmptyDatasetError
from energon.webdataset.running.worker_info import WorkerInfo, running_as
from tests.effort import mixed, some
from tests.ranks import finished, started
from tests.webdataset.shards import make_shards


def own_by_node(source):
    rank, world_size, _, _ = wds.utils.pytorch_worker_info()
    return islice(source, rank, None, world_size)


def own_by_worker(source):
    _, _, worker, workers = wds.utils.pytorch_worker_info()
    for number, item in enumerate(source):
        if number % workers == worker:
            yield item


def own_by_both(source):
    return own_by_worker(own_by_node(source))


class OwnByNode:
    def run(self, source):
        yield from own_by_node(source)


SPLITTERS = [
    [wds.split_by_node, wds.split_by_worker],
    [wds.split_by_worker, wds.split_by_node],
    [functools.partial(wds.split_by_node, group=None), own_by_worker],
    [OwnByNode(), wds.split_by_worker],
    [wds.pipelinefilter(own_by_worker)(), own_by_node],
    [own_by_both],
]

RANDOM = st.one_of(
    st.builds(wds.shuffle, st.integers(2, 9), initial=st.integers(0, 9)),
    st.builds(wds.shuffle, st.integers(2, 9), seed=st.integers(0, 3)),
    st.builds(wds.detshuffle, st.integers(2, 9), seed=st.integers(0, 3)),
)
PLAIN = st.sampled_from([wds.map(lambda item: item), iter, lambda source: iter(source)])
BETWEEN = st.lists(st.one_of(RANDOM, PLAIN), max_size=2)


def reader(counts):
    """A stage that yields the samples of shards: of shard n, pairs of n and a number."""
    return wds.flatmap(
        lambda shard: ((int(shard["url"]), k) for k in range(counts[int(shard["url"])]))
    )


@st.composite
def pipelines(draw, counts):
    """A function that returns a new pipeline over shards with these numbers of samples."""
    urls = [str(number) for number in range(len(counts))]
    seed = draw(st.sampled_from([None, 5]))
    splitters = draw(st.sampled_from(SPLITTERS))
    at_shards = draw(st.integers(0, len(splitters)))
    stages = draw(BETWEEN)
    for splitter in splitters[:at_shards]:
        stages += [splitter, *draw(BETWEEN)]
    stages += [reader(counts), *draw(BETWEEN)]
    for splitter in splitters[at_shards:]:
        stages += [splitter, *draw(BETWEEN)]
    is_nested, is_mixed = draw(st.booleans()), draw(st.booleans())
    cut = draw(st.integers(1, len(stages)))

    def make():
        first = wds.DataPipeline(wds.SimpleShardList(urls, seed=seed), *stages[:cut])
        if is_mixed:
            first = wds.RandomMix([first], longest=True)
        if is_nested or is_mixed:
            return wds.DataPipeline(first, *stages[cut:])
        return first.compose(*stages[cut:])

    return make


COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(any)
JOBS = st.tuples(st.integers(1, 3), st.integers(1, 3))


def loops(make, ranks, workers, count):
    """By rank, the items of each of `count` loops of all of its workers."""
    found = [[[] for _ in range(count)] for _ in range(ranks)]
    for rank in range(ranks):
        for worker in range(workers):
            with running_as(WorkerInfo(rank, ranks, worker, workers)):
                dataset = make()
                for loop in found[rank]:
                    loop.extend(dataset)
    return found


@pytest.mark.slow
@given(data=st.data(), counts=COUNTS, job=JOBS)
def test_places_read_each_sample_once(data, counts, job):
    make = data.draw(pipelines(counts))
    samples = sorted((number, k) for number, count in enumerate(counts) for k in range(count))
    found = loops(make, *job, 2)
    for epoch in range(2):
        assert sorted(item for rank in found for item in rank[epoch]) == samples


@pytest.mark.slow
@given(
    data=st.data(),
    counts=COUNTS,
    job=JOBS,
    length=st.integers(1, 12),
    scope=st.sampled_from(["worker", "rank", "job"]),
    continues=st.sampled_from([None, True, False]),
    size=st.integers(1, 3),
)
def test_places_yield_the_length_that_is_set(data, counts, job, length, scope, continues, size):
    ranks, workers = job
    make = data.draw(pipelines(counts))

    def limited():
        batches = make().compose(wds.batched(size, None, partial=False))
        return batches.with_epoch(length, scope=scope, continues=continues)

    per_rank = {"worker": length * workers, "rank": length, "job": -(-length // ranks)}[scope]
    if sum(counts) < size:
        with pytest.raises(EmptyDatasetError, match="fewer than a batch"):
            loops(limited, ranks, workers, 3)
    else:
        for rank in loops(limited, ranks, workers, 3):
            assert [len(loop) for loop in rank] == [per_rank] * 3


class OwnSource(IterableDataset):
    """Addresses of shards, divided by the program; or the samples of pipelines within."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return iter(self.source())


def numbers_at(place, dataset):
    with running_as(place):
        return [int(sample["__key__"]) for sample in dataset]


def test_a_source_of_the_program_is_not_split_unless_asked(tmp_path):
    urls = make_shards(tmp_path, [3] * 8)
    halves = [WorkerInfo(0, 1, 0, 2), WorkerInfo(0, 1, 1, 2)]

    def read(source, **options):
        dataset = wds.WebDataset(OwnSource(source), **options)
        return [numbers_at(place, dataset) for place in halves]

    def divided():
        return ({"url": url} for url in own_by_worker(urls))

    assert sorted(n for half in read(divided) for n in half) == [*range(24)]
    shuffled = read(divided, shardshuffle=True)
    assert sorted(n for half in shuffled for n in half) == [*range(24)]
    assert shuffled != read(divided)
    assert read(lambda: [{"url": url} for url in urls]) == [[*range(24)]] * 2
    asked = read(lambda: [{"url": url} for url in urls], workersplitter=wds.split_by_worker)
    assert sorted(n for half in asked for n in half) == [*range(24)]
    endless = wds.WebDataset(
        OwnSource(lambda: itertools.cycle(map(make_shard, urls))), shardshuffle=9
    )
    assert len(list(endless.slice(50))) == 50
    # Pipelines that make up the source are the only ones that can be split.
    for make in (
        lambda: wds.DataPipeline(OwnSource(lambda: wds.WebDataset(urls))),
        lambda: wds.DataPipeline(lambda: wds.WebDataset(urls)),
        lambda: wds.RandomMix([OwnSource(lambda: wds.WebDataset(urls))]),
        lambda: wds.DataPipeline(wds.WebDataset(urls), lambda source: iter(source)),
    ):
        found = [numbers_at(place, make()) for place in halves]
        assert sorted(n for half in found for n in half) == [*range(24)]
        assert all(found)


def make_shard(url):
    return {"url": url}


def merged(source):
    for shard in source:
        captions = wds.WebDataset(shard["url"])
        yield from zip(wds.WebDataset(shard["url"]), captions, strict=True)


def merged_in_pipelines(source):
    for shard in source:
        captions = wds.FluidWrapper(wds.WebDataset(shard["url"])).map(dict)
        yield from zip(wds.RandomMix([wds.WebDataset(shard["url"])]), captions, strict=True)


def in_torch(dataset):
    return DataLoader(dataset, None, num_workers=2, multiprocessing_context="fork")


def in_torchdata(dataset):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, None, num_workers=2, multiprocessing_context="fork")


def in_web_loader(dataset):
    return wds.WebLoader(dataset, None, num_workers=2, multiprocessing_context="fork")


LOADERS = [in_torch, in_web_loader, in_torchdata]


@pytest.mark.slow
@pytest.mark.parametrize(("load", "merge"), mixed([*LOADERS], [merged, merged_in_pipelines]))
def test_pipelines_within_a_stage_are_not_split_again(tmp_path, load, merge):
    urls = make_shards(tmp_path, [9] * 4)
    dataset = wds.DataPipeline(wds.SimpleShardList(urls), wds.split_by_worker, merge)
    pairs = [(one["__key__"], other["__key__"]) for one, other in load(dataset)]
    assert sorted(pairs) == [(f"{n:06}", f"{n:06}") for n in range(36)]


def test_items_may_be_pipelines(tmp_path):
    urls = make_shards(tmp_path, [9] * 4)
    inner = wds.flatmap(lambda shard: wds.WebDataset(shard["url"]))
    dataset = wds.DataPipeline(wds.SimpleShardList(urls), wds.split_by_node, inner)
    assert numbers_at(WorkerInfo(1, 2, 0, 1), dataset) == [*range(9, 18), *range(27, 36)]
    asked = wds.flatmap(lambda shard: wds.WebDataset(shard["url"], nodesplitter=wds.split_by_node))
    dataset = wds.DataPipeline(wds.SimpleShardList(urls), asked)
    assert numbers_at(WorkerInfo(1, 2, 0, 1), dataset) == []


def few_shards(counts=(2, 3, 1)):
    """A pipeline over fewer shards than there are workers."""
    return wds.DataPipeline(
        wds.SimpleShardList([str(number) for number in range(len(counts))]),
        wds.shuffle(9),
        wds.split_by_node,
        wds.split_by_worker,
        reader(counts),
        wds.shuffle(9),
    )


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_without_data_yield_the_length_that_is_set(persistent):
    loader = DataLoader(
        few_shards([5]).with_epoch(6),
        None,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=persistent,
    )
    assert [len(list(loader)) for _ in range(3)] == [12] * 3


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["worker", "rank"])
def test_lanes_without_data_yield_the_length_that_is_set(scope):
    dataset = few_shards().compose(wds.listed(2, partial=False)).with_epoch(6, scope=scope)
    with wds.WebLoader(dataset, None, num_workers=4) as loader:
        assert [len(list(loader)) for _ in range(3)] == [24 if scope == "worker" else 6] * 3


def test_data_of_others_is_announced_once(caplog):
    caplog.set_level(logging.WARNING, "energon")
    place = WorkerInfo(1, 2, 16, 17)
    with running_as(place):
        dataset = few_shards().with_epoch(20)
        assert [len(list(dataset)) for _ in range(3)] == [20] * 3
    (message,) = caplog.messages
    assert message.startswith("worker 16 of 17 on rank 1 of 2 has no items in its part of the data")


def test_a_place_in_data_of_others_can_be_saved(tmp_path):
    urls = make_shards(tmp_path, [2, 3, 1])

    def make():
        dataset = wds.WebDataset(urls, shardshuffle=True).map(lambda sample: sample["__key__"])
        return dataset.with_epoch(5)

    with running_as(WorkerInfo(0, 1, 5, 6)):
        dataset = make()
        loop = iter(dataset)
        next(loop)
        state = json.loads(json.dumps(dataset.state_dict()))
        rest = [list(loop), list(dataset)]
        restored = make()
        restored.load_state_dict(state)
        assert [list(restored), list(restored)] == rest


def test_shuffled_data_of_others_is_the_same_after_a_restore():
    def make():
        first = wds.RandomMix([few_shards([4])], longest=True)
        return wds.DataPipeline(first, wds.shuffle(2), wds.shuffle(2)).with_epoch(6)

    with running_as(WorkerInfo(1, 2, 1, 2)):
        for taken in range(1, 6):
            dataset = make()
            loop = iter(dataset)
            for _ in range(taken):
                next(loop)
            state = json.loads(json.dumps(dataset.state_dict()))
            restored = make()
            restored.load_state_dict(state)
            assert list(restored) == list(loop)


def test_a_splitter_that_leaves_a_worker_out_is_an_error():
    dataset = wds.DataPipeline(range(4), lambda source: iter(())).with_epoch(5)
    with pytest.raises(EmptyDatasetError, match="splitter of the program"):
        list(dataset)


def test_a_loop_after_an_error_has_items():
    damaged = {2}

    def read(item):
        if item in damaged:
            damaged.remove(item)
            raise ValueError(f"{item} is damaged")
        return item

    dataset = wds.DataPipeline(range(4), wds.map(read)).with_epoch(3, continues=True)
    with pytest.raises(ValueError, match="2 is damaged"):
        list(dataset)
    assert [len(list(dataset)) for _ in range(2)] == [3, 3]


@pytest.mark.slow
def test_accelerate_divides_a_stream_only_once(tmp_path):
    urls = make_shards(tmp_path, [5] * 8)
    program = Path(__file__).with_name("accelerated.py")
    outputs = finished(started(*urls, ranks=2, program=program))
    # The first worker of each loader says so in its first loop, on ranks that read.
    said = "accelerate divides this stream among the ranks"
    assert 4 <= sum(output.count(said) for output in outputs) <= 6
    one, other = json.loads(outputs[0].splitlines()[-1])
    for name in ("forked", "started", "sharded", "stream"):
        for mine, theirs in zip(one[name], other[name], strict=True):
            assert sorted(mine + theirs) == [*range(40)], name
    assert one["skipped"] == [one["stream"][0][5:]]


def random_job(draw):
    """A pipeline drawn at random, its samples, the number that each worker yields, and of ranks."""
    counts = draw(COUNTS)
    make = draw(pipelines(counts))
    samples = [(number, k) for number, count in enumerate(counts) for k in range(count)]
    return make, samples, draw(st.none() | st.integers(1, 12)), draw(st.integers(1, 2))


def check_job(load, make, samples, length, ranks):
    """Check two loops of each rank, whose pipeline a loader with two workers reads."""
    loops = [[], []]
    for rank in range(ranks):
        with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks)):
            dataset = make() if length is None else make().with_epoch(length)
            loader = load(dataset)
            for loop in loops:
                loop.append(list(map(tuple, loader)))
            getattr(loader, "close", list)()
    for loop in loops:
        if length is None:
            assert sorted(itertools.chain(*loop)) == samples
        else:
            assert [len(items) for items in loop] == [2 * length] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("load", some(LOADERS))
@settings(max_examples=16)
@given(data=st.data())
def test_loaders_read_each_sample_once_or_the_length_that_is_set(load, data):
    check_job(load, *random_job(data.draw))
