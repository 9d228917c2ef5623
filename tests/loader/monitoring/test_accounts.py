"""Times of stages are right on any machine, and measuring them costs little."""

from __future__ import annotations

import time

import pytest

from energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_savable_loader
from energon import get_train_dataset as train
from energon.stages.lane import active_lane
from tests.datasets import make_crude

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


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (1, "process"), (1, "thread")])
def test_a_hook_that_waits_does_not_hide_one_that_computes_before_it(tmp_path, workers, kind):
    run_of, expected = run(make_crude(tmp_path / "data", [60]), Encoder(), workers, kind)
    stages = run_of["stages"]
    computed, waited = (stages[name]["seconds"] for name in ("cook_crude_sample", "encode_sample"))
    assert computed / (computed + waited) == pytest.approx(expected, abs=0.05)


@pytest.mark.slow
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


@pytest.mark.slow
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
