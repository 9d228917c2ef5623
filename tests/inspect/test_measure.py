"""Numbers of the user for each sample are stored beside the index, and are found by runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon import (
    Balance,
    ConfigError,
    FormatError,
    SampleError,
    StateError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
)
from energon.errors import DatasetBusyError
from energon.formats.tables.measure_table import NO_VALUE, MeasureTable
from energon.inspect.measure import measure_dataset
from energon.metadataset.resolve import resolve
from energon.prepare.engines import Engine
from energon.prepare.files import dataset_lock
from energon.prepare.media import MediaFilter, prepare_media
from energon.sources.measures import DESCRIBED_RUNS, DESCRIBED_TOGETHER, SourceMeasures, spread_runs
from energon.sources.source import SampleSelection
from energon.sources.webdataset import WebdatasetSource
from energon.task_encoder.leaves import open_leaves
from tests.commands import ok, run
from tests.datasets import jpeg, write_crude, write_shard
from tests.servers.web import web_server
from tests.sources.distant import upload

COUNTS = [6, 4, 7]


def size(sample):
    return len(sample["txt"])


def half(sample):
    return len(sample["txt"]) / 2 + 0.25


def text(number):
    return b"x" * (number * number % 101 + 1)


def make(root, counts=COUNTS, first=0):
    for shard, count in enumerate(counts):
        samples = [(f"{first + n}", {"txt": text(first + n)}) for n in range(count)]
        write_shard(root / f"{shard}.tar", samples)
        first += count
    split = {"split_parts": ["train:[01].tar", "val:2.tar"], "sample_type": "CrudeWebdataset"}
    prepare_dataset(root, **split)
    return root


def measure(path, function=size, name="size", **settings):
    called = f"{function.__module__}:{function.__name__}"
    settings = {"engine": Engine(num_workers=1), **settings}
    return measure_dataset(path, function, name=name, function_name=called, **settings)


def values(path, name="size", split="train", **settings):
    source = WebdatasetSource(path, SampleSelection(split, **settings))
    measured = SourceMeasures(source, np.arange(len(source)))[name].tolist()
    return dict(zip(source.keys(np.arange(len(source))), measured, strict=True))


def expected(numbers):
    return {str(n): float(len(text(n))) for n in numbers}


@pytest.mark.parametrize("workers", [1, 2])
def test_each_sample_of_each_split_has_its_value(tmp_path, workers):
    make(tmp_path)
    (report,) = measure(tmp_path, engine=Engine(num_workers=workers))
    assert (report.num_samples, report.measured) == (17, 17)
    assert values(tmp_path) == expected(range(10))
    assert values(tmp_path, split="val") == expected(range(10, 17))
    assert values(tmp_path, exclude=["1.tar/8"]) == expected([*range(8), 9])
    assert values(tmp_path, subsets=[(2, 5)]) == expected(range(2, 5))


def test_only_changed_shards_are_read_again(tmp_path):
    make(tmp_path)
    measure(tmp_path)
    assert measure(tmp_path)[0].measured == 0
    write_shard(tmp_path / "1.tar", [(f"{n}", {"txt": text(n)}) for n in range(50, 55)])
    prepare_dataset(tmp_path, split_parts=["train:[01].tar", "val:2.tar"])
    with pytest.raises(FormatError, match=r"has changed since; run `energon measure .* again"):
        values(tmp_path)
    (report,) = measure(tmp_path)
    assert (report.num_samples, report.measured) == (18, 5)
    assert values(tmp_path) == expected([*range(6), *range(50, 55)])
    assert values(tmp_path, split="val") == expected(range(10, 17))


def test_another_function_replaces_all_values(tmp_path):
    make(tmp_path)
    measure(tmp_path)
    assert measure(tmp_path, half)[0].measured == 17
    assert values(tmp_path)["3"] == len(text(3)) / 2 + 0.25
    assert measure(tmp_path, half, again=True)[0].measured == 17


_KILLED = """
import os, sys
from energon.inspect.measure import measure_dataset
from energon.metadataset.resolve import resolve
from energon.prepare.engines import Engine
from tests.inspect.test_measure import size
def progress(done, total):
    if done >= 10: os.kill(os.getpid(), 9)
