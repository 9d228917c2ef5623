import os
import signal
import time

from energon.loader.fork_server import RUNNING, exit_code


def wait_for_exit(pid):
    deadline = time.monotonic() + 5
    while (code := exit_code(pid)) == RUNNING and time.monotonic() < deadline:
        time.sleep(0.001)
    return code


def forked(act):
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(7)
    return pid


def test_tells_how_a_process_has_ended():
    assert wait_for_exit(forked(lambda: None)) == 7
    assert wait_for_exit(forked(lambda: os.kill(os.getpid(), signal.SIGKILL))) == -9


def test_a_running_process_has_not_ended_even_if_exit_codes_are_not_kept():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        pid = forked(lambda: time.sleep(30))
        assert exit_code(pid) == RUNNING
        os.kill(pid, signal.SIGKILL)
        assert wait_for_exit(pid) == 0
    finally:
        signal.signal(signal.SIGCHLD, before)
