from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import dask
import pytest

import energon.webdataset as wds
from energon.errors import ConfigError, WorkerError
from energon.prepare.engines import Engine
from energon.webdataset.descriptor import shard_counts
from energon.webdataset.tools import map_shards
from tests.webdataset.shards import keys, make_shards

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/augment.py"


def augment_wds(input, output, maxcount=999999999):
    src = wds.DataPipeline(
        wds.SimpleShardList(input),
        wds.tarfile_to_samples(),
        wds.decode(),
        wds.to_tuple("__key__", "txt", "json"),
    )
    with wds.TarWriter(output) as dst:
        for key, text, data in islice(src, 0, maxcount):
            dst.write({"__key__": key, "txt": text.upper(), "cls": data["n"]})


def fragile(input, output):
    augment_wds(input, output)
    if os.path.exists(os.path.join(os.path.dirname(output), "break")) and "000005" in input:
        os.unlink(output)
        raise RuntimeError("interrupted")


@pytest.fixture
def shards(tmp_path):
    inputs = make_shards(tmp_path / "in", [4] * 8)
    (tmp_path / "out").mkdir()
    return inputs, [path.replace("/in/", "/out/") for path in inputs]


def check(outputs):
    samples = list(wds.WebDataset(outputs).decode())
    assert keys(samples) == [*range(32)]
    assert samples[5]["txt"] == "TEXT 5"
    assert samples[5]["cls"] == 5


@pytest.mark.slow
def test_delayed_calls_of_dask(shards):
    inputs, outputs = shards
    results = [dask.delayed(augment_wds)(*args) for args in zip(inputs, outputs, strict=True)]
    dask.compute(*results, scheduler="threads")
    check(outputs)


@pytest.mark.slow
def test_goes_on_after_a_failure(shards):
    inputs, outputs = shards
    stop = Path(outputs[0]).with_name("break")
    stop.touch()
    with pytest.raises(WorkerError, match="interrupted"):
        map_shards(fragile, inputs, outputs, engine=Engine(num_workers=2))
    stop.unlink()
    before = {path: os.stat(path).st_mtime_ns for path in outputs if os.path.exists(path)}
    assert 0 < len(before) < 8
    made = map_shards(augment_wds, inputs, outputs, engine=Engine(num_workers=2))
    assert sorted([*made, *before]) == outputs
    assert all(os.stat(path).st_mtime_ns == made_at for path, made_at in before.items())
    check(outputs)


def example(folder, engine, **options):
    command = [sys.executable, str(EXAMPLE), "in", engine, "--engine", engine]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True, **options
    )


def shards_in(folder):
    return sorted(path for path in folder.glob("*.tar"))


@pytest.fixture(scope="module")
def augmented(tmp_path_factory):
    """The folder of the example, and what its shards become."""
    folder = tmp_path_factory.mktemp("augment")
    assert example(folder, "local").communicate()[0].endswith("wrote 8 shards, 0 already existed\n")
    expected = [path.read_bytes() for path in shards_in(folder / "local")]
    assert len(expected) == 8
    return folder, expected


@pytest.mark.slow
def test_the_example_goes_on_on_dask_where_it_was_killed(augmented):
    folder, expected = augmented
    # An input that gives nothing keeps the cluster from finishing.
    blocked = folder / "in/train-000000.tar"
    blocked.rename(folder / "aside")
    os.mkfifo(blocked)
    killed = example(folder, "dask")
    while not (folder / "dask").exists() or len(shards_in(folder / "dask")) < 3:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    blocked.unlink()
    (folder / "aside").rename(blocked)
    before = {path: path.stat().st_mtime_ns for path in shards_in(folder / "dask")}
    assert 3 <= len(before) < 8
    said = example(folder, "dask").communicate()[0]
    assert said.endswith(f"wrote {8 - len(before)} shards, {len(before)} already existed\n")
    assert all(path.stat().st_mtime_ns == made_at for path, made_at in before.items())
    assert [path.read_bytes() for path in shards_in(folder / "dask")] == expected


@pytest.mark.slow
def test_the_example_goes_on_on_ray_where_another_engine_was(augmented):
    folder, expected = augmented
    (folder / "ray").mkdir()
    for path in shards_in(folder / "local")[:4]:
        (folder / "ray" / path.name).write_bytes(path.read_bytes())
    said = example(folder, "ray", stderr=subprocess.DEVNULL).communicate()[0]
    assert said.endswith("wrote 4 shards, 4 already existed\n")
    assert [path.read_bytes() for path in shards_in(folder / "ray")] == expected


def test_lists_have_to_fit():
    with pytest.raises(ConfigError, match="one distinct output per input, got"):
        map_shards(augment_wds, ["a", "b"], ["c", "c"])


def test_lengths_come_from_indexes(tmp_path):
    paths = make_shards(tmp_path, [3, 5])
    with pytest.raises(ConfigError, match="energon tar index"):
        wds.WebDataset(paths).with_length()
    with wds.ShardWriter(f"{tmp_path}/y-%d.tar", maxcount=2) as sink:
        for number in range(5):
            sink.write({"__key__": str(number), "cls": number})
    assert shard_counts(sink.shards) == [2, 2, 1]
    assert len(wds.WebDataset(sink.shards).shuffle(10).with_length()) == 5
    with pytest.raises(ConfigError, match="does not begin with a list"):
        wds.DataPipeline([1, 2]).with_length()
