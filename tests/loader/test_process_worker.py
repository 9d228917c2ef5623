import ctypes
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from energon.errors import WorkerError
from energon.loader.processes.start import stop_fork_server
from energon.loader.savable import get_savable_loader
from tests.commands import run_python
from tests.loader.fake_pipeline import fake, in_order


@pytest.fixture
def loader_of():
    """Builds loaders and closes them after the test."""
    made = []

    def build(make=None, *, options=None, **kwargs):
        pipeline = fake(make, **kwargs) if make else fake(**kwargs)
        made.append(get_savable_loader(pipeline, **(options or {})))
        return made[-1]

    yield build
    for loader in made:
        loader.close()


def pids(loader):
    return [worker.pid for worker in loader._workers]


@pytest.mark.slow
def test_order_and_state_survive_kill_9(loader_of, caplog):
    loader = loader_of(workers=2, lanes=4)
    batches = iter(loader)
    seen = list(islice(batches, 5))
    os.kill(pids(loader)[0], signal.SIGKILL)
    seen += islice(batches, 1000)
    os.kill(pids(loader)[1], signal.SIGKILL)
    seen += islice(batches, 1000)
    assert seen == in_order(4, 502)[:2005]
    assert loader.stats()["worker_deaths"] == 2
    assert loader.stats()["samples"] == 2005
    assert "was killed by SIGKILL" in caplog.text


def test_workers_leave_interrupts_and_sigterm_to_the_program(loader_of):
    loader = loader_of(workers=1)
    batches = iter(loader)
    seen = list(islice(batches, 5))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pids(loader)[0], number)
        seen += islice(batches, 1000)
    assert seen == in_order(1, 2005)
    assert loader.stats()["worker_deaths"] == 0


def exit_at_row_2_of_lane_1(lane, row):
    if (lane, row) == (1, 2):
        os._exit(3)
    return lane, row


@pytest.mark.slow
def test_a_row_that_kills_its_worker_is_left_out(loader_of, caplog):
    loader = loader_of(exit_at_row_2_of_lane_1, workers=2, lanes=2)
    got = list(islice(loader, 12))
    expected = [(0, 0), (1, 0), (0, 1), (1, 1)]
    expected += [(lane, row + lane) for row in range(2, 6) for lane in (0, 1)]
    assert got == expected
    assert loader.stats()["skipped_rows"] == {1: [2]}
    assert loader.stats()["worker_deaths"] == 3
    assert "lane 1 row 2 killed 3 workers" in caplog.text
    assert loader.save_state_rank()["positions"]["1"]["skip_rows"] == [2]


@pytest.mark.slow
def test_a_row_left_out_stays_so_in_the_next_pass(loader_of):
    loader = loader_of(exit_at_row_2_of_lane_1, workers=1, lanes=2, rows=4, restart=True)
    first = list(loader)
    assert list(loader) == first
    assert loader.stats()["worker_deaths"] == 3


@pytest.mark.slow
def test_a_worker_may_die_after_some_of_its_lanes_have_ended(loader_of):
    loader = loader_of(
        workers=1, lanes=3, rows=lambda lane: (2, 3000, 1)[lane], options={"prefetch_factor": 1}
    )
    batches = iter(loader)
    seen = list(islice(batches, 500))
    os.kill(pids(loader)[0], signal.SIGKILL)
    seen += batches
    assert seen == [(0, 0), (1, 0), (2, 0), (0, 1)] + [(1, row) for row in range(1, 3000)]
    assert loader.stats()["worker_deaths"] == 1


def segfault_at_row_1(lane, row):
    if row == 1:
        ctypes.string_at(0)
    return lane, row


@pytest.mark.slow
def test_a_crash_is_logged_with_its_traceback(loader_of, caplog):
    loader = loader_of(segfault_at_row_1, workers=1)
    assert list(islice(loader, 2)) == [(0, 0), (0, 2)]
    assert "SIGSEGV" in caplog.text
    assert "in segfault_at_row_1" in caplog.text


