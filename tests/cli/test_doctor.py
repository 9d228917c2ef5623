"""`energon doctor`: what it measures, and that it finds what is wrong."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from contextlib import contextmanager

import pytest

from energon import DefaultTaskEncoder, WorkerConfig, get_train_dataset
from energon.inspect.doctor import diagnose, surroundings
from energon.installation import SIGN
from energon.surroundings import cpu_quota, usable_cpus
from tests.commands import ok, run
from tests.control_groups import slow_disk
from tests.datasets import make_crude, write_crude
from tests.servers.web import web_server

QUICK = ("--seconds", "0.05", "--try-workers", "2", "--worker-kind", "thread")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("doctor") / "ds", [80, 80])


class Waiting(DefaultTaskEncoder):
    decoder = None

    def encode_sample(self, sample):
        time.sleep(0.005)
        return sample

    def batch(self, samples):
        return len(samples)


def make_with(root, encoder):
    return lambda config: get_train_dataset(
        root, worker_config=config, batch_size=4, task_encoder=encoder
    )


@pytest.mark.slow
def test_it_names_the_stage_and_the_settings_that_help(root):
    found = diagnose(make_with(root, Waiting()), seconds=0.4, workers=[4], kinds=["thread"])
    assert next(iter(found.stages)) == "encode_sample"
    assert (found.best.workers, found.best.kind) == (4, "thread")
    assert found.best.samples_per_second > 1.5 * found.measured[0].samples_per_second
    assert any("in encode_sample" in line for line in found.advice)
    assert any("use num_workers=4, workers='thread'" in line for line in found.advice)
    assert {each.prefetch for each in found.measured} == {2, 8}
    assert found.read_per_second[1] > found.best.samples_per_second
    alone = found.stage_per_second["encode_sample"]
    assert 200 / 4 < alone < 220  # a call sleeps for 5 ms


class Objects(Waiting):
    """Returns batches that cost nothing to make, and much to send."""

    def __init__(self):
        super().__init__()
        self.made = [{str(n): (n, str(n)) for n in range(20_000)}]

    def encode_sample(self, sample):
        return sample

    def batch(self, samples):
        return self.made


@pytest.mark.slow
def test_transfer_and_reading_are_measured(root):
    found = diagnose(make_with(root, Objects()), seconds=0.1, workers=[1], kinds=["process"])
    assert found.transfer_per_second > 0
    assert found.read_latency_seconds > 0
    assert found.read_bytes_per_second > 0
    assert any("sending batches limits worker processes" in line for line in found.advice)
    assert "use num_workers=0, where nothing is sent" in found.advice


@pytest.mark.slow
def test_a_store_is_not_held_against_a_cache(root):
    with web_server(root.parent) as server:
        url = f"http://127.0.0.1:{server.port}/{root.name}"
        found = diagnose(make_with(url, Waiting()), seconds=0.2, workers=[2], kinds=["thread"])
    assert found.is_remote
    assert not any("of what reading alone does" in line for line in found.advice)


@pytest.mark.slow
def test_a_slow_disk(tmp_path):
    samples = [(f"s{n}", {"bin": bytes(100_000)}) for n in range(120)]
    write_crude(tmp_path / "ds", samples)
    make = make_with(tmp_path / "ds", Waiting())
    with slow_disk(tmp_path / "ds", 8_000_000):
        found = diagnose(make, seconds=0.3, workers=[], kinds=["thread"])
    assert any("storage limits the run: it delivers" in line for line in found.advice)


def test_packages_that_do_not_fit_together(tmp_path, monkeypatch):
    monkeypatch.setattr("energon.inspect.doctor.__version__", "99.0")
    (tmp_path / "energon").mkdir()
    (tmp_path / "energon/version.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    found = [each.what for each in surroundings()]
    assert any("this is energon 99.0" in each and "is installed" in each for each in found)
    assert any(re.search(r"energon is on the path \d+ times", each) for each in found)


def found_here(dataset=None, **settings):
    return {each.what: each.is_bad for each in surroundings(dataset, **settings)}


@contextmanager
def open_files(limit):
    """Let this process open so many files only."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("limit", "is_bad"), [(1000, False), (500, True)])
def test_few_files_that_may_be_open(limit, is_bad):
    with open_files(limit):
        found = found_here()
    (line,) = [each for each in found if f"a process may open {limit} files" in each]
    assert found[line] is is_bad
    assert "`ulimit -n 4096`" in line


def test_little_shared_memory(monkeypatch):
    monkeypatch.setattr("energon.inspect.doctor.SHARED_MEMORY_BYTES", 1 << 62)
    assert any("start the container with --shm-size" in each for each in found_here())


@pytest.mark.parametrize("is_damaged", [False, True])
def test_jpeg_images_without_a_fast_decoder(monkeypatch, tmp_path, is_damaged):
    assert not any("fast-jpeg" in each for each in found_here())
    if is_damaged:
        (tmp_path / "simplejpeg.py").write_text("import a_library_that_is_missing")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "simplejpeg", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert any("pip install 'energon-loader[fast-jpeg]'" in each for each in found_here())


def test_a_wrong_clock(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 100_000.0)
    assert found_here()["the clock is wrong by years; stores refuse signed requests"]


def test_a_package_that_overwrites_this_one(tmp_path, monkeypatch):
    assert not any("megatron-energon is installed" in each for each in found_here())
    (tmp_path / SIGN).parent.mkdir(parents=True)
    (tmp_path / SIGN).touch()
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = [each for each, is_bad in found_here().items() if is_bad]
    assert "megatron-energon is installed as well" in line


def test_a_dataset_that_is_larger_than_memory(root, tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    dataset = make_with(root, Waiting())(WorkerConfig(rank=0, world_size=1, num_workers=0))
    found = found_here(dataset, cgroup=tmp_path)
    assert any("each epoch is read from disk, not from the page cache" in each for each in found)
    assert not any("page cache" in each for each in found_here(dataset))


def test_json_and_the_exit_code_for_ci(root):
    done = run("doctor", root, *QUICK, "--at-least", "1e12", "--json")
    assert done.exit_code == 1
    about = json.loads(done.output)
    assert "samples/s at best, expected" in about["failed"]
    assert {each["workers"] for each in about["measured"]} == {0, 2}
    assert about["best"]["samples_per_second"] > 0


def test_a_function_of_the_user(root, tmp_path, monkeypatch):
    (tmp_path / "my_training.py").write_text(
        "from tests.cli.test_doctor import Waiting, make_with\n"
        f"make = make_with({str(root)!r}, Waiting())\n"
        "wrong = lambda config: 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        done = ok("doctor", "my_training:make", *QUICK)
        assert "encode_sample" in done.output
        assert "reading alone:" in done.output
        assert "num_workers=2, workers='thread'" in done.output
        assert "<- best" in done.output
        done = run("doctor", "my_training:wrong", *QUICK)
        assert "my_training:wrong returned int, expected" in done.output
    finally:
        sys.modules.pop("my_training", None)


def test_the_quota_of_a_container(root, tmp_path):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cpu_quota(tmp_path) == usable_cpus(tmp_path) == 0.5
    dataset = make_with(root, Waiting())(WorkerConfig(rank=0, world_size=1, num_workers=0))
    found = [each.what for each in surroundings(dataset, cgroup=tmp_path)]
    assert any("may use 0.5 of" in each for each in found)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    assert cpu_quota(tmp_path / "none") is None
