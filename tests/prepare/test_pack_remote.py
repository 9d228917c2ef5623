"""Packing from stores and into stores: the same bytes as from disk to disk."""

from __future__ import annotations

import csv
import gzip
import json
import os
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from energon.cli.main import main
from energon.errors import ConfigError, ObjectChangedError, StorageError
from energon.formats.meta.info import load_info
from energon.io.epath import EPath
from energon.io.files import delete_file, forget_stores, list_files, read_bytes, write_bytes
from energon.prepare.importers.detect import find_source, open_source
from energon.prepare.importers.files import FolderSource
from energon.prepare.importers.row import RowRules
from energon.prepare.importers.selection import MAX_IN_MEMORY_BYTES, fetched, select
from energon.prepare.remote import pack_remote
from energon.prepare.verify.dataset import verify_dataset
from energon.prepare.writers.pack import PackOptions
from tests.datasets import write_shard
from tests.servers.places import open_place
from tests.servers.proxy import Fault
from tests.servers.web import web_server
from tests.sources.distant import train, upload

DATA = Path(__file__).parents[2] / "plugins/energon-mds/tests/data"


def run(*arguments):
    return CliRunner().invoke(main, ["pack", *map(str, arguments), "--no-progress"])


def write_folder(root):
    for n in range(40):
        path = root / f"{n % 3}/{n:03}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(n))
        path.with_suffix(".txt").write_text(f"text {n}")
    (root / "0/large.mp4").write_bytes(os.urandom(MAX_IN_MEMORY_BYTES + 1))
    (root / "README").write_text("no sample")
    return root


def write_csv(root):
    write_folder(root)
    rows = [{"image": f"{n % 3}/{n:03}.bin", "caption": f"text {n}"} for n in range(40)]
    with open(root / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["image", "caption"])
        writer.writeheader()
        writer.writerows(rows)
    return root / "table.csv"


def write_parquet(root):
    import pyarrow as pa
    import pyarrow.parquet as pq

    root.mkdir()
    pq.write_table(
        pa.table({"n": list(range(90)), "b": [b"x" * n for n in range(90)]}), root / "t.parquet"
    )
    return root / "t.parquet"


def write_jsonl(root):
    root.mkdir()
    (root / "t.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(50)))
    return root / "t.jsonl"


def write_archives(root):
    for shard in range(3):
        samples = [(f"{shard}{n:03}", {"txt": b"t" * n, "bin": bytes(n)}) for n in range(20)]
        write_shard(root / f"{shard}.tar", samples)
    with tarfile.open(root / "3.tgz", "w:gz") as tar:
        tar.add(root / "0.tar", "x/archive.bin")
    return root


SOURCES = {
    "folder": (write_folder, ()),
    "csv": (write_csv, ("--file-column", "image", "--part", "caption:txt")),
    "parquet": (write_parquet, ()),
    "jsonl": (write_jsonl, ()),
    "archives": (write_archives, ()),
    "mds": (lambda root: DATA / "mds_zstd", ()),
    "litdata": (lambda root: DATA / "litdata", ()),
}


def shards_of(address):
    """Return name and content of what tells one packed dataset from another."""
    return {
        each.key: read_bytes(f"{address}/{each.key}")
        for each in list_files(address)
        if each.key.endswith((".tar", ".tar.idx"))
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOURCES)
def test_a_store_is_packed_into_a_store_as_a_folder_into_a_folder(store, tmp_path, kind):
    make, options = SOURCES[kind]
    here = make(tmp_path / "source")
    folder = here if here.is_dir() else here.parent
    there = upload(folder, store.address)
    if folder != here:
        there = f"{there}/{here.name}"
    options = (*options, "--maxcount", 7)
    expected = run(here, tmp_path / "packed", *options)
    assert expected.exit_code == 0, expected.output
    done = run(there, f"{store.address}/packed", *options)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == expected.output.splitlines()[-1]
    assert shards_of(f"{store.address}/packed") == shards_of(tmp_path / "packed")
    report = verify_dataset(f"{store.address}/packed", depth="content")
    assert (report.ok, report.notes) == (True, [])
    assert report.num_checksums > 0
    assert "mirrors" not in done.output


def test_a_saved_dataset_of_hugging_face_is_copied_and_packed(s3, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"n": list(range(9))}).save_to_disk(str(tmp_path / "saved"))
    there = upload(tmp_path / "saved", s3.address)
    assert run(tmp_path / "saved", tmp_path / "packed").exit_code == 0
    done = run(there, f"{s3.address}/packed")
    assert done.exit_code == 0, done.output
    assert shards_of(f"{s3.address}/packed") == shards_of(tmp_path / "packed")


