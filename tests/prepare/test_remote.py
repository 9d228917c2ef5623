from __future__ import annotations

import shutil
import tempfile

import pytest

from energon.errors import ConfigError, DatasetNotFoundError, FormatError, StorageError
from energon.formats.meta.info import load_info
from energon.formats.tables.part_table import PartTable
from energon.io.epath import EPath
from energon.io.files import delete_file, forget_stores, write_bytes, write_text
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.index import IndexOptions
from energon.prepare.remote import mirrored
from energon.prepare.verify.dataset import verify_dataset
from tests.datasets import CRUDE, write_shard
from tests.servers.proxy import Fault
from tests.small_disks import fill, small_disk
from tests.sources.distant import train, upload


@pytest.fixture
def shards(tmp_path):
    """Shards that nobody has prepared."""
    root = tmp_path / "ds"
    for shard in range(4):
        samples = [
            (f"{shard}{n:03}", {"txt": f"text {n}".encode() * (n % 50), "bin": bytes(n * 100)})
            for n in range(40)
        ]
        write_shard(root / f"part/{shard}.tar", samples)
    return root


def prepare(address, *, options=None, exclude=(), **settings):
    settings = {"split_parts": ["train:.*"], "sample_type": "CrudeWebdataset", **settings}
    with mirrored(address, options=options, exclude=exclude) as folder:
        checksum = options is not None and options.checksum
        return prepare_dataset(
            folder, exclude=exclude, indexing=Indexing(checksum=checksum), **settings
        )


def index_files(address):
    return {
        path.name: PartTable.from_buffer(path.read_bytes(), origin=path.name)
        for path in EPath(address).glob("**/*.parts")
    }


def test_a_dataset_in_a_store_is_prepared_as_one_on_disk(s3, shards):
    address = upload(shards, s3.address)
    info = prepare(address)
    expected = prepare_dataset(shards, **CRUDE)
    assert info == expected == load_info(EPath(address))
    local = {path.name: PartTable.open(path) for path in shards.glob("part/*.parts")}
    remote = index_files(address)
    assert remote.keys() == local.keys()
    for name, table in remote.items():
        assert (table.part_offset == local[name].part_offset).all()
    names = {path.name for path in EPath(f"{address}/.nv-meta").walk()}
    assert {".info.json", "index.sqlite", "index.uuid", "split.yaml", "dataset.yaml"} == names
    assert train(address, batches=10)[0] == train(shards, batches=10)[0]


def test_only_shards_that_have_changed_are_read_again(s3, shards, tmp_path, monkeypatch):
    address = upload(shards, s3.address)
    s3.proxy.plan([])
    info = prepare(address)
    written = [request.path for request in s3.proxy.requests if request.method == "PUT"]
    assert written[-1].endswith("/.nv-meta/.info.json")  # which makes a folder a dataset
    for cache in ("cache", "cache of another machine"):
        monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / cache))
        s3.proxy.plan([])
        assert prepare(address) == info
        assert not any(request.is_data for request in s3.proxy.requests)
    shutil.rmtree(tmp_path / cache)  # and with it the mirror
    assert prepare(address) == info
    for shard in (0, 9):
        write_shard(tmp_path / "new.tar", [(f"{shard}{n:03}", {"txt": b"new"}) for n in range(7)])
        write_bytes(f"{address}/part/{shard}.tar", tmp_path / "new.tar")
    delete_file(f"{address}/part/3.tar")
    s3.proxy.plan([])
    expected = {f"part/{shard}.tar": count for shard, count in ((0, 7), (1, 40), (2, 40), (9, 7))}
    assert prepare(address).shard_counts == load_info(EPath(address)).shard_counts == expected
    read = {request.path[-5:] for request in s3.proxy.requests if request.is_data}
    assert read == {"0.tar", "9.tar"}


def test_datasets_that_were_prepared_before_their_upload_need_only_be_looked_at(s3, shards):
    prepare_dataset(shards, **CRUDE)
    address = upload(shards, s3.address)
    s3.proxy.plan([])
    prepare(address)
    edges = [
        tuple(map(int, request.range.removeprefix("bytes=").split("-")))
        for request in s3.proxy.requests
        if request.is_data and request.path.endswith(".tar")
    ]
    size = sum(path.stat().st_size for path in shards.glob("part/*.tar"))
    assert sum(last - first + 1 for first, last in edges) < size / 2


