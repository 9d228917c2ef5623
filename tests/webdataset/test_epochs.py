from __future__ import annotations

import itertools
import json
import os
import pickle
import tempfile
from multiprocessing.util import get_temp_dir

import pytest
from torch.utils.data import DataLoader

import energon.webdataset as wds
from energon.errors import ConfigError, StateError
from tests.effort import mixed, some
from tests.webdataset.shards import make_shards


def number(sample):
    return int(sample["__key__"])


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("epochs"), [3] * 12)


def load(dataset, *, workers, persistent=False, method=None):
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        persistent_workers=persistent,
        multiprocessing_context=method,
    )


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(("scope", "items"), some([("worker", 9), ("rank", 18), ("job", 18)]))
def test_shuffled_epochs_of_a_length_continue_in_workers(urls, persistent, scope, items):
    dataset = wds.WebDataset(urls, shardshuffle=True).map(number).with_epoch(items, scope=scope)
    loader = load(dataset, workers=2, persistent=persistent, method="fork")
    epochs = [[int(n) for n in loader] for _ in range(4)]
    assert [len(epoch) for epoch in epochs] == [18] * 4
    for once in (epochs[:2], epochs[2:]):
        assert sorted(n for epoch in once for n in epoch) == list(range(36))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_of_a_length_start_over_where_nothing_is_shuffled(urls, workers):
    def loops(**options):
        dataset = wds.WebDataset(urls).shuffle(0).map(number).with_epoch(2, **options)
        loader = load(dataset, workers=workers, method="fork" if workers else None)
        return [sorted(int(n) for n in loader) for _ in range(2)]

    first, second = ([0, 1, 3, 4], [2, 5, 6, 9]) if workers else ([0, 1], [2, 3])
    assert loops() == loops(continues=False) == [first, first]
    assert loops(continues=True) == [first, second]


def test_pipelines_know_whether_they_are_random(urls, tmp_path):
    plain = wds.WebDataset(urls)
    spec = {"datasets": [{"name": "a", "shards": urls, "choose": 2}]}
    random = [
        wds.WebDataset(urls, shardshuffle=True),
        wds.WebDataset(urls, resampled=True),
        wds.WebDataset(spec),
        wds.DataPipeline(wds.SimpleShardList(urls, seed=1)),
        wds.DataPipeline(wds.DirectoryShardList(str(tmp_path))),
        wds.RandomMix([plain, plain]),
        wds.RoundRobin([plain, plain.shuffle(9)]),
        *(
            plain.compose(stage)
            for stage in (wds.rsample(0.5), wds.detshuffle(9), wds.resampled(9))
        ),
    ]
    fixed = [plain, plain.shuffle(0), wds.DataPipeline(range(3)), wds.RoundRobin([plain, plain])]
    for dataset in random + fixed:
        nested = wds.WebLoader(wds.DataPipeline(dataset, wds.map(str)), batch_size=None)
        found = [dataset.is_random, nested.is_random, nested.with_epoch(3).extent.goes_on]
        assert found == [dataset in random] * 3, dataset


def same(source):
    yield from source


def reading(sample):
    with open(os.environ["READ"], "a") as file:
        file.write(f"{sample['__key__']}\n")
    return number(sample)


@pytest.mark.slow
@pytest.mark.parametrize("savable", some([True, False], 2))
def test_workers_that_start_anew_go_on_where_those_before_them_stopped(
    urls, tmp_path, monkeypatch, savable
):
    monkeypatch.setenv("READ", str(tmp_path / "read"))
    dataset = wds.WebDataset(urls, shardshuffle=True).map(reading)
    dataset = (dataset if savable else dataset.compose(same)).with_epoch(4)
    persistent = load(
        pickle.loads(pickle.dumps(dataset)), workers=2, persistent=True, method="fork"
    )
    expected = [[int(n) for n in persistent] for _ in range(6)]
    (tmp_path / "read").unlink()
    fresh = load(dataset, workers=2, method="fork")
    epochs = [[int(n) for n in fresh] for _ in range(6)]
    # Where nobody knows the position, each epoch begins with a new pass, and reads no more.
    assert (epochs == expected) == savable
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert len((tmp_path / "read").read_text().split()) == 48


