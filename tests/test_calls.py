"""How many calls a sample takes, in each kind of pipeline: counted and never timed."""

from __future__ import annotations

import pytest

from energon import (
    Cooker,
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
)
from tests.datasets import make_crude
from tests.tracing import ROOT, Trace, measure_no_hooks

BATCH_SIZE = 16


class Raw(DefaultTaskEncoder):
    decoder = None

    def batch(self, samples):
        return samples


class Encoding(Raw):
    def encode_sample(self, sample):
        return sample


class Cooking(Encoding):
    cookers = (Cooker(lambda sample: sample),)


def cook_text(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


class Typing(Encoding):
    cookers = (Cooker(cook_text),)


class Packing(Typing):
    def select_samples_to_pack(self, samples):
        return [samples[at : at + 8] for at in range(0, len(samples), 8)]

    def pack_selected_samples(self, samples):
        return samples


class UnseededPacking(Packing):
    seeds_global_generators = False


class Grouping(Typing):
    def batch_group_criterion(self, sample):
        return int(sample.__key__[1:]) % 4, None


class UnseededGrouping(Grouping):
    seeds_global_generators = False


@pytest.fixture(scope="module")
def crude(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("calls") / "ds", [100, 100, 100, 100])


def batches_of(root, encoder, lanes=1, **settings):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=lanes)
    dataset = get_train_dataset(root, worker_config=config, task_encoder=encoder, **settings)
    return get_savable_loader(dataset)


@pytest.fixture(autouse=True)
def no_measured_hooks(monkeypatch):
    measure_no_hooks(monkeypatch)


PACKS = {"packing_buffer_size": 64, "batch_size": 2}
PATHS = [
    (Encoding, {}, 3.87),
    (Cooking, {}, 3.87),
    (Typing, {}, 4.8),
    (Packing, PACKS, 35.4),
    (UnseededPacking, PACKS, 8.87),
    (Grouping, {}, 47.4),
    (UnseededGrouping, {}, 13.2),
]


def check_calls(root, encoder, settings, calls):
    """Check that a sample takes at most 10 % more calls than these."""
    with batches_of(root, encoder(), **{"batch_size": BATCH_SIZE, **settings}) as loader:
        batches = iter(loader)
        for _ in range(30):
            next(batches)
        samples = 0
        with Trace() as trace:
            while samples < 1600:
                batch = next(batches)
                samples += sum(map(len, batch)) if issubclass(encoder, Packing) else len(batch)
    found = trace.calls.total() / samples
    print(f"{found:.2f} calls a sample:", trace.report(), sep="\n")
    assert found <= 1.1 * calls, trace.report()


@pytest.mark.parametrize(("encoder", "settings", "calls"), PATHS)
def test_a_sample_takes_few_calls_beside_its_hooks(crude, encoder, settings, calls):
    """Lower the number where there are fewer."""
    check_calls(crude, encoder, settings, calls)


@pytest.mark.parametrize(("encoder", "settings", "calls"), [PATHS[0], PATHS[3]])
def test_a_sixth_more_calls_are_noticed(crude, encoder, settings, calls):
    scope = {}
    exec(compile("def more(): pass", f"{ROOT}/more.py", "exec"), scope)
    missing = 0.0

    class Wasteful(encoder):
        def batch(self, samples):
            nonlocal missing
            missing += calls / 6 * (sum(map(len, samples)) if encoder is Packing else len(samples))
            while missing > 0:
                scope["more"]()
                missing -= 1
            return super().batch(samples)

    with pytest.raises(AssertionError, match="more.py more"):
        check_calls(crude, Wasteful, settings, calls)


@pytest.mark.parametrize("encoder", [Encoding, Cooking])
def test_the_default_lanes_take_few_calls_more_than_one_lane(crude, encoder):
    calls = {}
    for lanes in (1, None):
        with batches_of(crude, encoder(), lanes, batch_size=32) as loader:
            batches = iter(loader)
            for _ in range(300):  # blocks have grown by then
                next(batches)
            with Trace() as trace:
                for _ in range(384):
                    next(batches)
        calls[lanes] = trace.calls.total() / 384
    assert calls[None] < calls[1] + 4, trace.report()
