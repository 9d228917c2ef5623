"""Troubles that are there, and whether the verdict names them."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from energon import Cooker, DefaultTaskEncoder, SkipSample, WorkerConfig, cooker, get_savable_loader
from energon import get_train_dataset as train
from energon.cache.file_pool import FileStoreCachePool
from energon.io.files import forget_stores, open_store
from energon.loader.monitoring.verdict import LoaderSetup, verdict_of
from energon.prepare.dataset import prepare_dataset
from tests.cache.stores import CountingStore
from tests.control_groups import half_a_cpu, moved_to, slow_disk
from tests.datasets import make_crude, write_shard
from tests.servers.proxy import Fault, FaultProxy
from tests.servers.web import web_server
from tests.small_disks import fill, small_disk
from tests.waiting import wait_until

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
        if step:  # who sleeps on a busy machine is not woken in time
            time.sleep(step)
    return loader


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (2, "process"), (2, "thread")])
def test_a_slow_hook(root, workers, kind):
    with load(root, Encoder(0.01), workers=workers, kind=kind) as loader:
        verdict, stats = loader.verdict(), loader.stats()
    who = ["the training process spends", "", f"2 {kind.replace('process', 'worker')}s spend"]
    assert "trainer waits" in verdict
    assert f"{who[workers]} " in verdict
    assert "in encode_sample of 'coco/train'" in verdict
    # The second where others keep the machine busy.
    assert any(each in verdict for each in ("would keep up", "wait for a CPU"))
    assert "workers='process'" not in verdict
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
    config = WorkerConfig(rank=0, world_size=1, num_workers=1)
    dataset = train(root, worker_config=config, batch_size=4, task_encoder=Encoder())
    with get_savable_loader(dataset, workers="thread") as loader:
        for _ in islice(loader, 10):
            # It is ahead of the trainer, however busy the machine is.
            wait_until(lambda: loader.stats()["workers"][0]["ready_batches"])
            time.sleep(0.1)
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


def test_a_slow_disk(tmp_path):
    samples = [(f"s{n}", {"bin": bytes(50_000)}) for n in range(100)]
    write_shard(tmp_path / "ds/0.tar", samples)
    prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    slow = slow_disk(tmp_path / "ds", 4_000_000)
    with slow, load(tmp_path / "ds", Encoder(), batches=15) as loader:
        verdict = loader.verdict()
    assert "the training process spends " in verdict
    assert "in reading of 'ds/train' " in verdict
    assert verdict.endswith("or from a faster disk")


@pytest.mark.slow
def test_a_slow_store(distant):
    with load(f"{distant.url}/far", Encoder(), step=0.001) as loader:
        verdict = loader.verdict()
        stores = loader.stats()["run"]["stores"]
    assert "in reading" in verdict
    assert stores[distant.url]["requests"] > 5


@pytest.mark.slow
def test_a_blend_with_a_slow_store(distant, root, tmp_path):
    (tmp_path / "mix.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        f"      - {{weight: 1, path: {distant.url}/far}}\n      - {{weight: 1, path: {root}}}\n"
    )
    with load(tmp_path / "mix.yaml", Encoder(), step=0.001, batches=30) as loader:
        assert "in reading (" in loader.verdict()


@pytest.mark.slow
def test_a_store_that_throttles(distant):
    faults = [Fault("status"), None] * 1000
    distant.plan(faults, lambda request: request.is_data)
    with load(f"{distant.url}/far", Encoder(), step=0.001) as loader:
        verdict = loader.verdict()
    assert f"{distant.url} is in trouble" in verdict
    assert "requests were retried" in verdict


@pytest.mark.slow
def test_requests_before_a_loader_was_made_are_not_its_own(distant):
    store, _ = open_store(distant.url)
    for number in range(50):  # as read-ahead of a loader that is closed by now
        store.read_range("far/0.tar", number, number + 1)
    before = len(distant.requests)
    with load(f"{distant.url}/far", Encoder(), step=0, batches=2) as loader:
        counted = loader.stats()[f"storage {distant.url} requests"]
        assert counted <= len(distant.requests) - before


@pytest.mark.slow
def test_copies_on_local_disk_are_counted(distant, monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_SHARDS", "1")
    for name in ("cache_misses", "cache_hits"):
        with load(f"{distant.url}/far", Encoder(), step=0) as loader:
            assert loader.stats()[f"storage {distant.url} {name}"] > 0
            assert "is in trouble" not in loader.verdict()


def test_a_full_disk_under_the_cache_of_a_store(distant, tmp_path, monkeypatch):
    with small_disk(tmp_path / "disk", 2048) as disk:
        monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(disk / "cache"))
        monkeypatch.setenv("ENERGON_STORAGE_CACHE_SHARDS", "1")
        fill(disk, 1024)
        with load(f"{distant.url}/far", Encoder(), step=0.001) as loader:
            verdict = loader.verdict()
    assert f"{distant.url} is in trouble" in verdict
    assert "because the cache disk is full" in verdict


@cooker(need_cache=True)
def cook_cached(sample, cache):
    key = sample["__key__"][1:]
    assert cache.get(FILES, key) == FILES.content(key)
    return sample


class Cached(Encoder):
    cookers = (Cooker(cook_cached),)


FILES = CountingStore(50_000)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_pool_and_its_disk(root, tmp_path, workers):
    with small_disk(tmp_path / "disk", 2048) as disk:
        pool = FileStoreCachePool(parent_cache_dir=disk)
        for full in (False, True):
            if full:
                fill(disk, 0)
            settings = {"cache_pool": pool, "batches": 60, "step": 0.0}
            with load(root, Cached(), workers=workers, **settings) as loader:
                verdict, stats = loader.verdict(), loader.stats()
            found = stats["run"]["cache"]
            assert found["hits"] + found["misses"] > 0
            if full:
                assert found["failed"] > 0
                assert "the disk of cache_pool takes no more files" in verdict
        pool.close()


class Objects(Encoder):
    """Makes batches that take much longer to rebuild than to make."""

    def batch(self, samples):
        return [{str(n): (n, str(n)) for n in range(30_000)}] * 1 + [repr(samples)]


@pytest.mark.slow
def test_a_trainer_that_is_busy_with_rebuilding_batches(root):
    with load(root, Objects(), workers=2, step=0.05, batches=12) as loader:
        figures = loader.stats()["run"]
    assert 0.01 < figures["rebuild_seconds"] < figures["wait_share"] * figures["seconds"]
    assert figures["stages"]["transfer"]["seconds"] >= figures["rebuild_seconds"]
    assert figures["busy_share"] <= 1


THREADS, PROCESSES = LoaderSetup(2, "thread", 8, 4.0), LoaderSetup(2, "process", 8, 4.0)


class Stalling(Encoder):
    """Takes long for a few samples, and hardly any time for the others."""

    def encode_sample(self, sample):
        if int(sample["__key__"][1:]) % 60 == 30:
            time.sleep(self.seconds)
        return sample


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "kind"),
    [(0, "process"), (2, "thread"), pytest.param(2, "process", marks=pytest.mark.slow)],
)
def test_rare_samples_that_take_very_long(root, workers, kind):
    for seconds in (0.2, 1, 5):  # what others let the trainer wait for is little beside one of them
        encoder = Stalling(seconds)
        with load(root, encoder, workers=workers, kind=kind, batches=62, step=0.001) as loader:
            verdict, run = loader.verdict(), loader.stats()["run"]
        if re.search(r"1 sample in \d+ takes [\d.]+ s in encode_sample of 'coco/tr", verdict):
            break
    else:
        pytest.fail(verdict)
    assert "skip such samples, or limit their time" in verdict
    about = run["stages"]["encode_sample"]["datasets"]["coco/train"]
    assert seconds <= about["slow_seconds"] <= about["seconds"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "advice"),
    [
        (Encoder(0.005), r"(\d+) workers would keep up"),
        (Stalling(0.5), r"(\d+) workers with prefetch_factor=(\d+) would bridge most of them"),
    ],
)
def test_what_a_verdict_recommends_ends_most_of_the_wait(root, encoder, advice):
    with load(root, encoder, batches=60, step=0.015) as loader:
        verdict, before = loader.verdict(), loader.stats()["run"]["wait_share"]
    workers, *prefetch = map(int, re.search(advice, verdict).groups())
    settings = {"prefetch_factor": prefetch[0]} if prefetch else {}
    with load(
        root, encoder, workers=workers, kind="thread", batches=120, step=0.015, **settings
    ) as loader:
        after = loader.stats()["run"]["wait_share"]
    print(f"{verdict}\nwith that, the trainer waits {after:.0%} of the time")
    assert after < before / 2


class StallingBatches(Encoder):
    def batch(self, samples):
        if any(int(sample["__key__"][1:]) == 30 for sample in samples):
            time.sleep(0.5)
        return super().batch(samples)


def test_rare_batches_that_take_very_long(root):
    with load(root, StallingBatches(), batches=62, step=0.002) as loader:
        assert re.search(r"1 batch in \d+ takes [\d.]+ s in batch ", loader.verdict())


def test_hooks_that_always_take_long_have_no_exceptions(root):
    with load(root, Encoder(0.12), batches=2) as loader:
        verdict, run = loader.verdict(), loader.stats()["run"]
    assert run["stages"]["encode_sample"]["slow_calls"] > 0
    assert "1 sample in" not in verdict
    # Unless tests beside this one take the CPUs, so that it would not help.
    assert verdict.endswith("move work out of encode_sample") or "other work takes" in verdict


def figures_of(stage, **changes):
    """Return figures of 10 s in which a trainer waited for half of the time."""
    about = {"seconds": 9.0, "share": 0.9, "seconds_per_sample": 0.01, "datasets": {}}
    about |= {"slow_calls": 0, "slow_seconds": 0.0}
    return {
        **{"batches": 10, "seconds": 10.0, "wait_share": 0.5, "restarts": 0, "stores": {}},
        **{"busy_seconds": 18.0, "busy_share": 0.9, "rebuild_seconds": 0.0, "cache": {"failed": 0}},
        "stages": {stage: about} if stage else {},
        **changes,
    }


def shares_of(number, *, cpu, waits, busy=0.9):
    figures = {"busy_share": busy, "cpu_share": cpu, "cpu_wait_share": waits}
    return [{"name": f"worker {n}", **figures} for n in range(number)]


def slow_calls_of(calls, seconds, **changes):
    """Return figures in which some of 2,000 calls took that many seconds in total."""
    about = {"seconds": 9.0, "seconds_per_sample": 0.0045}
    about |= {"slow_calls": calls, "slow_seconds": seconds}
    stage = {**about, "share": 0.9, "datasets": {"coco": about}}
    return figures_of("encode_sample", stages={"encode_sample": stage}, **changes)


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        # Most of the work of busy workers, or most of the wait while others are idle.
        (
            slow_calls_of(4, 8.0, busy_seconds=12.0),
            "1 sample in 500 takes 2 s in encode_sample of 'coco' (the others 0.5 ms); skip such "
            "samples, or limit their time; 4 workers with prefetch_factor=2 would bridge most of "
            "them",
        ),
        (slow_calls_of(2, 4.0, busy_share=0.3), "1 sample in 1000 takes 2 s in encode_sample"),
        # Neither, or too often.
        (slow_calls_of(2, 4.0), "2 workers spend 90% in encode_sample of 'coco'"),
        (slow_calls_of(1, 0.2, busy_share=0.3), "workers are busy only 30% of the time"),
        (slow_calls_of(900, 8.9, busy_seconds=12.0), "2 workers spend 90% in encode_sample"),
    ],
)
def test_slow_calls_are_named_where_they_are_what_the_trainer_waits_for(figures, cause):
    assert cause in verdict_of(figures, shares_of(2, cpu=0.1, waits=0.0, busy=0.3), PROCESSES)


def test_rebuilding_batches_is_named_where_it_is_what_the_trainer_waits_for():
    figures = figures_of("transfer", rebuild_seconds=4.0)
    verdict = verdict_of(figures, [], LoaderSetup(2, "process", 2, 8.0))
    assert "for 40% of the time it rebuilds what workers have sent" in verdict
    assert "workers='thread'" in verdict


def test_cpus_that_others_take_are_not_blamed_on_the_number_of_workers():
    figures = figures_of("encode_sample")
    verdict = verdict_of(figures, shares_of(2, cpu=0.1, waits=0.8), PROCESSES)
    assert "2 workers wait for a CPU 80% of the time: other work takes the 4 CPUs" in verdict
    assert "fewer workers" not in verdict
    many = LoaderSetup(8, "process", 8, 4.0)
    verdict = verdict_of(figures, shares_of(8, cpu=0.1, waits=0.8), many)
    assert "and this job may use only 4: give it more, or use fewer workers" in verdict


def test_batches_that_are_made_faster_than_they_are_handed_over():
    quick = figures_of("read", batches=10_000, busy_seconds=0.5, busy_share=0.03)
    for setup in (THREADS, PROCESSES):
        verdict = verdict_of(quick, shares_of(2, cpu=0.03, waits=0.0, busy=0.03), setup)
        assert verdict == (
            "trainer waits 50% of the time; workers make a batch in 50 us, and handing it over "
            "takes longer: use larger batches, or num_workers=0"
        )


def test_what_is_broken_comes_before_other_remedies():
    stores = {"https://far": {"requests": 10, "retries": 5}}
    verdict = verdict_of(
        figures_of("read", restarts=1, stores=stores), shares_of(2, cpu=0.1, waits=0.0), PROCESSES
    )
    assert "workers died or hung 1 time" in verdict
    assert "https://far is in trouble: 5 of 10 requests were retried" in verdict
    assert verdict.endswith("2 workers spend 90% in reading (10 ms/sample)")


def test_what_to_do_about_reading_depends_on_where_the_data_are():
    workers = shares_of(2, cpu=0.1, waits=0.0)
    assert verdict_of(figures_of("read"), workers, PROCESSES).endswith("or from a faster disk")
    remote = figures_of("read", stores={"https://far": {"requests": 10}})
    assert "ENERGON_STORAGE_CACHE_SHARDS=1" in verdict_of(remote, workers, PROCESSES)


def test_lanes_are_mentioned_where_the_run_has_set_them():
    figures, workers = figures_of("encode_sample"), shares_of(2, cpu=0.1, waits=0.0)
    assert "set lanes, too" in verdict_of(figures, workers, LoaderSetup(2, "process", 3, 4.0))
    for lanes in (None, 4):
        setup = LoaderSetup(2, "process", lanes, 4.0)
        assert verdict_of(figures, workers, setup).endswith(
            "4 workers would keep up, or move work out of encode_sample"
        )


def test_before_a_batch_is_measured_no_stage_is_blamed(root):
    verdict = verdict_of(figures_of(""), shares_of(1, cpu=0.0, waits=0.0), PROCESSES)
    assert (
        verdict == "trainer waits 50% of the time; the cause will be known after a few more batches"
    )


def test_a_trainer_that_makes_its_batches_waited_for_all_of_their_time(root):
    with load(root, Computing(0.004), step=0.008, batches=30) as loader:
        run, (worker,) = loader.stats()["run"], loader.stats()["workers"]
    assert run["busy_seconds"] == pytest.approx(run["wait_share"] * run["seconds"])
    assert run["busy_share"] == pytest.approx(run["wait_share"])
    assert worker["busy_share"] == pytest.approx(run["busy_share"], abs=0.1)
    assert worker["cpu_share"] > 0.01
    assert sum(each["seconds"] for each in run["stages"].values()) == pytest.approx(
        run["busy_seconds"]
    )


class Dying(Encoder):
    def encode_sample(self, sample):
        path = self.what
        if not os.path.exists(path) and sample["__key__"].endswith("7"):
            open(path, "w").close()
            os.kill(os.getpid(), signal.SIGSEGV)
        return sample


def test_a_dead_worker(root, tmp_path, caplog):
    with load(root, Dying(what=str(tmp_path / "died")), workers=1, step=0) as loader:
        verdict = loader.verdict()
        assert loader.stats()["run"]["restarts"] == 1
    assert "workers died or hung 1 time" in verdict
    (died,) = [each for each in caplog.messages if "was killed by SIGSEGV" in each]
    first, *lines = died.splitlines()
    assert first.endswith("; starting another one; it was here:")
    assert any(line.startswith("  File") and "in encode_sample" in line for line in lines)


LIMITED = """
import os, sys
from pathlib import Path
from tests.loader.monitoring.test_verdict import Computing, load, make_crude
if __name__ == "__main__":
    Path(sys.argv[2], "cgroup.procs").write_text(str(os.getpid()))
    root = make_crude(Path(sys.argv[1]), [60, 60])
    with load(root, Computing(0.01), workers=3, step=0.0, batches=24) as loader:
        print(loader.verdict())
