"""JSONL files that are compressed, read line by line."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import zstandard

from energon import DatasetNotFoundError
from energon.errors import ConfigError, FormatError, ShardChangedError
from energon.formats import compressed
from energon.formats.meta.jsonl import jsonl_copy_path
from energon.metadataset.kind import dataset_kind
from energon.plan.leaves.leaf import PARALLEL_SLICES
from energon.prepare.jsonl import prepare_jsonl
from energon.sources import decoded_blocks
from energon.sources.decoded_blocks import open_slices
from energon.sources.files.open import open_file_store
from energon.sources.tables.jsonl import JsonlSource
from tests.commands import ok, run
from tests.sources.distant import train, upload
from tests.sources.reads import read_samples

N = 2000


def in_frames(compress):
    def pack(content):
        step = 20_000
        return b"".join(compress(content[low : low + step]) for low in range(0, len(content), step))

    return pack


COMPRESS = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}
PACK = {name: in_frames(compress) for name, compress in COMPRESS.items()} | {
    f"one frame.{name}": compress for name, compress in COMPRESS.items()
}


@pytest.fixture(params=PACK)
def path(request, tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "SPACING_BYTES", 32 << 10)
    monkeypatch.setattr(compressed, "LONG_BYTES", 256 << 10)
    generator = np.random.default_rng(0)
    lines = [
        json.dumps({"n": n, "numbers": generator.integers(0, 999, n % 100).tolist()})
        for n in range(N)
    ]
    content = ("\n" + "\n".join(lines)).encode()
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "x.jsonl").write_bytes(content)
    prepare_jsonl(folder / "x.jsonl")
    path = folder / f"x.jsonl.{request.param.split('.')[-1]}"
    path.write_bytes(PACK[request.param](content))
    assert prepare_jsonl(path) == N
    assert Path(jsonl_copy_path(path)).exists() == request.param.startswith("one")
    return path


one_frame = pytest.mark.parametrize("path", ["one frame.gz", "one frame.zst"], indirect=True)


@pytest.mark.slow
def test_lines_are_those_of_the_file_that_is_not_compressed(path):
    assert dataset_kind(path) == "jsonl"
    source = pickle.loads(pickle.dumps(JsonlSource(path)))
    plain = JsonlSource(path.with_suffix(""))
    assert len(source.lines.points) > 1
    ordinals = np.random.default_rng(1).integers(0, N, 500)
    assert [s["json"] for s in read_samples(source, ordinals)] == [
        s["json"] for s in read_samples(plain, ordinals)
    ]
    assert source.locate(7).offset == plain.locate(7).offset
    store = open_file_store(path)
    assert [json.loads(line)["n"] for line in store.get_many(["1999.json", "0.json"])] == [1999, 0]
    assert 0 < source.slice_cost.samples < N
    assert open_slices([source.slice_cost]) == [PARALLEL_SLICES]


@pytest.mark.slow
def test_memory_is_bounded_by_what_slices_need(path, monkeypatch):
    monkeypatch.setattr(decoded_blocks, "BUDGET_BYTES", 100_000)
    source = JsonlSource(path)
    unpacked = []
    original = compressed.SeekPoints.unpack
    monkeypatch.setattr(
        compressed.SeekPoints,
        "unpack",
        lambda points, number, data: unpacked.append(number) or original(points, number, data),
    )
    for low in range(0, N, 100):
        read_samples(source, np.arange(low, low + 100))
        kept = source.lines.file._unpacked._blocks.values()
        assert sum(map(len, kept)) <= 100_000 or len(kept) <= 2
    assert unpacked == list(range(len(source.lines.points)))


@pytest.mark.slow
def test_training_from_a_store_fetches_what_lies_between_points(path, s3):
    address = upload(path.parent, s3.address)
    local = train(path, batches=20)
    assert train(f"{address}/{path.name}", batches=20)[0] == local[0]


@pytest.mark.slow
def test_commands_take_compressed_files(path):
    about = json.loads(run("info", path, "--json").output)
    assert (about["kind"], about["samples"], about["bytes"]) == ("jsonl", N, path.stat().st_size)
    ok("verify", path, "--checksum")
    ok("lint", path)
    points = path.with_name(f"{path.name}.points")
    points.unlink()
    with pytest.raises(DatasetNotFoundError, match=r"points is missing; run `energon prepare"):
        JsonlSource(path)
    done = run("verify", path)
    assert done.exit_code == 1
    assert f"{points.name}: no such file" in done.output.replace("\n", "")
    ok("repair", path)
    assert len(JsonlSource(path)) == N


@pytest.mark.parametrize("path", ["gz", "zst"], indirect=True)
def test_a_file_that_was_changed_or_damaged_is_an_error(path):
    data = path.read_bytes()
    path.write_bytes(data + data)
    with pytest.raises(ShardChangedError, match="run `energon prepare"):
        JsonlSource(path)
    path.write_bytes(data[:1000] + bytes(len(data) - 1000))
    with pytest.raises(FormatError, match=rf"{path.name}: (cannot be unpacked|holds)"):
        read_samples(JsonlSource(path), np.array([N - 1]))
    assert "content-damaged" in run("verify", path).output
    path.write_bytes(data[:-100])
    assert "the compressed data end too early" in run("prepare", path).output.replace("\n", " ")
    assert run("prepare", path).exit_code == 1


@one_frame
def test_the_copy_of_a_single_frame_is_announced_with_its_size_and_how_to_do_without(path):
    output = " ".join(run("prepare", path).output.split())
    assert f"lines are read from a copy in short frames, {path.name}.frames, of about" in output
    assert f"Write it in short frames: `{'gzip' if path.suffix == '.gz' else 'zstd'} -dc" in output
    path.write_bytes(PACK[path.suffix[1:]](path.with_suffix("").read_bytes()))
    assert "from a copy" not in run("prepare", path).output
    assert not Path(jsonl_copy_path(path)).exists()


@pytest.mark.slow
@one_frame
def test_a_copy_that_is_missing_changed_or_damaged_is_an_error_and_repaired(path):
    copy = Path(jsonl_copy_path(path))
    whole = copy.read_bytes()

    def read():
        return read_samples(JsonlSource(path), np.array([N - 1]))

    expected = read()
    copy.unlink()
    with pytest.raises(DatasetNotFoundError, match=r"frames is missing; run `energon prepare"):
        read()
    copy.write_bytes(whole[:-1])
    with pytest.raises(ShardChangedError, match=rf"has {len(whole) - 1} bytes, had {len(whole)}"):
        read()
    assert "index-damaged" in run("verify", path, "--quick").output
    copy.write_bytes(whole[:1000] + bytes(len(whole) - 1000))
    with pytest.raises(FormatError, match="cannot be unpacked"):
        read()
    assert "index-damaged" in run("verify", path, "--checksum").output
    ok("repair", path, "--checksum")
    ok("verify", path, "--checksum")
    assert copy.read_bytes() == whole
    assert read() == expected


@one_frame
def test_a_copy_without_room_is_refused_with_the_command_that_splits_the_file(path, monkeypatch):
    full = shutil.disk_usage(path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(ConfigError, match=r"split -C 8M.*would take about .* MB next to it, where"):
        prepare_jsonl(path)


@pytest.mark.slow
@one_frame
def test_a_single_frame_in_a_read_only_place_is_copied_to_the_cache(path, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = read_samples(JsonlSource(path), np.arange(N))
    for ending in (".frames", ".idx", ".points"):
        path.with_name(f"{path.name}{ending}").unlink()
    monkeypatch.setattr("energon.prepare.jsonl.os.access", lambda *_: False)
    assert prepare_jsonl(path) == N
    assert not Path(jsonl_copy_path(path)).exists()
    assert read_samples(JsonlSource(path), np.arange(N)) == expected
    ok("verify", path, "--quick")
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_BYTES", "1000")
    with pytest.raises(ConfigError, match="too large for the user's cache"):
        prepare_jsonl(path)


@pytest.mark.slow
@one_frame
def test_a_single_frame_in_a_store_is_copied_next_to_it(path, s3):
    local = train(path, batches=20)
    for ending in (".frames", ".idx", ".points"):
        path.with_name(f"{path.name}{ending}").unlink()
    address = f"{upload(path.parent, s3.address)}/{path.name}"
    ok("prepare", address)
    assert train(address, batches=20)[0] == local[0]
    for depth in ("--quick", "--checksum"):
        ok("verify", address, depth)
