from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import tempfile

import pytest

from energon.io.atomic import atomic_path, temporary_folder, write_atomic
from tests.small_disks import LITTLE_ROOM


def test_the_new_content_replaces_the_old_as_a_whole(tmp_path):
    path = tmp_path / "x"
    write_atomic(path, "old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600


def fail_halfway(path):
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise KeyError("something else")


def test_after_a_failure_the_old_content_is_there_and_nothing_else(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(KeyError):
        fail_halfway(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def killed_halfway(path):
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_what_a_killed_process_has_left_is_taken_over(tmp_path):
    path = tmp_path / "x"
    for _ in range(3):
        process = multiprocessing.get_context("spawn").Process(target=killed_halfway, args=[path])
        process.start()
        process.join()
        assert os.listdir(tmp_path) == [".x._partial"]
    write_atomic(path, "a whole")
    assert os.listdir(tmp_path) == ["x"]
    assert path.read_text() == "a whole"


def test_what_another_writer_is_at_is_left_alone(tmp_path):
    path = tmp_path / "x"
    with atomic_path(path) as first:
        first.write_text("first")
        with atomic_path(path) as second:
            second.write_text("second")
            assert first.read_text() == "first"
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["x"]


def test_a_link_or_a_folder_in_the_way_is_not_written_to(tmp_path):
    (tmp_path / "secret").write_text("untouched")
    (tmp_path / ".x._partial").symlink_to(tmp_path / "secret")
    os.link(tmp_path / "secret", tmp_path / ".y._partial")
    (tmp_path / ".z._partial").mkdir()
    os.mkfifo(tmp_path / ".p._partial")
    for name in "xyzp":
        write_atomic(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
    assert (tmp_path / "secret").read_text() == "untouched"


@pytest.mark.parametrize(("little_room", "problem"), LITTLE_ROOM)
def test_an_error_of_a_full_disk_names_the_file(tmp_path, little_room, problem):
    with (
        little_room(tmp_path / "disk", 64) as disk,
        pytest.raises(OSError, match=f"{problem}: '.*/disk/x'$"),
    ):
        write_atomic(disk / "x", bytes(100_000))


def keep_a_folder(started):
    with temporary_folder("test") as folder:
        started.put(folder)
        signal.pause()


def test_the_folder_of_a_killed_process_is_deleted_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    context = multiprocessing.get_context("spawn")
    folders, processes = [], []
    for _ in range(2):
        started = context.SimpleQueue()
        processes.append(context.Process(target=keep_a_folder, args=[started]))
        processes[-1].start()
        folders.append(started.get())
    processes[0].kill()
    processes[0].join()
    (tmp_path / "energon-test-of-mine").write_text("no folder")
    (tmp_path / "energon-other").mkdir()
    with temporary_folder("test") as folder:
        assert [each.exists() for each in (*folders, folder)] == [False, True, True]
    assert not folder.exists()
    processes[1].kill()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("energon-other", "energon-test-of-mine", folders[1].name)
    }
