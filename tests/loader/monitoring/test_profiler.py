"""Shares of stages are right on any machine, and looks survive what CPython 3.11 does not alone.

That is to look at frames while garbage is collected.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_savable_loader
from energon import get_train_dataset as train
from energon.loader.monitoring import profiler as profiling
from energon.loader.monitoring.interpreter import (
    COLLECTS_WITHIN_CALLS,
    SWITCH_SECONDS,
    prompt_looks,
    thread_frames,
)
from energon.loader.monitoring.profiler import profiler
from energon.stages.lane import active_lane
from tests.datasets import make_crude
from tests.effort import IN_CI

PROGRAM = """
import _thread
import gc
import sys
import threading
import time
from types import FrameType

from energon.loader.monitoring.interpreter import thread_frames


class Waiting:
    def __init__(self):
        self.itself = self

    def __del__(self):
        {wait}


def narrow(count):
    return (wide if count % 3 else narrow)(count - 1) if count else [0].count(0)


def wide(count):
    a, b, c, d, e = [count], count, [count], count, [count]
    found = (narrow if count % 2 else wide)(count - 1) if count else 0
    return found + len(a) + b + len(c) + d + len(e)


def work():
    while looking:
        for count in range(30):
            narrow(count)
            wide(count)


looking = True
worker = threading.Thread(target=work, daemon=True)
worker.start()
sys.setswitchinterval(1e-4)
for number in range({looks}):
    gc.set_threshold(1 + number % 50)
    Waiting()
    with thread_frames() as frames:
        frame = frames[worker.ident]
        for _ in range(100):
            assert frame is None or isinstance(frame, FrameType), frame
            frame = frame and frame.f_back
        assert frame is None
looking = False
worker.join()
gc.collect()  # while the interpreter ends, threads no longer start
"""


@pytest.mark.parametrize(
    "wait",
    [
        # Not threading.Thread, whose own locks may be held where the finalizer is called.
        "lock = _thread.allocate_lock(); lock.acquire(); "
        "_thread.start_new_thread(lock.release, ()); lock.acquire()",
        "time.sleep(0.0005)",
    ],
    ids=["for a thread", "a while"],
)
def test_finalizers_that_wait_do_not_disturb_a_look(wait):
    text = PROGRAM.replace("{wait}", wait).replace("{looks}", "2_000" if IN_CI else "300")
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)


def test_what_looks_recognise_is_there():
    """Files that are moved or renamed would go unrecognised, and their time to the wrong stage."""
    root = Path(profiling._ROOT)
    for start in profiling._ROOMS:
        assert (root / start).exists(), start
    for file, function in profiling._FUNCTIONS:
        assert f"def {function}(" in (root / file).read_text(), (file, function)


@pytest.fixture
def thresholds():
    """Those that the test begins with, which are put back afterwards."""
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)
    gc.enable()


def collections():
    return sum(each["collections"] for each in gc.get_stats())


def test_garbage_is_collected_afterwards_as_before(thresholds):
    with thread_frames() as frames:
        assert threading.get_ident() in frames
        before = collections()
        _ = [[] for _ in range(10 * thresholds[0])]
        assert (collections() == before) is COLLECTS_WITHIN_CALLS
    assert gc.isenabled()
    assert gc.get_threshold() == thresholds
    _ = [[] for _ in range(10 * thresholds[0])]
    assert collections() > before


def test_collection_that_the_program_disables_during_a_look_stays_disabled(thresholds):
    with thread_frames():
        gc.disable()
    assert not gc.isenabled()
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("threshold", [(0,), (50_000, 5, 5)])
def test_a_threshold_that_the_program_sets_during_a_look_stays(thresholds, threshold):
    with thread_frames():
        gc.set_threshold(*threshold)
    assert gc.get_threshold() == (*threshold, *thresholds[len(threshold) :])


@pytest.mark.skipif(not COLLECTS_WITHIN_CALLS, reason="this Python pauses nothing")
def test_a_threshold_that_was_read_during_a_look_is_not_kept(thresholds):
    with thread_frames():
        read = gc.get_threshold()
    gc.set_threshold(*read)
    with thread_frames():
        pass
    assert gc.get_threshold() == thresholds


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_forked_during_a_look_collects_garbage(thresholds):
    with thread_frames():
        pid = os.fork()
        if not pid:
            os._exit(gc.get_threshold() != thresholds)
    assert os.waitpid(pid, 0)[1] == 0


SECONDS = 0.3
"""How long hooks run."""


def compute(sample):
    """Run Python code, and note for how long."""
    began = time.perf_counter()
    while time.perf_counter() - began < 0.003:
        sum(range(50))
    sample["computed"] = time.perf_counter() - began


def wait(sample):
    """Wait without the GIL, and note for how long."""
    began = time.perf_counter()
    time.sleep(0.003)
    sample["waited"] = time.perf_counter() - began


def cook(sample):
    compute(sample)
    return sample


class Encoder(DefaultTaskEncoder):
    """Computes and waits in turn, and says how long that took."""

    decoder = None
    cookers = (Cooker(cook),)

    def encode_sample(self, sample):
        wait(sample)
        return sample

    def batch(self, samples):
        return [{name: s.get(name, 0.0) for name in ("computed", "waited")} for s in samples]


class Choosing(Encoder):
    """Computes with the samples of one dataset, and waits with those of another."""

    cookers = (Cooker(dict),)

    def encode_sample(self, sample):
        (compute if "quiet" not in sample["__sources__"][0].dataset_path else wait)(sample)
        return sample


def run(data, encoder, workers, kind):
    """Return statistics, and which share of the time hooks computed instead of waiting."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = train(
        data, worker_config=config, batch_size=4, task_encoder=encoder, virtual_epoch_length=10**6
    )
    computed = waited = 0.0
    with get_savable_loader(dataset, workers=kind) as loader:
        batches = iter(loader)
        next(batches)  # is not part of the run
        for batch in batches:
            computed += sum(sample["computed"] for sample in batch)
            waited += sum(sample["waited"] for sample in batch)
            if computed + waited > SECONDS:
                return loader.stats()["run"], computed / (computed + waited)


