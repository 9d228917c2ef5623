"""Processes that fork read through another one; processes that have read do not fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

from energon.errors import DatasetNotFoundError, StorageError, StorageTimeoutError
from energon.io.backends import reader_process
from energon.io.backends.reader_process import ForkSafeBackend
from energon.io.files import forget_stores, open_store, write_bytes
from tests.datasets import make_crude
from tests.effort import some
from tests.servers.bad_web import BadWebServer
from tests.servers.places import open_place
from tests.sources.distant import upload
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are not forked there")

ROOT = Path(__file__).parents[2]
BEGINNING = """
import logging, os, sys, warnings
from itertools import islice
from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon.io.files import read_bytes
from energon.io.threads import library_is_used_here, read_here
logging.basicConfig(stream=sys.stdout, format="%(message)s", level="WARNING")
address = sys.argv[1]
document = address + "/.nv-meta/.info.json"
SETTINGS = {}

class Encoder(DefaultTaskEncoder):
    def encode_sample(self, sample):
        return {"txt": sample["txt"], "parent": os.getppid(), "seen": dict(SETTINGS)}
    def batch(self, samples):
        return samples

def loader(num_workers, **options):
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers)
    dataset = get_train_dataset(
        address, worker_config=config, batch_size=4, task_encoder=Encoder(),
    )
    return get_savable_loader(dataset, **options)

def stream(num_workers):
    import energon.webdataset as wds
    dataset = wds.WebDataset(address + "/{000..002}.tar", shardshuffle=False)
    dataset = dataset.map(lambda sample: (sample["txt"], os.getppid(), dict(SETTINGS)))
    return wds.WebLoader(dataset, batch_size=None, num_workers=num_workers)
"""


@pytest.fixture(params=["moto", pytest.param("ceph", marks=pytest.mark.slow)])
def place(request):
    yield from open_place(request.param, request)


@pytest.fixture
def distant(place, tmp_path):
    """An address of 100 texts in three shards."""
    return upload(make_crude(tmp_path / "local", [40, 25, 35]), place.address)


def run(program, *arguments):
    """Run a program; return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BEGINNING + textwrap.dedent(program), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_documents_are_read_and_forks_read_samples(distant):
    program = """
        SETTINGS["set"] = "by the program"
        read_bytes(document)
        with loader(2) as batches:
            samples = [sample for batch in islice(batches, 6) for sample in batch]
        print({sample["parent"] for sample in samples} == {os.getpid()})
        print([dict(each) for each in {tuple(sample["seen"].items()) for sample in samples}])
        print(len({str(sample["txt"]) for sample in samples}), library_is_used_here())
        samples = list(stream(2))
        print({parent for _, parent, _ in samples} == {os.getpid()}, len(samples))
    """
    assert run(program, distant) == ["True", "[{'set': 'by the program'}]", "24 False", "True 100"]


@pytest.mark.slow
@pytest.mark.parametrize("start", some(["loader(2)", "stream(2)"], 2))
def test_a_program_that_has_read_samples_gets_the_fork_server_and_a_message(distant, start):
    program = f"""
        inline = next(iter({start.replace("2", "0")}))
        print(library_is_used_here())
        for _ in range(2):
            with {start} as batches:
                batch = next(iter(batches))
            first = batch[0]["parent"] if isinstance(batch[0], dict) else batch[1]
            print(first == os.getpid(), str(batch)[:9] == str(inline)[:9])
    """
    used, message, *others = run(program, distant)
    assert used == "True"
    argument = "start_method" if "loader" in start else "multiprocessing_context"
    assert message.startswith("this process has read samples from an object store")
    assert message.endswith(f"{argument}='forkserver' to expect this")
    assert others == ["False True"] * 2


@pytest.mark.slow
def test_a_loader_in_line_beside_workers_leaves_the_program_forkable(distant):
    """Such as one for validation, while the workers of training may have to be replaced."""
    program = """
        with loader(1) as train:
            batches = iter(train)
            next(batches)
            print(len(next(iter(loader(0)))), library_is_used_here())
            os.kill(train._workers[0].pid, 9)
            print({sample["parent"] for batch in islice(batches, 9) for sample in batch}
                == {os.getpid()})
    """
    lines = run(program, distant)
    assert (lines[0], lines[-1]) == ("4 False", "True")


