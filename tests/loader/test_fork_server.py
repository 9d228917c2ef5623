import errno
import os
import signal
import socket
import subprocess
import sys
import time

from energon.loader.processes.start import (
    RUNNING,
    START,
    exit_code,
    receive_answer,
    send_request,
)


def wait_for_exit(pid):
    while (code := exit_code(pid)) == RUNNING:
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


def serving(there, setup=""):
    """Start a server at the other end of `there`."""
    program = f"{setup}\nfrom energon.loader.processes.start import run_fork_server\n"
    program += f"run_fork_server({there.fileno()}, {os.getpid()})"
    return subprocess.Popen([sys.executable, "-c", program], pass_fds=[there.fileno()])


REFUSING = """
import errno, os
def fork():
    raise BlockingIOError(errno.EAGAIN, "none left")
os.fork = fork
"""


def test_a_system_that_allows_no_more_processes_is_an_answer():
    here, there = socket.socketpair()
    with here, there, serving(there, REFUSING) as server:
        there.close()
        for number in (5, 6):
            send_request(here, number, START)
            assert receive_answer(here) == (number, -errno.EAGAIN)
        here.close()
        assert server.wait() == 0


def test_a_parent_that_leaves_without_reading_ends_the_server_without_a_word(capfd):
    here, there = socket.socketpair()
    with here, there, serving(there) as server:
        there.close()
        for number in range(3):
            send_request(here, number, server.pid)
        receive_answer(here)
        here.close()
        assert server.wait() == 0
    assert capfd.readouterr().err == ""
