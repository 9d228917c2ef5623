"""Traces of a window of batches: events of all workers and the trainer, whole at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice

import pytest

from energon import ConfigError, WorkerConfig, get_loader
from energon import get_train_dataset as train
from energon.loader.monitoring.accounts import append
from tests.datasets import make_crude
from tests.loader.monitoring.test_verdict import Dying, Encoder
from tests.small_disks import fill, small_disk

BATCHES = 16
HOOK_SECONDS = 0.006


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("traced") / "coco", [60, 60])


def loader_of(root, encoder=None, *, num_workers=0, rank=0, world_size=1, **settings):
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers)
    encoder = encoder or Encoder(HOOK_SECONDS)
    dataset = train(root, worker_config=config, batch_size=4, task_encoder=encoder)
    return get_loader(dataset, **settings)


def events_in(path, *, is_closed=True):
    """Return the spans by the name of their thread, and those of all."""
    text = path.read_text()
    assert text.endswith("]\n") is is_closed
    events = json.loads(text if is_closed else text + "]")
    names = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events
        if each["name"] == "thread_name"
    }
    spans = [each for each in events if each["ph"] == "X"]
    assert all(each["dur"] >= 0 for each in spans)
    assert any(each["name"] == "process_name" for each in events)
    return names, spans


def seconds(spans, name):
    return sum(each["dur"] for each in spans if each["name"] == name) / 1e6


def check_nesting(spans):
    """Check that spans of a thread lie within each other or apart."""
    open_until = []
    for each in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        start, stop = each["ts"], each["ts"] + each["dur"]
        while open_until and open_until[-1] <= start + 0.5:
            open_until.pop()
        assert not open_until or stop <= open_until[-1] + 0.5, each
        open_until.append(stop)


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "kind"), [(0, "process"), (2, "process"), (2, "thread")])
def test_all_workers_and_the_waits_of_the_trainer_are_in_it(root, tmp_path, num_workers, kind):
    path = tmp_path / "out.json"
    loader = loader_of(
        root, num_workers=num_workers, workers=kind, trace=path, trace_batches=BATCHES
    )
    with loader:
        begun = time.perf_counter()
        for _ in islice(loader, BATCHES + 4):
            time.sleep(0.001)
        took = time.perf_counter() - begun
    names, spans = events_in(path)
    assert len(names) == max(1, 1 + num_workers)
    for thread in names:
        check_nesting([each for each in spans if (each["pid"], each["tid"]) == thread])
    made = [each for each in spans if each["name"] == "make a batch"]
    waits = [each for each in spans if each["name"] == "wait for a batch"]
    assert len(waits) == BATCHES
    assert len(made) == BATCHES
    assert len({(each["pid"], each["tid"]) for each in made}) == max(1, num_workers)
    assert seconds(spans, "wait for a batch") <= took
    assert seconds(spans, "encode_sample") >= HOOK_SECONDS * 4 * BATCHES
    assert seconds(spans, "encode_sample") <= seconds(spans, "make a batch")
    hooks = [each for each in spans if each["name"] == "encode_sample"]
    assert {each["args"]["dataset"] for each in hooks} == {"coco/train"}
    assert ("transfer" in {each["name"] for each in spans}) == (
        num_workers > 0 and kind == "process"
    )
    assert "trace" not in {each["name"] for each in spans}
    rebuilds = [each for each in spans if each["name"] == "rebuild"]
    assert bool(rebuilds) == (num_workers > 0 and kind == "process")
    for each in rebuilds:
        stop = each["ts"] + each["dur"]
        assert any(w["ts"] <= each["ts"] and stop <= w["ts"] + w["dur"] for w in waits)


def test_a_window_in_the_middle(root, tmp_path):
    path = tmp_path / "out.json"
    loader = loader_of(
        root, Encoder(), num_workers=2, workers="thread", trace=path, trace_batches=(6, 10)
    )
    with loader:
        for _ in islice(loader, 20):
            pass
    _, spans = events_in(path)
    waits = [each for each in spans if each["name"] == "wait for a batch"]
    assert [each["args"]["batch"] for each in waits] == [6, 7, 8, 9]
    assert sorted(each["args"]["batch"] for each in spans if each["name"] == "make a batch") == [
        *(3, 3),
        *(4, 4),
    ]


def test_each_rank_has_a_file(root, tmp_path):
    for rank in range(2):
        loader = loader_of(root, Encoder(), rank=rank, world_size=2, trace=tmp_path / "out.json")
        with loader:
            next(iter(loader))
    assert sorted(os.listdir(tmp_path)) == ["out.rank0.json", "out.rank1.json"]
    for path in tmp_path.iterdir():
        events_in(path)


@pytest.mark.slow
def test_a_worker_that_dies_leaves_whole_events_and_its_successor_continues(root, tmp_path):
    path = tmp_path / "out.json"
    dying = Dying(0.0, what=str(tmp_path / "died"))
    with loader_of(root, dying, num_workers=1, trace=path, trace_batches=BATCHES) as loader:
        for _ in islice(loader, BATCHES + 4):
            pass
    names, spans = events_in(path)
    assert (tmp_path / "died").exists()
    assert len(names) == 3
    made = {each["args"]["batch"] for each in spans if each["name"] == "make a batch"}
    assert made == set(range(BATCHES))


KILLED = """
import sys, time
from pathlib import Path
from tests.loader.monitoring.test_trace import loader_of
loader = loader_of(Path(sys.argv[1]), num_workers=2, trace=sys.argv[2])
if __name__ == "__main__":
    for number, _ in enumerate(loader):
        print(number, flush=True)
