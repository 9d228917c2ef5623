from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.formats.tar.scan import scan_archive, scan_tar
from energon.io.backends.local import LocalBackend
from energon.io.range_file import RemoteFile, RemoteObject, SkippingReader
from energon.io.store import Store
from tests.datasets import write_shard
from tests.servers.proxy import Fault, FaultProxy
from tests.servers.web import web_server
from tests.waiting import wait_until

CONTENT = os.urandom(9_000_001)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    (folder / "x").write_bytes(CONTENT)
    return Store(LocalBackend(str(folder)))


@given(
    st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(0, 600_000)), max_size=12),
    st.floats(1e-6, 1.0),
)
@settings(max_examples=40, deadline=None)
def test_gives_the_right_bytes_whichever_way_it_takes(store, moves, wait):
    reader = SkippingReader(RemoteObject(store, store.info("x")))
    reader._wait_seconds = wait
    position = 0
    for skip, size in moves:
        position += skip
        buffer = bytearray(size)
        count = reader.read_into(position, memoryview(buffer))
        assert buffer[:count] == CONTENT[position : position + size]
        position += size


def scanned(folder, sizes, *, latency, bytes_per_second):
    """Scan a shard with members of these sizes over a network; return its reads."""
    path = folder / "x.tar"
    write_shard(path, [(f"{n:04}", {"bin": bytes(size)}) for n, size in enumerate(sizes)])
    with (
        web_server(folder) as server,
        FaultProxy(server.port, latency=latency, bytes_per_second=bytes_per_second) as proxy,
    ):
        file = RemoteFile(f"{proxy.url}/x.tar")
        reader = SkippingReader(file.object)
        scan = scan_archive(reader.read_into, file.info.size, origin=file.path)
        ranges = [request.range for request in proxy.requests if request.is_data]
    assert (scan.part_offset == scan_tar(path).part_offset).all()
    return [tuple(map(int, text.removeprefix("bytes=").split("-"))) for text in ranges]


def test_small_members_are_streamed(tmp_path):
    ranges = scanned(tmp_path, [20_000] * 600, latency=0.05, bytes_per_second=50e6)
    assert len(ranges) < 20


def test_large_members_are_skipped(tmp_path):
    ranges = scanned(tmp_path, [4_000_000] * 15, latency=0.0, bytes_per_second=20e6)
    assert sum(last - first for first, last in ranges) < 30_000_000


@pytest.mark.slow
def test_a_slow_connection_to_begin_with_is_forgotten(tmp_path):
    """The first answer comes late; all others at once, so that headers are best asked for."""
    path = tmp_path / "x.tar"
    write_shard(path, [(f"{n:04}", {"bin": bytes(4_000_000)}) for n in range(10)])
    with web_server(tmp_path) as server, FaultProxy(server.port, bytes_per_second=10e6) as proxy:
        file = RemoteFile(f"{proxy.url}/x.tar")
        proxy.plan([Fault("delay", seconds=2)])
        reader = SkippingReader(file.object)
        scan_archive(reader.read_into, file.info.size, origin=file.path)
        ranges = [request.range for request in proxy.requests if request.is_data]
    edges = [tuple(map(int, text.removeprefix("bytes=").split("-"))) for text in ranges]
    assert sum(last - first for first, last in edges) < 20_000_000


def test_requests_ahead_end_with_their_reader(tmp_path):
    (tmp_path / "x").write_bytes(CONTENT)
    with web_server(tmp_path) as server, FaultProxy(server.port) as proxy:
        reader = SkippingReader(RemoteFile(f"{proxy.url}/x").object)
        reader._until_probe = 2
        behind = [Fault("status", status=503)] * 10_000
        proxy.plan(behind, lambda each: each.is_data and not each.range.startswith("bytes=0-"))
        reader.read_into(0, memoryview(bytearray(10)))
        ahead = list(reader._chunks.values())
        assert ahead
        assert not any(each.done() for each in ahead)
        del reader
        wait_until(lambda: all(each.done() for each in ahead))
