from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
import threading
import time

import pytest

from energon.errors import DatasetBusyError
from energon.formats.meta.info import load_info
from energon.prepare import files
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.engines import Engine
from energon.prepare.files import dataset_lock
from energon.prepare.verify.dataset import verify_dataset
from tests.datasets import write_shard

HOLD = "import sys\nfrom pathlib import Path\nfrom energon.prepare.files import dataset_lock\n"
HOLD += (
    "with dataset_lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_another_process_that_holds_it_is_named(holder, tmp_path):
    taken = pytest.raises(DatasetBusyError, match=f"process {holder.pid} on .* --wait")
    with taken, dataset_lock(tmp_path):
        pass


def test_a_lock_is_held_if_the_note_about_its_holder_is_damaged(holder, tmp_path):
    for note in ["[" * 4000, "[]", '{"pid": [1]}', "{", ""]:
        (tmp_path / ".nv-meta/.lock").write_text(note)
        with pytest.raises(DatasetBusyError, match="process"), dataset_lock(tmp_path):
            pass


def test_waiting_ends_when_the_other_is_done_or_killed(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_POLL_SECONDS", 0.01)
    entered = threading.Event()

    def enter():
        with dataset_lock(tmp_path, wait=True):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.1)
    holder.kill()
    thread.join()
    assert entered.is_set()


def test_nothing_is_left_of_it(tmp_path):
    for _ in range(3):
        with dataset_lock(tmp_path):
            assert (tmp_path / ".nv-meta/.lock").exists()
        assert not (tmp_path / ".nv-meta/.lock").exists()


def test_only_one_at_a_time_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_POLL_SECONDS", 0.001)
    inside, most, rounds = 0, 0, 0
    guard = threading.Lock()

    def enter():
        nonlocal inside, most, rounds
        for _ in range(20):
            with dataset_lock(tmp_path, wait=True):
                with guard:
                    inside += 1
                    most, rounds = max(most, inside), rounds + 1
                time.sleep(0.0002)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, rounds) == (1, 80)


def test_a_file_system_without_locks_is_only_warned_about(tmp_path, monkeypatch, caplog):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with dataset_lock(tmp_path):
        pass
    assert "this file system has no locks" in caplog.text


@pytest.mark.slow
def test_two_preparations_at_once_leave_a_whole_dataset(tmp_path):
    for n in range(6):
        write_shard(tmp_path / f"{n}.tar", [(f"{n}_{k}", {"txt": b"x"}) for k in range(200)])
    program = (
        "import sys\nfrom energon.cli.main import main\n"
        "main(['prepare', sys.argv[1], '--split-ratio', sys.argv[2], '--non-interactive',"
        " '--force-overwrite', '--wait'])"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), ratio],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for ratio in ("5,1", "3,3", "1,5")
    ]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert verify_dataset(tmp_path, engine=Engine(num_workers=1)).ok
    assert load_info(tmp_path).num_samples == 1200


def test_a_preparation_that_finds_another_changes_nothing(holder, tmp_path):
    write_shard(tmp_path / "a.tar", [("a", {"txt": b"x"})])
    with pytest.raises(DatasetBusyError):
        prepare_dataset(
            tmp_path, split_parts=["train:.*"], indexing=Indexing(Engine(num_workers=1))
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == [".nv-meta", "a.tar"]