def test_checksums_are_those_of_the_contents(s3, shards):
    address = upload(shards, s3.address)
    prepare(address, options=IndexOptions(checksum=True))
    prepare_dataset(shards, **CRUDE, indexing=Indexing(checksum=True))
    for name, table in index_files(address).items():
        expected = PartTable.open(shards / "part" / name).part_crc32
        assert (table.part_crc32 == expected).all()


def test_a_run_that_breaks_off_leaves_the_old_dataset_and_goes_on_later(
    s3, shards, tmp_path, quick_retries, monkeypatch
):
    address = upload(shards, s3.address)
    prepare(address)
    before = {path.url: path.read_bytes() for path in EPath(f"{address}/.nv-meta").walk()}
    for shard in (5, 6, 7):
        write_shard(tmp_path / "new.tar", [(f"{shard}{n:03}", {"t": b"new"}) for n in range(3)])
        write_bytes(f"{address}/part/{shard}.tar", tmp_path / "new.tar")
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "2")
    forget_stores()
    s3.proxy.plan(
        [Fault("status")] * 50, lambda request: request.is_data and "6.tar" in request.path
    )
    with pytest.raises(StorageError):
        prepare(address)
    s3.proxy.plan([])
    after = {path.url: path.read_bytes() for path in EPath(f"{address}/.nv-meta").walk()}
    assert after == before
    assert len(prepare(address).shard_counts) == 7


def test_a_damaged_shard_is_named_unless_it_is_excluded(s3, shards):
    data = (shards / "part/2.tar").read_bytes()
    (shards / "part/2.tar").write_bytes(data[: len(data) // 2])
    address = upload(shards, s3.address)
    with pytest.raises(FormatError, match=r"s3://.*part/2\.tar"):
        prepare(address)
    assert len(prepare(address, exclude=["part/2"]).shard_counts) == 3


def test_a_folder_without_shards_is_refused(s3):
    write_text(f"{s3.address}/x.txt", "no shard")
    with pytest.raises(DatasetNotFoundError, match=r"no \.tar file"):
        prepare(s3.address)


def test_a_url_is_not_taken_for_a_folder():
    with pytest.raises(ConfigError, match="s3://bucket/x: expected a local path"):
        prepare_dataset("s3://bucket/x")


@pytest.mark.slow
@pytest.mark.parametrize("free_kib", [0, 8, 24])
def test_on_a_full_disk_a_temporary_folder_stands_for_the_dataset(
    s3, shards, tmp_path, monkeypatch, caplog, free_kib
):
    address = upload(shards, s3.address)
    with small_disk(tmp_path / "disk", 4096) as disk:
        monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(disk / "cache"))
        (disk / "cache").mkdir()
        fill(disk, free_kib)
        assert prepare(address).num_samples == 160
        assert verify_dataset(address, depth="headers").ok
        assert sum("is full" in each.getMessage() for each in caplog.records) == 2
        assert "energon-mirror-" in caplog.text
    assert not [*tmp_path.glob("tmp/energon-mirror-*")]
    assert len(train(address, batches=5)[0]) == 5


def test_where_no_disk_has_room_it_is_said_which_folder_is_full(
    s3, shards, tmp_path, monkeypatch, caplog
):
    address = upload(shards, s3.address)
    with small_disk(tmp_path / "disk", 4096) as disk:
        monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(disk / "cache"))
        (disk / "cache").mkdir()
        (disk / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(disk / "tmp"))
        fill(disk, 8)
        with pytest.raises(StorageError, match="has no room for intermediate files"):
            prepare(address)
        assert not [*(disk / "tmp").iterdir()]
    prepare(address)


@pytest.mark.slow
@pytest.mark.parametrize("notes", ["{", "[" * 100_000, "[]", '{"part/0.tar": [1]}'])
def test_damaged_notes_on_versions_cost_time_only(s3, shards, tmp_path, notes):
    address = upload(shards, s3.address)
    expected = prepare(address)
    (path,) = (tmp_path / "cache").rglob("versions.json")
    path.write_text(notes)
    assert prepare(address) == expected
    assert "[[" not in path.read_text()
