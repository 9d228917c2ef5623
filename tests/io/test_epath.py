from __future__ import annotations

import io
import os
import pickle

import pytest

from energon import EPath
from energon.errors import ConfigError, DatasetNotFoundError
from tests.servers.places import open_place


@pytest.fixture(params=["local", "moto", "aistore"])
def folder(request):
    for place in open_place(request.param, request):
        yield EPath(place.address) / "folder"


def test_files_are_written_as_a_whole_and_read_in_pieces(folder):
    path = folder / "a/x.bin"
    with path.open("wb") as file:
        file.write(b"0123456789")
        assert not path.is_file()
    with path.open("rb") as file:
        file.seek(-4, io.SEEK_END)
        assert file.read(2) == b"67"
        assert file.tell() == 8
    assert path.size() == 10


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_what_was_written_before_an_exception_is_dropped(folder, mode):
    path = folder / "x"
    path.write_text("old")

    def write_half():
        with path.open(mode) as file:
            file.write("new" if mode == "w" else b"new")
            raise RuntimeError("broken")

    def write_and_forget():
        path.open(mode).write("new" if mode == "w" else b"new")

    with pytest.raises(RuntimeError, match="broken"):
        write_half()
    write_and_forget()
    assert path.read_text() == "old"
    with path.open("w") as file:
        file.write("ä\n")
    assert path.read_bytes() == "ä\n".encode()


def test_folders_are_there_while_something_is_in_them(folder):
    path = folder / "a/b/x.tar"
    assert not folder.exists()
    path.write_text("x")
    assert folder.is_dir()
    assert (folder / "a").is_dir()
    assert not (folder / "a").is_file()
    path.unlink()
    assert not path.exists()
    with pytest.raises(DatasetNotFoundError, match=r"x\.tar: there is no such file"):
        path.stat()


def test_patterns_match_folder_by_folder(folder):
    for name in ("0.tar", "a/1.tar", "a/b/2.tar", "a/b/2.txt"):
        (folder / name).write_text(name)

    def found(pattern):
        return [path.relative_to(folder) for path in folder.glob(pattern)]

    assert found("*.tar") == ["0.tar"]
    assert found("*/*.tar") == ["a/1.tar"]
    assert found("**/*.tar") == ["0.tar", "a/1.tar", "a/b/2.tar"]
    assert len(list(folder.walk())) == 4


def test_files_are_copied_and_moved_to_anywhere(folder, tmp_path):
    here = EPath(tmp_path / "x.bin")
    here.write_bytes(os.urandom(10_000))
    here.copy(folder / "y.bin")
    (folder / "y.bin").move(folder / "z.bin")
    assert not (folder / "y.bin").exists()
    (folder / "z.bin").copy(EPath(tmp_path / "back.bin"))
    assert (tmp_path / "back.bin").read_bytes() == here.read_bytes()


def test_names_are_those_of_paths(folder):
    path = folder / "a.b" / "x.tar.gz"
    assert (path.name, path.suffix, path.parent.name) == ("x.tar.gz", ".gz", "a.b")
    assert path.with_suffix(".idx").name == "x.tar.idx"
    assert path.with_suffix("").name == "x.tar"
    assert (folder / "a.b/../a.b/./x.tar.gz") == path
    assert pickle.loads(pickle.dumps(path)) == path
    assert sorted([path, folder]) == [folder, path]
    assert len({path, EPath(path), EPath(path.url)}) == 1
    with pytest.raises(ValueError, match=r"not in the subpath|different places"):
        folder.relative_to(path)


def test_secrets_of_an_url_are_kept_and_not_shown():
    path = EPath("https://me:secret@host/data?sig=secret") / "x.tar"
    assert path.url == "https://me:secret@host/data/x.tar?sig=secret"
    assert "secret" not in f"{path} {path!r} {path.profile} {path.name}"


@pytest.mark.parametrize("mode", ["a", "r+", "x", "rw"])
def test_other_modes_are_refused(tmp_path, mode):
    with pytest.raises(ConfigError, match="expected 'r', 'rb', 'w' or 'wb'"):
        EPath(tmp_path / "x").open(mode)
