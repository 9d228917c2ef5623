from __future__ import annotations

import os
import subprocess

import pytest

from energon.errors import DatasetNotFoundError, StorageAccessError, StorageError, StorageFullError
from energon.formats.tar.writer import END, encode_header
from energon.prepare import files
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.engines import Engine
from energon.prepare.files import (
    clear_leftovers,
    commit_files,
    flush_files,
    list_dataset_files,
    stage_files,
    write_files,
)
from energon.prepare.verify.dataset import verify_dataset
from energon.prepare.writers.shard_writer import ShardWriter
from tests.datasets import CRUDE, write_shard
from tests.small_disks import fill, small_disk


@pytest.mark.parametrize("count", [1, 3, 40])
def test_files_are_there_as_a_whole_or_not_at_all(tmp_path, count):
    paths = [tmp_path / f"{n}.x" for n in range(count)]
    staged = stage_files(((path, b"new") for path in paths), durable=True)
    assert not any(path.exists() for path in paths)
    commit_files(staged)
    assert [path.read_bytes() for path in paths] == [b"new"] * count
    assert len(os.listdir(tmp_path)) == count


def test_an_error_leaves_nothing_of_any_file(tmp_path):
    with pytest.raises(DatasetNotFoundError):
        write_files([(tmp_path / "a", b"x"), (tmp_path / "no/folder", b"x")])
    assert os.listdir(tmp_path) == []