@pytest.mark.slow
def test_threads_read_in_the_process_itself(distant):
    program = """
        with loader(2, workers="thread") as batches:
            next(iter(batches))
        print(library_is_used_here())
    """
    assert run(program, distant) == ["True"]


FORKED = """
    if sys.argv[2] == "samples":
        read_here()
    content = read_bytes(document)
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        print(read_bytes(document) == content, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print(read_bytes(document) == content)
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", some(["documents", "samples"], 2))
def test_forks_of_the_programs_own_can_read_whatever_was_read_before(distant, before):
    assert run(FORKED, distant, before) == ["True", "True"]


@pytest.mark.slow
def test_workers_of_torchs_dataloader_read_after_the_program_has(distant):
    program = """
        from torch.utils.data import DataLoader
        import energon.webdataset as wds
        dataset = wds.WebDataset(address + "/{000..002}.tar", shardshuffle=False)
        print(len(list(dataset)), library_is_used_here())
        print(len(list(DataLoader(dataset, batch_size=None, num_workers=2))))
    """
    assert run(program, distant) == ["100 True", "100"]


@pytest.fixture
def reader(monkeypatch):
    """Let this process ask its reader process, whether or not earlier tests have read samples."""
    monkeypatch.setattr(reader_process, "reads_here", lambda: False)


@pytest.mark.usefixtures("reader")
def test_every_request_is_made_by_the_other_process_as_here(place, tmp_path):
    store, key = open_store(place.address + "/a/b.bin")
    assert isinstance(store.backend, ForkSafeBackend)
    content = os.urandom(3 << 20)
    store.write(key, content)
    file = tmp_path / "file"
    file.write_bytes(b"from a file")
    store.write(key + "2", file)
    assert store.info(key).size == len(content)
    assert store.read(key) == b"".join(store.stream(key)) == content
    assert store.read_range(key, 5, 9) == content[5:9]
    assert store.read_range(key + "2", 0, 4) == b"from"
    ranges = [(n, n + 1) for n in range(40)]
    pieces = store.together(partial(store.read_range, key), ranges)
    assert pieces == [content[n : n + 1] for n in range(40)]
    assert [each.size for each in store.list(key.rpartition("/")[0])] == [len(content), 11]
    next(store.stream(key))  # is not read to its end
    store.delete(key)
    with pytest.raises(DatasetNotFoundError, match=r"a/b\.bin"):
        store.info(key)


@pytest.mark.usefixtures("reader")
def test_a_reader_that_dies_is_replaced(place):
    address = place.address + "/kept"
    write_bytes(address, b"kept")
    store, key = open_store(address)
    first = reader_process._reader._process
    os.kill(first.pid, signal.SIGKILL)
    assert store.read(key) == b"kept"
    assert reader_process._reader._process.pid != first.pid


@pytest.mark.slow
def test_it_ends_with_its_process(distant):
    program = """
        from energon.io.backends import reader_process
        read_bytes(document)
        print(reader_process._reader._process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    code = BEGINNING + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", code, distant], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: not os.path.exists(f"/proc/{int(done.stdout)}"))


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
def test_a_stream_that_breaks_with_the_reader_is_resumed(place):
    address = place.address + "/large"
    content = os.urandom(24 << 20)
    write_bytes(address, content)
    store, key = open_store(address)
    chunks = store.stream(key)
    data = next(chunks)
    os.kill(reader_process._reader._process.pid, signal.SIGKILL)
    assert data + b"".join(chunks) == content


@pytest.mark.usefixtures("reader")
def test_a_backend_that_cannot_be_reached_says_so_through_the_reader(monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_DEADLINE_SECONDS", "1")
    store, key = open_store("http://localhost:9/a")
    with pytest.raises(StorageError, match="localhost:9"):
        store.read(key)


@pytest.mark.usefixtures("reader")
def test_the_deadline_of_a_stream_holds_in_the_reader(monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_DEADLINE_SECONDS", "1")
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "1")
    with BadWebServer(b"x" * 50_000, "drips") as server:
        forget_stores()
        store, key = open_store(f"{server.url}/x.bin")
        begun = time.monotonic()
        with pytest.raises(StorageTimeoutError):
            list(store.stream(key))
        assert time.monotonic() - begun < 25