@pytest.mark.slow
@pytest.mark.parametrize(("method", "workers"), some([("fork", 2), ("forkserver", 1)], 2))
def test_positions_of_workers_leave_nothing_in_the_temporary_folder(
    urls, tmp_path, monkeypatch, method, workers
):
    (tmp_path / "temporary").mkdir()
    get_temp_dir()  # the one of multiprocessing, whose sockets need short names, stays where it is
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    dataset = wds.WebDataset(urls).map(number).with_epoch(4, continues=True)
    loader = load(dataset, workers=workers, method=method)
    one, other = ([int(n) for n in loader] for _ in range(2))
    assert len({*one, *other}) == len(one) + len(other)
    assert not list(tmp_path.rglob("energon*"))
    assert method != "fork" or not os.listdir(tmp_path / "temporary")


@pytest.mark.slow
def test_an_epoch_that_was_left_is_made_up_for(urls):
    def make():
        dataset = wds.WebDataset(urls).map(number).with_epoch(4, continues=True)
        return load(dataset, workers=2, method="fork")

    loader, other = make(), make()
    expected = [[int(n) for n in loader] for _ in range(4)]
    assert [int(n) for n in other] == expected[0]
    for _ in other:
        break
    assert [int(n) for n in other] == expected[2]
    assert [int(n) for n in other] == expected[3]


def ranks(monkeypatch, world, make):
    found = []
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        found.append(list(make()))
    return found


@pytest.mark.parametrize(("world", "shuffled"), mixed([1, 2, 5, 12, 20], [False, True]))
def test_ranks_share_each_epoch_whatever_their_seeds(urls, monkeypatch, world, shuffled):
    seeds = iter(range(100))
    found = ranks(
        monkeypatch,
        world,
        lambda: wds.WebDataset(urls, shardshuffle=shuffled, seed=next(seeds)).map(number),
    )
    assert sorted(n for rank in found for n in rank) == list(range(36))
    # More ranks than shards: they share the samples of a shard.
    assert all(found)


def test_ranks_take_equal_numbers_of_steps(urls, monkeypatch):
    def make(**options):
        dataset = wds.WebDataset(urls).map(number)
        return ranks(monkeypatch, 5, lambda: dataset.compose().with_epoch(36, **options))

    assert [len(rank) for rank in make(scope="job")] == [8] * 5
    assert [len(rank) for rank in make()] == [36] * 5


def test_workers_of_a_rank_can_count_for_themselves(urls, monkeypatch):
    monkeypatch.setenv("WORKER", "1")
    monkeypatch.setenv("NUM_WORKERS", "4")
    dataset = wds.WebDataset(urls).map(number)
    assert len(list(dataset.with_epoch(10))) == 10
    assert len(list(dataset.compose().with_epoch(10, scope="rank"))) == 3
    assert len(list(dataset.compose().with_epoch(10, scope="job"))) == 3


def test_the_next_epoch_can_be_set(urls):
    one, other = (wds.WebDataset(urls, shardshuffle=True).map(number) for _ in range(2))
    epochs = [list(one) for _ in range(3)]
    other.set_epoch(2)
    assert list(other) == epochs[2]


def test_seeds_change_the_order_and_may_come_from_the_environment(urls, monkeypatch):
    orders = {tuple(map(number, wds.WebDataset(urls, shardshuffle=True, seed=s))) for s in range(5)}
    assert len(orders) == 5
    monkeypatch.setenv("WDS_SEED", "3")
    assert tuple(map(number, wds.WebDataset(urls, shardshuffle=True))) in orders
    monkeypatch.setenv("WDS_SEED", "x")
    with pytest.raises(ConfigError, match="WDS_SEED='x'"):
        wds.WebDataset(urls)