@pytest.mark.parametrize("kind", ["gcs", pytest.param("azure", marks=pytest.mark.slow)])
def test_other_stores_are_packed_alike(request, tmp_path, kind):
    for place in open_place(kind, request):
        there = upload(write_archives(tmp_path / "source"), place.address)
        assert run(tmp_path / "source", tmp_path / "packed").exit_code == 0
        done = run(there, f"{place.address}/packed")
        assert done.exit_code == 0, done.output
        assert shards_of(f"{place.address}/packed") == shards_of(tmp_path / "packed")


def test_what_was_packed_is_trained_on(s3, tmp_path):
    write_folder(tmp_path / "source")
    for target in (tmp_path / "packed", f"{s3.address}/packed"):
        assert run(tmp_path / "source", target, "--maxcount", 7).exit_code == 0
    assert train(f"{s3.address}/packed", batches=9)[0] == train(tmp_path / "packed", batches=9)[0]


def test_a_table_on_a_web_server_is_packed_with_the_files_that_it_names(tmp_path, monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    table = write_csv(tmp_path / "web")
    options = ("--file-column", "image", "--maxcount", 7)
    assert run(table, tmp_path / "expected", *options).exit_code == 0
    forget_stores()
    with web_server(tmp_path / "web", token="secret") as server:
        done = run(f"{server.url}/table.csv?sig=secret", tmp_path / "packed", *options)
        assert done.exit_code == 0, done.output
        assert "secret" not in (tmp_path / "packed/.nv-meta/pack.json").read_text()
        refused = run(table, f"{server.url}/x?sig=secret", *options)
        assert "read only" in refused.output
        refused = run(f"{server.url}/?sig=secret", tmp_path / "other", *options)
        assert "web servers do not list" in refused.output
        assert "secret" not in refused.output
    forget_stores()
    assert shards_of(tmp_path / "packed") == shards_of(tmp_path / "expected")


def test_large_files_are_fetched_from_servers_without_ranges(tmp_path):
    content = os.urandom(MAX_IN_MEMORY_BYTES + 1)
    (tmp_path / "large.mp4").write_bytes(content)
    with web_server(tmp_path, ranges=False) as server:
        samples = fetched(iter([{"__key__": "a", "mp4": EPath(f"{server.url}/large.mp4")}]))
        assert [sample["mp4"].read_bytes() for sample in samples] == [content]


def test_a_store_that_refuses_to_tell_of_a_file_is_an_error(tmp_path):
    with web_server(tmp_path, token="secret") as server:
        rules = RowRules(root=EPath(server.url))
        assert not rules.has_file("../outside.bin")
        with pytest.raises(StorageError):
            rules.has_file("a.bin")


@pytest.mark.slow
def test_missing_files_of_rows_in_stores_are_named_or_left_out(s3, tmp_path):
    table = write_csv(tmp_path / "source")
    there = f"{upload(table.parent, s3.address)}/table.csv"
    delete_file(f"{s3.address}/source/1/001.bin")
    options = ("--file-column", "image")
    done = run(there, tmp_path / "packed", *options)
    assert done.exit_code == 2
    assert f"{s3.address}/source/1/001.bin" in done.output
    done = run(there, tmp_path / "packed", *options, "--skip-missing", "--overwrite")
    assert done.exit_code == 0, done.output
    assert "row 2: a file is missing" in done.output
    assert "39 samples" in done.output
    write_bytes(there, b"image\n../../outside.bin\n")
    assert "is not below" in run(there, tmp_path / "other", *options).output


def pack(source, address, **settings):
    identity = {"source": str(source)}
    return pack_remote(
        FolderSource(select([str(source)])),
        address,
        PackOptions(maxcount=7, **settings),
        identity=identity,
    )


def test_a_run_that_breaks_off_goes_on_on_any_machine(s3, tmp_path, quick_retries, monkeypatch):
    source = write_folder(tmp_path / "source")
    assert run(source, tmp_path / "packed", "--maxcount", 7).exit_code == 0
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "2")
    forget_stores()
    address = f"{s3.address}/packed"
    s3.proxy.plan(
        [Fault("status")] * 2,
        lambda request: request.method in ("PUT", "POST") and "00003.tar" in request.path,
    )
    with pytest.raises(StorageError):
        pack(source, address)
    s3.proxy.plan([])
    names = [each.key for each in list_files(address)]
    assert [name for name in names if name.endswith(".tar")] == [
        f"shards/0000{n}.tar" for n in range(3)
    ]
    assert ".nv-meta/.info.json" not in names
    delete_file(f"{address}/shards/00002.tar.parts")  # as if it had ended between the two
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "another machine"))
    s3.proxy.plan([])
    pack(source, address)
    written = {each.path.rpartition("/")[2] for each in s3.proxy.requests if each.method == "PUT"}
    assert "00001.tar" not in written
    assert "00004.tar" in written
    assert shards_of(address) == shards_of(tmp_path / "packed")
    assert verify_dataset(address, depth="content").ok
    written = [each.path for each in s3.proxy.requests if each.method == "PUT"]
    assert written[-1].endswith("/.nv-meta/.info.json")


