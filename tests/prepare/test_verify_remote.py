"""Checking and repairing datasets in stores: with what comes out for the same dataset on disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from energon.errors import ConfigError, DatasetNotFoundError, StorageError
from energon.formats.meta.info import load_info
from energon.io.epath import EPath
from energon.io.files import delete_file, forget_stores, list_files, read_bytes, write_bytes
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.engines import Engine
from energon.prepare.jsonl import prepare_jsonl
from energon.prepare.verify.dataset import repair_dataset, verify_dataset
from energon.prepare.writers.shard_writer import ShardWriter
from tests.datasets import CRUDE, write_shard
from tests.effort import some
from tests.servers.places import open_place
from tests.servers.proxy import Fault
from tests.servers.web import web_server
from tests.sources.distant import train, upload
from tests.waiting import wait_until

ALONE = Engine(num_workers=1)


@pytest.fixture
def dataset(tmp_path):
    root = tmp_path / "ds"
    with ShardWriter(root / "part/%d.tar", maxcount=20) as writer:
        for n in range(60):
            writer.write({"__key__": f"k{n:03}", "txt": b"x" * n, "json": {"n": n}})
    prepare_dataset(root, **CRUDE)
    return root


def repair(address, **settings):
    return repair_dataset(address, indexing=Indexing(), **settings)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


def write_anew(path):
    write_shard(path, [(f"n{n:03}", {"txt": b"y" * n}) for n in range(20)])


def miscount(path):
    path.write_text(path.read_text().replace('1.tar": 20', '1.tar": 21'))


def named_semaphores(group):
    """Return the semaphores that the processes of a group have mapped, by their names."""
    maps = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.getpgid(int(pid)) == group:
                maps += Path(f"/proc/{pid}/maps").read_text().split()
    return {path for path in maps if path.startswith("/dev/shm/")}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_group_of_processes_leaves_nothing_behind(dataset, tmp_path, s3):
    address = upload(dataset, s3.address)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = "from energon.cli.main import main; main()"
    options = ["repair", address, "--checksum", "--num-workers", "2"]
    command = [sys.executable, "-c", program, *options]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    wait_until(lambda: any(temporary.iterdir()))
    shared = named_semaphores(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not any(map(os.path.exists, shared))
    assert [path.name[:15] for path in temporary.iterdir()] == ["energon-verify-"]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert list(temporary.iterdir()) == []


HARMS = {
    "nothing": lambda root: None,
    "content": lambda root: flip(root / "part/1.tar", 520),
    "header": lambda root: flip(root / "part/1.tar", 3),
    "cut off": lambda root: cut(root / "part/1.tar"),
    "rewritten": lambda root: write_anew(root / "part/1.tar"),
    "gone": lambda root: (root / "part/1.tar").unlink(),
    "no table": lambda root: (root / "part/1.tar.parts").unlink(),
    "damaged table": lambda root: flip(root / "part/1.tar.parts", 200),
    "damaged index": lambda root: cut(root / "part/2.tar.idx"),
    "another tool": lambda root: [path.unlink() for path in root.glob("part/*.parts")],
    "sqlite": lambda root: cut(root / ".nv-meta/index.sqlite"),
    "uuid": lambda root: (root / ".nv-meta/index.uuid").unlink(),
    "counts": lambda root: miscount(root / ".nv-meta/.info.json"),
    "split": lambda root: (root / ".nv-meta/split.yaml").write_text("[]"),
    "description": lambda root: (root / ".nv-meta/dataset.yaml").write_text("__module__: ["),
    "list of shards": lambda root: (root / ".nv-meta/.info.json").write_text("{"),
}


def found(report):
    return [(each.kind, each.where, each.repairable, each.key) for each in report.problems]


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS)
def test_the_same_is_wrong_with_a_dataset_in_a_store_as_on_disk(store, dataset, harm):
    HARMS[harm](dataset)
    address = upload(dataset, store.address)
    before = {each.key: each.version for each in list_files(address)}
    for depth in ("quick", "headers", "content"):
        here = verify_dataset(dataset, depth=depth, engine=ALONE)
        there = verify_dataset(address, depth=depth)
        assert found(there) == found(here)
        assert (there.num_samples, there.num_checksums) == (here.num_samples, here.num_checksums)
        told = json.dumps(there.to_json())
        assert there.dataset == address
        assert "mirrors" not in told
        assert str(dataset.parent) not in told
    assert {each.key: each.version for each in list_files(address)} == before


@pytest.mark.slow
@pytest.mark.parametrize("harm", some([name for name in HARMS if name != "list of shards"]))
def test_the_same_is_repaired_in_a_store_as_on_disk(store, dataset, harm):
    HARMS[harm](dataset)
    address = upload(dataset, store.address)
    there = repair(address, drop=True)
    here = repair_dataset(dataset, drop=True, indexing=Indexing(ALONE))
    assert (there.indexed, there.dropped) == (here.indexed, here.dropped)
    assert found(there.before) == found(here.before)
    assert found(there.after) == found(here.after)
    assert found(verify_dataset(address)) == found(here.after)
    assert load_info(EPath(address)) == load_info(dataset)
    shutil.rmtree(dataset.parent / "cache")
    assert found(verify_dataset(address)) == found(here.after)
    if here.after.ok:
        assert train(address, batches=5)[0] == train(dataset, batches=5)[0]


def requested(place, ending):
    """Return how many bytes of files with this ending were asked for."""
    edges = [
        map(int, request.range.removeprefix("bytes=").split("-"))
        for request in place.proxy.requests
        if request.is_data and request.path.endswith(ending)
    ]
    return sum(last - first + 1 for first, last in edges)


def test_shards_are_read_once_at_most(s3, dataset):
    address = upload(dataset, s3.address)
    size = sum(path.stat().st_size for path in dataset.glob("part/*.tar"))
    s3.proxy.plan([])
    assert verify_dataset(address, depth="quick").ok
    assert requested(s3, ".tar") == 0
    for depth in ("headers", "content"):
        s3.proxy.plan([])
        assert verify_dataset(address, depth=depth).ok
        assert 0 < requested(s3, ".tar") <= 1.2 * size + 3 * 2 * (16 << 10)
        copies = [each.path for each in s3.proxy.requests if "/.nv-meta/index.sqlite" in each.path]
        assert copies == []  # what has not changed is here already
    delete_file(f"{address}/part/1.tar.parts")
    s3.proxy.plan([])
    assert repair(address).indexed == ["part/1.tar"]
    assert requested(s3, ".tar") <= 1.2 * size + 3 * 4 * (16 << 10)


@pytest.mark.slow
def test_large_contents_are_not_held_in_memory(s3, tmp_path):
    import tracemalloc

    with ShardWriter(tmp_path / "big/%d.tar") as writer:
        writer.write({"__key__": "0", "bin": os.urandom(1 << 20) * 80})
    prepare_dataset(tmp_path / "big", **CRUDE)
    address = upload(tmp_path / "big", s3.address)
    tracemalloc.start()
    report = verify_dataset(address, depth="content", engine=ALONE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (report.ok, report.num_checksums) == (True, 1)
    assert peak < 60 << 20


def test_errors_that_pass_change_nothing(s3, dataset, quick_retries):
    address = upload(dataset, s3.address)
    faults = [Fault("status"), Fault("reset"), Fault("cut", after=700), Fault("short", after=9)]
    s3.proxy.plan(faults * 2, lambda request: request.method == "GET")
    assert verify_dataset(address, depth="content").num_checksums == 120
    assert s3.proxy.faults_left == 0


def test_a_store_that_stays_away_is_an_error_and_no_problem_of_the_dataset(
    s3, dataset, quick_retries, monkeypatch
):
    address = upload(dataset, s3.address)
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "2")
    forget_stores()
    s3.proxy.plan([Fault("status")] * 100, lambda request: request.path.endswith("1.tar"))
    with pytest.raises(StorageError, match="gave up after 2 attempts"):
        verify_dataset(address)
    with pytest.raises(StorageError, match="gave up after 2 attempts"):
        repair(address)
    s3.proxy.plan([])
    assert verify_dataset(address).ok


def test_a_shard_that_is_replaced_while_it_is_checked_is_named_and_repaired(
    s3, dataset, tmp_path, monkeypatch
):
    from energon.prepare.index import ShardFile
    from energon.prepare.verify import dataset as verifying

    address = upload(dataset, s3.address)
    write_anew(tmp_path / "new.tar")
    content = (tmp_path / "new.tar").read_bytes()

    class Replaced(ShardFile):
        """Is replaced between its size being asked for and its content."""

        def __init__(self, place):
            super().__init__(place)
            if place.endswith("1.tar"):
                write_bytes(place, content)

    monkeypatch.setattr(verifying, "ShardFile", Replaced)
    (problem,) = verify_dataset(address).problems
    assert (problem.kind, problem.shard) == ("index-stale", "part/1.tar")
    assert "was replaced while it was checked" in problem.message
    write_bytes(f"{address}/part/1.tar", dataset / "part/1.tar")
    done = repair(address)
    assert (done.indexed, done.after.ok) == (["part/1.tar"], True)


def test_a_repair_that_breaks_off_goes_on_later(s3, dataset, quick_retries, monkeypatch):
    for name in ("part/0.tar.parts", "part/1.tar.parts", ".nv-meta/index.sqlite"):
        flip(dataset / name, 200)
    address = upload(dataset, s3.address)
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "2")
    forget_stores()
    s3.proxy.plan(
        [Fault("status")] * 4,
        lambda request: request.method == "PUT" and "index.sqlite" in request.path,
    )
    before = read_bytes(f"{address}/.nv-meta/index.sqlite")
    with pytest.raises(StorageError):
        repair(address)
    s3.proxy.plan([])
    assert read_bytes(f"{address}/.nv-meta/index.sqlite") == before
    done = repair(address)
    assert (done.indexed, done.after.ok) == ([], True)  # these were uploaded before
    assert read_bytes(f"{address}/.nv-meta/index.sqlite") != before


def test_what_was_only_changed_here_is_uploaded_by_the_next_run(
    s3, dataset, quick_retries, monkeypatch
):
    """A preparation that fails while it uploads leaves nothing that the next one relies on."""
    from energon.prepare.remote import mirrored

    address = upload(dataset, s3.address)
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "2")
    forget_stores()

    def prepare():
        with mirrored(address) as folder:
            prepare_dataset(folder, split_parts=["train:.*0.tar", "val:.*[12].tar"])

    s3.proxy.plan([Fault("status")] * 4, lambda request: request.method == "PUT")
    with pytest.raises(StorageError):
        prepare()
    s3.proxy.plan([])
    prepare()
    assert "val" in read_bytes(f"{address}/.nv-meta/split.yaml").decode()


def test_checking_does_not_hide_from_preparing_that_a_shard_has_changed(s3, dataset):
    """Even if size and date are the same as before."""
    from energon.prepare.remote import mirrored

    address = upload(dataset, s3.address)
    with mirrored(address) as folder:
        prepare_dataset(folder, **CRUDE)
    write_anew(dataset / "part/1.tar")
    write_bytes(f"{address}/part/1.tar", (dataset / "part/1.tar").read_bytes())
    assert not verify_dataset(address).ok
    with mirrored(address) as folder:
        prepare_dataset(folder, **CRUDE)
    assert verify_dataset(address).ok


@pytest.fixture
def web(request, dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    forget_stores()
    with web_server(dataset.parent, token="secret") as server:
        yield f"{server.url}/ds?sig=secret"
    forget_stores()


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["nothing", "content", "cut off", "gone", "no table", "uuid"])
def test_a_dataset_on_a_web_server_is_checked_without_a_listing(web, dataset, harm):
    HARMS[harm](dataset)
    for depth in ("quick", "headers", "content"):
        there = verify_dataset(web, depth=depth)
        assert found(there) == found(verify_dataset(dataset, depth=depth, engine=ALONE))
        assert "sig=secret" not in json.dumps(there.to_json())


def test_web_servers_are_read_only(web):
    with pytest.raises(ConfigError, match="read only"):
        repair(web)


@pytest.mark.parametrize("kind", ["gcs", pytest.param("azure", marks=pytest.mark.slow)])
def test_other_stores_are_checked_and_repaired_alike(request, dataset, kind):
    for place in open_place(kind, request):
        flip(dataset / "part/1.tar.parts", 200)
        address = upload(dataset, place.address)
        assert [each.kind for each in verify_dataset(address).problems] == ["index-damaged"]
        assert repair(address).after.ok
        assert verify_dataset(address, depth="content").ok


def test_a_folder_that_is_no_dataset_is_an_error(s3):
    write_bytes(f"{s3.address}/x.txt", b"x")
    for check in (verify_dataset, repair):
        with pytest.raises(DatasetNotFoundError, match=f"{s3.address} .*energon prepare"):
            check(s3.address)
    with pytest.raises(ConfigError, match="expected one of"):
        verify_dataset(s3.address, depth="deep")


def test_jsonl_files_in_stores_are_checked_and_repaired(s3, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(20)))
    prepare_jsonl(path, split_ratio={"train": 9, "val": 1})
    address = f"{s3.address}/x.jsonl"
    for each in tmp_path.glob("x.jsonl*"):
        write_bytes(f"{s3.address}/{each.name}", each)
    for depth in ("quick", "headers", "content"):
        report = verify_dataset(address, depth=depth)
        assert (report.ok, report.num_samples, report.dataset) == (True, 20, address)
    write_bytes(address, path.read_bytes() + b'{"n": 20}\n')
    (problem,) = verify_dataset(address, depth="quick").problems
    assert problem.kind == "content-changed"
    assert address in problem.message
    done = repair(address)
    assert (done.indexed, done.after.ok, done.after.num_samples) == (["x.jsonl"], True, 21)
    assert verify_dataset(address).ok
    with pytest.raises(DatasetNotFoundError, match="no such file"):
        verify_dataset(f"{s3.address}/y.jsonl")


def test_the_cache_holds_no_contents_of_shards(s3, dataset, tmp_path):
    address = upload(dataset, s3.address)
    verify_dataset(address, depth="content")
    shards = list(Path(tmp_path / "cache").rglob("*.tar"))
    assert len(shards) == 3
    assert all(path.stat().st_blocks == 0 for path in shards)