def test_epochs_repetitions_and_lengths_change_the_pipeline_itself(urls):
    dataset = wds.WebDataset(urls).map(number)
    assert not hasattr(dataset, "__len__")
    assert dataset.with_epoch(5) is dataset
    assert (len(list(dataset)), dataset.nsamples) == (5, 5)
    assert dataset.repeat(2) is dataset
    assert (len(list(dataset)), dataset.repetitions) == (72, 2)
    assert dataset.repeat(nbatches=50) is dataset
    assert len(list(dataset)) == 50
    assert dataset.with_length(4) is dataset
    assert (len(dataset), dataset.size, dataset.length) == (4, 4, -1)
    assert len(dataset.map(abs)) == 4
    assert isinstance(dataset, wds.WebDataset)
    copied = pickle.loads(pickle.dumps(dataset))
    assert (len(copied), list(copied)) == (
        4,
        list(wds.WebDataset(urls).map(number).repeat(nbatches=50)),
    )


def test_epochs_that_are_set_after_loops_begin_with_a_new_pass(urls):
    dataset = wds.WebDataset(urls).map(number)
    assert (len(list(dataset)), next(iter(dataset))) == (36, 0)
    dataset.with_epoch(50)
    assert [len(list(dataset)) for _ in range(3)] == [50, 50, 50]
    dataset.with_epoch(2, continues=True)
    assert list(dataset) + list(dataset) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "make", [lambda d: d.repeat(0), lambda d: d.repeat(-2, -2), lambda d: d.with_epoch()]
)
def test_loops_without_end(urls, make):
    items = itertools.islice(make(wds.WebDataset(urls).map(number)), 80)
    assert list(items) == [*range(36), *range(36), *range(8)]


def test_appended_stages_are_iterated_over(urls):
    dataset = wds.WebDataset(urls)
    dataset.append(wds.map(number))
    dataset.append([wds.slice(8), None, wds.batched(4, None)])
    assert list(dataset) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    empty = wds.DataPipeline()
    empty.append(wds.RandomMix([[1, 2], [3]], longest=True))
    assert sorted(empty) == [1, 2, 3]
    with pytest.raises(ConfigError, match="3 is not a stage"):
        dataset.append(3)


def test_the_list_of_stages_may_be_changed(urls):
    def decided(source):
        yield from source

    dataset = wds.WebDataset(urls).map(number).compose(decided)
    assert dataset.pipeline[-1] is dataset.stage(-1) is decided
    assert isinstance(dataset.pipeline[0], wds.SimpleShardList)
    other = dataset.compose()
    assert dataset.pipeline.pop() is decided
    dataset.pipeline[-1] = wds.map(lambda sample: sample["__key__"])
    dataset.pipeline.insert(1, wds.slice(2))
    assert list(dataset) == [f"{n:06}" for n in range(6)]
    assert list(other) == list(range(36))
    dataset.pipeline[0].urls.reverse()
    assert list(dataset) == [f"{n:06}" for n in (33, 34, 35, 30, 31, 32)]


def test_a_loop_keeps_the_stages_that_it_began_with(urls):
    dataset = wds.WebDataset(urls).map(number).repeat(2)
    loop = iter(dataset)
    first = [next(loop) for _ in range(3)]
    dataset.append(wds.map(str))
    state = json.loads(json.dumps(dataset.state_dict()))
    assert first + list(loop) == [*range(36), *range(36)]
    assert list(dataset) == list(map(str, [*range(36), *range(36)]))
    restored = wds.WebDataset(urls).map(number).repeat(2)
    restored.load_state_dict(state)
    assert list(restored)[:3] == [3, 4, 5]
    with pytest.raises(StateError, match="saved by another pipeline; stage 6 was None"):
        dataset.load_state_dict(state)


@pytest.mark.parametrize("appended", [True, False])
def test_a_changed_pipeline_begins_anew_and_can_be_saved(urls, appended):
    dataset = wds.WebDataset(urls).map(number).with_epoch(10, continues=True)
    assert [list(dataset) for _ in range(2)] == [[*range(10)], [*range(10, 20)]]
    assert dataset.with_epoch(10, continues=True) is dataset
    assert list(dataset) == [*range(20, 30)]
    assert list(dataset.with_epoch(4, continues=True)) == [30, 31, 32, 33]
    if appended:
        dataset.append(wds.map(str))
    else:
        dataset.pipeline.append(wds.map(str))
    assert dataset.state_dict()["items"] is None
    assert list(dataset) == ["0", "1", "2", "3"]
    state = dataset.state_dict()
    assert list(dataset) == ["4", "5", "6", "7"]
    other = wds.WebDataset(urls).map(number).map(str).with_epoch(4, continues=True)
    other.load_state_dict(state)
    assert list(other) == ["4", "5", "6", "7"]


