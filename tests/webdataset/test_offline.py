from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import dask
import pytest

import energon.webdataset as wds
from energon.errors import ConfigError, WorkerError
from energon.prepare.engines import Engine
from energon.webdataset.lengths import shard_counts
from energon.webdataset.offline import map_shards
from tests.webdataset.shards import keys, make_shards


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


def test_delayed_calls_of_dask(shards):
    inputs, outputs = shards
    results = [dask.delayed(augment_wds)(*args) for args in zip(inputs, outputs, strict=True)]
    dask.compute(*results, scheduler="threads")
    check(outputs)


@pytest.mark.parametrize("engine", ["local", "dask", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_goes_on_after_an_interruption(shards, engine):
    inputs, outputs = shards
    where = Engine(engine, num_workers=2)
    stop = Path(outputs[0]).with_name("break")
    stop.touch()
    if engine == "local":
        with pytest.raises(WorkerError, match="interrupted"):
            map_shards(fragile, inputs, outputs, engine=where)
    else:
        # The first run does half of the work.
        map_shards(augment_wds, inputs[:4], outputs[:4], engine=Engine(num_workers=1))
    stop.unlink()
    before = {path: os.stat(path).st_mtime_ns for path in outputs if os.path.exists(path)}
    assert 0 < len(before) < 8
    made = map_shards(augment_wds, inputs, outputs, engine=where)
    assert sorted([*made, *before]) == outputs
    assert all(os.stat(path).st_mtime_ns == time for path, time in before.items())
    check(outputs)


def test_lists_have_to_fit():
    with pytest.raises(ConfigError, match="an output of its own"):
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
