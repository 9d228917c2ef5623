from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import pytest

from energon.errors import StateError
from energon.webdataset import filters, handlers
from energon.webdataset.compat import WebDataset
from energon.webdataset.extradatasets import MockDataset
from energon.webdataset.mix import RoundRobin
from energon.webdataset.pipeline import DataPipeline
from energon.webdataset.reading.tar_samples import TarSamples
from energon.webdataset.records import jsonl_to_samples
from energon.webdataset.shardlists import ResampledShards, SimpleShardList
from tests.effort import mixed, some
from tests.webdataset.shards import make_shards


def number(sample):
    return int(sample["__key__"])


def twins(value):
    yield value
    yield -value


class FailsAt:
    """A function that fails at one of the numbers, as often as it gets it."""

    def __init__(self, number):
        self.number = number

    def __call__(self, value):
        if value == self.number:
            raise ValueError(value)
        return value


class DecodesUpTo:
    """A decoder of texts that fails at one."""

    def __init__(self, last):
        self.last = last.encode()

    def __call__(self, name, data):
        if data == self.last:
            raise ValueError(data)
        return data.decode() if name == "txt" else None


def stop_at(stage, number):
    return stage(FailsAt(number), handler=handlers.ignore_and_stop)


PIPELINES = {
    "raw": lambda urls: WebDataset(urls).map(number),
    "shuffled": lambda urls: WebDataset(urls, shardshuffle=True).map(number).shuffle(7, initial=3),
    "shuffled at once": lambda urls: WebDataset(urls).map(number).shuffle(7, initial=1),
    "twice shuffled": lambda urls: WebDataset(urls).shuffle(5).map(number).shuffle(9, initial=2),
    "unshuffled": lambda urls: WebDataset(urls).map(number).shuffle(0),
    "select": lambda urls: WebDataset(urls).map(number).select(lambda n: n % 3),
    "rsample": lambda urls: WebDataset(urls).map(number).rsample(0.4),
    "slice": lambda urls: WebDataset(urls).map(number).slice(2, 20, 3),
    "batches": lambda urls: WebDataset(urls).map(number).shuffle(4).listed(4),
    "rebatched": lambda urls: (
        WebDataset(urls).map(number).listed(4).unlisted().shuffle(5).listed(3)
    ),
    "flatmap": lambda urls: WebDataset(urls).map(number).flatmap(twins).shuffle(6),
    "epoch": lambda urls: WebDataset(urls, shardshuffle=True).map(number).shuffle(5).with_epoch(17),
    "repeat": lambda urls: WebDataset(urls, shardshuffle=True).map(number).repeat(3),
    "resampled": lambda urls: WebDataset(urls, resampled=True).map(number).with_epoch(40),
    "stopped map": lambda urls: (
        WebDataset(urls).map(number).compose(stop_at(filters.map, 9)).listed(4)
    ),
    "stopped select": lambda urls: (
        WebDataset(urls).map(number).compose(stop_at(filters.select, 9)).listed(2).repeat(2)
    ),
    "stopped shuffle": lambda urls: (
        WebDataset(urls).map(number).compose(stop_at(filters.map, 22)).shuffle(5).listed(4)
    ),
    "stopped decode": lambda urls: (
        WebDataset(urls)
        .decode(DecodesUpTo("text 9"), handler=handlers.ignore_and_stop)
        .to_tuple("__key__", "txt")
        .batched(4)
    ),
    "explicit": lambda urls: DataPipeline(
        SimpleShardList(urls), TarSamples(), filters.map(number), filters.shuffle(5)
    ),
    "list": lambda urls: DataPipeline([1, 2, 3, 4, 5, 6, 7], filters.shuffle(3)),
    "resampled list": lambda urls: DataPipeline(
        ResampledShards(urls, nshards=5), TarSamples(), filters.map(number)
    ),
}


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("state"), [5, 1, 11, 7])


@pytest.mark.slow
@pytest.mark.parametrize("name", some([*PIPELINES]))
def test_goes_on_where_it_was_saved_at_every_position(name, urls):
    make = PIPELINES[name]
    pipeline = make(urls)
    for epoch in range(2):
        states, items = [pipeline.state_dict()], []
        for item in pipeline:
            items.append(item)
            states.append(json.loads(json.dumps(pipeline.state_dict())))
        assert items
        following = list(make_at(make, urls, epoch + 1))
        after = next(iter(make_at(make, urls, epoch + 2)), None)
        for done, state in enumerate(states):
            other = make(urls)
            other.load_state_dict(state)
            assert other.state_dict() == state
            is_last = done == len(items)
            assert list(other) == (following if is_last else items[done:]), (epoch, done)
            assert next(iter(other), None) == (after if is_last else [*following, None][0])


def make_at(make, urls, epoch):
    pipeline = make(urls)
    for _ in range(epoch):
        list(pipeline)
    return pipeline


