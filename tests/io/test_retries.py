"""What is said of a store in trouble, and when nothing more is asked of it."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
import traceback

import pytest

from energon import WorkerConfig, get_loader, get_train_dataset
from energon.errors import (
    DatasetNotFoundError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
    WorkerError,
)
from energon.io.files import forget_stores, open_store
from energon.io.range_file import RemoteFile, Span, SpanBuffer
from energon.io.settings import Retries, StorageSettings
from energon.messages import trainers
from tests.datasets import write_crude
from tests.servers.proxy import Fault, FaultProxy
from tests.servers.web import web_server
from tests.sources.distant import start
from tests.waiting import wait_until

SAMPLE_BYTES = 20_000


@pytest.fixture
def proxy(tmp_path, monkeypatch, quick_retries):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "x.bin").write_bytes(bytes(1 << 20))
    forget_stores()
    with web_server(tmp_path) as server, FaultProxy(server.port) as proxy:
        yield proxy
    forget_stores()


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "energon"]


def test_an_episode_is_heard_at_once_and_then_once_in_a_while(proxy, caplog, monkeypatch):
    store, _ = open_store(proxy.url)
    proxy.plan([Fault("status")] * 9, lambda request: request.is_data)
    store.read_range("x.bin", 0, 10)
    [line] = lines(caplog)
    assert f"{proxy.url}/x.bin: the server answered 503" in line
    assert "1 failed attempt" in line
    assert "of at most 300 s (ENERGON_STORAGE_DEADLINE_SECONDS)" in line
    assert store.statistics.snapshot()["retries"] == 9

    # All the time that an episode takes, as if ten seconds passed between any two attempts.
    monkeypatch.setattr("energon.io.settings.SAY_SECONDS", 1e-4)
    caplog.clear()
    proxy.plan([Fault("status", status=429)] * 4, lambda request: request.is_data)
    store.read_range("x.bin", 0, 10)
    *said, last = lines(caplog)
    assert len(said) >= 2
    assert all("429" in line for line in said)
    assert "answers again, after" in last


@pytest.mark.parametrize("ask", ["read_range", "info"])
def test_a_store_that_keeps_silent_is_heard(ask, proxy, caplog, monkeypatch):
    monkeypatch.setattr("energon.io.settings.SAY_SECONDS", 0.05)
    others = watchers()  # of other tests, which still sleep
    store, _ = open_store(proxy.url)
    proxy.plan([Fault("delay", seconds=0.3)])
    getattr(store, ask)("x.bin", *([0, 10] if ask == "read_range" else []))
    assert any("x.bin: no answer yet after " in line for line in lines(caplog))
    wait_until(lambda: not watchers() - others)


def watchers() -> set[threading.Thread]:
    """Return the threads that look for requests without an answer."""
    return {each for each in threading.enumerate() if each.name == "energon storage"}


def test_a_long_wait_for_what_is_on_its_way_is_heard(proxy, caplog, monkeypatch):
    monkeypatch.setattr("energon.io.settings.SAY_SECONDS", 0.05)
    file = RemoteFile(f"{proxy.url}/x.bin")
    proxy.plan([Fault("delay", seconds=0.5)], lambda request: request.is_data)
    buffer, span = SpanBuffer(), Span(file.object, 0, 100)
    buffer.fetch(span)
    assert buffer.find(file.object, 5, 15) == bytes(10)
    assert any("x.bin: no answer yet" in line for line in lines(caplog))


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:{port}", "http://no-such-host.invalid:{port}"]
)
def test_servers_that_are_not_there_are_given_up_early_with_advice(address, monkeypatch, caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("ENERGON_STORAGE_REFUSED_SECONDS", "0.5")
    forget_stores()
    store, _ = open_store(address.format(port=port))
    with pytest.raises(
        StorageTimeoutError,
        match=r"(refused|cannot be resolved).*ENERGON_STORAGE_REFUSED_SECONDS=0\.5 sets",
    ) as caught:
        store.read_range("x.bin", 0, 10)
    assert "Check the address and the endpoint" in str(caught.value)
    assert store.statistics.snapshot()["requests"] < 1000
    assert "; retrying" in lines(caplog)[0]
    forget_stores()


def test_a_server_that_has_answered_before_is_waited_for():
    trouble = Retries("s3://b", StorageSettings(refused_seconds=1), None, sleep=len_of_sleep)
    error = StorageError("s3://b/x: connection refused", transient=True, unreachable=True)
    long_ago = time.monotonic() - 2
    with pytest.raises(StorageTimeoutError, match="REFUSED_SECONDS=1 sets"):
        trouble.failed(error, asked_at=long_ago, begun=long_ago, attempts=1, seconds=300)
    trouble.answered()
    trouble.failed(error, asked_at=long_ago, begun=long_ago, attempts=1, seconds=300)
    with pytest.raises(StorageTimeoutError, match="DEADLINE_SECONDS=300 how long each"):
        trouble.failed(error, asked_at=long_ago, begun=long_ago - 300, attempts=2, seconds=300)


def test_a_request_is_retried_soon_after_the_store_answers_others(monkeypatch):
    monkeypatch.setattr("energon.io.settings.SAY_SECONDS", 0.0)
    monkeypatch.setattr("energon.io.settings._random.uniform", lambda _, longest: longest)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            trouble.answered()  # in another thread, say

    trouble = Retries("s3://b", StorageSettings(), None, sleep=sleep)
    error, now = StorageError("s3://b/x: 503", transient=True), time.monotonic()
    trouble.failed(error, asked_at=now, begun=now, attempts=9, seconds=300)
    assert len(slept) == 3


def test_the_host_behind_a_bucket_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "1")
    forget_stores()
    store, key = open_store("s3://bucket/x")
    with pytest.raises(
        StorageTimeoutError, match=rf"x: connection refused \(127\.0\.0\.1:{port}\)"
    ):
        store.info(key)
    forget_stores()


def test_a_store_in_trouble_is_asked_until_the_deadline(proxy, monkeypatch):
    monkeypatch.delenv("ENERGON_STORAGE_ATTEMPTS")
    monkeypatch.setenv("ENERGON_STORAGE_DEADLINE_SECONDS", "0.5")
    forget_stores()
    store, _ = open_store(proxy.url)
    proxy.plan([Fault("status")] * 10_000)
    with pytest.raises(
        StorageTimeoutError, match=r"after \d\d+ attempts.*DEADLINE_SECONDS=0\.5 how"
    ):
        store.read_range("x.bin", 0, 10)
    assert store.statistics.snapshot()["retries"] > 10


@pytest.mark.parametrize("attempts", [None, 3])
def test_the_patience_is_the_deadline_unless_attempts_are_limited(attempts):
    """The patience of a request is what the log promises, with as many attempts as fit."""
    trouble = Retries("s3://b", StorageSettings(attempts=attempts), None, sleep=len_of_sleep)
    error, now = StorageError("s3://b/x: 503", transient=True), time.monotonic()
    for number in range(1, attempts or 2000):
        trouble.failed(error, asked_at=now, begun=now, attempts=number, seconds=300)
    begun = now if attempts else now - 300
    with pytest.raises(StorageTimeoutError, match="DEADLINE_SECONDS=300 how long each") as caught:
        trouble.failed(error, asked_at=now, begun=begun, attempts=attempts or 2000, seconds=300)
    assert ("ENERGON_STORAGE_ATTEMPTS=3 how often" in str(caught.value)) is bool(attempts)


def test_requests_that_were_on_their_way_when_credentials_changed_are_made_again():
    renewals = []
    trouble = Retries("s3://b", StorageSettings(), lambda: renewals.append(1), sleep=len_of_sleep)
    error, asked_at = StorageAccessError("s3://b/x: access denied"), time.monotonic()
    for _ in range(8):  # in as many threads, say
        trouble.failed(error, asked_at=asked_at, begun=asked_at, attempts=1, seconds=300)
    assert len(renewals) == 1
    later = time.monotonic() + 1
    with pytest.raises(StorageAccessError, match="looked up again"):
        trouble.failed(error, asked_at=later, begun=asked_at, attempts=2, seconds=300)
    assert trouble.is_denied
    trouble.answered()
    assert not trouble.is_denied


def len_of_sleep(seconds):
    assert seconds <= 10


def test_reading_ahead_stops_where_an_object_is_gone(proxy, tmp_path):
    file = RemoteFile(f"{proxy.url}/x.bin")
    (tmp_path / "x.bin").rename(tmp_path / "y.bin")
    buffer = SpanBuffer()
    spans = [Span(file.object, n * 100, n * 100 + 100) for n in range(500)]
    for span in spans:
        buffer.fetch(span)
    with pytest.raises(DatasetNotFoundError):
        buffer.find(file.object, 0, 100)
    # What nobody fetches is asked for when it is needed.
    assert buffer.find(file.object, 49_000, 49_100) is None
    assert len([each for each in proxy.requests if each.is_data]) <= 17
    (tmp_path / "y.bin").rename(tmp_path / "x.bin")
    assert file.pread(40_000, 10) == bytes(10)  # asked for in spite of it


def test_a_run_whose_token_expires_asks_but_a_few_times(tmp_path, proxy):
    samples = [(f"{n:04}", {"bin": bytes([n % 251]) * SAMPLE_BYTES}) for n in range(600)]
    write_crude(tmp_path / "ds", samples)
    batches = start(f"{proxy.url}/ds", max_samples_per_sequence=1)
    for _ in range(3):
        next(batches)
    expired = Fault("status", status=401, code="ExpiredToken")
    proxy.plan([expired] * 10_000, lambda request: request.path.endswith(".tar"))
    with pytest.raises(StorageAccessError, match=r"401 .*check the credentials.*looked up again"):
        for _ in batches:
            pass
    # At most what was on its way, twice: the credentials were looked up again once.
    assert len(proxy.requests) <= 2 * 16 + 2


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (1, "thread"), (1, "process")])
def test_how_long_the_trainer_has_waited_is_heard(
    workers, kind, tmp_path, proxy, caplog, monkeypatch
):
    monkeypatch.delenv("ENERGON_STORAGE_ATTEMPTS")
    monkeypatch.setattr("energon.io.settings.SAY_SECONDS", 0.01)
    monkeypatch.setattr("energon.messages._EARLY", 0.0)  # of those that a process sends
    forget_stores()
    samples = [(f"{n:04}", {"bin": bytes(SAMPLE_BYTES)}) for n in range(60)]
    write_crude(tmp_path / "ds", samples)
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(f"{proxy.url}/ds", worker_config=config, batch_size=4)
    broken = [Fault("status")] * 6
    with get_loader(dataset, workers=kind, prefetch_factor=1) as loader:
        proxy.plan(broken, lambda request: request.path.endswith(".tar"))
        next(iter(loader))
    assert not proxy.faults_left
    told = [line for line in lines(caplog) if "; retrying: " in line]
    assert told
    assert all(re.search(r"; the trainer has waited \d+\.\d s for its batch$", s) for s in told)


def test_a_trainer_that_has_its_batch_is_not_waiting(tmp_path, proxy, caplog):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    write_crude(tmp_path / "ds", [("0", {"bin": b"0"}), ("1", {"bin": b"1"})])
    dataset = get_train_dataset(tmp_path / "ds", worker_config=config, batch_size=1)
    store, _ = open_store(proxy.url)
    with get_loader(dataset) as loader:
        next(iter(loader))
        proxy.plan([Fault("status")], lambda request: request.is_data)
        store.read_range("x.bin", 0, 10)
    (line,) = lines(caplog)
    assert line.endswith("; the trainer is not waiting for a batch")


def test_a_trainer_is_mentioned_only_where_there_is_one(proxy, caplog):
    trainers.clear()  # what other tests have left
    store, _ = open_store(proxy.url)
    proxy.plan([Fault("status")], lambda request: request.is_data)
    store.read_range("x.bin", 0, 10)
    (line,) = lines(caplog)
    assert line.endswith("(ENERGON_STORAGE_DEADLINE_SECONDS)")


def test_what_has_no_credentials_is_not_said_to_have_looked_them_up():
    error = StorageAccessError("/data/x: Permission denied")
    with pytest.raises(StorageAccessError) as caught:
        Retries("/", StorageSettings(), None).failed(
            error, asked_at=0, begun=0, attempts=1, seconds=9
        )
    assert caught.value is error


def is_retrying() -> bool:
    """Return whether a thread waits to make a request again."""
    waits = Retries.failed.__code__
    stacks = sys._current_frames().values()
    return any(frame.f_code is waits for each in stacks for frame, _ in traceback.walk_stack(each))


def test_what_was_to_be_fetched_ahead_is_no_longer_asked_for_once_it_is_dropped(proxy, monkeypatch):
    monkeypatch.delenv("ENERGON_STORAGE_ATTEMPTS")
    forget_stores()
    file = RemoteFile(f"{proxy.url}/x.bin")
    proxy.plan([Fault("status")] * 100_000, lambda request: request.is_data)
    buffer, span = SpanBuffer(), Span(file.object, 0, 100)
    buffer.fetch(span)
    wait_until(is_retrying)
    buffer.drop([span])  # as a loader does that is closed
    wait_until(lambda: not is_retrying())
    assert span.wait() is None


def test_threads_of_a_loader_that_is_closed_do_not_go_on_asking(tmp_path, proxy, monkeypatch):
    monkeypatch.delenv("ENERGON_STORAGE_ATTEMPTS")
    forget_stores()
    samples = [(f"{n:04}", {"bin": bytes(SAMPLE_BYTES)}) for n in range(60)]
    write_crude(tmp_path / "ds", samples)
    config = WorkerConfig(rank=0, world_size=1, num_workers=2)
    dataset = get_train_dataset(f"{proxy.url}/ds", worker_config=config, batch_size=4)
    proxy.plan([Fault("status")] * 100_000, lambda request: request.path.endswith(".tar"))
    loader = get_loader(dataset, workers="thread")
    errors = []

    def take_a_batch():
        try:
            next(iter(loader))
        except WorkerError as error:
            errors.append(error)

    trainer = threading.Thread(target=take_a_batch)
    trainer.start()
    wait_until(is_retrying)
    loader.close()
    wait_until(lambda: not is_retrying())
    trainer.join()
    assert "this loader is closed" in str(errors)
    proxy.plan([])
    with get_loader(dataset, workers="thread") as another:  # whose requests use the same threads
        assert len(next(iter(another))["__key__"]) == 4
