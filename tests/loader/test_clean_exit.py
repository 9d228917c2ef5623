"""Every way out of a program leaves no process, descriptor or shared memory behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from energon.errors import WorkerError
from energon.loader.savable import get_loader
from tests.commands import run_python
from tests.effort import some
from tests.loader.fake_pipeline import fake
from tests.waiting import descendants, wait_for_end, wait_until

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


THREAD = """
import os
import threading
import numpy as np
from energon.loader import get_loader
from tests.loader.fake_pipeline import fake

def make(lane, row):
    return np.zeros(1000)

def iterate():
    try:
        for _ in get_loader(fake(make, workers=2)):
            begun.set()
    except BaseException as error:
        # At once, or not at all: the interpreter ends while a traceback is printed.
        os.write(2, f"{type(error).__name__}: {error}\\n".encode())

begun = threading.Event()
threading.Thread(target=iterate, daemon=True).start()
begun.wait()
"""


@pytest.mark.slow
def test_a_thread_that_iterates_while_the_program_exits_is_told_so():
    for _ in range(some([1, 2, 3], 1)[-1]):
        done = run_python(THREAD)
        assert "SIGKILL" not in done.stderr
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        assert all("the program is exiting" in line for line in errors), done.stderr


@contextmanager
def running(program, method="fork"):
    """Run PROGRAM and `program`; give the process, and the processes it has started."""
    code = PROGRAM.format(method=method) + textwrap.dedent(program)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        started = list(map(int, process.stdout.readline().split()))
        started += descendants(process.pid)
        try:
            yield process, started
        finally:
            process.kill()


def run(program, method="fork", *, signal_number=None):
    """Run PROGRAM and `program`; return its exit code and the processes it has started."""
    with running(program, method) as (process, started):
        if signal_number is not None:
            process.send_signal(signal_number)
        return process.wait(), started


def shared_memory():
    """Names of what Python and torch share; other programs come and go."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "torch_"))}


@pytest.fixture(autouse=True)
def shared_memory_is_as_before():
    before = shared_memory()
    yield
    wait_until(lambda: shared_memory() <= before)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_kill_9_of_the_program(method):
    code, started = run("time.sleep(100)", method, signal_number=signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert len(set(started)) >= 2
    wait_for_end(started)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_kill_9_while_a_fork_of_the_program_lives_on(method):
    program = """
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with running(program, method) as (process, started):
        process.wait()
        wait_for_end(started[:2])  # while standard input keeps the fork alive


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_kill_9_while_a_worker_holds_the_interpreter_lock(method):
    program = """
        import ctypes
        def stuck(lane, row):
            print(os.getpid(), flush=True)
            ctypes.PyDLL(None).sleep(1000)
        next(iter(get_loader(fake(stuck, workers=1), start_method=loader.options.start_method)))
    """
    with running(program, method) as (process, started):
        started += [int(process.stdout.readline())]
        process.kill()
        wait_for_end(started)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "expected"),
    some(
        [
            ("", 0),
            ("raise SystemExit(3)", 3),
            ("del kept; loader.close()", 0),
            ("os._exit(4)", 4),
            ("sys.stderr.close(); raise RuntimeError", 1),
        ],
        5,
    ),
)
def test_ways_to_end_a_program(program, expected):
    code, started = run(program)
    assert code == expected
    wait_for_end(started)


def test_sigterm_to_the_program():
    code, started = run("time.sleep(100)", signal_number=signal.SIGTERM)
    assert code == -signal.SIGTERM
    wait_for_end(started)


def test_a_fork_of_the_program_leaves_the_workers_alone():
    program = """
        pid = os.fork()
        if pid == 0:
            try:
                for _ in range(1000):
                    next(batches)
            except Exception as error:
                sys.exit(0 if "create a separate loader" in str(error) else 9)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for _ in range(100):
            next(batches)
        sys.exit(code + loader.stats()["worker_deaths"])
    """
    code, started = run(program)
    assert code == 0
    wait_for_end(started)


def test_forgetting_a_loader_ends_its_workers():
    loader = get_loader(fake(workers=2))
    list(islice(loader, 3))
    pids = [worker.pid for worker in loader._workers]
    del loader
    gc.collect()
    wait_for_end(pids)


def test_an_exception_in_the_loop_ends_them_with_the_loader():
    pids = []

    def train():
        with get_loader(fake(workers=2)) as loader:
            for batch in loader:
                pids.extend(worker.pid for worker in loader._workers)
                raise KeyError(batch)

    with pytest.raises(KeyError):
        train()
    wait_for_end(pids)


@pytest.mark.slow
def test_a_loader_that_is_dropped_with_its_iterator_in_use():
    batches = iter(get_loader(fake(workers=1)))
    next(batches)
    pid = batches._loader._workers[0].pid
    gc.collect()
    assert next(batches) == (0, 1)
    del batches
    gc.collect()
    wait_for_end([pid])


# In a process of their own: what other tests have left opens and closes files, too.
DESCRIPTORS = """
import gc, os, signal
from contextlib import contextmanager
from itertools import islice
from energon.loader import get_loader
from tests.loader.fake_pipeline import fake

def count():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
"""


def run_alone(program):
    """Run a program; return what it printed as numbers."""
    code = DESCRIPTORS + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    return list(map(int, done.stdout.split()))


@pytest.mark.slow
def test_closed_loaders_hold_no_descriptor():
    program = """
        def use():
            with get_loader(fake(workers=2)) as loader:
                list(islice(loader, 5))
            print(count())

        for _ in range(4):
            use()
    """
    assert len(set(run_alone(program))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_replaced_worker_leaves_no_descriptor(method):
    program = f"""
        with get_loader(fake(workers=1), start_method={method!r}) as loader:
            batches = iter(loader)
            next(batches)
            for number in range(4):
                list(islice(batches, 1000))
                print(loader.stats()["worker_deaths"], count())
                os.kill(loader._workers[0].pid, signal.SIGKILL)
    """
    printed = run_alone(program)
    deaths, descriptors = printed[::2], printed[1::2]
    assert deaths == [0, 1, 2, 3]
    # Slots of shared memory are mapped as they come: their number differs by what is on its way.
    assert max(descriptors[1:]) <= descriptors[0] + 2


def test_a_closed_loader_says_so():
    loader = get_loader(fake(workers=1))
    batches = iter(loader)
    next(batches)
    worker = loader._workers[0]
    loader.close()
    with pytest.raises(WorkerError, match="this loader is closed"):
        worker.take()
