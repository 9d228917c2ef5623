import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Barrier

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, EmptyDatasetError, SkipSample
from energon.loader.loader import loop
from energon.loader.options import LoaderOptions
from energon.loader.savable import get_loader, get_savable_loader
from energon.worker import WorkerConfig
from tests.loader.fake_pipeline import FakePipeline, fake, in_order, lane_and_row

KINDS = [(0, "thread"), (2, "thread"), (2, "process")]


@pytest.fixture(params=KINDS, ids=["in-line", "threads", "processes"])
def loader_of(request):
    """Builds loaders of each kind and closes them after the test."""
    number, kind = request.param
    made = []

    def build(**kwargs):
        made.append(get_loader(fake(workers=number, **kwargs), workers=kind))
        return made[-1]

    yield build
    for loader in made:
        loader.close()


def test_delivers_in_global_order(loader_of):
    assert list(islice(loader_of(lanes=3), 10)) == in_order(3, 4)[:10]


def test_lanes_of_different_length_end_one_by_one(loader_of):
    loader = loader_of(lanes=3, rows=lambda lane: lane + 1)
    assert list(loader) == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (2, 2)]
    assert len(loader) == 6


def test_a_rank_delivers_its_share(loader_of):
    loader = loader_of(lanes=4, rank=1, world_size=2)
    assert list(islice(loader, 4)) == [(1, 0), (3, 0), (1, 1), (3, 1)]


def test_training_goes_on_after_break_and_epoch(loader_of):
    loader = loader_of(lanes=2, virtual_epoch_length=4)
    assert list(loader) == in_order(2, 2)
    assert next(iter(loader)) == (0, 2)
    assert list(loader) == [(1, 2), (0, 3), (1, 3)]
    assert len(loader) == 4
    assert next(iter(loader)) == (0, 4)


@given(length=st.integers(1, 5), restart=st.booleans(), count=st.integers(0, 20))
@settings(deadline=None, max_examples=30)
def test_an_endless_loop_is_one_loop_after_another(length, restart, count):
    """Over validation data, over virtual epochs, and over data that ends."""
    kinds = [{"rows": length, "restart": restart}, {"virtual_epoch_length": length}]
    for settings_ in kinds:
        loops = get_loader(fake(lanes=1, **settings_))
        expected = [batch for _ in range(count + 1) for batch in loops][:count]
        assert list(islice(loop(get_loader(fake(lanes=1, **settings_))), count)) == expected


def test_an_endless_loop_continues_from_any_state():
    for count in range(9):
        first = get_savable_loader(fake(lanes=2, virtual_epoch_length=4))
        batches = loop(first)
        list(islice(batches, count))
        second = get_savable_loader(fake(lanes=2, virtual_epoch_length=4))
        second.restore_state_rank(first.save_state_rank())
        assert list(islice(loop(second), 6)) == list(islice(batches, 6))


def test_an_endless_loop_without_batches_is_an_error():
    with pytest.raises(EmptyDatasetError, match="SavableDataLoader of rank 0.*has no batches"):
        next(loop(get_savable_loader(fake(lanes=1, rows=0))))


def test_validation_starts_afresh_each_time(loader_of):
    loader = loader_of(lanes=2, rows=2, restart=True)
    assert list(islice(loader, 1)) == [(0, 0)]
    for _ in range(2):
        assert list(loader) == in_order(2, 2)


def test_data_with_an_end_start_again_after_it(loader_of):
    loader = loader_of(lanes=2, rows=2)
    for _ in range(2):
        assert next(iter(loader)) == (0, 0)
        assert list(loader) == in_order(2, 2)[1:]


def test_the_next_loop_is_another_pass_if_one_stopped_at_the_last_batch(loader_of):
    loader = loader_of(lanes=2, rows=2)
    for _ in range(3):
        assert list(islice(loader, len(loader))) == in_order(2, 2)


def test_virtual_epochs_that_fill_a_pass_leave_no_empty_loop(loader_of):
    loader = loader_of(lanes=2, rows=5, virtual_epoch_length=5)
    passes = 2 * in_order(2, 5)
    assert [list(loader) for _ in range(4)] == [passes[i : i + 5] for i in range(0, 20, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 3])
def test_data_of_which_nothing_comes_yield_empty_loops(loader_of, rows):
    loader = loader_of(make=skip_all, lanes=2, rows=rows)
    assert [list(loader) for _ in range(3)] == [[], [], []]


def skip_all(lane, row):
    raise SkipSample


def skip_odd_rows(lane, row):
    if row % 2:
        raise SkipSample
    return lane, row


@pytest.mark.slow
@settings(max_examples=200)
@given(
    rows=st.integers(1, 6),
    lanes=st.integers(1, 3),
    epoch=st.sampled_from([0, 1, 2, 3, 5, 7]),
    make=st.sampled_from([lane_and_row, skip_odd_rows]),
    loops=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=8),
)
def test_loops_that_stop_anywhere_go_through_one_pass_after_the_other(
    rows, lanes, epoch, make, loops
):
    def loader():
        return get_savable_loader(fake(make, lanes=lanes, rows=rows, virtual_epoch_length=epoch))

    (whole,) = [[*get_loader(fake(make, lanes=lanes, rows=rows))]]
    batches, done, in_epoch = loader(), 0, 0
    for count, resumes in loops:
        if resumes:
            state, batches = batches.state_dict(), loader()
            batches.load_state_dict(state)
        if done == len(whole):
            done = in_epoch = 0
        if epoch:
            in_epoch %= epoch
            count = min(count, epoch - in_epoch)
        expected = whole[done : done + count]
        assert list(islice(batches, count)) == expected
        done += len(expected)
        in_epoch += len(expected)