measure_dataset(
    sys.argv[1], size, name="size", function_name="tests.inspect.test_measure:size",
    engine=Engine(num_workers=1), progress=progress,
)
"""


def test_a_killed_run_is_continued(tmp_path):
    make(tmp_path)
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    journal = tmp_path / ".nv-meta/size.measure.partial"
    with open(journal, "ab") as file:
        file.write(b'["2.tar", "cut off')
    with pytest.raises(ConfigError, match="no measure 'size'"):
        values(tmp_path)
    (report,) = measure(tmp_path)
    assert 0 < report.measured < 10
    assert values(tmp_path) == expected(range(10))
    assert values(tmp_path, split="val") == expected(range(10, 17))
    assert not journal.exists()


def test_one_process_at_a_time_measures_a_dataset(tmp_path):
    make(tmp_path)
    with dataset_lock(tmp_path), pytest.raises(DatasetBusyError, match="wait"):
        measure(tmp_path)


def test_all_datasets_of_a_metadataset_are_measured(tmp_path):
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        make(tmp_path / name, first=20 * number)
    blend = {"blend": [{"path": "a"}, {"path": "b", "subset": {"range": ["0%", "50%"]}}]}
    document = tmp_path / "blend.yaml"
    document.write_text(json.dumps({"splits": {"train": blend, "val": {"path": "a"}}}))
    reports = measure(document)
    assert [report.measured for report in reports] == [17, 10]
    assert values(tmp_path / "b") == expected(range(20, 30))
    with pytest.raises(FormatError, match=r"lacks samples of '2.tar'"):
        values(tmp_path / "b", split="val")


def test_a_dataset_in_a_store_is_measured_there(tmp_path, s3):
    address = upload(make(tmp_path / "data"), s3.address)
    assert measure(address)[0].measured == 17
    assert values(address) == expected(range(10))
    assert measure(address)[0].measured == 0
    assert "size" in list(SourceMeasures(WebdatasetSource(address), np.arange(1)))


def test_a_measure_is_read_from_a_web_server_which_lists_nothing(tmp_path):
    make(tmp_path)
    measure(tmp_path)
    with web_server(tmp_path) as server:
        address = server.url
        assert values(address) == expected(range(10))
        assert "bytes" in list(SourceMeasures(WebdatasetSource(address), np.arange(1)))
        ok("info", address)


def fail(sample):
    if sample["__key__"] == "8":
        raise KeyError("caption")
    return 1


def infinite(sample):
    return float("inf")


def test_failures_name_the_sample(tmp_path):
    make(tmp_path)
    with pytest.raises(SampleError, match=r"1\.tar: the measure of sample '8' failed: .*caption"):
        measure(tmp_path, fail)
    with pytest.raises(SampleError, match="expected a finite number"):
        measure(tmp_path, infinite)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-4], "bytes, expected"),
        (lambda data: data[:-1] + b"\x7f", "do not match their checksum"),
        (lambda data: b"energonX" + data[8:], "expected b'energonM'"),
        (lambda data: data[:16] + b"[" + data[17:], "delete the file"),
        (lambda data: data.replace(b'"version": 1', b'"version": 2'), "version 2"),
        (lambda data: b"", "begins with b''"),
    ],
)
def test_damaged_values_are_refused_and_replaced(tmp_path, damage, message):
    make(tmp_path)
    measure(tmp_path)
    file = tmp_path / ".nv-meta/size.measure"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(FormatError, match=message) as refused:
        values(tmp_path, split="val")
    assert f"energon measure {tmp_path} --name size --with" in str(refused.value)
    measure(tmp_path)
    assert values(tmp_path, split="val") == expected(range(10, 17))


def test_the_file_is_as_documented(tmp_path):
    make(tmp_path)
    measure(tmp_path)
    data = (tmp_path / ".nv-meta/size.measure").read_bytes()
    end = 16 + int.from_bytes(data[8:16], "little")
    header = json.loads(data[16:end])
    assert end % 64 == 0
    assert {name: count for name, (count, _) in header["files"].items()} == {
        f"{n}.tar": count for n, count in enumerate(COUNTS)
    }
    stored = np.frombuffer(data, "<i4", offset=end + 4 * len(COUNTS))
    assert stored.tolist() == [len(text(n)) for n in range(17)]
    assert NO_VALUE["int32"] not in MeasureTable(data, origin="data").values


def test_the_command(tmp_path, monkeypatch):
    make(tmp_path / "data")
    (tmp_path / "own_measures.py").write_text("def words(sample):\n    return len(sample['txt'])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    named = ["measure", "data", "--with", "own_measures:words", "--workers", 1]
    result = ok(*named, "--name", "words", "--json")
    (report,) = json.loads(result.output)["datasets"]
    assert (report["num_samples"], report["measured"]) == (17, 17)
    assert "17 samples, 0 of them" in run(*named, "--name", "words").output
    assert "cannot be called 'a:b'" in run(*named, "--name", "a:b").output
    del sys.modules["own_measures"]


def loader_of(path, state=None, **settings):
    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=2),
        batch_size=2,
        balance=Balance(cost="size", **settings),
    )
    loader = get_savable_loader(dataset)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def test_a_state_with_other_measures_is_refused(tmp_path):
    make(tmp_path)
    with pytest.raises(ConfigError, match=r"run `energon measure .* --name size --with MODULE"):
        loader_of(tmp_path)
    measure(tmp_path)
    with loader_of(tmp_path, window=2) as loader:
        next(iter(loader))
        state = loader.state_dict()
    loader_of(tmp_path, state, window=2).close()
    measure(tmp_path, half)
    with pytest.raises(StateError, match="balance.measures: saved"):
        loader_of(tmp_path, state, window=2)


def test_the_measure_of_a_joined_sample_is_the_sum_of_those_of_its_members(tmp_path):
    for name in ("a", "b"):
        make(tmp_path / name)
    measure(tmp_path / "a")
    measure(tmp_path / "b", half)
    document = tmp_path / "join.yaml"
    members = [{"path": name} for name in ("a", "b")]
    joined = {"join": members, "joiner": {"__module__": __name__, "__function__": "joined"}}
    document.write_text(json.dumps({"splits": {"train": joined}}))
    ok("prepare", document, "--non-interactive", "--allow", "code")
    leaf = resolve(document, split_part="train", allow=("code",)).leaves[0]
    source = open_leaves([leaf], None, allow=("code",))[0].source
    summed = SourceMeasures(source, np.arange(len(source)))
    assert summed["size"].tolist() == [1.5 * len(text(n)) + 0.25 for n in range(10)]
    assert {"bytes", "txt:bytes", "size"} <= set(summed)


def joined(*samples):
    return samples[0]


def test_sizes_and_durations_of_media_are_measures(tmp_path):
    images = [(f"{n}", {"jpg": jpeg(n, size=(16 + n, 8))}) for n in range(3)]
    write_crude(tmp_path, [*images, ("text", {"txt": b"without an image"})])
    source = WebdatasetSource(tmp_path)
    measures = SourceMeasures(source, np.arange(4))
    with pytest.raises(ConfigError, match="run `energon prepare-media"):
        measures["jpg:pixels"]
    assert "jpg:pixels" not in list(measures)
    prepare_media(tmp_path, MediaFilter("EXTENSION"), engine=Engine(num_workers=1))
    measures = SourceMeasures(WebdatasetSource(tmp_path), np.arange(4))
    assert measures["jpg:pixels"].tolist() == [128, 136, 144, 0]
    assert measures["jpg:frames"].tolist() == [0, 0, 0, 0]
    assert {"jpg:pixels", "jpg:frames", "jpg:seconds"} < set(measures)


def test_info_shows_the_distributions_of_measures(tmp_path):
    make(tmp_path)
    measure(tmp_path)
    about = json.loads(run("info", tmp_path, "--json").output)["measures"]["size"]
    lengths = np.array([len(text(n)) for n in range(17)])
    assert about["count"] == sum(bucket["count"] for bucket in about["histogram"]) == 17
    assert (about["min"], about["median"], about["max"]) == (
        lengths.min(),
        np.median(lengths),
        lengths.max(),
    )
    assert f"- measure size: min {lengths.min()}, median" in run("info", tmp_path).output
    (tmp_path / ".nv-meta/size.measure").write_bytes(b"")
    assert "measure size cannot be used" in run("info", tmp_path).output


def described(path):
    return json.loads(run("info", path, "--json").output).get("measures", {})


def test_info_shows_the_measures_that_are_known_without_further_work(tmp_path):
    images = [(f"{n}", {"jpg": jpeg(n, size=(16 + n, 8))}) for n in range(3)]
    write_crude(tmp_path, [*images, ("text", {"txt": b"without an image"})])
    prepare_media(tmp_path, MediaFilter("EXTENSION"), engine=Engine(num_workers=1))
    about = described(tmp_path)
    assert list(about) == ["bytes", "jpg:bytes", "jpg:pixels"], "images have no frames or seconds"
    pixels = about["jpg:pixels"]
    assert (pixels["count"], pixels["measured"], pixels["samples"]) == (3, 4, 4)
    assert (pixels["min"], pixels["median"], pixels["max"]) == (128, 136, 144)
    assert (
        "- measure jpg:pixels: min 128, median 136, p99 144, max 144\n"
        in run("info", tmp_path).output
    )


def test_info_shows_numeric_columns_and_those_with_gaps(tmp_path):
    table = {"score": [0.5, -1.5, 2.5], "part": [1, None, 3], "text": ["a", "b", "c"]}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    about = described(tmp_path / "x.parquet")
    score = about["score"]
    assert (score["min"], score["median"], score["max"]) == (-1.5, 0.5, 2.5)
    assert sum(bucket["count"] for bucket in score["histogram"]) == 3
    assert score["histogram"][-1] == {"below": 2.5, "count": 1}
    assert "row 'x/1' has no value in column 'part'" in about["part"]["problem"]
    assert "text" not in about


@settings(max_examples=20)
@given(st.integers(0, 10**12))
def test_distributions_are_those_of_a_bounded_number_of_evenly_spread_samples(total):
    most = DESCRIBED_RUNS * DESCRIBED_TOGETHER
    numbers = spread_runs(total)
    assert len(numbers) == min(total, most)
    if total:
        assert (numbers[0], numbers[-1]) == (0, total - 1)
        gaps = np.diff(numbers)
        assert gaps.min(initial=1) == 1
        assert gaps.max(initial=1) <= total / (DESCRIBED_RUNS - 1) + 1


def test_samples_of_several_splits_stand_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr("energon.sources.measures.DESCRIBED_RUNS", 2)
    monkeypatch.setattr("energon.sources.measures.DESCRIBED_TOGETHER", 3)
    make(tmp_path)
    measure(tmp_path)
    about = described(tmp_path)["size"]
    chosen = [len(text(n)) for n in (0, 1, 2, 14, 15, 16)]
    assert (about["measured"], about["samples"]) == (6, 17)
    assert (about["min"], about["max"]) == (min(chosen), max(chosen))
    assert ", of 6 evenly spread samples\n" in run("info", tmp_path).output