@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (1, "process"), (1, "thread")])
def test_a_hook_that_waits_does_not_hide_one_that_computes_before_it(tmp_path, workers, kind):
    run_of, expected = run(make_crude(tmp_path / "data", [60]), Encoder(), workers, kind)
    stages = run_of["stages"]
    computed, waited = (stages[name]["seconds"] for name in ("cook_crude_sample", "encode_sample"))
    assert computed / (computed + waited) == pytest.approx(expected, abs=0.05)


def test_a_dataset_that_waits_does_not_hide_one_that_computes(tmp_path):
    for name in ("busy", "quiet"):
        make_crude(tmp_path / name, [60])
    blend = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {
            "train": {"blend": [{"path": str(tmp_path / each)} for each in ("busy", "quiet")]}
        },
    }
    run_of, expected = run(blend, Choosing(), 1, "process")
    datasets = run_of["stages"]["encode_sample"]["datasets"]
    busy, quiet = (datasets[f"{name}/train"]["seconds"] for name in ("busy", "quiet"))
    assert busy / (busy + quiet) == pytest.approx(expected, abs=0.05)


class Noting(DefaultTaskEncoder):
    """Notes whether its calls are timed, and takes so long for each."""

    decoder = None

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def encode_sample(self, sample):
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return active_lane().host.clock is not None

    def batch(self, samples):
        return samples


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.0, 0.001, 0.5), (0.003, 1.0, 1.0)])
def test_calls_of_fast_hooks_are_timed_in_some_batches_only(tmp_path, seconds, least, most):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = train(
        make_crude(tmp_path / "data", [60]),
        worker_config=config,
        batch_size=10,
        task_encoder=Noting(seconds),
    )
    with get_savable_loader(dataset) as loader:
        batches = [next(iter(loader)) for _ in range(10 if seconds else 2000)]
        stages = loader.stats()["run"]["stages"]
    assert all(len(set(batch)) == 1 for batch in batches)
    assert not batches[0][0]  # it is start-up, not the run
    assert least <= sum(batch[0] for batch in batches) / (len(batches) - 1) <= most
    assert stages["encode_sample"]["seconds"] > 0


@pytest.fixture
def no_other_looks(monkeypatch):
    """Keep the thread that looked at loaders of earlier tests from shortening the interval, too."""
    monkeypatch.setattr(profiler(), "look_if_due", lambda: 0.01)
    time.sleep(0.05)
    profiler()._disarm()


@pytest.mark.usefixtures("no_other_looks")
def test_the_switch_interval_is_short_only_while_a_look_is_about_to_come():
    usual = sys.getswitchinterval()
    with prompt_looks(), prompt_looks():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert sys.getswitchinterval() == usual


@pytest.mark.usefixtures("no_other_looks")
def test_a_switch_interval_that_the_program_sets_meanwhile_stays():
    usual = sys.getswitchinterval()
    try:
        with prompt_looks():
            sys.setswitchinterval(0.002)
        assert sys.getswitchinterval() == pytest.approx(0.002)
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.usefixtures("no_other_looks")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_forked_before_a_look_has_the_usual_interval():
    usual = sys.getswitchinterval()
    with prompt_looks():
        child = os.fork()
        if not child:
            os._exit(sys.getswitchinterval() != usual)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
