"""Hooks that draw, skip and yield at random, in blends of any kind: resumed at every batch."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon import DefaultTaskEncoder, SkipSample
from tests.datasets import make_crude
from tests.task_encoder.runs import resumable, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blend")
    for name, count in (("a", 7), ("b", 5), ("c", 3)):
        make_crude(folder / name, [count], prefix=name)
    return folder


class Drawing(DefaultTaskEncoder):
    skips = False

    def preencode_sample(self, sample):
        if self.skips and random.random() < 0.4:
            raise SkipSample
        return {**sample, "draw": random.random()}

    def batch(self, samples):
        return [(sample["__key__"], sample["draw"]) for sample in samples], random.random()


class Skipping(Drawing):
    skips = True


class YieldingSamples(Drawing):
    def preencode_sample(self, sample):
        for _ in range(random.randrange(3)):
            yield {**sample, "draw": random.random()}


class YieldingBatches(Skipping):
    def encode_batch(self, batch):
        yield batch
        yield batch, random.random()


class YieldingBoth(YieldingSamples, YieldingBatches):
    pass


ENCODERS = [Drawing, Skipping, YieldingSamples, YieldingBatches, YieldingBoth]


@settings(max_examples=30, deadline=None)
@given(
    encoder=st.sampled_from(ENCODERS),
    blend=st.sampled_from(["samples", "batches", "repetitions", "repetitions once"]),
    batch_size=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_blends_with_random_hooks_resume_at_every_batch(
    folder, encoder, blend, batch_size, drop_last
):
    by_weight = blend in ("samples", "batches")
    kind, share = ("blend", "weight") if by_weight else ("blend_epochized", "repetitions")
    entries = [{"path": str(folder / name), share: 1 + (name == "a")} for name in "abc"]
    dataset = train(
        {"splits": {"train": {kind: entries}}},
        encoder(),
        batch_size=batch_size,
        batch_drop_last=drop_last,
        blend_unit="batch" if blend == "batches" else "sample",
        repeat=blend != "repetitions once",
    )
    resumable(dataset, limit=12)