@pytest.mark.slow
def test_workers_see_that_a_pipeline_has_changed(urls):
    dataset = wds.WebDataset(urls).map(number).with_epoch(4, continues=True)
    loader = load(dataset, workers=2, method="fork")
    assert len({int(n) for _ in range(2) for n in loader}) == 16
    dataset.append(wds.map(str))
    changed = list(loader)
    fresh = wds.WebDataset(urls).map(number).map(str).with_epoch(4)
    assert changed == list(load(fresh, workers=2, method="fork"))


def test_a_pipeline_in_another_gives_what_its_own_loops_would(urls):
    dataset = wds.WebDataset(urls).map(number)
    assert list(wds.FluidWrapper(dataset.compose().with_epoch(5)).map(abs)) == [0, 1, 2, 3, 4]
    assert list(wds.DataPipeline(dataset.compose().repeat(2, 40))) == [*range(36), 0, 1, 2, 3]
    two = wds.RoundRobin([dataset.compose().with_epoch(2), dataset.compose().with_epoch(2)])
    assert list(two) == [0, 0, 1, 1]


def test_a_loop_loads_a_state_by_itself(urls):
    """As torchdata's StatefulDataLoader does."""
    dataset = wds.WebDataset(urls, shardshuffle=True).map(number).shuffle(5)
    loop = iter(dataset)
    first = [next(loop) for _ in range(9)]
    state = json.loads(json.dumps(loop.state_dict()))
    other = wds.WebDataset(urls, shardshuffle=True).map(number).shuffle(5)
    restored = iter(other)
    restored.load_state_dict(state)
    rest = list(restored)
    assert sorted(first + rest) == list(range(36))
    assert rest == list(loop)
    assert list(other) == list(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("is_savable", [True, False])
def test_torchdata_saves_what_can_be_saved_and_reads_everything(urls, is_savable):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def load():
        dataset = wds.WebDataset(urls, shardshuffle=True).map(number).shuffle(5)
        dataset = dataset if is_savable else dataset.compose(lambda source: iter(source))
        return StatefulDataLoader(dataset, None, num_workers=2, multiprocessing_context="fork")

    loader, restored = load(), load()
    loop = iter(loader)
    first = [int(next(loop)) for _ in range(9)]
    restored.load_state_dict(loader.state_dict())
    rest = [int(n) for n in loop]
    assert sorted(first + rest) == list(range(36))
    if is_savable:
        assert [int(n) for n in restored] == rest
    else:
        with pytest.raises(StateError, match="the pipeline cannot be saved, because .*lambda"):
            list(restored)


@pytest.mark.slow
def test_an_old_fashioned_node_splitter_sees_all_shards(urls, monkeypatch):
    found = ranks(
        monkeypatch, 3, lambda: wds.WebDataset(urls, nodesplitter=wds.split_by_node).map(number)
    )
    assert sorted(n for rank in found for n in rank) == list(range(36))
    with pytest.raises(ConfigError, match="there are 3 ranks"):
        list(wds.WebDataset(urls, nodesplitter=wds.single_node_only))
    everything = ranks(monkeypatch, 2, lambda: wds.WebDataset(urls, nodesplitter=None).map(number))
    assert everything == [list(range(36))] * 2


def test_resampling_gives_each_worker_its_own_draws(urls, monkeypatch):
    found = ranks(
        monkeypatch, 4, lambda: wds.WebDataset(urls, resampled=True).map(number).slice(30)
    )
    assert len(set(map(tuple, found))) == 4


def test_repeat_goes_over_the_data_again_in_another_order(urls):
    dataset = wds.WebDataset(urls, shardshuffle=True).map(number).repeat(2)
    items = list(dataset)
    assert sorted(items[:36]) == sorted(items[36:]) == list(range(36))
    assert items[:36] != items[36:]
    assert len(list(dataset.repeat(nbatches=50))) == 50
