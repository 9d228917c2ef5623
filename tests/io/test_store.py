"""What is added to every backend: retries, deadlines, hedging, continued streams, counting."""

from __future__ import annotations

import os
import threading

import pytest

from energon.errors import (
    DatasetNotFoundError,
    StorageError,
    StorageTimeoutError,
    TruncatedError,
)
from energon.io.backends.base import ObjectInfo, seconds_left
from energon.io.backends.libraries import LibraryBackend
from energon.io.files import open_store
from energon.io.settings import StorageSettings
from energon.io.store import Store
from tests.servers.proxy import Fault, FaultProxy
from tests.servers.web import web_server

CONTENT = os.urandom(3 << 20)
QUICK = {"first_wait_seconds": 0.001, "longest_wait_seconds": 0.01}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("web")
    (folder / "x.bin").write_bytes(CONTENT)
    with web_server(folder) as server:
        yield server


@pytest.fixture
def proxy(server):
    with FaultProxy(server.port) as proxy:
        yield proxy


def make_store(proxy, **settings):
    found, _ = open_store(proxy.url)
    return Store(found.backend, StorageSettings(**{**QUICK, **settings}))


def test_a_broken_stream_goes_on_where_it_broke(proxy):
    store = make_store(proxy)
    breaks = [Fault("reset", after=2_500_000), Fault("cut", after=500_000), Fault("status"), None]
    proxy.plan(breaks, lambda request: request.method == "GET")
    assert b"".join(store.stream("x.bin")) == CONTENT
    assert proxy.faults_left == 0
    starts = [
        int(request.range.removeprefix("bytes=").rstrip("-")) if request.range else 0
        for request in proxy.requests
        if request.method == "GET"
    ]
    assert starts == sorted(starts)
    assert starts[-1] > 0
    assert store.statistics.snapshot()["bytes_read"] == len(CONTENT)


def test_a_request_is_made_so_many_times_and_no_more(proxy):
    store = make_store(proxy, attempts=4)
    proxy.plan([Fault("status")] * 50)
    with pytest.raises(StorageTimeoutError, match=r"x\.bin: .*503.*SlowDown.*after 4 attempts"):
        store.read_range("x.bin", 0, 10)
    assert len(proxy.requests) == 4
    counts = store.statistics.snapshot()
    assert (counts["requests"], counts["retries"], counts["failed"]) == (4, 3, 1)
    assert counts["error: StorageError"] == 4


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda store: store.read("gone"), DatasetNotFoundError),
        (lambda store: store.read_range("x.bin", len(CONTENT), len(CONTENT) + 1), TruncatedError),
    ],
)
def test_what_will_not_change_is_not_asked_again(proxy, ask, error):
    store = make_store(proxy)
    with pytest.raises(error):
        ask(store)
    assert "retries" not in store.statistics.snapshot()


def test_a_slow_answer_is_overtaken_by_a_second_one(proxy):
    store = make_store(proxy, hedge_after_seconds=0.05)
    proxy.plan([Fault("delay", seconds=30)])
    assert store.read_range("x.bin", 5, 15) == CONTENT[5:15]
    counts = store.statistics.snapshot()
    assert (counts["hedged"], counts["requests"]) == (1, 1)  # the first goes on


def test_the_better_of_two_answers_counts(proxy):
    store = make_store(proxy, hedge_after_seconds=0.05, attempts=1)
    proxy.plan([Fault("delay", seconds=1), Fault("status")])
    assert store.read_range("x.bin", 5, 15) == CONTENT[5:15]


def test_connections_are_used_again(proxy):
    store = make_store(proxy)
    for start in range(20):
        store.read_range("x.bin", start, start + 10)
    assert proxy.connections <= 2


def test_an_answer_that_drips_is_asked_for_again(server, monkeypatch):
    monkeypatch.setattr("energon.io.backends.object_backend.ANSWER_SECONDS", 1)
    monkeypatch.setattr("energon.io.threads._reads_samples", True)  # in this process
    with FaultProxy(server.port) as proxy:
        store = make_store(proxy)
        drips = Fault("drip", seconds=0.1)
        proxy.plan([drips, drips], lambda request: request.is_data)
        assert store.read_range("x.bin", 0, 100_000) == CONTENT[:100_000]
        assert proxy.faults_left == 0
        assert store.statistics.snapshot()["error: StorageError"] >= 2


@pytest.mark.slow
def test_libraries_that_know_no_deadline_are_not_waited_for(monkeypatch):
    asked, release = [], threading.Event()

    class Hanging(LibraryBackend):
        origin = "mem://x"

        def head(self, key):
            return ObjectInfo(key, 100)

        def _range(self, key, start, stop):
            asked.append(start)
            release.wait(60)
            return b""

        def _delete(self, key):
            pass

        def _translate(self, error, place):
            return StorageError(str(error))

    store = Store(Hanging(), StorageSettings(deadline_seconds=1.5, **QUICK))
    for ask in (lambda: store.read_range("k", 0, 10), lambda: store.read("k")):
        with pytest.raises(StorageTimeoutError, match="no answer in time"):
            ask()
    release.set()
    assert len(asked) >= 2


def test_an_upload_has_the_time_that_its_size_takes(server, monkeypatch):
    limits = []
    with FaultProxy(server.port) as proxy:
        store = make_store(proxy, deadline_seconds=1.0)
        put = store.backend.put
        monkeypatch.setattr(
            store.backend,
            "put",
            lambda *content: (limits.append(seconds_left(10**9)), put(*content)),
        )
        store.write("uploaded", bytes(2_000_000))
    assert 20 < limits[0] <= 21