"""


@pytest.mark.slow
def test_the_trace_of_a_run_that_is_killed_can_be_read(root, tmp_path):
    (tmp_path / "run.py").write_text(KILLED)
    path = tmp_path / "out.json"
    run = subprocess.Popen(
        [sys.executable, tmp_path / "run.py", root, path],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    with run:
        for _ in islice(run.stdout, 6):
            pass
        run.send_signal(signal.SIGKILL)
    names, spans = events_in(path, is_closed=False)
    assert len(names) == 3
    assert seconds(spans, "encode_sample") > 0


def test_a_loader_that_is_closed_and_used_again_leaves_the_trace_alone(root, tmp_path):
    path = tmp_path / "out.json"
    loader = loader_of(root, Encoder(), num_workers=1, workers="thread", trace=path)
    for _ in range(2):
        for _ in islice(loader, 3):
            pass
        loader.close()
    _, spans = events_in(path)
    assert len([each for each in spans if each["name"] == "wait for a batch"]) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_that_closes_the_loader_leaves_the_trace_to_its_parent(root, tmp_path):
    path = tmp_path / "out.json"
    with loader_of(root, Encoder(), trace=path) as loader:
        batches = iter(loader)
        next(batches)
        pid = os.fork()
        if not pid:
            loader.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        next(batches)
    _, spans = events_in(path)
    assert len([each for each in spans if each["name"] == "wait for a batch"]) == 2


def test_a_full_disk_ends_the_trace_and_not_the_run(root, tmp_path, caplog):
    with small_disk(tmp_path / "disk", 64) as disk:
        path = disk / "out.json"
        with loader_of(root, Encoder(), trace=path) as loader:
            assert len(list(islice(loader, 3))) == 3
            fill(disk, 0)
            assert len(list(islice(loader, 90))) == 90
    assert "the trace ends here" in caplog.text
    assert caplog.text.count("the trace ends here") <= 2


def test_events_that_do_not_fit_on_the_disk_are_not_there_in_part(tmp_path):
    with small_disk(tmp_path / "disk", 64) as disk:
        path = disk / "out.json"
        path.write_text("[1")
        fill(disk, 4)
        with pytest.raises(OSError, match="No space left"):
            append(str(path), ",\n" + "2" * 10_000)
        assert path.read_text() == "[1"


def test_events_of_which_the_system_writes_a_part_are_there_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_text("[")

    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    append(str(path), "0123456789" * 5)
    monkeypatch.undo()
    assert path.read_text() == "[" + "0123456789" * 5


def test_a_thread_that_writes_a_trace_may_collect_the_loader_of_another(tmp_path, monkeypatch):
    path, other = tmp_path / "out.json", tmp_path / "other.json"
    path.write_text("[")
    other.write_text("[")
    write = os.write

    def collect(descriptor, data):
        monkeypatch.undo()
        append(str(other), "]")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", collect)
    append(str(path), "]")
    assert path.read_text() == other.read_text() == "[]"


@pytest.mark.parametrize("batches", [0, (5, 5), (-1, 5)])
def test_a_window_without_batches_is_an_error(root, batches):
    with pytest.raises(ConfigError, match="trace_batches must be a number of batches"):
        loader_of(root, trace="x.json", trace_batches=batches)


def test_a_folder_that_is_missing_is_an_error(root, tmp_path):
    with pytest.raises(ConfigError, match="name a file in an existing folder"):
        loader_of(root, trace=tmp_path / "none/out.json")