"""


def test_the_quota_of_a_container(root):
    settings = {"step": 0, "batches": 30}
    with half_a_cpu() as group, moved_to(group), load(root, Computing(0.003), **settings) as loader:
        verdict = loader.verdict()
    assert "training process waits " in verdict
    assert "of the time, and the quota of its control group" in verdict
    assert "allows only 0.5: give it more" in verdict
    assert "fewer workers" not in verdict


def run_script(text, *arguments):
    script = Path(arguments[0]).with_suffix(".py")
    script.write_text(text)
    return subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ).stdout


@pytest.mark.slow
def test_workers_that_share_the_quota_of_a_container(tmp_path):
    with half_a_cpu() as group:
        verdict = run_script(LIMITED, tmp_path / "ds", group)
    assert "3 workers wait " in verdict
    assert "of the time, and the quota of its control group" in verdict
    assert "allows only 0.5: give it more, or use fewer workers" in verdict


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
    verdict = run_script(STARVED, tmp_path / "ds")
    assert "of the time, and this job may use only 1" in verdict


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


def test_a_cache_pool_hides_no_figures(root, tmp_path):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    inner = train(root, worker_config=config, batch_size=4, task_encoder=Encoder())
    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    with get_savable_loader(inner, cache_pool=pool) as loader:
        for _ in zip(range(4), loader, strict=False):
            pass
        assert loader.report()["datasets"]["coco/train"]["samples"] == 16
        assert loader.stats()["run"]["bytes"] > 0


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
