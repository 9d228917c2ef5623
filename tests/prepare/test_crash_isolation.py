from __future__ import annotations

import gc
import os
import signal
from concurrent.futures import BrokenExecutor, Future

import pytest

from energon.errors import WorkerError
from energon.prepare import engines
from energon.prepare.engines import Engine, IsolatedCall, _run_jobs, note, run_isolated


def look(deadly, noting, ordinals):
    """Return the numbers; die at those of `deadly`."""
    for ordinal in ordinals:
        if noting:
            note(ordinal)
        if ordinal in deadly:
            os.kill(os.getpid(), signal.SIGKILL)
    return list(ordinals)


def fail(ordinals):
    raise ValueError("not what I want")


def run(jobs, function=look, num_processes=2):
    """Return by job what was looked at, and what was deadly."""
    results = {job.number: ([], []) for job in jobs}
    engine = Engine(num_workers=num_processes)
    for number, looked_at in run_isolated(engine, function, jobs, lambda *args: {args[-1]}):
        results[number][isinstance(looked_at, set)].extend(looked_at)
    return {number: (sorted(looked), sorted(died)) for number, (looked, died) in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize("noting", [True, False])
def test_every_number_is_looked_at_once_or_found_to_be_deadly(noting):
    deadly = [{3}, set(), {0, 7}]
    jobs = [IsolatedCall(number, (some, noting), range(8)) for number, some in enumerate(deadly)]
    assert run(jobs) == {
        number: ([n for n in range(8) if n not in some], sorted(some))
        for number, some in enumerate(deadly)
    }


def test_what_another_call_has_noted_accuses_nobody():
    jobs = [
        IsolatedCall(0, ({5}, False), range(8)),
        IsolatedCall(1, (set(), True), range(8)),
        IsolatedCall(2, ({6}, True), range(0, 12, 3)),  # which need not follow one another
    ]
    found = run(jobs, num_processes=1)
    assert found == {0: ([0, 1, 2, 3, 4, 6, 7], [5]), 1: (list(range(8)), []), 2: ([0, 3, 9], [6])}


def test_an_exception_is_raised_as_it_is():
    with pytest.raises(ValueError, match="not what I want"):
        run([IsolatedCall(0, (), range(3))], fail)


def test_gives_up_when_processes_die_again_and_again(monkeypatch):
    monkeypatch.setattr(engines, "MAX_DEATHS", 2)
    with pytest.raises(WorkerError, match="died 3 times, perhaps out of memory"):
        run([IsolatedCall(0, (set(range(9)), True), range(9))])


def test_results_that_are_there_when_a_process_dies_are_kept():
    lost, results = [], []

    def submit(job):
        future = Future()
        if job % 2:
            future.set_exception(BrokenExecutor("a process has died"))
        else:
            future.set_result(-job)
        return future

    jobs = _run_jobs(submit, list(range(20)), lost, lambda job, error: None, ahead=20)
    with pytest.raises(BrokenExecutor, match="a process has died"):
        list(map(results.append, jobs))
    assert sorted(results) == [(job, -job) for job in range(0, 20, 2)]
    assert sorted(lost) == list(range(1, 20, 2))


def test_nothing_to_do_is_done_at_once():
    assert run([]) == {}


class Scaler:
    """Garbage that is freed only where it was made, like a scaler of FFmpeg with its threads."""

    def __init__(self):
        self.process = os.getpid()
        self.cycle = self

    def __del__(self):
        if os.getpid() != self.process:
            os.kill(os.getpid(), signal.SIGKILL)


def collect(ordinals):
    gc.collect()
    return list(ordinals)


def test_garbage_of_the_parent_is_not_freed_in_its_processes():
    gc.disable()
    try:
        Scaler()
        assert run([IsolatedCall(0, (), range(2))], collect) == {0: ([0, 1], [])}
    finally:
        gc.enable()
