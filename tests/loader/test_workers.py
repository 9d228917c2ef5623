import multiprocessing
import os
import threading
import time
from itertools import islice

import pytest

from energon.errors import WorkerError
from energon.loader.hosting import InlineWorker, Watchdog
from energon.loader.options import LoaderOptions
from energon.loader.savable import get_loader, get_savable_loader
from tests.loader.fake_pipeline import fake, in_order
from tests.waiting import wait_until


def test_threads_work_ahead_of_the_trainer():
    made = []

    def make(lane, row):
        made.append(row)
        return row

    with get_loader(fake(make, workers=1), workers="thread", prefetch_factor=3) as loader:
        next(iter(loader))
        wait_until(lambda: len(made) >= 5)
        # One delivered, three ready, one waiting for room.
        time.sleep(0.01)
        assert made == [0, 1, 2, 3, 4]


def test_the_state_of_threads_is_that_of_the_delivered_batches():
    with get_savable_loader(fake(workers=2, lanes=2), workers="thread") as loader:
        list(islice(loader, 3))
        positions = loader.save_state_rank()["positions"]
    assert [positions[lane]["state"]["row"] for lane in "01"] == [2, 1]


def test_closing_ends_the_threads():
    loader = get_loader(fake(workers=2), workers="thread")
    next(iter(loader))
    assert len(threads()) == 2
    loader.close()
    assert threads() == []


def test_forgetting_a_loader_ends_its_threads():
    loader = get_loader(fake(workers=1), workers="thread")
    next(iter(loader))
    del loader
    assert threads() == []


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("energon rank")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_drops_a_loader_whose_thread_was_busy():
    loader = get_loader(fake(workers=1), workers="thread")
    next(iter(loader))
    channel = loader._workers[0]._channel
    held, go = threading.Event(), threading.Event()

    def hold():
        with channel._changed:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if not pid:
        loader.close()
        os._exit(0)
    go.set()
    thread.join()
    loader.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_thread_that_hangs_is_reported(caplog):
    release = threading.Event()

    def make(lane, row):
        if row == 1:
            release.wait()
        return lane, row

    def release_when_reported():
        wait_until(lambda: "threads cannot be replaced" in caplog.text)
        release.set()

    pipeline = fake(make, workers=1)
    with get_loader(pipeline, workers="thread", watchdog_timeout_seconds=0.05) as loader:
        threading.Thread(target=release_when_reported).start()
        assert list(islice(loader, 3)) == in_order(1, 3)
        assert loader.stats()["worker_timeouts"] >= 1  # on a busy machine others are slow, too


@pytest.mark.parametrize(("row", "seconds"), [(0, 0.25), (1, 0.05)])
def test_a_thread_that_hangs_raises_if_asked_to(row, seconds):
    """The first batch, before which data is opened, may take longer than the others."""
    release = threading.Event()
    pipeline = fake(lambda lane, n: release.wait() if n == row else (lane, n), workers=1)
    limits = {"watchdog_timeout_seconds": 0.05, "watchdog_initial_timeout_seconds": 0.25}
    loader = get_loader(pipeline, workers="thread", fail_on_timeout=True, **limits)
    with pytest.raises(WorkerError, match=rf"has not made a batch for {seconds} s"):
        list(islice(loader, 2))
    release.set()
    loader.close()


def test_a_closed_worker_says_so():
    worker = InlineWorker(fake(), LoaderOptions())
    worker.close()
    with pytest.raises(WorkerError, match="is closed"):
        worker.take()


def test_loaders_that_are_watched_share_one_thread():
    loaders = [get_loader(fake(), watchdog_timeout_seconds=60) for _ in range(20)]
    for loader in loaders:
        next(iter(loader))
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("energon watchdog") == 1


def test_a_forked_process_watches_by_itself():
    next(iter(get_loader(fake(), watchdog_timeout_seconds=60)))
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_hang_until_it_is_noticed)
    child.start()
    child.join(60)
    assert child.exitcode == 3


def _hang_until_it_is_noticed():
    def leave():
        os._exit(3)

    with Watchdog("a test", leave, 0.05):
        time.sleep(30)