@pytest.mark.parametrize("name", ["twice shuffled", "flatmap", "epoch"])
def test_states_of_restored_pipelines_are_as_good(name, urls):
    make = PIPELINES[name]
    items = list(make(urls))
    pipeline, found = make(urls), []
    while True:
        loop = iter(pipeline)
        found += [item for _, item in zip(range(3), loop, strict=False)]
        if len(found) >= len(items):
            break
        state = pipeline.state_dict()
        pipeline = make(urls)
        pipeline.load_state_dict(state)
    assert found == items


@pytest.mark.parametrize("kind", ["tar", "jsonl"])
def test_files_end_where_the_handler_has_ended_them_even_if_they_can_be_read_later(kind, tmp_path):
    files = make_shards(tmp_path, [3, 2, 4])
    stage = TarSamples(handler=handlers.ignore_and_stop)
    if kind == "jsonl":
        for number, path in enumerate(files):
            Path(path).write_text("".join(f"[{number}, {line}]\n" for line in range(3)))
        stage = jsonl_to_samples(handler=handlers.ignore_and_stop)

    def make():
        return DataPipeline(SimpleShardList(files), stage, filters.listed(2))

    missing = Path(files[1]).rename(tmp_path / "missing")
    pipeline = make()
    (first, last) = pipeline
    loop = iter(pipeline)
    assert [next(loop), next(loop)] == [first, last]
    state = pipeline.state_dict()
    missing.rename(files[1])
    resumed = make()
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == first


def test_pipelines_that_nobody_has_changed_are_the_same_after_pickling(urls):
    pipeline = WebDataset(urls, shardshuffle=True).map(number).shuffle(5).with_length(24)
    copied = pickle.loads(pickle.dumps(pipeline))
    assert list(copied) == list(pipeline)
    assert len(copied) == 24


def test_states_do_not_contain_the_sample_of_a_mock_dataset():
    small, large = (MockDataset({"a": list(range(n))}, 3) for n in (1, 1000))
    assert small.describe() == large.describe()
    assert [len(each) for each in [*large]] == [1] * 3


def test_a_generator_function_works_and_says_that_it_cannot_be_saved(urls):
    def pairs(source):
        for sample in source:
            yield sample, sample

    pipeline = WebDataset(urls).compose(pairs).shuffle(3)
    assert len(list(pipeline)) == 24
    next(iter(pipeline))
    with pytest.raises(StateError, match="pairs is a plain iterable or generator function"):
        pipeline.state_dict()


def test_generator_functions_that_choose_shards_can_be_saved(urls):
    def every_other(shards):
        for index, shard in enumerate(shards):
            if index % 2:
                yield shard

    def make():
        return DataPipeline(SimpleShardList(urls), every_other, TarSamples(), filters.map(number))

    pipeline = make()
    loop = iter(pipeline)
    first = [next(loop) for _ in range(3)]
    other = make()
    other.load_state_dict(pipeline.state_dict())
    assert first + list(other) == [5, 17, 18, 19, 20, 21, 22, 23]


def test_a_state_of_another_pipeline_is_refused_with_the_difference(urls):
    state = WebDataset(urls).shuffle(5).state_dict()
    with pytest.raises(StateError, match=r"stage 5 was .*5.* now it is .*6"):
        WebDataset(urls).shuffle(6).load_state_dict(state)
    with pytest.raises(StateError, match="another pipeline; stage 0"):
        WebDataset(urls[:2]).shuffle(5).load_state_dict(state)
    with pytest.raises(StateError, match="seed"):
        WebDataset(urls, seed=4).shuffle(5).load_state_dict(state)
    with pytest.raises(StateError, match="not a state of a webdataset"):
        WebDataset(urls).load_state_dict({"lanes": 3})


@pytest.mark.parametrize(("repetitions", "buffered"), mixed([1, 2], [0, 20]))
def test_the_users_generators_go_on_in_the_next_epoch_wherever_a_state_was_saved(
    repetitions, buffered
):
    def make():
        parts = [
            DataPipeline(list(range(count)), filters.shuffle(5, initial=2, rng=random.Random(4)))
            for count in (6, 9)
        ]
        mixed = RoundRobin(parts, longest=True).compose(filters.shuffle(buffered, initial=2))
        return mixed.repeat(repetitions)

    pipeline, states, items = make(), [], []
    for item in pipeline:
        items.append(item)
        states.append(json.loads(json.dumps(pipeline.state_dict())))
    done = json.loads(json.dumps(pipeline.state_dict()))
    following, after = list(pipeline), list(pipeline)
    for number, state in enumerate(states, start=1):
        other = make()
        other.load_state_dict(state)
        rest = [items[number:], following] if items[number:] else [following, after]
        assert [list(other), list(other)] == rest
    other = make()
    other.load_state_dict(done)
    assert list(other) == following
