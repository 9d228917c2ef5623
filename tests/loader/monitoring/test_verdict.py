"""Troubles that are there, and whether the verdict names them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time

import pytest

from energon import DefaultTaskEncoder, SkipSample, WorkerConfig, get_savable_loader
from energon import get_train_dataset as train
from energon.io.files import forget_stores
from energon.prepare.dataset import prepare_dataset
from tests.datasets import make_crude, write_shard
from tests.servers.proxy import Fault, FaultProxy
from tests.servers.web import web_server

BATCHES = 20


class Encoder(DefaultTaskEncoder):
    """Takes so long for a sample, or for one of a dataset."""

    decoder = None

    def __init__(self, seconds=0.0, what=""):
        super().__init__()
        self.seconds = seconds
        self.what = what

    def encode_sample(self, sample):
        if self.seconds and self.what in sample["__key__"]:
            time.sleep(self.seconds)
        return sample

    def batch(self, samples):
        return [sample["__key__"] for sample in samples]


class Computing(Encoder):
    def encode_sample(self, sample):
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            math.sqrt(2)
        return sample


class Choosing(Encoder):
    def encode_sample(self, sample):
        number = int(sample["__key__"][1:])
        if number % 3 == 0:
            raise SkipSample("too short")
        if number % 4 == 0:
            raise ValueError(f"{number} is no good")
        return sample


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("verdict") / "coco", [60, 60])


def load(root, encoder, *, workers=0, kind="process", batches=BATCHES, step=0.002, **settings):
    """Return the loader after some batches, each of which the trainer works on for `step`."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = train(root, worker_config=config, batch_size=4, task_encoder=encoder)
    loader = get_savable_loader(dataset, workers=kind, **settings)
    for _ in zip(range(batches), loader, strict=False):
        time.sleep(step)
    return loader


@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (2, "process"), (2, "thread")])
def test_a_slow_hook(root, workers, kind):
    with load(root, Encoder(0.01), workers=workers, kind=kind) as loader:
        verdict, stats = loader.verdict(), loader.stats()
    who = ["the training process spends", "", f"2 {kind.replace('process', 'worker')}s spend"]
    assert "trainer waits" in verdict
    assert f"{who[workers]} " in verdict
    assert "in encode_sample of 'coco/train'" in verdict
    assert "would keep up" in verdict or "of the time for a CPU" in verdict  # if others use them
    run = stats["run"]
    assert next(iter(run["stages"])) == "encode_sample"
    per_sample = run["stages"]["encode_sample"]["datasets"]["coco/train"]["seconds_per_sample"]
    assert 0.005 < per_sample < 1
    assert run["wait_share"] > 0.1  # others take the CPU from the trainer, too
    assert run["samples"] == 4 * (BATCHES - 1)
    assert len(stats["workers"]) == max(1, workers)


