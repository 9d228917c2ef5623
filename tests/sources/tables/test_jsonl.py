from __future__ import annotations

import gzip
import json
import os
import pickle
import random

import numpy as np
import pytest

from energon import (
    ConfigError,
    Cooker,
    DatasetNotFoundError,
    DefaultTaskEncoder,
    EmptyDatasetError,
    TextSample,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon.errors import NoSuchFileError, ShardChangedError
from energon.formats.meta.jsonl import jsonl_split_path
from energon.io.address import join_address
from energon.io.files import write_bytes
from energon.prepare.dataset import prepare_dataset
from energon.prepare.jsonl import prepare_jsonl
from energon.sources.files.open import open_file_store
from energon.sources.source import SampleSelection
from energon.sources.tables.jsonl import (
    JsonlFile,
    JsonlFileStore,
    JsonlSource,
    LineContents,
    LinesFolder,
)
from energon.task_encoder.cooker import cooker
from energon.testing import check_resume
from tests.commands import ok, run
from tests.datasets import write_shard
from tests.servers.proxy import Fault
from tests.sources.reads import read_samples
from tests.task_encoder.runs import config

N = 40


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "lines.jsonl"
    rows = [json.dumps({"n": n, "text": "ä" * (n % 7)}) for n in range(N)]
    path.write_text("\n" + "\n\n".join(rows[:20]) + "\n" + "\n".join(rows[20:]), "utf-8")
    assert prepare_jsonl(path) == N
    return path


def numbers(samples):
    return [json.loads(sample["json"])["n"] for sample in samples]


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.jsonl.gz"])
def test_the_index_of_a_file_in_a_read_only_place_is_in_the_cache_of_the_user(
    tmp_path, path, s3, monkeypatch, caplog, name
):
    expected = numbers(read_samples(JsonlSource(path), np.arange(N)))
    content = path.read_bytes() if name == path.name else gzip.compress(path.read_bytes())
    here = tmp_path / "read_only" / name
    here.parent.mkdir()
    here.write_bytes(content)
    there = join_address(s3.address, name)
    write_bytes(there, content)
    for address in (here, there):
        with pytest.raises(DatasetNotFoundError, match=r"is missing; run `energon prepare"):
            JsonlSource(address)
    refused = Fault("status", status=403, code="AccessDenied")
    s3.proxy.plan([refused] * 99, lambda request: request.method in ("PUT", "POST"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
        assert prepare_jsonl(here) == N
    assert prepare_jsonl(there) == N
    assert caplog.text.count("cannot write next to it") == 2
    assert [each.name for each in here.parent.iterdir()] == [name]
    for address in (here, there):
        source = pickle.loads(pickle.dumps(JsonlSource(address)))
        assert numbers(read_samples(source, np.arange(N))) == expected
        ok("verify", address, "--checksum")
    monkeypatch.chdir(here.parent)
    assert len(JsonlSource(name)) == N
    here.write_bytes(content + b" " * (name == path.name))  # another version has another index
    with pytest.raises(DatasetNotFoundError, match="is missing"):
        JsonlSource(here)
    assert "no such file" in run("verify", here).output.replace("\n", " ")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        ok("repair", here)
    ok("verify", here)
    assert [each.name for each in here.parent.iterdir()] == [name]


def test_samples_of_any_ordinals_come_in_their_order(path):
    source = JsonlSource(path)
    ordinals = list(range(N)) * 2
    random.Random(0).shuffle(ordinals)
    samples = read_samples(source, np.array(ordinals))
    assert numbers(samples) == ordinals
    assert [sample["__key__"] for sample in samples] == [str(n) for n in ordinals]
    assert samples[0]["__shard__"] == "lines.jsonl"
    assert read_samples(source, np.array([], np.int64)) == []
    with pytest.raises(IndexError, match="0 to 39, not 40"):
        read_samples(source, np.array([3, 40]))


def test_splits_and_excluded_samples_count_from_zero(path):
    prepare_jsonl(path, split_ratio={"train": 8, "val": 1, "test": 1})
    sizes = {
        name: len(JsonlSource(path, SampleSelection(name))) for name in ("train", "val", "test")
    }
    assert sizes == {"train": 32, "val": 4, "test": 4}
    val = JsonlSource(path, SampleSelection("val", exclude=["33", "lines.jsonl/35", "2"]))
    assert numbers(read_samples(val, np.arange(2))) == [32, 34]
    assert val.locate(1).key == "34"
    assert val.locate(1).offset == path.read_bytes().index(b'{"n": 34')
    half = JsonlSource(path, SampleSelection("train", subsets=[("50%", "100%")]))
    assert numbers(read_samples(half, np.array([0, 15]))) == [16, 31]


def test_the_file_of_splits_may_be_written_by_hand(path):
    with open(jsonl_split_path(path), "w") as file:
        file.write("split_parts: {train: [0, '75%'], val: ['75%', end]}\n")
    with pytest.raises(ConfigError, match=r"split 'train'.*mixes"):
        JsonlSource(path)
    with open(jsonl_split_path(path), "w") as file:
        file.write("split_parts: {train: ['0%', '75%'], val: [30, end]}\nexclude: [31]\n")
    assert len(JsonlSource(path)) == 30
    assert numbers(read_samples(JsonlSource(path, SampleSelection("val")), np.arange(9)))[:2] == [
        30,
        32,
    ]
    prepare_jsonl(path, split_ratio={"train": 1})
    assert len(JsonlSource(path)) == N - 1  # what is excluded stays so


def test_an_empty_split_is_an_error(path):
    with open(jsonl_split_path(path), "w") as file:
        file.write("split_parts: {train: [5, 5]}\n")
    with pytest.raises(EmptyDatasetError, match="no samples"):
        JsonlSource(path)


def test_a_file_that_was_changed_is_an_error(path):
    text = path.read_bytes()
    path.write_bytes(text + b"\n")
    with pytest.raises(ShardChangedError, match="energon prepare"):
        JsonlSource(path)
    path.write_bytes(text.replace(b'{"n": 3,', b' "n": 3,'))
    with pytest.raises(ShardChangedError, match="sample 3 begins with"):
        read_samples(JsonlSource(path), np.array([3]))


def test_a_file_that_is_not_indexed_or_not_there_is_an_error(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="does not exist"):
        JsonlSource(tmp_path / "absent.jsonl")
    (tmp_path / "x.jsonl").write_text("{}")
    with pytest.raises(DatasetNotFoundError, match=r"x\.jsonl\.idx is missing; run `energon prep"):
        JsonlSource(tmp_path / "x.jsonl")


def test_fingerprints_tell_contents_apart(path):
    first = JsonlSource(path).fingerprint()
    assert JsonlSource(path).fingerprint() == first
    assert JsonlSource(path, SampleSelection(exclude=["1"])).fingerprint() != first
    assert JsonlSource(path, SampleSelection(subsets=[(0, 39)])).fingerprint() != first


def test_lines_are_files_by_number(path):
    store = open_file_store(path)
    assert isinstance(store, JsonlFileStore)
    store = pickle.loads(pickle.dumps(store))
    assert json.loads(store.get("7.json"))["n"] == 7
    names = ["30.json", "2.json", "30.json", "0.json"]
    assert [json.loads(data)["n"] for data in store.get_many(names)] == [30, 2, 30, 0]
    assert store.get_many([]) == []
    assert list(store.names())[-1] == "39.json"
    assert store["39.json"][1].file_names == ("39.json",)


@pytest.mark.parametrize(
    "name", ["40.json", "-1.json", "1", "01.json", "x.json", "1.txt", "", "٣.json", "1.0.json"]
)
def test_other_names_are_no_lines(path, name):
    store = JsonlFileStore(path)
    assert name not in store
    with pytest.raises(NoSuchFileError, match="0.json to 39.json"):
        store.get(name)


def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=str(sample["json"]["n"]))


class Encoder(DefaultTaskEncoder):
    cookers = (Cooker(cook),)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_jsonl_file_is_a_dataset_to_train_on(path, num_workers):
    dataset = get_train_dataset(
        path,
        worker_config=config(num_workers=num_workers),
        batch_size=4,
        task_encoder=Encoder(),
        virtual_epoch_length=N // 4,
    )
    with get_savable_loader(dataset) as loader:
        texts = [text for batch in loader for text in batch.text]
    assert sorted(texts, key=int) == [str(n) for n in range(N)]
    assert texts != sorted(texts, key=int)


def test_pipelines_over_jsonl_files_resume_anywhere(path):
    dataset = get_val_dataset(path, worker_config=config(), batch_size=7, task_encoder=Encoder())
    check_resume(dataset.stage)
    texts = [text for batch in get_savable_loader(dataset) for text in batch.text]
    assert texts == [str(n) for n in range(N)]


def test_a_jsonl_file_is_auxiliary_data_and_its_own(path, tmp_path):
    write_shard(tmp_path / "ds" / "0.tar", [(f"k{n}", {"txt": b"%d" % n}) for n in range(3)])
    prepare_dataset(tmp_path / "ds", split_parts=["val:.*"], sample_type="CrudeWebdataset")
    (tmp_path / "meta.yaml").write_text(
        "splits: {val: {path: lines.jsonl, aux: {lines: lines.jsonl, texts: ds}}}"
    )

    @cooker(need_primary=True)
    def cook_all(sample, lines, texts, primary):
        own = primary.get(".json")
        other = lines.get("5.json", sample)
        text = f"{own['n']} {other['n']} {texts.get('k2.txt')}"
        return TextSample(**basic_sample_keys(sample), text=text)

    class AuxEncoder(DefaultTaskEncoder):
        cookers = (Cooker(cook_all),)

    dataset = get_val_dataset(
        tmp_path / "meta.yaml", worker_config=config(), batch_size=None, task_encoder=AuxEncoder()
    )
    assert [sample.text for sample in get_savable_loader(dataset)] == [f"{n} 5 2" for n in range(N)]


def test_the_command_prepares_describes_and_checks_it(path):
    result = run("prepare", path, "--split-ratio", "train:3,val:1")
    assert (result.exit_code, result.output) == (0, "Done. Found 40 samples.\n")
    about = json.loads(run("info", path, "--json").output)
    assert about["samples"] == 40
    assert about["splits"]["val"]["samples"] == 10
    ok("info", path)
    result = run("lint", path, "--num-workers", 1)
    assert (result.exit_code, result.output) == (0, "40 samples: no problems\n")


def test_what_a_quarantine_file_lists_is_left_out(path, tmp_path):
    ok("lint", path, "--quarantine", tmp_path / "none.jsonl")
    ok("prepare", path, "--exclude-from", tmp_path / "none.jsonl")
    assert not (tmp_path / "lines.jsonl.split.yaml").exists()
    (tmp_path / "bad.txt").write_text("lines.jsonl/3\n5\n")
    ok("prepare", path, "--exclude-from", tmp_path / "bad.txt")
    kept = [n for n in range(N) if n not in (3, 5)]
    for split in ("train", "val"):
        assert (
            numbers(read_samples(JsonlSource(path, SampleSelection(split)), np.arange(N - 2)))
            == kept
        )
    (tmp_path / "more.jsonl").write_text('{"shard": "lines.jsonl", "key": "7", "reason": "x"}\n')
    again = ("prepare", path, "--exclude-from", tmp_path / "more.jsonl", "--split-ratio", "1")
    ok(*again)
    about = json.loads(run("info", path, "--json").output)
    assert about["splits"] == {"train": {"samples": N - 3, "shards": 1, "excluded": 3}}


def test_what_a_quarantine_file_lists_must_be_there(path, tmp_path):
    (tmp_path / "bad.txt").write_text("40\n")
    done = run("prepare", path, "--exclude-from", tmp_path / "bad.txt")
    assert done.exit_code == 2
    assert f"{tmp_path}/bad.txt: '40' is excluded, but there are only" in done.output
    assert not (tmp_path / "lines.jsonl.split.yaml").exists()


@pytest.mark.parametrize("command", ["prepare", "index"])
def test_options_that_mean_nothing_for_jsonl_files_are_refused(path, command):
    given = {
        "prepare": ["--exclude", "x", "--sample-type", "TextSample", "--checksum"],
        "index": ["--engine", "local", "--checksum"],
    }[command]
    done = run(command, path, *given)
    assert done.exit_code == 2
    names = ", ".join(option for option in given if option.startswith("--"))
    for name in names.split(", "):
        assert name in done.output
    assert "is a JSONL file; --" in done.output
    assert "do not apply, omit them" in done.output
    ok(command, path, "--workers", "2", "--no-progress", "--reindex")


@pytest.mark.parametrize(("suffix", "advice"), [(".bz2", "bunzip2 -k"), (".xz", "unxz -k")])
def test_compressed_files_are_refused_with_the_command_that_unpacks_them(tmp_path, suffix, advice):
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(b"")
    result = run("prepare", path)
    assert result.exit_code == 2
    assert f"{advice} {path}" in result.output


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('\ufeff{"n": 0}\n{"n": 1}\n')
    assert prepare_jsonl(path) == 2
    lines = [sample["json"] for sample in read_samples(JsonlSource(path), np.array([0, 1, 0]))]
    assert lines == [b'{"n": 0}', b'{"n": 1}', b'{"n": 0}']
    (part,) = LineContents(JsonlSource(path)).files(0).values()
    assert part.read() == LinesFolder(JsonlFile(path)).find("0.json").read() == b'{"n": 0}\n'
