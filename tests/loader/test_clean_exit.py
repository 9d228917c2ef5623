"""Every way out of a program leaves no process, descriptor or shared memory behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import islice
from pathlib import Path

import pytest

from energon.errors import WorkerError
from energon.loader.getters import get_loader
from tests.loader.fake_pipeline import fake

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, sys, time
import numpy as np
from energon.loader import get_loader
from tests.loader.fake_pipeline import fake

def make(lane, row):
    return np.zeros(100_000)

loader = get_loader(fake(make, workers=2), start_method={method!r})
batches = iter(loader)
kept = [next(batches), next(batches)]
print(*(worker.pid for worker in loader._workers), flush=True)
"""


def run(program, method="forkserver", *, signal_number=None):
    """Run PROGRAM and `program`; return its exit code and the processes it has started."""
    code = PROGRAM.format(method=method) + textwrap.dedent(program)
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        started = list(map(int, process.stdout.readline().split()))
        started += children(process.pid)
        if signal_number is not None:
            process.send_signal(signal_number)
        return process.wait(timeout=20), started


def children(pid):
    """Process ids of all descendants of `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found += [int(path.parent.name), *children(int(path.parent.name))]
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def assert_gone(pids):
    assert wait_until(lambda: not any(map(is_running, pids)))


def shared_memory():
    """Names of what Python and torch share; other programs come and go."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "torch_"))}


@pytest.fixture(autouse=True)
def shared_memory_is_as_before():
    before = shared_memory()
    yield
    assert wait_until(lambda: shared_memory() <= before)


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_kill_9_of_the_program(method):
    code, started = run("time.sleep(100)", method, signal_number=signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert len(set(started)) >= 2
    assert_gone(started)


def test_kill_9_while_a_fork_of_the_program_lives_on():
    program = """
        if os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    _, started = run(program)
    assert_gone(started[:2])


def test_kill_9_while_a_worker_holds_the_interpreter_lock():
    program = """
        import ctypes
        def stuck(lane, row):
            if row == 1:
                ctypes.PyDLL(None).sleep(100)
        more = iter(get_loader(fake(stuck, workers=1)))
        next(more)
        print(more._loader._workers[0].pid, flush=True)
        next(more)
    """
    code = PROGRAM.format(method="forkserver") + textwrap.dedent(program)
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        started = list(map(int, process.stdout.readline().split()))
        started += [int(process.stdout.readline())]
        time.sleep(0.1)
        process.kill()
    assert_gone(started)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("del kept; loader.close()", 0),
        ("os._exit(4)", 4),
        ("sys.stderr.close(); raise RuntimeError", 1),
    ],
)
def test_ways_to_end_a_program(program, expected):
    code, started = run(program)
    assert code == expected
    assert_gone(started)


def test_sigterm_to_the_program():
    code, started = run("time.sleep(100)", signal_number=signal.SIGTERM)
    assert code == -signal.SIGTERM
    assert_gone(started)


def test_a_fork_of_the_program_leaves_the_workers_alone():
    program = """
        pid = os.fork()
        if pid == 0:
            try:
                for _ in range(1000):
                    next(batches)
            except Exception as error:
                sys.exit(0 if "build a loader of its own" in str(error) else 9)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for _ in range(100):
            next(batches)
        sys.exit(code + loader.stats()["worker_deaths"])
    """
    code, started = run(program)
    assert code == 0
    assert_gone(started)


def test_forgetting_a_loader_ends_its_workers():
    loader = get_loader(fake(workers=2))
    list(islice(loader, 3))
    pids = [worker.pid for worker in loader._workers]
    del loader
    gc.collect()
    assert_gone(pids)


def test_an_exception_in_the_loop_ends_them_with_the_loader():
    pids = []

    def train():
        with get_loader(fake(workers=2)) as loader:
            for batch in loader:
                pids.extend(worker.pid for worker in loader._workers)
                raise KeyError(batch)

    with pytest.raises(KeyError):
        train()
    assert_gone(pids)


def test_a_loader_that_is_dropped_with_its_iterator_in_use():
    batches = iter(get_loader(fake(workers=1)))
    next(batches)
    pid = batches._loader._workers[0].pid
    gc.collect()
    assert next(batches) == (0, 1)
    del batches
    gc.collect()
    assert_gone([pid])


def open_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_closed_loaders_hold_no_descriptor():
    def use():
        with get_loader(fake(workers=2)) as loader:
            list(islice(loader, 5))

    use()
    before = open_descriptors()
    for _ in range(3):
        use()
    # Threads that other tests have left may open a file for a moment.
    assert wait_until(lambda: open_descriptors() <= before)


def test_a_replaced_worker_leaves_no_descriptor():
    with get_loader(fake(workers=1)) as loader:
        batches = iter(loader)
        next(batches)
        before = open_descriptors()
        for _ in range(3):
            os.kill(loader._workers[0].pid, signal.SIGKILL)
            list(islice(batches, 1000))
        assert loader.stats()["worker_deaths"] == 3
        assert open_descriptors() <= before + 2


def test_a_closed_loader_says_so():
    loader = get_loader(fake(workers=1))
    batches = iter(loader)
    next(batches)
    worker = loader._workers[0]
    loader.close()
    with pytest.raises(WorkerError, match="was closed"):
        worker.take()
