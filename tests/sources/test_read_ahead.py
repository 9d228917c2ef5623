"""What is fetched before it is needed: enough, and not too much."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import islice

import pytest

from energon import Balance
from energon.errors import StorageError
from energon.io.files import forget_stores
from energon.prepare.dataset import prepare_dataset
from tests.datasets import CRUDE, write_crude, write_shard
from tests.servers.proxy import Fault, FaultProxy
from tests.servers.web import web_server
from tests.sources.distant import start

SAMPLE_BYTES = 50_000
BUDGET = 4_000_000
SLICE = 16


@pytest.fixture
def distant(tmp_path, monkeypatch):
    """a dataset of 20 MB on a web server, as its proxy and address."""
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ENERGON_STORAGE_READ_AHEAD_BYTES", str(BUDGET))
    for shard in range(2):
        samples = [(f"{shard}{n:03}", {"bin": bytes([n]) * SAMPLE_BYTES}) for n in range(200)]
        write_shard(tmp_path / f"ds/{shard}.tar", samples)
    prepare_dataset(tmp_path / "ds", **CRUDE)
    forget_stores()
    with web_server(tmp_path) as server, FaultProxy(server.port) as proxy:
        yield proxy, f"{proxy.url}/ds"
    forget_stores()


def fetched_bytes(proxy) -> int:
    """Return how much was asked for of shards, when nothing more is asked for."""
    count = -1
    while count != len(proxy.requests) or proxy.under_way:
        count = len(proxy.requests)
        time.sleep(0.3)
    edges = [
        request.range.removeprefix("bytes=").split("-")
        for request in proxy.requests
        if request.is_data and request.path.endswith(".tar")
    ]
    return sum(int(last) - int(first) + 1 for first, last in edges)


def test_no_more_is_fetched_ahead_than_there_is_memory_for(distant):
    proxy, address = distant
    batches = start(address, max_samples_per_sequence=SLICE)
    taken = 0
    for count in (1, 20, 20):
        for _ in range(count):
            taken += len(next(batches))
        # Samples of open slices were fetched with those that came of them, in two lanes.
        open_slices = 2 * 3 * SLICE * SAMPLE_BYTES
        ahead = fetched_bytes(proxy) - taken * SAMPLE_BYTES
        assert ahead <= 1.2 * (BUDGET + 2 * open_slices)
    assert ahead > 0


@pytest.mark.slow
def test_lanes_that_share_slices_fetch_them_once(distant):
    """24 lanes in one worker take no more of a store than one, and no more requests."""
    proxy, address = distant
    fetched, requests = {}, {}
    for lanes in (1, None):
        forget_stores()
        before = len(proxy.requests), fetched_bytes(proxy)
        batches = start(address, lanes=lanes, max_samples_per_sequence=SLICE)
        for _ in range(100):
            next(batches)
        fetched[lanes] = fetched_bytes(proxy) - before[1]
        requests[lanes] = len(proxy.requests) - before[0]
        batches.close()
    slice_bytes = 3 * SLICE * SAMPLE_BYTES
    assert fetched[None] <= 1.1 * fetched[1] + slice_bytes
    assert requests[None] <= 1.1 * requests[1] + 24


@pytest.mark.slow
def test_balanced_runs_make_about_as_many_requests(distant, monkeypatch):
    """Slices are fetched once, although their samples are spread over the steps of a window."""
    proxy, address = distant
    monkeypatch.setenv("ENERGON_STORAGE_READ_AHEAD_BYTES", str(4 * BUDGET))
    requests = {}
    for window in (None, 64):
        forget_stores()
        before = len(proxy.requests)
        balance = None if window is None else Balance(cost="bytes", window=window)
        slices = {"max_samples_per_sequence": SLICE, "parallel_shard_iters": 1}
        batches = start(address, lanes=1, balance=balance, **slices)
        for _ in range(200):
            next(batches)
        fetched_bytes(proxy)
        requests[window] = len(proxy.requests) - before
        batches.close()
    assert requests[64] <= 1.3 * requests[None]


def test_balanced_runs_begin_without_opening_all_shards(tmp_path, monkeypatch):
    """Costs are looked up when they are needed, so the first batch does not wait for all."""
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    for shard in range(40):
        samples = [(f"{shard}_{n}", {"bin": bytes(20_000)}) for n in range(SLICE)]
        write_shard(tmp_path / f"ds/{shard:02}.tar", samples)
    prepare_dataset(tmp_path / "ds", **CRUDE)
    shards = {}
    with web_server(tmp_path) as server, FaultProxy(server.port) as proxy:
        for balance in None, Balance(cost="bytes", window=4):
            forget_stores()
            proxy.requests.clear()
            batches = start(
                f"{proxy.url}/ds",
                lanes=1,
                balance=balance,
                max_samples_per_sequence=SLICE,
                parallel_shard_iters=1,
            )
            next(batches)
            asked = [request for request in proxy.requests if ".tar" in request.path]
            shards[balance is None] = len({request.path for request in asked})
            sizes = [request.path for request in asked if request.method == "HEAD"]
            assert len(sizes) == len({*sizes})
            batches.close()
    forget_stores()
    assert shards[True] < shards[False] <= 40  # of 80 files: shards, and their indexes


def test_a_dataset_that_fits_into_memory_is_fetched_once(distant, monkeypatch):
    """Five epochs of 20 MB take 20 MB and a few dozen requests, whatever the order."""
    proxy, address = distant
    monkeypatch.setenv("ENERGON_STORAGE_READ_AHEAD_BYTES", "256MB")
    forget_stores()
    fetched_bytes(proxy)
    proxy.requests.clear()
    batches = start(address, lanes=4, max_samples_per_sequence=1)
    for _ in range(5 * 400 // 3):
        next(batches)
    assert fetched_bytes(proxy) <= 1.1 * 400 * SAMPLE_BYTES
    assert len(proxy.requests) <= 60
    batches.close()


def test_no_more_is_fetched_than_some_batches_need(tmp_path, monkeypatch):
    """Small samples are bounded by batches: a short run does not fetch all there is room for."""
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ENERGON_STORAGE_READ_AHEAD_BYTES", str(15_000_000))
    samples = [(f"{n:05}", {"bin": bytes(4_000)}) for n in range(4_000)]
    write_crude(tmp_path / "ds", samples)
    forget_stores()
    with web_server(tmp_path) as server, FaultProxy(server.port) as proxy:
        batches = start(f"{proxy.url}/ds", max_samples_per_sequence=SLICE)
        for _ in range(5):
            next(batches)
        assert fetched_bytes(proxy) <= 5_000_000
        batches.close()
    forget_stores()


def all_samples(address):
    """Return the samples of an epoch, once no request of before fails that was under way."""
    for _ in range(50):
        with suppress(StorageError):
            return [sample for batch in islice(start(address, lanes=1), 130) for sample in batch]
    raise AssertionError("blocks that could not be fetched are not asked for again")


def test_a_block_that_could_not_be_fetched_is_asked_for_again(distant, monkeypatch):
    proxy, address = distant
    monkeypatch.setenv("ENERGON_STORAGE_READ_AHEAD_BYTES", "256MB")
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "1")
    forget_stores()
    batches = start(address, lanes=1, max_samples_per_sequence=SLICE)
    next(batches)
    proxy.plan([Fault("status")] * 40, lambda request: request.is_data)
    with pytest.raises(StorageError, match="503"):
        for _ in batches:
            pass
    proxy.plan([])
    assert len(all_samples(address)) == 390