def test_without_a_call_for_all_files_each_is_flushed(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(files, "_flush_file_system", lambda folder: False)
    monkeypatch.setattr(os, "fsync", flushed.append)
    write_files((tmp_path / str(n), b"x") for n in range(20))
    assert len(flushed) == 20


@pytest.mark.parametrize("count", [1, 20])
def test_flushing_files_of_a_lost_folder_names_it(tmp_path, count):
    with pytest.raises(DatasetNotFoundError, match="/lost"):
        flush_files([tmp_path / "lost" / str(n) for n in range(count)])


def test_files_are_listed_through_links_and_without_indexes(tmp_path):
    for name in ("b/c.tar", "a.tar", ".nv-meta/split.yaml", "x/y/.nv-meta/z"):
        (tmp_path / "ds" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ds" / name).touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/d.tar").touch()
    (tmp_path / "ds/link").symlink_to(tmp_path / "other")
    (tmp_path / "ds/b/loop").symlink_to(tmp_path / "ds")
    assert list_dataset_files(tmp_path / "ds") == ["a.tar", "b/c.tar", "link/d.tar"]


def test_what_killed_runs_have_left_is_cleared_away(tmp_path):
    write_shard(tmp_path / "a.tar", [("a", {"txt": b"x"})])
    (tmp_path / ".nv-meta").mkdir()
    left = [".a.tar.idx.0a1b2c3d", ".a.tar.parts.abcd_123", ".nv-meta/.index.sqlite.01234567"]
    kept = [".b.tar.01234567", ".a.tar.idx.short", "a.tar.idx.01234567"]
    for name in left + kept:
        (tmp_path / name).touch()
    clear_leftovers(tmp_path, ["a.tar"])
    assert not any((tmp_path / name).exists() for name in left)
    assert all((tmp_path / name).exists() for name in kept)


def test_a_full_disk_is_an_error_and_keeps_the_old_dataset(tmp_path):
    with small_disk(tmp_path / "ds", 1024) as root:
        write_shard(root / "0.tar", [(f"{n}", {"txt": b"x"}) for n in range(100)])
        prepare_dataset(root, **CRUDE)
        before = (root / ".nv-meta/.info.json").read_text()
        write_shard(root / "1.tar", [(f"k{n}", {"txt": b""}) for n in range(900)])
        fill(root, 0)
        with pytest.raises(StorageFullError, match="No space left on device; free some space"):
            prepare_dataset(root, **CRUDE)
        assert (root / ".nv-meta/.info.json").read_text() == before
        assert [name for name in os.listdir(root) if name.startswith(".0") or ".1" in name] == []
        assert verify_dataset(root, engine=Engine(num_workers=1)).ok
        (root / "filler").unlink()
        assert prepare_dataset(root, **CRUDE).num_samples == 1000


def test_a_disk_without_room_for_the_sql_index_is_an_error(tmp_path):
    with small_disk(tmp_path / "disk", 256) as disk:
        with ShardWriter(disk / "%d.tar") as writer:
            writer.write({"__key__": "a", "txt": "x"})
        (disk / ".nv-meta").mkdir()
        fill(disk, 0)
        with pytest.raises(StorageError, match="index.sqlite: No space left on device; free some"):
            prepare_dataset(disk, **CRUDE)
        (disk / "filler").unlink()
        assert prepare_dataset(disk, **CRUDE).num_samples == 1


def test_a_full_disk_leaves_nothing_of_a_shard(tmp_path):
    with small_disk(tmp_path / "ds", 256) as root:

        def write():
            with ShardWriter(root / "%d.tar", maxcount=50) as writer:
                for n in range(1000):
                    writer.write({"__key__": f"{n}", "txt": b"x" * 1000})

        with pytest.raises(OSError, match=r"No space left.*\.tar'$"):
            write()
        left = sorted(name for name in os.listdir(root) if name.endswith(".tar"))
        assert left
        assert not any(name.startswith(".") for name in os.listdir(root))
        with ShardWriter(root / "%d.tar", resume=True) as writer:
            assert writer.num_samples == 50 * len(left)


def test_a_folder_that_cannot_be_written_to_is_an_error_with_advice(tmp_path):
    with small_disk(tmp_path / "ds", 1024) as root:
        write_shard(root / "0.tar", [("a", {"txt": b"x"})])
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        with pytest.raises(StorageAccessError, match="must be writable.*a folder with links"):
            prepare_dataset(root, **CRUDE)
        folder = tmp_path / "links"
        folder.mkdir()
        (folder / "0.tar").symlink_to(root / "0.tar")
        assert prepare_dataset(folder, **CRUDE).num_samples == 1


def test_a_shard_that_vanishes_during_the_run_is_an_error(tmp_path):
    size = 20 << 20  # so that each is read for itself
    for n in range(3):
        with open(tmp_path / f"{n}.tar", "wb") as file:
            file.write(encode_header(f"{n}.bin", size))
            file.seek(size, os.SEEK_CUR)
            file.write(END)
    done_when_it_vanished = []

    def progress(done, total):
        done_when_it_vanished.append((done, total))
        (tmp_path / "2.tar").unlink(missing_ok=True)

    vanishing = Indexing(Engine(num_workers=1), progress=progress)
    with pytest.raises(DatasetNotFoundError, match=r"2\.tar: no such file; if it was deleted"):
        prepare_dataset(tmp_path, **CRUDE, indexing=vanishing)
    assert done_when_it_vanished[0] == (1, 3)
    assert not (tmp_path / ".nv-meta/.info.json").exists()
    assert prepare_dataset(tmp_path, **CRUDE).shard_counts == {"0.tar": 1, "1.tar": 1}


@pytest.mark.parametrize("name", ["0.tar.parts", "0.tar.idx", ".nv-meta/index.sqlite"])
def test_a_folder_where_an_index_belongs_is_an_error_that_names_it(tmp_path, name):
    write_shard(tmp_path / "0.tar", [("a", {"txt": b"x"})])
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(StorageError, match=f"{name}: Is a directory"):
        prepare_dataset(tmp_path, **CRUDE)


def test_a_broken_link_is_an_error_that_names_it(tmp_path):
    write_shard(tmp_path / "0.tar", [("a", {"txt": b"x"})])
    (tmp_path / "1.tar").symlink_to(tmp_path / "nothing")
    with pytest.raises(DatasetNotFoundError, match=r"1\.tar"):
        prepare_dataset(tmp_path, **CRUDE)
