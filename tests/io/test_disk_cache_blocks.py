from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import StorageError
from energon.io.disk_cache import BLOCK_BYTES, RUN_BLOCKS, BlockFile
from tests.commands import run_python

CONTENT = os.urandom(10 * BLOCK_BYTES + 12_345)


class Source:
    """Yields ranges of CONTENT and notes which."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> bytes:
        self.asked.append((start, stop))
        return self.content[start:stop]

    def open(self, path: Path, **more) -> BlockFile:
        return BlockFile(path, size=len(self.content), read=self.read, **more)


@given(st.lists(st.tuples(*[st.integers(0, len(CONTENT))] * 2), max_size=8))
@settings(max_examples=30, deadline=None)
def test_any_ranges_are_right_and_no_block_is_fetched_twice(tmp_path_factory, ranges):
    source = Source()
    file = source.open(tmp_path_factory.mktemp("cache") / "x")
    for start, stop in map(sorted, ranges):
        assert file.read(start, stop) == CONTENT[start:stop]
    blocks = [
        block
        for start, stop in source.asked
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
    ]
    assert len(blocks) == len(set(blocks))
    assert file.read(0, len(CONTENT)) == file.path.read_bytes() == CONTENT


def test_neighbouring_blocks_come_with_one_request(tmp_path):
    source = Source()
    source.open(tmp_path / "x").read(0, len(CONTENT))
    assert len(source.asked) == -(-11 // RUN_BLOCKS)


def test_another_process_reads_what_is_here(tmp_path):
    source = Source()
    source.open(tmp_path / "x").read(0, len(CONTENT))
    again = Source()
    assert again.open(tmp_path / "x").read(5, 3_000_000) == CONTENT[5:3_000_000]
    assert again.asked == []


@pytest.mark.parametrize("damage", ["changed", "cut off", "deleted", "map cut off", "map damaged"])
def test_damaged_blocks_are_fetched_again(tmp_path, damage):
    path, map_path = tmp_path / "x", tmp_path / "x.map"
    Source().open(path).read(0, len(CONTENT))
    if damage == "changed":
        data = bytearray(path.read_bytes())
        data[3 * BLOCK_BYTES + 17] ^= 1
        path.write_bytes(data)
    elif damage == "cut off":
        os.truncate(path, 3 * BLOCK_BYTES + 5)
    elif damage == "deleted":
        path.unlink()
    elif damage == "map cut off":
        os.truncate(map_path, 30)
    else:
        map_path.write_bytes(os.urandom(map_path.stat().st_size))
    source = Source()
    assert source.open(path).read(0, len(CONTENT)) == CONTENT
    assert source.asked
    if damage == "changed":
        assert source.asked == [(3 * BLOCK_BYTES, 4 * BLOCK_BYTES)]


@pytest.mark.parametrize("is_created_again", [False, True])
def test_evicted_files_are_shared_again(tmp_path, is_created_again):
    path, source, other = tmp_path / "folder/x", Source(), Source()
    file = source.open(path)
    assert file.read(0, BLOCK_BYTES) == CONTENT[:BLOCK_BYTES]
    shutil.rmtree(path.parent)
    if is_created_again:
        other.open(path).read(0, 2 * BLOCK_BYTES)
    assert file.read(0, 3 * BLOCK_BYTES) == CONTENT[: 3 * BLOCK_BYTES]
    first = 2 * BLOCK_BYTES if is_created_again else 0
    assert source.asked == [(0, BLOCK_BYTES), (first, 3 * BLOCK_BYTES)]
    other.asked.clear()
    assert other.open(path).read(0, 3 * BLOCK_BYTES) == CONTENT[: 3 * BLOCK_BYTES]
    assert other.asked == []


def test_a_folder_that_cannot_be_created_again_is_not_needed(tmp_path):
    reasons = []
    file = Source().open(tmp_path / "folder/x", failed=reasons.append)
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "folder").write_text("no folder")
    for _ in range(2):
        assert file.read(5, 3_000_000) == CONTENT[5:3_000_000]
    assert len(reasons) == 1


def test_more_objects_are_cached_than_files_may_be_open(tmp_path):
    program = f"""
import os, resource
from pathlib import Path
from energon.io.disk_cache import BlockFile
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
before = len(os.listdir("/proc/self/fd"))
def failed(error):
    raise error
def read(start, stop):
    return b"x" * (stop - start)
files = [BlockFile(Path({str(tmp_path)!r}) / f"{{n}}", size=9, read=read, failed=failed)
         for n in range(500)]
for file in [*files, *files]:
    assert file.read(0, 9) == b"x" * 9
assert len(os.listdir("/proc/self/fd")) == before
"""
    run_python(program)
    assert len(list(tmp_path.iterdir())) == 2 * 500


def test_many_threads_fetch_each_block_once(tmp_path):
    source = Source()
    file = source.open(tmp_path / "x")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: file.read(n, n + 2_000_000), range(0, 8_000_000, 10**6)))
    assert found == [CONTENT[n : n + 2_000_000] for n in range(0, 8_000_000, 10**6)]
    assert sum(stop - start for start, stop in source.asked) <= len(CONTENT)


def test_a_failed_request_leaves_the_block_to_the_next(tmp_path):
    def fail(start, stop):
        raise StorageError("no luck")

    path = tmp_path / "x"
    broken = BlockFile(path, size=len(CONTENT), read=fail)
    with pytest.raises(StorageError):
        broken.read(0, 10)
    assert Source().open(path).read(0, 10) == CONTENT[:10]


def test_a_stream_can_be_read_while_it_comes(tmp_path):
    half, go_on = threading.Event(), threading.Event()

    def stream():
        yield CONTENT[: 5 * BLOCK_BYTES]
        half.set()
        assert go_on.wait(10)
        yield CONTENT[5 * BLOCK_BYTES :]

    file = BlockFile(tmp_path / "x", size=len(CONTENT), read=Source().read, stream=stream)
    with ThreadPoolExecutor(2) as threads:
        end = threads.submit(file.read, len(CONTENT) - 10, len(CONTENT))
        assert half.wait(10)
        assert file.read(100, 200) == CONTENT[100:200]
        assert not end.done()
        go_on.set()
        assert end.result() == CONTENT[-10:]


def test_a_stream_of_another_length_is_refused(tmp_path):
    for content in (CONTENT[:-1], CONTENT + b"x"):
        file = BlockFile(
            tmp_path / "x",
            size=len(CONTENT),
            read=Source().read,
            stream=lambda c=content: iter([c]),
        )
        with pytest.raises(StorageError, match="the object has changed"):
            file.read(len(CONTENT) - 1, len(CONTENT))


@pytest.mark.slow
def test_processes_share_the_work(tmp_path):
    """Four processes read all; what they ask for in all is hardly more than the object."""
    (tmp_path / "content").write_bytes(CONTENT)
    code = f"""
import sys, time
from pathlib import Path
from energon.io.disk_cache import BlockFile
content = Path({str(tmp_path / "content")!r}).read_bytes()
asked = 0
def read(start, stop):
    global asked
    asked += stop - start
    time.sleep(0.02)
    return content[start:stop]
file = BlockFile(Path({str(tmp_path / "x")!r}), size=len(content), read=read)
assert file.read(0, len(content)) == content
print(asked)
"""
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    asked = [int(process.communicate()[0]) for process in started]
    assert sum(asked) == len(CONTENT)


def test_an_empty_object_has_nothing_to_fetch(tmp_path):
    file = Source(b"").open(tmp_path / "x")
    assert file.read(0, 0) == b""
    assert file.path.read_bytes() == b""
