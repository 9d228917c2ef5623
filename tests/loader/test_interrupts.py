"""Ctrl-C at any moment of starting ends the loop it hits, and nothing that comes after it."""

import signal
import subprocess
import sys
import textwrap
from _thread import interrupt_main
from pathlib import Path

import pytest

from energon.loader.processes.main import SIGNALS, undisturbed

ROOT = Path(__file__).parents[2]
PROGRAM = """
import gc, os, signal, sys, threading, time, warnings
from itertools import islice

from energon.loader import get_loader
from energon.loader.processes.start import stop_fork_server
from tests.loader.fake_pipeline import fake, in_order

method, moments = sys.argv[1], int(sys.argv[2])
warnings.simplefilter("error")
unraisable = []
sys.unraisablehook = lambda caught: unraisable.append(repr(caught.exc_value))

def load():
    with get_loader(fake(workers=2), start_method=method) as loader:
        return list(islice(loader, 4))

def interrupted_after(seconds):
    # Sends ^C as a terminal does, to all processes, and returns whether it hit the loop.
    def interrupt():
        time.sleep(seconds)
        os.killpg(0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    try:
        try:
            thread.start()
            load()
        finally:
            thread.join()
    except KeyboardInterrupt:
        return not thread.is_alive() or thread.join()
    return False

def timed():
    stop_fork_server()
    start = time.perf_counter()
    load()
    return time.perf_counter() - start

whole = timed()
hits = 0
for number in range(moments):
    # A fork server that starts is hit as often as one that runs.
    if number % 2:
        stop_fork_server()
    seconds = whole * number / moments / (1 if number % 2 else 4)
    hits += interrupted_after(seconds) is not False
    start = time.perf_counter()
    assert load() == in_order(2, 2), number
    if method == "fork":  # each run takes as long as the first, unless the machine is busy
        whole = time.perf_counter() - start
gc.collect()
stop_fork_server()
assert unraisable == [], unraisable
print(hits)
"""


def run(program, *arguments):
    """Run a program in a process group of its own; return what it printed, and its errors."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def slow(method):
    return pytest.param(method, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*map(slow, ["forkserver", "spawn"]), "fork"])
def test_after_an_interrupt_at_any_moment_the_next_loader_works(method):
    moments = 16 if method != "spawn" else 6
    printed, errors = run(PROGRAM, method, moments)
    assert int(printed) > moments // 4
    assert errors == ""


@pytest.mark.parametrize("when", range(7))
def test_an_interrupt_while_handlers_and_masks_change_leaves_them_as_they_were(when, monkeypatch):
    def interrupting(function):
        def run(*arguments):
            result = function(*arguments)
            calls.append(function)
            if len(calls) == when + 1:
                interrupt_main()
            return result

        return run

    def state():
        return mask(signal.SIG_BLOCK, ()), [signal.getsignal(number) for number in SIGNALS]

    calls, mask, before = [], signal.pthread_sigmask, (set(), [signal.default_int_handler] * 2)
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    monkeypatch.setattr("signal.pthread_sigmask", interrupting(mask))
    monkeypatch.setattr("signal.signal", interrupting(signal.signal))
    try:
        with pytest.raises(KeyboardInterrupt), undisturbed():
            pass
        assert state() == before
        assert len(calls) > when
    finally:
        monkeypatch.undo()
        mask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGTERM, old)
