from __future__ import annotations

import os
import stat

import pytest

from energon.io.atomic import atomic_path, write_atomic


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
