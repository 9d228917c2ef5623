"""Training from object stores: the same batches as from disk, whatever the network does."""

from __future__ import annotations

import json
import logging
import os
import pickle
import tarfile

import pytest

from energon import WorkerConfig, get_train_dataset
from energon.errors import ShardChangedError, StorageError, StorageTimeoutError
from energon.io.address import join_address
from energon.io.files import all_statistics, delete_file, forget_stores, write_bytes, write_text
from tests.datasets import CRUDE, make_crude, write_shard
from tests.servers.places import SERVERS, open_place
from tests.servers.proxy import Fault
from tests.servers.web import web_server
from tests.sources.distant import start, train, upload
from tests.waiting import wait_until

BATCHES = 40


@pytest.fixture
def local(tmp_path):
    """Three shards of texts, 100 samples in all."""
    return make_crude(tmp_path / "local", [40, 25, 35])


@pytest.fixture(
    params=[
        kind if kind in ("moto", "web") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in SERVERS
    ]
)
def place(request):
    """Every server there is; outside CI, one that lists and one that does not."""
    yield from open_place(request.param, request)


@pytest.fixture
def distant(s3, local):
    return upload(local, s3.address)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_store_gives_the_batches_of_the_disk(place, local, num_workers):
    expected, state, _ = train(local, batches=BATCHES)
    address = upload(local, place.address)
    found, remote_state, stats = train(address, batches=BATCHES, num_workers=num_workers)
    assert found == expected
    assert stats["storage requests"] > 0
    following, _, _ = train(local, batches=5, state=state)
    assert train(address, batches=5, state=state)[0] == following
    assert train(local, batches=5, state=remote_state)[0] == following


BROKEN = [Fault("reset", after=50), Fault("cut", after=50), Fault("short", after=7)]
DRILLS = {
    "503 burst": [Fault("status")] * 12,
    "500 and 429": [Fault("status", status=500), Fault("status", status=429)] * 3,
    "reset before the answer": [Fault("reset")] * 8,
    "reset, cut and too short bodies": BROKEN * 4,
    "silence": [Fault("stall", after=50, seconds=5)] * 2,
    "slow first byte": [Fault("delay", seconds=5)] * 2,
    "everything": [*BROKEN, Fault("status"), None, Fault("reset")] * 3,
}


