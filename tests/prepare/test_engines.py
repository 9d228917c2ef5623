"""The same everywhere: in this process, in several, on real clusters of Dask and Ray."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from energon.errors import ConfigError, FormatError, StorageError, StorageFullError, WorkerError
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.engines import MAX_TRIES, Engine, run_batches
from energon.prepare.writers import tokens
from energon.prepare.writers.tokens import TokenizeOptions, pack_tokens
from energon.sources.webdataset import WebdatasetSource
from tests.datasets import CRUDE, write_shard
from tests.effort import mixed
from tests.servers.process import free_port, wait_for_port
from tests.sources.reads import read_samples
from tests.waiting import wait_until


def square(number):
    return number * number, os.getpid()


def touch_and_wait(path):
    """Show that the call has begun."""
    Path(path).touch()
    time.sleep(60)


def fail(number, folder, error, times):
    """Raise an error the first few times that it is called with a number."""
    path = Path(folder) / f"{number}-{len(os.listdir(folder))}"
    path.touch()
    if number == 3 and len(list(Path(folder).glob("3-*"))) <= times:
        raise error("on purpose")
    return number


def die_once(number, folder):
    path = Path(folder) / "dead"
    if number == 3 and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def alone(**settings):
    return Engine(num_workers=1, **settings)


def two():
    return Engine(num_workers=2)


@pytest.mark.parametrize("engine", [alone(), two()])
def test_every_batch_is_done_once(engine):
    found = dict(run_batches(engine, square, [(n,) for n in range(20)]))
    assert {number: value for number, (value, _) in found.items()} == {n: n * n for n in range(20)}
    others = {pid for _, pid in found.values()} - {os.getpid()}
    assert bool(others) == (engine.num_local > 1)


@pytest.mark.parametrize("engine", [alone(), two()])
def test_what_may_pass_is_tried_again(engine, tmp_path, caplog):
    batches = [(n, str(tmp_path), StorageError, 2) for n in range(6)]
    found = dict(run_batches(engine, fail, batches))
    assert sorted(found.values()) == list(range(6))
    assert caplog.text.count("; retrying") == 2


@pytest.mark.parametrize("engine", [alone(), two()])
def test_what_fails_again_and_again_ends_it(engine, tmp_path):
    batches = [(n, str(tmp_path), OSError, 99) for n in range(6)]
    with pytest.raises(WorkerError, match=f"failed {MAX_TRIES} times.*OSError: on purpose"):
        list(run_batches(engine, fail, batches))


def fill_disk(number, folder, wrapper):
    """Fail for lack of space, the way the engines report it that wrap errors of workers."""
    (Path(folder) / f"{number}-{len(os.listdir(folder))}").touch()
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x/y.bin")
    if wrapper is None:
        raise error
    raise wrapper("lost") from error


@pytest.mark.parametrize(
    ("engine", "wrapper"), [(alone(), None), (alone(), RuntimeError), (two(), None)]
)
def test_a_full_disk_ends_it_at_once(engine, wrapper, tmp_path, caplog):
    with pytest.raises(OSError, match=r"No space left on device: '/x/y\.bin'$"):
        list(run_batches(engine, fill_disk, [(3, str(tmp_path), wrapper)]))
    assert os.listdir(tmp_path) == ["3-0"]
    assert not caplog.records


@pytest.mark.parametrize(
    ("engine", "error"), mixed([alone(), two()], [FormatError, StorageFullError])
)
def test_a_damaged_shard_or_a_full_disk_of_a_worker_ends_it_at_once(engine, error, tmp_path):
    batches = [(n, str(tmp_path), error, 99) for n in range(6)]
    with pytest.raises(error, match="on purpose"):
        list(run_batches(engine, fail, batches))
    assert len(list(tmp_path.glob("3-*"))) == 1


def test_a_process_that_is_killed_is_replaced(tmp_path, caplog):
    found = dict(run_batches(two(), die_once, [(n, str(tmp_path)) for n in range(8)]))
    assert found == {n: n for n in range(8)}
    assert "restarting the processes" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "spark"}, "expected one of local, dask, ray"),
        ({"address": "tcp://x"}, "has no address"),
        ({"num_workers": 0}, "at least 1"),
    ],
)
def test_engines_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Engine(**settings)


def make_shards(root):
    for shard in range(6):
        write_shard(root / f"{shard}.tar", [(f"{shard}_{n}", {"txt": b"x"}) for n in range(20)])
    return root


def check_prepared(root, engine):
    """Check that other processes work, what is damaged, and that the rest is done."""
    pids = {pid for _, (_, pid) in run_batches(engine, square, [(n,) for n in range(2)])}
    assert os.getpid() not in pids
    (root / "6.tar").write_bytes((root / "5.tar").read_bytes()[:3000])
    with pytest.raises(FormatError, match=r"6\.tar"):
        prepare_dataset(root, **CRUDE, indexing=Indexing(engine))
    (root / "6.tar").unlink()
    info = prepare_dataset(root, **CRUDE, indexing=Indexing(engine))
    assert info.shard_counts == {f"{n}.tar": 20 for n in range(6)}
    source = WebdatasetSource(root)
    assert len(read_samples(source, np.arange(len(source)))) == 120


@pytest.fixture
def start(tmp_path):
    """Start programs, which end with the test, by default without any ceremony."""
    started = []

    def start_program(*command, stop=signal.SIGKILL):
        with open(tmp_path / f"{len(started)}.log", "wb") as log:
            # Workers import this file to run what is in it.
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        started.append((process, stop))

    yield start_program
    for process, stop in reversed(started):
        process.send_signal(stop)
    for process, _ in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def dask_address(start, tmp_path):
    """A scheduler and two workers, each a process of its own."""
    pytest.importorskip("distributed")
    file = tmp_path / "scheduler.json"
    place = ("--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(file))
    start("distributed.cli.dask_scheduler", *place, "--port", "0")
    for _ in range(2):
        start("distributed.cli.dask_worker", *place, "--nthreads", "1", "--no-nanny")
    wait_until(lambda: file.exists() and file.stat().st_size)
    address = json.loads(file.read_text())["address"]
    from distributed import Client

    with Client(address) as client:
        client.wait_for_workers(2, timeout=90)
    return address


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_prepares_and_tokenizes_the_same(dask_address, tmp_path):
    check_prepared(make_shards(tmp_path / "ds"), Engine("dask", dask_address))
    check_tokenized(tmp_path, Engine("dask", dask_address))


@pytest.mark.slow
def test_the_commands_of_the_compose_file_prepare_a_dataset(tmp_path):
    pytest.importorskip("distributed")
    folder = make_shards(tmp_path / "images")
    file = Path(__file__).parents[2] / "examples/cluster/compose.yaml"
    services = yaml.safe_load(file.read_text())["services"]
    port, program = str(free_port()), f"'{sys.executable}' -m"
    processes = []
    try:
        for name in ("scheduler", "worker", "prepare"):
            # Without a container, there is nothing to install, and everything is on this machine.
            command = shlex.split(services[name]["command"].replace("$$", "$"))[2]
            command = command.partition(" && ")[2].replace("scheduler:8786", f"127.0.0.1:{port}")
            command = command.replace("8786", port).replace("/data/", f"{tmp_path}/")
            for each in ("dask", "energon"):
                command = re.sub(rf"^{each} ", f"exec {program} {each} ", command)
            process = subprocess.Popen(["bash", "-c", command], start_new_session=True)
            processes.append(process)
            if name == "scheduler":
                wait_for_port(int(port), process)
        assert processes[-1].wait() == 0
    finally:
        for process in reversed(processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert len(json.loads((folder / ".nv-meta/.info.json").read_text())["shard_counts"]) == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_missing_dask_cluster_is_an_error():
    pytest.importorskip("distributed")
    import dask

    quick = dask.config.set({"distributed.comm.timeouts.connect": "0.3s"})
    with quick, pytest.raises(WorkerError, match="no Dask scheduler answers at tcp://127.0.0.1:1"):
        list(run_batches(Engine("dask", "tcp://127.0.0.1:1"), square, [(1,)]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_missing_ray_cluster_is_an_error():
    pytest.importorskip("ray")
    with pytest.raises(WorkerError, match="no Ray cluster answers at 127.0.0.1:1"):
        list(run_batches(Engine("ray", "127.0.0.1:1"), square, [(1,)]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_without_an_address_dask_runs_on_this_machine(tmp_path):
    pytest.importorskip("distributed")
    indexing = Indexing(Engine("dask", num_workers=2))
    assert len(prepare_dataset(make_shards(tmp_path), **CRUDE, indexing=indexing).shard_counts) == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_prepares_and_tokenizes_the_same(ray_head, tmp_path):
    check_prepared(make_shards(tmp_path / "ds"), Engine("ray", ray_head.address))
    check_tokenized(tmp_path, Engine("ray", ray_head.address))


def check_tokenized(folder, engine):
    """Check that texts are tokenized as in this process, over several ranges."""
    lines = [json.dumps({"text": "x" * (n % 9) + " yy" * (n % 5)}) for n in range(2000)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    options = TokenizeOptions("tests.prepare.test_pack_tokens:words", vocabulary_size=100)
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "RANGE_BYTES", 20_000)
        for name, own in (("here", alone()), ("there", engine)):
            pack_tokens([str(folder / "texts.jsonl")], folder / f"{name}.idx", options, engine=own)
            files = (folder / f"{name}{suffix}" for suffix in (".idx", ".bin"))
            written.append([file.read_bytes() for file in files])
    assert written[0] == written[1]
    assert len(written[0][1]) > 2 * 2000


KILLED = """
import sys

from energon.prepare.engines import Engine, run_batches
from tests.prepare.test_engines import touch_and_wait

list(run_batches(Engine(num_workers=2), touch_and_wait, [(path,) for path in sys.argv[1:]]))
"""


def mapped_by_group(group):
    """The files that the processes of a group have mapped."""
    files = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getpgid(int(pid)) == group:
                files |= {*Path(f"/proc/{pid}/maps").read_text().split()}
    return files


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_processes_that_are_killed_together_leave_nothing(tmp_path, start_method):
    """No semaphore with a name and no folder, which nothing would ever remove."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary), "ENERGON_START_METHOD": start_method}
    begun = [tmp_path / name for name in ("1", "2")]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, *map(str, begun)],
        env={**os.environ, **environment, "PYTHONPATH": os.getcwd()},
        start_new_session=True,
    )
    wait_until(lambda: all(path.exists() for path in begun))
    shared = [path for path in mapped_by_group(process.pid) if path.startswith("/dev/shm/sem.")]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert [path for path in shared if os.path.exists(path)] == []
    assert list(temporary.iterdir()) == []
