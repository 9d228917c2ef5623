from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import threading
from itertools import islice

import numpy as np
import pytest
import torch

from energon.errors import ConfigError, StateError, WorkerError
from energon.loader.hosting import LaneHost
from energon.loader.state import LanePosition
from energon.webdataset import filters, web_loader
from energon.webdataset.compat import WebDataset
from energon.webdataset.web_loader import WebLoader
from tests.effort import mixed
from tests.webdataset.shards import make_shards


def number(sample):
    return int(sample["__key__"])


def pair(sample):
    return np.full((3,), number(sample)), number(sample)


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("loader"), [5, 1, 11, 7, 4])


@pytest.mark.parametrize("workers", [0, 2])
def test_gives_each_sample_once_an_epoch_and_each_epoch_another_order(urls, workers):
    dataset = WebDataset(urls, shardshuffle=True).map(number).shuffle(10)
    with WebLoader(dataset, batch_size=None, num_workers=workers) as loader:
        one, two = list(loader), list(loader)
    assert sorted(one) == sorted(two) == list(range(28))
    assert one != two


def test_batches_in_workers_and_again_after_them(urls):
    dataset = WebDataset(urls).map(pair).batched(4)
    loader = WebLoader(dataset, batch_size=None, num_workers=2)
    with loader.unbatched().shuffle(10).batched(6) as again:
        arrays, numbers = next(iter(again))
        assert arrays.shape == (6, 3)
        assert isinstance(arrays, torch.Tensor)
        assert isinstance(numbers, torch.Tensor)
        assert (arrays[:, 0] == numbers).all()
        assert sum(len(batch[1]) for batch in again) == 28
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_as_the_loader_of_torch_does(urls, workers):
    dataset = WebDataset(urls).map(pair)
    expected = list(torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=workers))
    with WebLoader(dataset, batch_size=8, num_workers=workers) as loader:
        found = list(loader)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("collate", [None, lambda batch: batch, dict])
def test_decoded_documents_come_from_workers_as_they_are_made_in_line(urls, collate):
    dataset = WebDataset(urls[:1], shardshuffle=False).decode().batched(4)
    loaders = [
        WebLoader(dataset, batch_size=None, num_workers=workers, collate_fn=collate)
        for workers in (0, 1)
    ]
    inline, sent = map(list, loaders)
    for loader in loaders:
        loader.close()
    assert sent == inline
    assert repr(sent) == repr(inline)


def endless(value):
    yield value


def test_texts_in_batches_are_of_the_types_that_the_loader_of_torch_gives(urls):
    dataset = WebDataset(urls).map(key_and_text)
    expected = list(torch.utils.data.DataLoader(dataset, batch_size=8))
    assert list(WebLoader(dataset, batch_size=8)) == expected
    assert type(expected[0][0]) is tuple


def key_and_text(sample):
    return sample["__key__"], [sample["__url__"], {"key": sample["__key__"]}]


@pytest.mark.slow
@pytest.mark.parametrize("restored_workers", [0, 1, 3])
def test_goes_on_with_any_number_of_workers(urls, restored_workers):
    dataset = WebDataset(urls, shardshuffle=True).map(number).shuffle(5)

    def make(workers):
        return WebLoader(dataset, batch_size=None, num_workers=workers).shuffle(4).listed(3)

    with make(2) as loader:
        loop = iter(loader)
        first = [next(loop) for _ in range(4)]
        state = json.loads(json.dumps(loader.state_dict()))
        rest = list(loop)
        second = list(loader)
    with make(restored_workers) as other:
        other.load_state_dict(state)
        assert list(other) == rest
        assert list(other) == second
    assert sorted(n for batch in first + rest for n in batch) == list(range(28))