def test_one_of_two_datasets_is_slow(tmp_path):
    for name in "ab":
        samples = [(f"{name}{n}", {"txt": b"x"}) for n in range(60)]
        write_shard(tmp_path / f"{name}/0.tar", samples)
        prepare_dataset(tmp_path / name, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    (tmp_path / "mix.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        "      - {weight: 1, path: a}\n      - {weight: 1, path: b}\n"
    )
    with load(tmp_path / "mix.yaml", Encoder(0.02, what="b")) as loader:
        assert "in encode_sample of 'b/train'" in loader.verdict()
        datasets = loader.stats()["run"]["stages"]["encode_sample"]["datasets"]
    assert 0.01 < datasets["b/train"]["seconds_per_sample"] < 1
    assert datasets.get("a/train", {"seconds": 0})["seconds"] < datasets["b/train"]["seconds"]


def test_a_loader_that_keeps_up(root):
    with load(root, Encoder(), step=0.1, batches=10) as loader:
        assert "keeps up" in loader.verdict()


def test_before_the_second_batch_there_is_no_verdict(root):
    with load(root, Encoder(), batches=1) as loader:
        assert "no verdict yet" in loader.verdict()
        assert loader.stats()["seconds_to_first_batch"] > 0
    assert "no verdict yet" in get_savable_loader(loader.dataset).verdict()


@pytest.fixture
def distant(tmp_path, monkeypatch, quick_retries):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ENERGON_STORAGE_READ_AHEAD_BYTES", "1000")
    samples = [(f"s{n}", {"bin": bytes(200_000)}) for n in range(200)]
    write_shard(tmp_path / "far/0.tar", samples)
    prepare_dataset(tmp_path / "far", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    forget_stores()
    with web_server(tmp_path) as server, FaultProxy(server.port, latency=0.02) as proxy:
        yield proxy
    forget_stores()


def test_a_slow_store(distant):
    with load(f"{distant.url}/far", Encoder(), step=0.001) as loader:
        verdict = loader.verdict()
        stores = loader.stats()["run"]["stores"]
    assert "in reading" in verdict
    assert stores[distant.url]["requests"] > 5


def test_a_store_that_throttles(distant):
    faults = [Fault("status"), None] * 1000
    distant.plan(faults, lambda request: request.is_data)
    with load(f"{distant.url}/far", Encoder(), step=0.001) as loader:
        verdict = loader.verdict()
    assert f"{distant.url} is in trouble" in verdict
    assert "requests were made again" in verdict


class Dying(Encoder):
    def encode_sample(self, sample):
        path = self.what
        if not os.path.exists(path) and sample["__key__"].endswith("7"):
            open(path, "w").close()
            os.kill(os.getpid(), signal.SIGSEGV)
        return sample


def test_a_dead_worker(root, tmp_path):
    with load(root, Dying(what=str(tmp_path / "died")), workers=1, step=0) as loader:
        verdict = loader.verdict()
        assert loader.stats()["run"]["restarts"] == 1
    assert "workers died or hung 1 time" in verdict


STARVED = """
import os, sys, tempfile
from pathlib import Path
from tests.loader.monitoring.test_verdict import Computing, load, make_crude
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if __name__ == "__main__":
    root = make_crude(Path(sys.argv[1]), [60, 60])
    with load(root, Computing(0.005), workers=3, step=0.0) as loader:
        print(loader.verdict())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="CPUs cannot be taken away")
def test_too_few_cpus(tmp_path):
    script = tmp_path / "starved.py"
    script.write_text(STARVED)
    found = subprocess.run(
        [sys.executable, script, tmp_path / "ds"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert "of the time for a CPU, of which this job may use 1" in found.stdout, found


def test_the_log_says_it_once_in_a_while(root, caplog):
    with load(root, Encoder(0.01), verdict_seconds=0.1, batches=30):
        pass
    said = [each.getMessage() for each in caplog.records if "trainer waits" in each.getMessage()]
    assert said
    assert "encode_sample" in said[-1]
    assert len(said) <= 12  # less and less often, as long as it is the same


def test_reasons_with_their_first_samples(root):
    with load(root, Choosing(), workers=2, step=0) as loader:
        stats = loader.stats()
    (failure,), (skip,) = stats["failures"], stats["skips"]
    assert (failure["hook"], failure["dataset"]) == ("encode_sample", "coco/train")
    assert failure["reason"].startswith("ValueError at test_verdict.py:")
    assert failure["count"] == stats["failed"] > 3
    assert len(failure["samples"]) == 3
    assert all("is no good" in each["message"] for each in failure["samples"])
    assert all("coco" in each["source"] for each in failure["samples"])
    assert (skip["reason"], skip["count"]) == ("too short", stats["skipped"])
    assert not [name for name in stats if "\t" in name or name.startswith("time ")]


def test_flat_figures_are_numbers_by_path(root):
    with load(root, Encoder(), step=0) as loader:
        flat = loader.stats(flat=True)
    assert flat["batches"] == BATCHES
    assert flat["run/batches"] == BATCHES - 1
    assert flat["workers/0/memory_bytes"] > 0
    assert all(isinstance(value, int | float) for value in flat.values())


class Unreported:
    """A pipeline of the user around another one, which cannot tell what was drawn."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def report(self, **about):
        raise KeyError("read")


def test_figures_are_not_worth_a_run(root):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    inner = train(root, worker_config=config, batch_size=4, task_encoder=Encoder(0.002))
    with get_savable_loader(Unreported(inner), verdict_seconds=0.01) as loader:
        assert len([batch for batch, _ in zip(loader, range(BATCHES), strict=False)]) == BATCHES
        assert loader.stats()["run"]["bytes"] == 0
        assert "encode_sample" in loader.verdict()
