from __future__ import annotations

import json
import re
from importlib import metadata
from time import process_time

import pytest

from energon.errors import ConfigError, DatasetNotFoundError, MissingExtraError
from energon.io.files import write_bytes
from energon.metadataset import kind as kinds
from energon.metadataset.kind import dataset_kind
from energon.prepare.importers.detect import find_source
from tests.commands import run
from tests.metadataset.folders import write
from tests.servers.web import web_server


@pytest.mark.parametrize(
    ("file", "path", "kind"),
    [
        ("d/.nv-meta/.info.json", "d", "webdataset"),
        ("d/.nv-meta/.info.yaml", "d", "webdataset"),
        ("d.yaml/.nv-meta/.info.json", "d.yaml", "webdataset"),
        ("d/.nv-meta/index.sqlite", "d", "filesystem"),
        ("m.yaml", "m.yaml", "metadataset"),
        ("m.yml", "m.yml", "metadataset"),
        ("x.jsonl", "x.jsonl", "jsonl"),
    ],
)
def test_tells_kinds_apart(tmp_path, file, path, kind):
    write(tmp_path / file, "")
    assert dataset_kind(tmp_path / path) == kind


def test_a_folder_with_shards_and_index_is_a_webdataset(tmp_path):
    write(tmp_path / ".nv-meta/index.sqlite", "")
    write(tmp_path / ".nv-meta/.info.json", "{}")
    assert dataset_kind(str(tmp_path)) == "webdataset"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("folder", "{root}/folder holds no files; put tar shards into it and run `energon prepare"),
        (
            "a.tar",
            "{root}/a.tar is a shard; `energon prepare {root}` makes a dataset of its folder",
        ),
        ("no/such.yaml", "{root}/no/such.yaml does not exist: no 'no' in {root}"),
        ("folder/gone", "{root}/folder/gone does not exist: no 'gone' in {root}/folder"),
    ],
)
def test_says_what_was_looked_for(tmp_path, path, message):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "a.tar", "")
    with pytest.raises(DatasetNotFoundError) as info:
        dataset_kind(tmp_path / path)
    assert str(info.value).startswith(message.format(root=tmp_path))


def test_a_dead_link_is_not_its_own_correction(tmp_path):
    link = tmp_path / "lines.jsonl"
    link.symlink_to("elsewhere.jsonl")
    with pytest.raises(DatasetNotFoundError, match="is a link to 'elsewhere.jsonl', which does"):
        dataset_kind(link)


def test_a_bare_name_is_missing_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetNotFoundError, match=r"^gone does not exist: no 'gone' in /") as info:
        dataset_kind("gone")
    assert str(info.value).endswith(f" in {tmp_path}")


def test_an_unknown_scheme_is_named():
    with pytest.raises(ConfigError, match="neither energon nor fsspec knows nosuch://"):
        dataset_kind("nosuch://host/d")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://no-such-bucket/data/shapes", "there is no such bucket; check its name"),
        ("{root}/data/shape", "does not exist: no 'shape' in {root}/data, did you mean 'shapes'?"),
        ("{root}/dta/shapes", "does not exist: no 'dta' in {root}, did you mean 'data'?"),
        ("{root}/data/other", "no 'other' in {root}/data, which has 'photos', 'shapes'"),
        ("{root}/data/mix.yaml", "no 'mix.yaml' in {root}/data, which has 'photos', 'shapes'"),
        ("{root}/data/shapes", "has no .nv-meta/.info.json; run `energon prepare {root}/data/"),
    ],
)
def test_buckets_prefixes_and_what_is_not_prepared_are_told_apart(s3, address, said):
    for name in ("data/shapes/a.tar", "data/photos/b.tar"):
        write_bytes(f"{s3.address}/{name}", b"x")
    with pytest.raises(DatasetNotFoundError, match=re.escape(said.format(root=s3.address))):
        dataset_kind(address.format(root=s3.address))