@pytest.mark.parametrize("seconds", [0, 100])
def test_states_that_only_count_batches_are_not_sent(urls, monkeypatch, seconds):
    monkeypatch.setattr(web_loader, "NOTE_SECONDS", seconds)
    loader = WebLoader(WebDataset(urls).map(number).shuffle(5), batch_size=None)
    host = LaneHost(loader.stages[0].loader.dataset, {0: LanePosition()}, lanes=1)
    states = [event.state for event in host if not event.ended]
    assert [state is None for state in states] == [False] + [seconds > 0] * 27


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "epoch"), mixed([None, 0, 2], [None, 6, 28]))
def test_a_state_of_the_last_item_begins_the_next_epoch(urls, workers, epoch):
    def pipeline():
        dataset = WebDataset(urls, shardshuffle=True).map(number).shuffle(10)
        if epoch is not None:
            dataset = dataset.with_epoch(epoch)
        return dataset if workers is None else WebLoader(dataset, None, num_workers=workers)

    with pipeline() as loader:
        epochs = [list(loader) for _ in range(3)]
    with pipeline() as loader:
        assert list(islice(loader, len(epochs[0]))) == epochs[0]
        state = json.loads(json.dumps(loader.state_dict()))
    with pipeline() as loader:
        loader.load_state_dict(state)
        assert [list(loader), list(loader)] == epochs[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_loops_that_stop_at_the_last_batch_are_followed_by_full_ones(urls, workers):
    with WebLoader(WebDataset(urls).map(number), None, num_workers=workers) as loader:
        assert [len(list(islice(loader, 28))) for _ in range(3)] == [28, 28, 28]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_another_one_has_replaced_says_so(urls, workers):
    with WebLoader(WebDataset(urls).map(number), None, num_workers=workers) as loader:
        first, second = iter(loader), iter(loader)
        next(first)
        rest = [next(second)]
        with pytest.raises(ConfigError, match="another loop over this WebLoader has begun"):
            next(first)
        assert sorted([*rest, *second]) == list(range(28))


@pytest.mark.slow
def test_goes_on_where_it_was_saved_after_every_batch(urls, monkeypatch):
    monkeypatch.setattr(web_loader, "NOTE_SECONDS", 100)
    dataset = WebDataset(urls, shardshuffle=True).map(number).shuffle(5)
    loader, other = (WebLoader(dataset, batch_size=None, num_workers=n) for n in (2, 0))
    with loader:
        batches, states = [], []
        for batch in loader:
            batches.append(batch)
            states.append(json.loads(json.dumps(loader.state_dict())))
    for done, state in enumerate(states[:-2], start=1):
        other.load_state_dict(state)
        assert next(iter(other)) == batches[done]
        other.load_state_dict(other.state_dict())
        assert list(other) == batches[done + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_epochs_of_a_length_go_through_all_data(urls, workers):
    dataset = WebDataset(urls, shardshuffle=True).map(number).with_epoch(7, scope="rank")
    with WebLoader(dataset, batch_size=None, num_workers=workers) as loader:
        epochs = [list(loader) for _ in range(8)]
    assert [len(epoch) for epoch in epochs] == [7] * 8
    # Workers have different shards, and one that has few samples begins its second pass early.
    assert len({number for epoch in epochs for number in epoch}) > 20
    if workers < 2:
        assert sorted(n for epoch in epochs[:4] for n in epoch) == list(range(28))


def same(source):
    yield from source


@pytest.mark.slow
@pytest.mark.parametrize(("drop_last", "workers"), mixed([False, True], [1, 2]))
def test_no_batch_belongs_to_two_epochs(urls, workers, drop_last):
    """On any number of workers, also after a restore, each lane has its own epochs."""

    def make(workers):
        dataset = WebDataset(urls, shardshuffle=True).map(number).with_epoch(7)
        return WebLoader(dataset, batch_size=3, num_workers=workers, drop_last=drop_last)

    with make(workers) as loader:
        epochs = [[batch.tolist() for batch in loader] for _ in range(4)]
        sizes = [3, 3] if drop_last else [3, 3, 1]
        for epoch in epochs:
            assert [len(batch) for batch in epoch] == [n for n in sizes for _ in range(workers)]
        loop = iter(loader)
        first = [next(loop).tolist() for _ in range(workers)]
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [batch.tolist() for batch in loop]
        following = [batch.tolist() for batch in loader]
    if workers == 1 and not drop_last:
        assert sorted(n for epoch in epochs for batch in epoch for n in batch) == [*range(28)]
    with make(0) as other:
        other.load_state_dict(state)
        assert [batch.tolist() for batch in other] == rest
        assert len(first + rest) == len(epochs[0])
        assert [batch.tolist() for batch in other] == following


def test_epochs_without_a_whole_batch_are_refused(urls):
    dataset = WebDataset(urls, shardshuffle=True).map(number).with_epoch(2)
    with pytest.raises(ConfigError, match="an epoch of 2 items has no whole batch of 3"):
        WebLoader(dataset, batch_size=3, drop_last=True)


@pytest.mark.parametrize("savable", [True, False])
def test_epochs_of_a_loader_are_counted_over_its_workers(urls, savable):
    dataset = WebDataset(urls, shardshuffle=True).map(number)
    dataset = dataset if savable else dataset.compose(same)
    with WebLoader(dataset, batch_size=None, num_workers=2).with_epoch(7) as loader:
        epochs = [list(loader) for _ in range(4)]
    assert sorted(n for epoch in epochs for n in epoch) == [*range(28)]
    assert [len(epoch) for epoch in epochs] == [7] * 4


def test_a_worker_that_dies_is_replaced_and_the_order_stays(urls, tmp_path):
    flag = tmp_path / "died"

    def die_once(sample):
        if number(sample) == 9 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), 9)
        return number(sample)

    with WebLoader(WebDataset(urls).map(number), batch_size=None, num_workers=2) as loader:
        expected = list(loader)
    with WebLoader(WebDataset(urls).map(die_once), batch_size=None, num_workers=2) as loader:
        assert list(loader) == expected
    assert flag.exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_ends_the_program_is_named_with_its_sample(urls, workers):
    def leave(sample):
        return sys.exit("enough") if number(sample) == 9 else number(sample)

    message = r"SystemExit\('enough'\) was raised by leave .*, sample '0*9' of .*tar, in batch"
    loader = WebLoader(WebDataset(urls).map(leave), batch_size=None, num_workers=workers)
    with loader, pytest.raises(WorkerError, match=message):
        list(loader)


