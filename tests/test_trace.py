"""How much code a batch of two decoded samples runs through: files, calls and frames.

`pytest -s tests/test_trace.py` prints all functions, for a batch and for the first of a loader.
"""

from __future__ import annotations

import importlib

from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from tests.commands import run_python
from tests.datasets import make_captions
from tests.tracing import Trace, measure_no_hooks

MODULES = """
import sys
from energon import WorkerConfig, get_savable_loader, get_train_dataset
config = WorkerConfig(rank=0, world_size=1, num_workers=0)
dataset = get_train_dataset(sys.argv[1], worker_config=config, batch_size=2)
next(iter(get_savable_loader(dataset)))
print(*[name for name in sys.modules if name.startswith(("energon", "megatron"))])
"""

FINDERS = {"/compat/megatron/finder.py"}
"""Asked for every module that a decoder imports, once an earlier test has installed them."""


def test_training_in_the_own_process_imports_at_most_150_modules(tmp_path):
    found = run_python(MODULES, make_captions(tmp_path / "ds", [8])).stdout.split()
    assert len(found) <= 150, sorted(found)
    assert not [name for name in found if "compat" in name or name.startswith("megatron")]


def traced(batches):
    with Trace() as trace:
        next(batches)
    return trace


def test_a_batch_of_two_decoded_samples_runs_through_few_files_calls_and_frames(
    tmp_path, monkeypatch
):
    importlib.import_module("torch")  # as programs that train do, before their first batch
    dataset = get_train_dataset(
        make_captions(tmp_path / "ds", [64]),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=1),
        task_encoder=DefaultTaskEncoder(),
        batch_size=2,
    )
    with get_savable_loader(dataset) as loader, Trace() as first:
        next(iter(loader))
    measure_no_hooks(monkeypatch)
    with get_savable_loader(dataset) as loader:
        batches = iter(loader)
        next(batches)
        steady = min((traced(batches) for _ in range(8)), key=lambda trace: trace.calls.total())
    print("steady:", steady.report(), "first:", first.report(), sep="\n")
    assert len(steady.files) <= 11, steady.report()
    assert steady.calls.total() <= 60, steady.report()
    assert steady.deepest <= 13, steady.report()
    assert len(first.files - FINDERS) <= 26, first.report()