@pytest.mark.slow
def test_a_crash_has_its_traceback_after_a_library_has_taken_the_signal():
    """As Ray takes it when a program connects to a cluster."""
    program = (
        "import faulthandler, signal\n"
        "faulthandler.enable()\n"
        "signal.signal(signal.SIGSEGV, signal.SIG_DFL)\n"
        "from itertools import islice\n"
        "from energon import get_savable_loader\n"
        "from tests.loader.fake_pipeline import fake\n"
        "from tests.loader.test_process_worker import segfault_at_row_1\n"
        "with get_savable_loader(fake(segfault_at_row_1, workers=1)) as loader:\n"
        "    list(islice(loader, 2))\n"
    )
    done = run_python(program)
    assert "in segfault_at_row_1" in done.stderr


def hang_at_row_3(lane, row):
    if row == 3:
        time.sleep(1000)
    return lane, row


@pytest.mark.slow
def test_a_row_that_hangs_is_left_out(loader_of, caplog):
    options = {"watchdog_timeout_seconds": 1, "watchdog_initial_timeout_seconds": 200}
    loader = loader_of(hang_at_row_3, workers=1, options=options)
    assert list(islice(loader, 5)) == [(0, 0), (0, 1), (0, 2), (0, 4), (0, 5)]
    assert loader.stats()["worker_timeouts"] >= 3  # on a busy machine others are slow, too
    assert "in hang_at_row_3" in caplog.text


@pytest.mark.slow
def test_raises_instead_if_asked_to(loader_of):
    options = {
        "watchdog_timeout_seconds": 3,
        "watchdog_initial_timeout_seconds": 200,
        "fail_on_timeout": True,
    }
    batches = iter(loader_of(hang_at_row_3, workers=1, options=options))
    assert list(islice(batches, 3)) == in_order(1, 3)
    with pytest.raises(WorkerError, match=r"made no progress for 3 s"):
        next(batches)


class DiesWhenLoaded:
    def __reduce__(self):
        return os._exit, (5,)


def test_gives_up_when_no_worker_gets_going(loader_of):
    options = {"start_method": "forkserver"}  # forks load nothing
    loader = loader_of(workers=1, print_of={"cause": DiesWhenLoaded()}, options=options)
    with pytest.raises(WorkerError, match="exited with code 5 between samples"):
        next(iter(loader))


@contextmanager
def killer(loader, *, times=None, victim=lambda pid: pid):
    """Kill each worker of a loader, or what `victim` makes of it, as soon as it appears."""
    killed = []
    stopping = threading.Event()

    def kill():
        while not stopping.is_set() and (times is None or len(killed) < times):
            for pid in pids(loader):
                number = None if pid is None or pid in killed else victim(pid)
                if number is not None:
                    killed.append(pid)
                    with suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
            time.sleep(0.0005)

    thread = threading.Thread(target=kill)
    thread.start()
    yield killed
    stopping.set()
    thread.join()


class SlowToLoad:
    def __reduce__(self):
        return time.sleep, (0.3,)


@pytest.mark.slow
def test_kills_while_workers_start_are_waited_out(loader_of, caplog):
    loader = loader_of(workers=1, print_of={"cause": SlowToLoad()})
    with killer(loader, times=7) as killed:
        assert list(islice(loader, 50)) == in_order(1, 50)
    assert len(killed) == 7
    assert loader.stats()["worker_deaths"] == 7
    assert "starting another one in 0.1 s" in caplog.text


def test_kills_without_end_end_the_run_when_patience_does(loader_of):
    options = {"restart_patience_seconds": 1}
    loader = loader_of(workers=1, options=options, print_of={"cause": SlowToLoad()})
    message = r"killed \d+ times in \d+ s .* patience \(restart_patience_seconds=1\)"
    with killer(loader), pytest.raises(WorkerError, match=message):
        list(islice(loader, 100_000))