def run_in_threads(count, function):
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(function) for _ in range(count)]]


def take_a_pass_slowly(loader, taken):
    for batch in loader:
        taken.append(batch)
        time.sleep(0.0005)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [{"rows": 20}, {"rows": 20, "restart": True}, {"virtual_epoch_length": 40}],
    ids=["training that ends", "validation", "virtual epochs"],
)
def test_threads_that_loop_together_get_every_batch_once(loader_of, kind):
    loader = loader_of(lanes=2, **kind)
    for epoch in range(2):
        taken, barrier = [], Barrier(4)

        def loop(taken=taken, barrier=barrier):
            batches = iter(loader)
            barrier.wait(timeout=60)
            take_a_pass_slowly(batches, taken)

        run_in_threads(4, loop)
        first = 20 * epoch if "rows" not in kind else 0
        assert sorted(taken) == [(v, row) for v in range(2) for row in range(first, first + 20)]


def test_a_thread_joins_a_loop_over_validation_data_that_has_begun(loader_of):
    loader = loader_of(lanes=2, rows=4, restart=True)
    batches = iter(loader)
    begun = list(islice(batches, 3))
    (rest,) = run_in_threads(1, lambda: list(loader))
    assert begun + rest == in_order(2, 4)
    assert list(batches) == []
    assert list(loader) == in_order(2, 4)


def test_a_finished_loop_stays_finished(loader_of):
    loop = iter(loader_of(virtual_epoch_length=2, lanes=2))
    assert list(loop) == in_order(2, 1)
    assert list(loop) == []


@pytest.mark.slow
def test_goes_on_after_close(loader_of):
    loader = loader_of(lanes=2)
    list(islice(loader, 3))
    loader.close()
    assert next(iter(loader)) == (1, 1)


def fail_at_row_1(lane, row):
    if row == 1:
        raise KeyError("one")
    return lane, row


def test_an_exception_of_user_code_comes_through(loader_of):
    batches = iter(loader_of(make=fail_at_row_1, lanes=2))
    assert list(islice(batches, 2)) == in_order(2, 1)
    with pytest.raises(KeyError, match="one"):
        next(batches)


def interrupt_once(lane, row):
    if row == 1:
        interrupt_once.calls += 1
        if interrupt_once.calls == 1:
            raise KeyboardInterrupt
    return lane, row


def test_an_interrupt_ends_the_workers_and_loses_nothing():
    interrupt_once.calls = 0
    loader = get_loader(fake(interrupt_once, lanes=2))
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    assert loader._workers == []
    assert list(islice(loader, 2)) == in_order(2, 2)[2:]


def test_a_loader_without_a_state_names_the_one_with(loader_of):
    loader = loader_of(lanes=3)
    assert not hasattr(loader, "state_dict")
    with pytest.raises(AttributeError, match="get_savable_loader returns a loader with a state"):
        loader.save_state_global()
    with pytest.raises(AttributeError, match=r"no attribute 'lenght'$"):
        _ = loader.lenght


def test_counts_what_was_delivered(loader_of):
    loader = loader_of(lanes=2)
    list(islice(loader, 5))
    stats = loader.stats()
    assert (stats["batches"], stats["samples"]) == (5, 5)


def test_has_no_length_without_an_end():
    with pytest.raises(TypeError, match="virtual_epoch_length"):
        len(get_loader(fake()))


class SizedPipeline(FakePipeline):
    def __len__(self):
        return 17


def test_takes_the_length_of_one_pass_from_the_dataset():
    assert len(get_loader(SizedPipeline(fake().worker_config))) == 17


def test_describes_itself():
    config = get_loader(fake(lanes=3, workers=2)).config()
    assert (config["lanes"], config["num_workers"], config["dataset"]) == (3, 2, {"seed": 7})


def test_says_whom_it_serves_in_a_line():
    loader = get_loader(fake(lanes=2))
    next(iter(loader))
    assert "rank 0 of 1: 2 lanes" in repr(loader)
    assert "1 batch delivered" in repr(loader)


def test_takes_pipelines_only():
    with pytest.raises(ConfigError, match="the result of get_train_dataset or its like, found 'x'"):
        get_loader("x")


def test_takes_no_other_worker_config():
    other = WorkerConfig(rank=0, world_size=1, num_workers=3)
    with pytest.raises(ConfigError, match="omit worker_config"):
        get_loader(fake(), worker_config=other)
    get_loader(fake(), worker_config=fake().worker_config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": "greenlet"}, "workers must be one of process, thread, ray, got 'greenlet'"),
        ({"start_method": "exec"}, "start_method must be one of forkserver"),
        ({"cache_pool": 3}, "cache_pool=3: expected a pool such as FileStoreCachePool"),
        ({"prefetch_factor": 0}, "prefetch_factor must be at least 1, got 0"),
        ({"watchdog_timeout_seconds": 0}, "must be positive or None"),
    ],
)
def test_checks_its_options(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LoaderOptions(**arguments)


def test_the_first_sample_may_take_longer_than_others():
    assert LoaderOptions(watchdog_timeout_seconds=2).watchdog_initial_timeout_seconds == 10
    assert LoaderOptions(watchdog_timeout_seconds=None).watchdog_initial_timeout_seconds is None
    assert LoaderOptions(watchdog_initial_timeout_seconds=7).watchdog_initial_timeout_seconds == 7


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_loaders_cannot_be_copied(loader_of, duplicate):
    with pytest.raises(TypeError, match="cannot be pickled or copied.*get_savable_loader"):
        duplicate(loader_of(lanes=3))
