from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

import energon
from energon.io.atomic import FileLock, hold_byte, locked, release_byte
from tests.commands import run_python

HOLD = """
import sys
from energon.io.atomic import FileLock
lock = FileLock(sys.argv[1])
lock.hold(shared=sys.argv[2] == "shared")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Start processes that hold the lock; they end with the test."""
    processes = []

    def start(path, kind="alone"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_lock_may_be_shared_and_is_exclusive_afterwards(tmp_path, holder):
    path = tmp_path / "lock"
    other = holder(path, "shared")
    with FileLock(path) as lock:
        assert lock.hold(wait=False, shared=True)
        assert not lock.hold(wait=False)
        other.kill()
        other.wait()
        assert lock.hold(wait=False)


def test_a_lock_that_its_holder_deletes_is_taken_anew(tmp_path):
    path = tmp_path / "lock"
    first = FileLock(path)
    assert not first.existed
    assert first.hold()
    late = FileLock(path)
    first.delete()
    first.close()
    first.close()
    assert late.hold(wait=False)
    assert not late.is_at_path
    late.close()
    with locked(path, deletes=True):
        assert path.exists()
    assert not path.exists()
    with locked(path):
        pass
    assert path.exists()


def test_without_create_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "lock", create=False)
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "nowhere" / "lock")


def test_file_systems_without_locks_are_an_error_only_where_it_matters(tmp_path, monkeypatch):
    def refuse(descriptor, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks"), locked(tmp_path / "lock"):
        pass
    with locked(tmp_path / "lock", deletes=True):
        pass
    assert not (tmp_path / "lock").exists()


def test_single_bytes_are_locked_against_other_processes(tmp_path):
    path = tmp_path / "blocks"
    path.write_bytes(bytes(8))
    code = (
        "import os, sys\n"
        "from energon.io.atomic import hold_byte\n"
        "file = os.open(sys.argv[1], os.O_RDWR)\n"
        "print(hold_byte(file, 3), hold_byte(file, 4))\n"
    )

    def other():
        done = run_python(code, path)
        return done.stdout.split()

    with open(path, "r+b") as file:
        assert hold_byte(file.fileno(), 3)
        assert other() == ["False", "True"]
        release_byte(file.fileno(), 3)
        assert other() == ["True", "True"]


def test_no_other_module_locks_files():
    root = Path(energon.__file__).parent
    modules = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "fcntl.flock" in (text := path.read_text()) or "fcntl.lockf" in text
    }
    assert modules == {"io/atomic.py"}