def fork_server_of(pid):
    """The parent of a worker; None if it has lost that."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        is_server = b"fork_server" in Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return None
    return parent if is_server else None


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_kills_of_the_fork_server_are_waited_out(loader_of):
    options = {"start_method": "forkserver"}
    loader = loader_of(workers=2, print_of={"cause": SlowToLoad()}, options=options)
    with killer(loader, times=3, victim=fork_server_of) as killed:
        assert list(islice(loader, 50)) == in_order(2, 25)
    assert len(killed) == 3
    assert list(islice(loader, 50)) == in_order(2, 50)[50:]


class NotPickled(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first}, {second}")


def fail_at_row_2(lane, row):
    if row == 2:
        raise ValueError("two") if lane == 0 else NotPickled(1, 2)
    return lane, row


def test_an_exception_arrives_in_its_place_with_type_and_traceback(loader_of):
    batches = iter(loader_of(fail_at_row_2, workers=2))
    assert list(islice(batches, 4)) == in_order(2, 2)
    with pytest.raises(ValueError, match="two") as caught:
        next(batches)
    assert "in fail_at_row_2" in str(caught.value.__cause__)


def test_after_an_exception_the_loader_tries_again(loader_of):
    loader = loader_of(fail_at_row_2, workers=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="two"):
            list(loader)
    assert loader.save_state_rank()["positions"]["0"]["batches"] == 2


def test_an_exception_that_cannot_be_sent_is_described(loader_of):
    batches = iter(loader_of(fail_at_row_2, workers=1, rank=1, world_size=2, lanes=2))
    assert list(islice(batches, 2)) == [(1, 0), (1, 1)]
    with pytest.raises(WorkerError, match=r"NotPickled: 1, 2"):
        next(batches)


def unpicklable_batch(lane, row):
    return (lane, row) if row < 2 else {"lane": lane, "files": [open(os.devnull)]}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_batch_that_cannot_be_sent_is_an_error_in_its_place(loader_of):
    batches = iter(loader_of(unpicklable_batch, workers=1))
    assert list(islice(batches, 2)) == in_order(1, 2)
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        next(batches)
    (note,) = caught.value.__notes__
    assert "cannot be sent to the training process because of dict['files'][0]; " in note


def big_array(lane, row):
    return {"row": row, "array": np.full(100_000, row)}


def test_arrays_are_views_that_stay_intact(loader_of):
    loader = loader_of(big_array, workers=2, lanes=2)
    kept = [batch["array"] for batch in islice(loader, 40)]
    assert [int(array[0]) for array in kept] == [i // 2 for i in range(40)]
    assert all((array == array[0]).all() for array in kept)
    assert not kept[0].flags.owndata
    assert loader.stats()["batches_copied"] > 0


def test_nothing_is_copied_for_a_trainer_that_keeps_one_batch(loader_of):
    loader = loader_of(big_array, workers=2, lanes=2)
    for number, batch in enumerate(islice(loader, 40)):
        assert (batch["array"] == number // 2).all()
    # Threads that look at frames may hold what a frame does for a moment.
    assert loader.stats()["batches_copied"] <= 2


def test_views_outlive_the_loader(loader_of):
    loader = loader_of(big_array, workers=1)
    first = next(iter(loader))["array"]
    loader.close()
    assert (first == 0).all()


rebuilt_here = []


def rebuild(row):
    rebuilt_here.append(row)
    return row


class NotedWhenRebuilt:
    def __init__(self, lane, row):
        self.row = row

    def __reduce__(self):
        return rebuild, (self.row,)


def test_each_batch_is_rebuilt_when_its_turn_comes(loader_of):
    rebuilt_here.clear()
    loader = loader_of(NotedWhenRebuilt, workers=1)
    for row in islice(loader, 500):
        assert rebuilt_here[-1] == row


def test_a_validation_loader_starts_afresh_in_the_same_processes(loader_of):
    loader = loader_of(workers=2, rows=3, restart=True)
    assert list(loader) == in_order(2, 3)
    before = pids(loader)
    assert next(iter(loader)) == (0, 0)
    assert list(loader) == in_order(2, 3)
    assert pids(loader) == before


def test_more_workers_than_lanes_start_no_idle_ones(loader_of):
    loader = loader_of(workers=5, lanes=2)
    assert list(islice(loader, 4)) == in_order(2, 2)
    assert len(pids(loader)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    # The fork server is started twice.
    ["fork", pytest.param("forkserver", marks=pytest.mark.slow)],
)
def test_works_with_more_descriptors_than_select_can_take(loader_of, method):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("the system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    stop_fork_server()
    try:
        loader = loader_of(workers=1, options={"start_method": method})
        assert list(islice(loader, 3)) == in_order(1, 3)
    finally:
        stop_fork_server()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