def test_generator_functions_load_and_say_that_they_cannot_be_saved(urls):
    def twice(source):
        for sample in source:
            yield number(sample)
            yield number(sample)

    dataset = WebDataset(urls).compose(twice)
    with WebLoader(dataset, batch_size=None, num_workers=1) as loader:
        assert len(list(loader)) == 56
        next(iter(loader))
        with pytest.raises(StateError, match="twice is a plain iterable or generator function"):
            loader.state_dict()


def test_user_code_in_workers_finds_the_worker_info_of_torch(urls):
    def where(source):
        for _ in source:
            info = torch.utils.data.get_worker_info()
            yield info.id, info.num_workers

    with WebLoader(WebDataset(urls).compose(where), batch_size=None, num_workers=2) as loader:
        assert {tuple(each) for each in loader} == {(0, 2), (1, 2)}


def worker_seed(source):
    for _ in source:
        yield torch.utils.data.get_worker_info().seed


@pytest.mark.slow
def test_seeds_of_workers_differ_in_each_loop_and_rank_and_follow_the_program(urls, monkeypatch):
    def loops(rank=0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        dataset = WebDataset(urls, nodesplitter=None).compose(worker_seed)
        with WebLoader(dataset, batch_size=None, num_workers=2) as loader:
            return [sorted(set(loader)) for _ in range(2)]

    torch.manual_seed(3)
    first = loops()
    torch.manual_seed(3)
    assert loops() == first
    others = [*first, *loops(rank=1)]
    torch.manual_seed(4)
    others += loops()
    assert all(two - one == 1 for one, two in others)
    assert len({one for one, _ in others}) == len(others)


def test_pipelines_are_inherited_and_not_pickled(urls):
    """Programs hold locks, shared values, and objects that hold the loader."""

    class Trainer:
        def __init__(self):
            self.lock = threading.Lock()
            self.epoch = multiprocessing.Value("i", 7)
            self.keys = (f"k{n}" for n in itertools.count())
            dataset = WebDataset(urls, shardshuffle=False).map(self.read)
            self.loader = WebLoader(dataset, batch_size=None, num_workers=1)

        def read(self, sample):
            with self.lock:
                return next(self.keys), self.epoch.value, number(sample)

    trainer = Trainer()
    assert next(iter(trainer.loader)) == ["k0", 7, 0]
    trainer.epoch.value = 8
    assert [each[2] for each in trainer.loader] == list(range(28))
    trainer.loader.close()


def test_what_other_start_methods_cannot_send_is_named_with_an_option_of_this_loader(urls):
    lock = threading.Lock()
    dataset = WebDataset(urls).map(lambda sample: (lock, sample))
    loader = WebLoader(dataset, num_workers=1, multiprocessing_context="forkserver")
    with pytest.raises(ConfigError, match="lock.*: multiprocessing_context='fork'"):
        next(iter(loader))


def test_splitters_ask_the_process_group_of_the_program(urls, tmp_path):
    distributed = torch.distributed

    def split(shards):
        return itertools.islice(shards, distributed.get_rank(), None, distributed.get_world_size())

    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dataset = WebDataset(urls, nodesplitter=split, shardshuffle=False).map(number)
        with WebLoader(dataset, batch_size=None, num_workers=2) as loader:
            assert sorted(loader) == list(range(28))
    finally:
        distributed.destroy_process_group()


def test_other_datasets_are_loaded_by_torch():
    with WebLoader([1, 2, 3, 4], batch_size=2) as loader:
        assert [batch.tolist() for batch in loader.map(lambda batch: batch + 1)] == [[2, 3], [4, 5]]


def test_arguments_that_would_do_nothing_are_refused(urls):
    with pytest.raises(ConfigError, match="sampler=.*shuffled and sampled by their own"):
        WebLoader(WebDataset(urls), sampler=[1])
    WebLoader(WebDataset(urls), persistent_workers=True, shuffle=False, sampler=None)


def test_unknown_arguments_are_refused_as_by_torch(urls):
    with pytest.raises(ConfigError, match=r"WebLoader\(\) has no argument 'nope'; see") as error:
        WebLoader(WebDataset(urls), nope=True)
    assert isinstance(error.value, TypeError)
    with pytest.raises(TypeError, match="has no argument 'batchsize'; did you mean 'batch_size'"):
        WebLoader(WebDataset(urls), batchsize=2)


def negative(value):
    return -value - 1


@pytest.mark.parametrize(("workers", "counted"), mixed([0, 1], [False, True]))
def test_a_pipeline_that_is_changed_is_loaded_anew(urls, workers, counted):
    dataset = WebDataset(urls).map(number).slice(5)
    if counted:
        dataset.with_epoch(4)
    with WebLoader(dataset, batch_size=None, num_workers=workers) as loader:
        first = list(loader)
        dataset.append(filters.map(negative))
        second, third = list(loader), list(loader)
    assert first == [*range(4 if counted else 5)]
    assert second == [negative(n) for n in first]
    assert third == second


def test_an_interrupt_as_an_epoch_begins_moves_no_lane(urls, monkeypatch):
    loader = WebLoader(WebDataset(urls).map(number), batch_size=None, num_workers=2)
    with loader:
        assert len(list(loader)) == 28
        lanes = loader.stages[0].loader
        before = lanes.save_state_rank()

        def interrupted(position):
            if next(interrupts):
                raise KeyboardInterrupt
            return saved_state(position)

        saved_state, interrupts = LanePosition.saved_state, iter([False, True])
        monkeypatch.setattr(LanePosition, "saved_state", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lanes.begin_epoch(1)
        monkeypatch.undo()
        assert lanes.save_state_rank() == before