@pytest.mark.parametrize(
    ("names", "address", "said"),
    [
        (["1.txt", "2.txt"], "raw", "has files (.txt) and no shards; `energon pack {raw} {raw}_p"),
        (["a.csv", "b.csv"], "raw", "has tables (.csv); `energon pack {raw} {raw}_packed`"),
        (["a.tar.gz"], "raw", "has compressed archives; `energon pack {raw} {raw}_packed`"),
        (["t.csv"], "raw/t.csv", "is a table; `energon pack {raw}/t.csv {raw}/t_packed`"),
        (
            ["t.json.gz"],
            "raw/t.json.gz",
            "is compressed JSON; if each line is a sample, rename it to t.jsonl.gz",
        ),
        (
            ["t.json.gz", "u.json.gz"],
            "raw",
            "has compressed JSON files; if each line is a sample, rename them to names",
        ),
        (["t.tar"], "raw/t.tar", "is a shard; `energon prepare {raw}` makes"),
    ],
)
def test_of_what_lies_in_a_store_is_said_how_it_becomes_a_dataset(s3, names, address, said):
    for name in names:
        write_bytes(f"{s3.address}/raw/{name}", b"x")
    message = f"{s3.address}/{address} {said.format(raw=f'{s3.address}/raw')}"
    with pytest.raises(DatasetNotFoundError, match=re.escape(message)):
        dataset_kind(f"{s3.address}/{address}")


def test_nobody_is_told_to_write_beside_a_bucket():
    write_bytes("memory://texts-in-here/1.txt", b"x")
    with pytest.raises(DatasetNotFoundError, match=r"`energon pack memory://texts-in-here TARGET`"):
        dataset_kind("memory://texts-in-here")


@pytest.mark.parametrize("path", ["", "/", "/data"])
def test_web_servers_are_not_asked_for_what_they_cannot_list(tmp_path, path):
    with (
        web_server(tmp_path) as server,
        pytest.raises(DatasetNotFoundError, match=r"\.nv-meta/\.info\.json; check the address"),
    ):
        dataset_kind(f"{server.url}{path}")


def test_a_folder_of_datasets_is_not_one_to_prepare(tmp_path, s3):
    for root in (str(tmp_path), s3.address):
        for name in ("cats", "dogs"):
            write_bytes(f"{root}/sets/{name}/0.tar", b"x")
            write_bytes(f"{root}/sets/{name}/.nv-meta/.info.json", b"{}")
        said = f"{root}/sets contains prepared datasets; name one of them: cats, dogs"
        with pytest.raises(DatasetNotFoundError, match=f"^{re.escape(said)}$"):
            dataset_kind(f"{root}/sets")
        write_bytes(f"{root}/sets/more/0.tar", b"x")
        with pytest.raises(DatasetNotFoundError, match="run `energon prepare"):
            dataset_kind(f"{root}/sets")


@pytest.mark.slow
def test_a_bucket_is_no_file(s3):
    write_bytes(f"{s3.address.rpartition('/')[0]}/0.tar", b"x")
    bucket = "s3://" + s3.address.removeprefix("s3://").partition("/")[0]
    with pytest.raises(DatasetNotFoundError, match=f"{bucket} has no .nv-meta"):
        dataset_kind(bucket)


def test_an_address_with_one_slash_is_corrected():
    with pytest.raises(DatasetNotFoundError, match="two slashes: s3://photos/sets$"):
        dataset_kind("s3:/photos/sets")


def test_a_state_of_a_loader_makes_no_dataset_of_a_folder(tmp_path):
    for number in range(3):
        write_bytes(f"{tmp_path}/photos/{number}.jpg", b"x")
    write_bytes(f"{tmp_path}/photos/state.json", b'{"format": "energon loader state"}')
    assert dataset_kind(f"{tmp_path}/photos") == "folder"
    assert find_source([f"{tmp_path}/photos"]).kind == "folder"


def test_long_patterns_are_refused_in_linear_time():
    began = process_time()
    with pytest.raises(DatasetNotFoundError):
        dataset_kind("*" * 80_000)
    assert process_time() - began < 2  # a quadratic search takes ten seconds


@pytest.mark.parametrize("key", ["shards", "chunks"])
def test_datasets_of_a_package_that_is_not_installed_are_refused_with_its_name(
    tmp_path, monkeypatch, key
):
    for folder in ("data", "splits/train"):
        write(tmp_path / folder / "index.json", json.dumps({key: []}))
    kinds._entries_on.cache_clear()
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    try:
        for path in (tmp_path / "data", tmp_path / "splits"):
            for command in (["info", path], ["lint", path], ["pack", path, tmp_path / "out"]):
                done = run(*command)
                assert done.exit_code
                text = " ".join(done.output.split())
                assert f"{path}: is of the kind" in text
                assert "pip install 'energon-loader[mds]'" in text
                assert "pip install ./plugins/energon-mds" in text
        with pytest.raises(MissingExtraError, match="energon-mds"):
            kinds.kind_entry("litdata")
    finally:
        kinds._entries_on.cache_clear()
