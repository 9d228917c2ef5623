import os
import signal
import sys
import threading
from itertools import islice

import pytest

from energon.loader.processes import start
from energon.loader.processes.start import stop_fork_server
from energon.loader.savable import get_loader
from tests.loader.fake_pipeline import fake
from tests.waiting import wait_until


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def where(lane, row):
    return os.getpid(), os.getcwd(), os.environ.get("SET_LATER")


@pytest.mark.slow
def test_workers_share_a_server_and_see_the_present_environment(monkeypatch, tmp_path):
    servers = set()
    for value in ("one", "two"):
        monkeypatch.setenv("SET_LATER", value)
        monkeypatch.chdir(tmp_path)
        with get_loader(fake(where, workers=1), start_method="forkserver") as loader:
            pid, directory, seen = next(iter(loader))
            servers.add(parent_of(pid))
        assert (directory, seen) == (str(tmp_path), value)
    assert len(servers) == 1


@pytest.mark.slow
def test_a_server_that_does_not_end_in_time_is_killed_and_waited_for(monkeypatch):
    monkeypatch.setattr(start, "STOP_SECONDS", 0.1)
    with get_loader(fake(where, workers=1), start_method="forkserver") as loader:
        server = parent_of(next(iter(loader))[0])
    os.kill(server, signal.SIGSTOP)  # as good as a machine that is too busy
    stop_fork_server()
    assert not os.path.exists(f"/proc/{server}")  # nor is it a zombie


def interrupt_in(function):
    """Send ^C when the main thread is in a function of this name."""
    main = threading.main_thread().ident
    wait_until(lambda: sys._current_frames()[main].f_code.co_name == function)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_an_interrupt_within_a_request_costs_only_those_who_make_it():
    with (
        get_loader(fake(where, workers=1), start_method="forkserver") as running,
        get_loader(fake(workers=1), start_method="forkserver") as broken,
    ):
        first = next(iter(running))[0]
        server = parent_of(first)
        os.kill(server, signal.SIGSTOP)  # so the interrupt comes while an answer is waited for
        batches = iter(broken)
        threading.Thread(target=interrupt_in, args=["receive_answer"]).start()
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        os.kill(server, signal.SIGCONT)
        assert next(iter(broken)) == (0, 0)
        assert [batch[0] for batch in islice(running, 500)] == [first] * 500
        assert running.stats()["worker_deaths"] == broken.stats()["worker_deaths"] == 0
        assert parent_of(broken._workers[0].pid) != server
    with get_loader(fake(workers=1), start_method="forkserver") as loader:
        next(iter(loader))
    wait_until(lambda: not os.path.exists(f"/proc/{server}"))


def drawn(lane, row):
    import random

    import numpy as np

    return random.random(), np.random.random()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_global_generators_differ_between_workers_and_not_between_runs(method):
    def run():
        with get_loader(fake(drawn, workers=2), start_method=method) as loader:
            batches = iter(loader)
            return [next(batches) for _ in range(4)]

    first, second = run(), run()
    assert first == second
    assert len({number for batch in first for number in batch}) == 8
