"""Writers that a program never closes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tarfile

import pytest

import energon
import energon.webdataset as wds
from energon.prepare.writers.shard_writer import TarWriter
from tests.effort import mixed

WRITERS = {
    "energon.ShardWriter": (energon.ShardWriter, "%02d.tar"),
    "wds.ShardWriter": (wds.ShardWriter, "%02d.tar"),
    "TarWriter": (TarWriter, "00.tar"),
    "wds.TarWriter": (wds.TarWriter, "00.tar"),
    "wds.TarWriter of gzip": (wds.TarWriter, "00.tar.gz"),
    "wds.TarWriter of a command": (
        lambda path: wds.TarWriter(f"pipe:cat > {path}", allow=("shell",)),
        "00.tar",
    ),
}


def forgotten(kind, folder):
    make, name = WRITERS[kind]
    writer = make(f"{folder}/{name}")
    for number in range(3):
        writer.write({"__key__": f"{number}", "txt": "text"})
    return writer


def collect(held):
    held.clear()
    gc.collect()


def names(path):
    with tarfile.open(path) as archive:
        return archive.getnames()


def check(folder, kind):
    (shard,) = [name for name in os.listdir(folder) if name.endswith((".tar", ".gz"))]
    assert names(folder / shard) == ["0.txt", "1.txt", "2.txt"]
    if shard.endswith(".tar"):
        assert (folder / shard).read_bytes().endswith(bytes(1024))
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.parametrize(("kind", "in_cycle"), mixed([*WRITERS], [False, True]))
def test_a_collected_writer_writes_its_end_and_warns(kind, in_cycle, tmp_path):
    held = [[forgotten(kind, tmp_path)]]
    if in_cycle:
        held[0].append(held[0])
    with pytest.warns(ResourceWarning, match=r"00\.tar\S* with 3 samples was not closed"):
        collect(held)
    check(tmp_path, kind)


def test_writers_that_are_open_when_the_program_ends_do_so_too(tmp_path):
    for number in range(len(WRITERS)):
        (tmp_path / str(number)).mkdir()
    code = (
        "from tests.prepare.test_forgotten_writers import WRITERS, forgotten\n"
        f"kept = [forgotten(kind, f'{tmp_path}/{{n}}') for n, kind in enumerate(WRITERS)]"
    )
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stderr.count("with 3 samples was not closed") == len(WRITERS)
    for number, kind in enumerate(WRITERS):
        check(tmp_path / str(number), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS)
def test_closed_and_aborted_writers_do_not_warn(kind, tmp_path):
    forgotten(kind, tmp_path).close()
    gc.collect()
    check(tmp_path, kind)
    (tmp_path / "other").mkdir()
    forgotten(kind, tmp_path / "other").abort()
    gc.collect()


def test_an_end_that_cannot_be_written_is_named(tmp_path):
    held = [forgotten("TarWriter", tmp_path)]
    (tmp_path / ".00.tar._partial").unlink()
    with pytest.warns(ResourceWarning, match=r"00\.tar with 3 samples .* could not be written"):
        collect(held)
