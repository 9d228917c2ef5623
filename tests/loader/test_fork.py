"""Workers that are forks of the training process see its program, and leave the rest to it."""

import gc
import multiprocessing
import os
import queue
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from energon.errors import ConfigError, WorkerError
from energon.loader.options import LoaderOptions
from energon.loader.savable import get_loader
from energon.loader.transport import pickling
from energon.loader.transport.pickling import copy_for_worker, inherited_class
from energon.sources.shards import ShardPool
from tests.loader.fake_pipeline import fake

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are not forked there")

ROOT = Path(__file__).parents[2]


def test_is_the_default_on_linux_and_the_environment_changes_it(monkeypatch):
    assert LoaderOptions().start_method == "fork"
    monkeypatch.setenv("ENERGON_START_METHOD", "spawn")
    assert LoaderOptions().start_method == "spawn"
    assert LoaderOptions(start_method="forkserver").start_method == "forkserver"
    monkeypatch.setenv("ENERGON_START_METHOD", "exec")
    with pytest.raises(ConfigError, match="ENERGON_START_METHOD='exec': expected one of fork"):
        LoaderOptions()


def test_the_default_elsewhere_is_the_fork_server(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert LoaderOptions().start_method == "forkserver"


def forked(make, workers=1):
    return get_loader(fake(make, workers=workers), start_method="fork")


def test_workers_use_what_the_program_holds():
    """Locks, queues, shared values, generators and the loader itself are not pickled."""
    seen = multiprocessing.Value("i", 0)
    numbers = iter(range(100))
    lock = threading.Lock()

    class Trainer:
        def __init__(self):
            self.queue = queue.SimpleQueue()
            self.loader = forked(self.make)

        def make(self, lane, row):
            with lock, seen.get_lock():
                seen.value += 1
            return next(numbers), self.loader is not None

    trainer = Trainer()
    with trainer.loader as loader:
        assert list(islice(loader, 3)) == [(0, True), (1, True), (2, True)]
    assert seen.value >= 3
    assert next(numbers) == 0


def test_classes_of_functions_come_back_as_the_same_classes():
    class Batch:
        def __init__(self, row):
            self.row = row

    with forked(lambda lane, row: Batch(row)) as loader:
        batches = list(islice(loader, 2))
    assert [type(batch) for batch in batches] == [Batch, Batch]


def test_classes_that_only_a_worker_has_come_back_by_value():
    def make(lane, row):
        class Late:
            number = row

        return Late()

    with forked(make) as loader:
        assert [batch.number for batch in islice(loader, 2)] == [0, 1]


def test_a_class_that_is_gone_is_named():
    with pytest.raises(ConfigError, match="train.Gone: a batch is of this class"):
        inherited_class(1, "train", "Gone")


def test_energons_own_objects_begin_as_new_and_those_of_the_program_stay():
    pool, lock, options = ShardPool(7), threading.Lock(), {"a": [np.zeros(3)]}
    pool._lock.acquire()
    copied_pool, (copied_lock, copied) = copy_for_worker((pool, [lock, options]))
    assert copied_pool is not pool
    assert copied_pool.max_open == 7
    assert not copied_pool._lock.locked()
    assert copied_lock is lock
    assert copied["a"][0] is options["a"][0]


def test_bound_methods_of_energons_objects_are_those_of_the_copies():
    pool = ShardPool(7)
    copied_pool, method = copy_for_worker((pool, pool.close))
    assert method.__self__ is copied_pool


def test_signals_for_which_the_program_has_handlers_are_left_to_it():
    calls = multiprocessing.Value("i", 0)

    def save(*_):
        calls.value += 1

    def make(lane, row):
        if row == 1:
            for number in (signal.SIGUSR2, signal.SIGHUP):
                os.kill(os.getpid(), number)
        return os.getpid()

    before = {number: signal.signal(number, save) for number in (signal.SIGUSR2, signal.SIGHUP)}
    try:
        with forked(make) as loader:
            assert len(set(islice(loader, 4))) == 1
            assert loader.stats()["worker_deaths"] == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert calls.value == 0


@pytest.mark.slow
def test_standard_input_belongs_to_the_program():
    code = """
        import sys
        from energon.loader import get_loader
        from tests.loader.fake_pipeline import fake
        with get_loader(fake(lambda lane, row: sys.stdin.read(), workers=1)) as loader:
            print(repr(next(iter(loader))), sys.stdin.read())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        input="typed",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == "'' typed\n"


def test_a_system_that_refuses_another_process_is_an_error(monkeypatch):
    def refuse():
        raise BlockingIOError(11, "none left")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(WorkerError, match="the system cannot start another process"):
        next(iter(forked(lambda lane, row: row)))


def open_files(lane, row):
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing itself is a file that is closed again
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


@pytest.mark.slow
def test_workers_hold_no_socket_of_their_siblings():
    gc.collect()  # sockets of earlier tests, which only the first forks would inherit
    with forked(open_files, workers=3) as loader:
        batches = iter(loader)
        counts = [next(batches) for _ in range(6)]
        assert len(set(counts)) == 1
        for worker in loader._workers:
            os.kill(worker.pid, signal.SIGKILL)
        replaced = list(islice(batches, 60))[-3:]
    assert replaced == counts[:3]


def test_workers_free_no_garbage_of_the_program(monkeypatch, tmp_path):
    class Garbage:
        def __init__(self):
            self.itself = self

        def __del__(self):
            if os.getpid() != program:
                (tmp_path / "freed").touch()

    def fork():
        gc.set_threshold(1)  # whatever a fork begins anew has it look for garbage
        Garbage()
        try:
            return real_fork()
        finally:
            gc.set_threshold(*thresholds)

    program, real_fork, thresholds = os.getpid(), os.fork, gc.get_threshold()
    monkeypatch.setattr(os, "fork", fork)
    with forked(open_files, workers=1) as loader:
        next(iter(loader))
    assert not (tmp_path / "freed").exists()


def shared_maps(lane, row):
    maps = Path("/proc/self/maps").read_text().count("/memfd:energon")
    return maps, np.zeros(100_000)


@pytest.mark.slow
def test_a_replaced_worker_keeps_no_memory_of_its_siblings():
    with forked(shared_maps, workers=3) as loader:
        batches = iter(loader)
        first = [next(batches)[0] for _ in range(30)][-3:]
        time.sleep(0.1)  # more batches arrive
        for worker in loader._workers:
            worker.arrived()
        os.kill(loader._workers[1].pid, signal.SIGKILL)
        last = [next(batches)[0] for _ in range(60)][-3:]
    assert max(last) <= max(first) + 1


def test_workers_are_replaced_while_other_threads_hold_locks_and_log():
    """Threads of the program are not in the fork, whatever they are doing at that moment."""
    import logging

    logger = logging.getLogger("tests.fork")
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            logger.debug("busy")
            random.random()

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        with forked(lambda lane, row: logger.debug("here") or row) as loader:
            batches = iter(loader)
            for _ in range(5):
                next(batches)
                os.kill(loader._workers[0].pid, signal.SIGKILL)
            rows = [next(batches) for _ in range(20)]
        assert rows == list(range(5, 25))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("in_thread", [False, True])
def test_torch_works_in_forks_of_a_program_whose_threads_have_computed(in_thread):
    torch = pytest.importorskip("torch")
    (torch.randn(500, 500, requires_grad=True) @ torch.randn(500, 500)).sum().backward()

    def make(lane, row):
        return (torch.ones(400, 400) @ torch.ones(400, 400))[0, :2], torch.get_num_threads()

    taken = []

    def train():
        with forked(make) as loader:
            taken.extend(islice(loader, 2))

    if in_thread:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    else:
        train()
    assert [(values.tolist(), threads) for values, threads in taken] == [([400.0, 400.0], 1)] * 2


def test_process_groups_can_be_asked_in_workers(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with forked(lambda lane, row: (distributed.is_initialized(), distributed.get_rank())) as it:
            assert next(iter(it)) == (True, 0)
    finally:
        distributed.destroy_process_group()


def test_classes_are_found_among_those_of_the_process():
    assert pickling.inherited_class(id(ShardPool), ShardPool.__module__, "ShardPool") is ShardPool
