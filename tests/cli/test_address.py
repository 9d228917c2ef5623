"""Commands on datasets in stores."""

from __future__ import annotations

import json

import pytest

from energon.errors import ConfigError
from energon.io.files import delete_file, list_files, write_bytes, write_text
from energon.prepare.writers.shard_writer import ShardWriter, TarWriter
from energon.stages.hooks.failures import Quarantine
from tests.commands import ok, run
from tests.datasets import jpeg, write_shard
from tests.sources.distant import train, upload


@pytest.fixture
def address(s3, tmp_path):
    for shard in range(3):
        samples = [(f"{shard}{n:03}", {"txt": f"text {n}".encode()}) for n in range(20)]
        write_shard(tmp_path / f"ds/{shard}.tar", samples)
    return upload(tmp_path / "ds", s3.address)


PREPARE = ["--split-parts", "train:.*", "--non-interactive", "--no-progress"]


@pytest.mark.slow
def test_a_dataset_in_a_bucket_is_prepared_and_described(address):
    done = ok("prepare", address, *PREPARE)
    assert "60 samples in 3 shards" in done.output
    described = ok("info", address, "--json")
    about = json.loads(described.stdout)
    assert about["samples"] == 60
    assert about["sample_type"] == "CrudeWebdataset"
    assert len(train(address, batches=5)[0]) == 5


def test_who_prepares_files_in_a_bucket_is_told_to_pack_them(s3):
    write_bytes(f"{s3.address}/raw/1.txt", b"text")
    done = run("prepare", f"{s3.address}/raw", *PREPARE)
    assert done.exit_code == 2
    pack = f"`energon pack {s3.address}/raw {s3.address}/raw_packed`"
    assert f"it has files (.txt) and no shards; {pack}" in done.output


def test_a_second_preparation_needs_to_be_confirmed(address, caplog):
    caplog.set_level("INFO")
    run("prepare", address, *PREPARE)
    assert f"{address}: 3 of 3 shards were new or changed" in caplog.text
    assert "mirrors" not in caplog.text
    write_bytes(f"{address}/new.tar", bytes(10_240))
    refused = run("prepare", address, *PREPARE)
    assert refused.exit_code == 2
    assert f"{address} is already prepared" in refused.output
    assert "new or changed" not in refused.output  # all shards would have been read for nothing
    delete_file(f"{address}/new.tar")
    ok("prepare", address, *PREPARE, "--force-overwrite")


def test_a_failed_preparation_uploads_nothing(address):
    done = run("prepare", address, *PREPARE, "--sample-type", "NoSuchSample")
    assert done.exit_code != 0
    assert list_files(f"{address}/.nv-meta") == []


def test_media_metadata_are_made_along_with_the_index(s3, tmp_path):
    write_shard(tmp_path / "ds/0.tar", [(f"{n}", {"jpg": jpeg(n)}) for n in range(3)])
    address = upload(tmp_path / "ds", s3.address)
    media = "--media-metadata-by-extension"
    assert (
        "stored in index.sqlite" in run("prepare", address, *PREPARE, media, "--no-sqlite").output
    )
    assert list_files(f"{address}/.nv-meta") == []
    done = ok("prepare", address, *PREPARE, media)
    assert "media metadata of 3 files" in done.output
    ok("verify", address)


def test_a_dataset_in_a_bucket_is_verified_and_repaired(address, tmp_path):
    run("prepare", address, *PREPARE)
    done = ok("verify", address, "--quick", "--no-progress")
    assert "60 samples in 3 shards: no problems" in done.stdout
    delete_file(f"{address}/1.tar.parts")
    delete_file(f"{address}/2.tar")
    listed = tmp_path / "lost.jsonl"
    done = run("verify", address, "--json", "--quarantine", listed)
    assert done.exit_code == 1
    about = json.loads(done.stdout)
    assert about["dataset"] == address
    assert [problem["kind"] for problem in about["problems"]] == ["index-missing", "shard-missing"]
    assert json.loads(listed.read_text())["shard"] == "2.tar"
    assert run("repair", address).exit_code == 1
    done = ok("repair", address, "--drop", "--json")
    assert json.loads(done.stdout)["dropped"] == ["2.tar"]
    ok("verify", address, "--checksum")


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_what_cannot_be_checked_is_another_exit_code_than_what_is_wrong(address, command):
    done = run(command, address)
    assert done.exit_code == 2
    assert f"{address} has no .nv-meta/.info.json" in done.output
    done = run(command, address, "--engine", "dask")
    assert "shards in stores are read by this machine" in done.output


def test_a_jsonl_file_in_a_bucket_is_prepared_and_trained_on(s3, tmp_path):
    lines = [json.dumps({"n": n, "text": "x" * n}) for n in range(30)]
    for address in (f"{s3.address}/x.jsonl", str(tmp_path / "x.jsonl")):
        write_text(address, "\n".join(lines) + "\n")
        done = ok("prepare", address, "--split-ratio", "train:9,val:1")
        assert "30 samples" in done.output
    assert train(f"{s3.address}/x.jsonl", batches=5)[0] == train(tmp_path / "x.jsonl", batches=5)[0]
    write_text(f"{s3.address}/x.jsonl", "{}\nno json\n")
    done = run("prepare", f"{s3.address}/x.jsonl")
    assert done.exit_code != 0
    assert f"{s3.address}/x.jsonl" in done.output


@pytest.mark.parametrize("writer", [ShardWriter, TarWriter])
def test_writers_of_shards_refuse_a_url_and_say_how_to_upload(writer):
    with pytest.raises(ConfigError, match="s3://bucket/x.tar: shards are written on this machine"):
        writer("s3://bucket/x.tar")


def test_an_unknown_scheme_is_named():
    done = run("prepare", "nowhere://host/x", *PREPARE)
    assert done.exit_code != 0
    assert "neither energon nor fsspec knows nowhere://" in done.output


@pytest.mark.slow
def test_lists_of_what_fails_are_kept_on_this_machine(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("prepare", address, *PREPARE)
    refused = run("lint", address, "--quarantine", f"{address}/bad.jsonl")
    assert refused.exit_code != 0
    assert "expected a local path" in refused.output
    with pytest.raises(ConfigError, match="expected a local path"):
        Quarantine("s3://bucket/bad")
    assert not list(tmp_path.glob("s3*"))


def test_samples_are_excluded_by_a_list_in_a_bucket(address):
    write_text(f"{address}/bad.jsonl", '{"shard": "0.tar", "key": "0001"}\n{"shard": "1.tar"}\n')
    ok("prepare", address, *PREPARE, "--exclude-from", f"{address}/bad.jsonl")
    keys = {key for batch in train(address, batches=30)[0] for key, _ in batch}
    assert len(keys) == 39
    assert "0001" not in keys