def test_shards_leave_this_machine_when_they_are_uploaded(s3, tmp_path):
    source = write_folder(tmp_path / "source")
    pack(source, f"{s3.address}/packed")
    shards = list((tmp_path / "cache").rglob("*.tar"))
    assert len(shards) > 3
    assert all(path.stat().st_blocks == 0 for path in shards)


def test_another_dataset_is_refused_or_deleted_where_that_is_data_file(s3, tmp_path):
    write_bytes(f"{s3.address}/other/x.txt", b"x")
    source = write_folder(tmp_path / "source")
    with pytest.raises(ConfigError, match="is not empty"):
        pack(source, f"{s3.address}/other")
    address = f"{s3.address}/packed"
    pack(source, address)
    small = tmp_path / "small"
    for n in range(9):
        small.mkdir(exist_ok=True)
        (small / f"{n}.txt").write_text("x")
    with pytest.raises(ConfigError, match=f"{address}: was packed from something else"):
        pack(small, address)
    pack(small, address, overwrite=True)
    assert load_info(EPath(address)).shard_counts == {"shards/00000.tar": 7, "shards/00001.tar": 2}
    assert len([each for each in list_files(address) if each.key.endswith(".tar")]) == 2
    assert verify_dataset(address, depth="content").ok


@pytest.mark.parametrize("name", ["1.tar", "1.tar.gz"])
def test_archives_in_stores_that_are_cut_off_are_named(s3, tmp_path, name):
    write_archives(tmp_path / "source")
    content = (tmp_path / "source/1.tar").read_bytes()
    if name.endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    write_bytes(f"{s3.address}/old/{name}", content[: len(content) // 2])
    done = run(f"{s3.address}/old", f"{s3.address}/new")
    assert done.exit_code == 1
    assert f"{s3.address}/old/{name}: " in done.output
    assert "restore" in done.output
    assert {each.key for each in list_files(f"{s3.address}/new")} <= {".nv-meta/pack.json"}


def test_an_archive_that_is_replaced_while_it_is_packed_is_noticed(s3, tmp_path):
    samples = [(f"{n:03}", {"bin": os.urandom(1 << 20)}) for n in range(24)]
    write_shard(tmp_path / "large.tar", samples)
    write_bytes(f"{s3.address}/old/0.tar", tmp_path / "large.tar")
    found = open_source(find_source([f"{s3.address}/old"]), RowRules()).samples("")
    next(found)
    write_shard(tmp_path / "large.tar", samples[::-1])
    write_bytes(f"{s3.address}/old/0.tar", tmp_path / "large.tar")
    with pytest.raises(ObjectChangedError, match=f"{s3.address}/old/0.tar"):
        list(found)
