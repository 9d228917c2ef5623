from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from energon.prepare.dataset import prepare_dataset
from tests.cli.mounts import call_mount, files_of, libraries, mounted, mounting, unmount
from tests.commands import run
from tests.datasets import CRUDE, make_crude, write_crude, write_shard
from tests.effort import some

pytestmark = pytest.mark.usefixtures("libfuse")


def test_shows_samples_as_folders(tmp_path):
    root = make_crude(tmp_path / "ds", [2, 1])
    with mounted(root, tmp_path / "mnt", "--sample-folders") as mnt:
        assert files_of(mnt) == {f"s{n}/txt": f"text {n}".encode() for n in range(3)}


@pytest.mark.slow
@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize("document", some([False, True], 2))
def test_paths_may_be_relative(tmp_path, monkeypatch, library, document):
    # libfuse 3 goes to the root folder as soon as it has mounted.
    make_crude(tmp_path / "ds", [1])
    (tmp_path / "meta.yaml").write_text("splits: {train: {path: ds}}")
    (tmp_path / "mnt").mkdir()
    monkeypatch.chdir(tmp_path)
    path = "meta.yaml" if document else "ds"
    expected = {"train/ds/s0.txt" if document else "s0.txt": b"text 0"}
    mnt, env = Path("mnt"), libraries()[library]
    with mounting(path, mnt, env=env):
        assert files_of(mnt) == expected
    done = call_mount(path, mnt, "--detach", env=env)
    try:
        assert done.returncode == 0, done.stderr
        assert files_of(mnt) == expected
    finally:
        unmount(mnt)


@pytest.mark.slow
def test_a_dataset_whose_shards_are_all_gone_is_not_mounted(tmp_path):
    root = make_crude(tmp_path / "ds", [1, 1])
    for shard in root.glob("*.tar"):
        shard.unlink()
    (tmp_path / "mnt").mkdir()
    done = call_mount(root, tmp_path / "mnt", "--detach")
    assert done.returncode == 2
    assert done.stderr.count("000.tar") == 1
    assert done.stderr.count("Error: ") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "mnt").is_mount()


def test_mounts_in_the_background_and_says_there_what_cannot_be_shown(tmp_path):
    root = make_crude(tmp_path / "ds", [1, 1])
    (root / "000.tar").unlink()
    (tmp_path / "mnt").mkdir()
    done = call_mount(root, tmp_path / "mnt", "--detach")
    try:
        assert done.returncode == 0, done.stderr
        assert "a shard cannot be shown" in done.stderr
        assert files_of(tmp_path / "mnt") == {"s1.txt": b"text 1"}
    finally:
        unmount(tmp_path / "mnt")


def test_a_folder_with_nothing_to_show_is_not_mounted(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mnt").mkdir()
    done = run("mount", f"filesystem://{tmp_path}/empty", tmp_path / "mnt")
    assert done.exit_code == 2
    assert "there is nothing to show" in done.stderr
    assert not (tmp_path / "mnt").is_mount()


@pytest.mark.slow
def test_lists_many_samples_completely(tmp_path):
    root = tmp_path / "ds"
    names = [f"{n:06}" for n in range(3_000)]  # the kernel asks for about a hundred at a time
    write_crude(root, [(name, {"txt": b""}) for name in names])
    with mounted(root, tmp_path / "mnt") as mnt:
        assert os.listdir(mnt) == [f"{name}.txt" for name in names]
        with os.scandir(mnt) as entries:
            assert all(entry.is_file() for entry in entries)


def test_shows_files_that_are_read_anywhere_and_never_written_until_ctrl_c(tmp_path):
    contents = {f"{n}.bin": os.urandom(size) for n, size in enumerate([0, 700_000, 3 << 20])}
    shards = [[*contents][:1], [*contents][1:]]
    for number, names in enumerate(shards):
        samples = [(name.partition(".")[0], {"bin": contents[name]}) for name in names]
        write_shard(tmp_path / f"ds/{number}.tar", samples)
    prepare_dataset(tmp_path / "ds", **CRUDE)
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    with mounting(tmp_path / "ds", mnt) as running, ThreadPoolExecutor(8) as threads:
        assert files_of(mnt) == contents
        read = threads.map(
            lambda name: (mnt / name).read_bytes() == contents[name], [*contents] * 6
        )
        assert all(read)
        large = contents["2.bin"]
        assert (mnt / "2.bin").stat().st_size == len(large)
        with open(mnt / "2.bin", "rb") as file:
            for start in (2 << 20, 17, len(large) - 5, 0):
                file.seek(start)
                assert file.read(100_000) == large[start : start + 100_000]
        for write in (
            lambda: (mnt / "0.bin").write_text("other"),
            lambda: (mnt / "new.bin").touch(),
            lambda: (mnt / "0.bin").unlink(),
            lambda: (mnt / "folder").mkdir(),
        ):
            with pytest.raises(OSError, match="Read-only file system"):
                write()
        running.send_signal(signal.SIGINT)
        assert running.wait(100) == 0
        assert not mnt.is_mount()


def test_shards_that_vanish_give_errors_and_no_wrong_data(tmp_path):
    root = make_crude(tmp_path / "ds", [1, 1])
    with mounted(root, tmp_path / "mnt") as mnt:
        (root / "000.tar").rename(tmp_path / "elsewhere.tar")
        os.truncate(root / "001.tar", 0)
        # The first was opened by the mount, so it is still there.
        assert (mnt / "s0.txt").read_bytes() == b"text 0"
        with pytest.raises(OSError, match="Input/output error"):
            (mnt / "s1.txt").read_bytes()


@pytest.mark.parametrize("kind", ["absent", "file", "full"])
def test_says_what_is_wrong_with_the_folder_to_mount_on(tmp_path, kind):
    root = make_crude(tmp_path / "ds", [1])
    target = tmp_path / "mnt"
    if kind == "file":
        target.touch()
    if kind == "full":
        (target / "x").mkdir(parents=True)
    done = run("mount", root, target)
    assert done.exit_code == 2
    assert str(target) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", some([[], ["--detach"]], 2))
def test_says_that_there_is_no_dataset(tmp_path, options):
    (tmp_path / "mnt").mkdir()
    if options:
        done = call_mount(tmp_path / "nothing", tmp_path / "mnt", *options)
        assert done.returncode == 2
    else:
        done = run("mount", tmp_path / "nothing", tmp_path / "mnt")
        assert done.exit_code == 2
    assert done.stderr.count("Error") == 1
    assert "does not exist" in done.stderr