WAIT = ("silence", "slow first byte")
"""Drills that are over when time is up."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in WAIT else name for name in DRILLS],
)
def test_a_bad_network_changes_nothing_but_statistics(s3, local, quick_retries, monkeypatch, name):
    faults = DRILLS[name]
    monkeypatch.setattr("energon.io.backends.object_backend.READ_SECONDS", 2)
    monkeypatch.setattr("energon.io.threads._reads_samples", True)  # in this process
    expected, _, _ = train(local, batches=BATCHES)
    address = upload(local, s3.address)
    forget_stores()
    s3.proxy.plan(faults, lambda request: request.is_data)
    assert train(address, batches=BATCHES)[0] == expected
    assert s3.proxy.faults_left == 0
    wanted = sum(fault is not None for fault in faults)
    # What is fetched ahead may be in the middle of its last retry.
    wait_until(lambda: errors_of(all_statistics()["s3://bucket"]) >= wanted)


def errors_of(counted):
    return sum(count for name, count in counted.items() if name.startswith("error"))


@pytest.fixture
def nothing_kept(monkeypatch):
    """Fetch what is planned for some batches, though the dataset would fit into memory."""
    monkeypatch.setattr("energon.sources.reader.KEPT_SHARE", 0.0)


def test_every_store_survives_a_bad_network(place, local, quick_retries, nothing_kept):
    expected, _, _ = train(local, batches=BATCHES)
    address = upload(local, place.address)
    forget_stores()
    place.proxy.plan(DRILLS["everything"], lambda request: request.is_data)
    found, _, stats = train(address, batches=BATCHES)
    assert found == expected
    assert place.proxy.faults_left == 0
    assert stats["storage retries"] > 0


@pytest.mark.slow
def test_workers_survive_a_bad_network(s3, local, quick_retries):
    expected, _, _ = train(local, batches=BATCHES)
    address = upload(local, s3.address)
    forget_stores()
    s3.proxy.plan(DRILLS["everything"], lambda request: request.is_data)
    found, _, stats = train(address, batches=BATCHES, num_workers=2)
    assert found == expected
    assert s3.proxy.faults_left == 0
    assert stats["storage retries"] > 0


def test_faults_while_opening_are_survived(s3, local, quick_retries):
    expected, _, _ = train(local, batches=5)
    address = upload(local, s3.address)
    s3.proxy.plan([Fault("status"), Fault("reset"), None] * 6)
    assert train(address, batches=5)[0] == expected


def test_a_store_that_stays_away_ends_the_run_and_says_what_was_tried(
    s3, distant, quick_retries, monkeypatch
):
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "4")
    forget_stores()
    s3.proxy.plan([Fault("status")] * 500, lambda request: request.is_data)
    with pytest.raises(StorageTimeoutError, match=r"\.tar: .*503.*SlowDown.*after 4 attempts"):
        train(distant, batches=1)


def test_slow_answers_are_asked_for_twice_if_wanted(s3, local, quick_retries, monkeypatch):
    expected, _, _ = train(local, batches=5)
    address = upload(local, s3.address)
    monkeypatch.setenv("ENERGON_STORAGE_HEDGE_AFTER_SECONDS", "0.1")
    forget_stores()
    s3.proxy.plan([Fault("delay", seconds=20)], lambda request: request.is_data)
    found, _, stats = train(address, batches=5)
    assert found == expected
    assert stats["storage hedged"] >= 1


def test_an_expired_token_is_looked_up_anew(s3, local, quick_retries):
    expected, _, _ = train(local, batches=BATCHES)
    address = upload(local, s3.address)
    expired = Fault("status", status=400, code="ExpiredToken")
    s3.proxy.plan([expired], lambda request: request.is_data)
    assert train(address, batches=BATCHES)[0] == expected


@pytest.mark.parametrize("same", [True, False])
def test_a_shard_that_is_replaced_in_the_middle_is_read_on_if_it_is_the_same(
    local, tmp_path, monkeypatch, same
):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ENERGON_STORAGE_READ_AHEAD_BYTES", "1")
    expected, _, _ = train(local, batches=BATCHES)
    with web_server(local.parent) as server:
        batches = start(f"{server.url}/local")
        found = [next(batches) for _ in range(5)]
        for shard in local.glob("*.tar"):
            data = shard.read_bytes()
            new = tmp_path / shard.name
            new.write_bytes(data if same else data.replace(b"text", b"TEXT").replace(b"s", b"t"))
            os.utime(new, (10**9, 10**9))
            new.replace(shard)  # at once: it is read ahead all the time
        if same:
            assert found + [next(batches) for _ in range(BATCHES - 5)] == expected
        else:
            with pytest.raises(ShardChangedError, match=r"\.tar: .*rewritten.*energon index"):
                list(zip(range(BATCHES), batches, strict=False))


def test_a_shard_that_was_written_anew_is_refused(s3, distant, tmp_path):
    train(distant, batches=1)
    content = [(f"s{n}", {"txt": f"text {n + 1000}".encode() * 3}) for n in range(40)]
    write_shard(tmp_path / "new/000.tar", content)
    write_bytes(f"{distant}/000.tar", tmp_path / "new/000.tar")
    with pytest.raises(ShardChangedError, match=r"000\.tar: .*energon index"):
        train(distant, batches=BATCHES)


def test_a_shard_that_vanished_is_named_when_it_is_needed(s3, distant):
    delete_file(f"{distant}/001.tar")
    with pytest.raises(FileNotFoundError, match=r"001\.tar"):
        train(distant, batches=BATCHES)


def test_servers_without_ranges_are_read_shard_by_shard(local, tmp_path, monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    expected, _, _ = train(local, batches=BATCHES)
    with web_server(local.parent, ranges=False) as server:
        assert train(f"{server.url}/local", batches=BATCHES)[0] == expected
        fetched = [path for path in server.paths if path.endswith(".tar")]
    # One answer without a range for the first, then a HEAD and the whole for each shard.
    assert len(fetched) <= 4 * 3


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["another tool", "another release"])
def test_a_dataset_that_others_have_prepared_needs_no_part_tables(s3, local, tool):
    expected, _, _ = train(local, batches=BATCHES)
    for table in local.glob("*.parts"):
        if tool == "another tool":
            table.unlink()
        else:
            table.write_bytes(b"ENERGPT2" + table.read_bytes()[8:])
    assert train(upload(local, s3.address), batches=BATCHES)[0] == expected


def test_the_second_run_on_a_machine_asks_for_no_table(s3, distant):
    tables = []
    for _ in range(2):
        forget_stores()
        s3.proxy.plan([])
        train(distant, batches=BATCHES)
        tables.append(sum(request.path.endswith(".parts") for request in s3.proxy.requests))
    assert tables == [3, 0]


def test_cached_shards_are_fetched_once(s3, distant, monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_SHARDS", "1")
    forget_stores()
    expected, _, _ = train(distant, batches=BATCHES)
    forget_stores()
    s3.proxy.plan([])
    assert train(distant, batches=BATCHES)[0] == expected
    assert not any(request.is_data for request in s3.proxy.requests)


@pytest.mark.slow
def test_a_slice_takes_one_request(s3, tmp_path, nothing_kept):
    samples = [(f"s{n:03}", {"bin": bytes([n % 256]) * 200_000}) for n in range(128)]
    write_shard(tmp_path / "big/000.tar", samples)
    from energon.prepare.dataset import prepare_dataset

    prepare_dataset(tmp_path / "big", **CRUDE)
    address = upload(tmp_path / "big", s3.address)
    train(address, batches=2, max_samples_per_sequence=16)  # opens the shard
    s3.proxy.plan([])
    train(address, batches=40, max_samples_per_sequence=16)
    ranges = [request.range for request in s3.proxy.requests if request.is_data]
    edges = [map(int, text.removeprefix("bytes=").split("-")) for text in ranges]
    sizes = [last - first + 1 for first, last in edges]
    # The first batches of both lanes come sample by sample, and slices at the ends are shorter.
    assert sum(size > 14 * 200_000 for size in sizes) >= 0.7 * (len(sizes) - 2 * 3)


def test_metadatasets_reach_what_lies_beside_them_and_elsewhere(s3, local, tmp_path):
    upload(local, f"{s3.address}/data")
    other = make_crude(tmp_path / "other", [10], prefix="o")
    text = f"""
    __module__: megatron.energon
    __class__: MetadatasetV2
    splits:
      train:
        blend:
          - {{weight: 3, path: ../data/local}}
          - {{weight: 1, path: {other}}}
    """
    write_text(f"{s3.address}/blends/x.yaml", text)
    (tmp_path / "x.yaml").write_text(text.replace("../data/local", str(local)))
    expected, _, _ = train(tmp_path / "x.yaml", batches=20)
    assert train(f"{s3.address}/blends/x.yaml", batches=20)[0] == expected


def test_secrets_are_shown_nowhere(place, local, caplog, quick_retries, monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "3")
    caplog.set_level(logging.DEBUG)
    address = upload(local, place.address)
    forget_stores()
    shown = []
    dataset = get_train_dataset(
        address, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0), batch_size=2
    )
    shown += [repr(dataset), json.dumps(dataset.config())]
    if "://" in address and not address.startswith("http"):
        shown.append(str(pickle.dumps(dataset)))
    _, state, stats = train(address, batches=3, state=None)
    shown += [json.dumps(state), json.dumps(stats)]
    for fault in (Fault("status"), Fault("status", status=403), Fault("reset")):
        place.proxy.plan([fault] * 100)
        with pytest.raises(StorageError) as caught:
            train(address, batches=1)
        shown += [str(caught.value), repr(caught.value)]
        place.proxy.plan([])
    with pytest.raises(FileNotFoundError) as missing:
        train(join_address(address, "gone"), batches=1)
    shown += [str(missing.value), caplog.text]
    assert place.secrets
    for secret in place.secrets:
        assert not [text for text in shown if secret in text]


def test_shards_of_other_tools_keep_their_members(s3, local):
    """A shard with long names, which another archiver wrote, reads as on disk."""
    path = local / "002.tar"
    with tarfile.open(path) as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar.getmembers()]
    import io

    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for member, data in members:
            info = tarfile.TarInfo("a" * 120 + "/" + member.name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    from energon.prepare.dataset import prepare_dataset

    prepare_dataset(local, **CRUDE)
    for table in local.glob("*.parts"):
        table.unlink()
    expected, _, _ = train(local, batches=BATCHES)
    assert train(upload(local, s3.address), batches=BATCHES)[0] == expected
