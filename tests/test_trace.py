"""How much code a batch of two decoded samples runs through: files, calls and frames.

`pytest -s tests/test_trace.py` prints all functions, for a batch and for the first of a loader.
"""

from __future__ import annotations

from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from tests.datasets import make_captions
from tests.tracing import Trace, measure_no_hooks


def traced(batches):
    with Trace() as trace:
        next(batches)
    return trace


def test_a_batch_of_two_decoded_samples_runs_through_few_files_calls_and_frames(
    tmp_path, monkeypatch
):
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
    assert len(steady.files) <= 13, steady.report()
    assert steady.calls.total() <= 69, steady.report()
    assert steady.deepest <= 13, steady.report()
    assert len(first.files) <= 40, first.report()  # one finds modules, in a longer session
