"""Every hook may skip what it is given, and the run continues, after a restore, too."""

from __future__ import annotations

import random

import pytest

from energon import Cooker, DefaultTaskEncoder, SkipSample
from tests.datasets import make_crude
from tests.effort import some
from tests.task_encoder.runs import one_lane, resumable, train, val


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("crude") / "ds", [15, 18, 17])


def maybe_skip(value):
    if random.random() < 0.3:
        raise SkipSample
    return value


def cook(sample):
    return {"__key__": sample["__key__"], "__restore_key__": sample["__restore_key__"]}


class Packing(DefaultTaskEncoder):
    cookers = (Cooker(cook),)

    def preencode_sample(self, sample):
        return sample

    def select_samples_to_pack(self, samples):
        return [samples[start : start + 3] for start in range(0, len(samples), 3)]

    def postencode_sample(self, sample):
        return sample

    def pack_selected_samples(self, samples):
        return {**samples[0], "keys": [sample["__key__"] for sample in samples]}

    def batch_group_criterion(self, sample):
        return len(sample["keys"]), 2

    def batch(self, samples):
        return [key for sample in samples for key in sample["keys"]]

    def encode_batch(self, batch):
        return batch


HOOKS = [
    "cook_crude_sample",
    "preencode_sample",
    "select_samples_to_pack",
    "postencode_sample",
    "pack_selected_samples",
    "batch_group_criterion",
    "batch",
    "encode_batch",
]


def skipping(hook):
    def skip(self, *arguments):
        return maybe_skip(getattr(super(kind, self), hook)(*arguments))

    kind = type("Skipping", (Packing,), {hook: skip})
    return kind()


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_skips_is_left_out_and_counted(root, hook):
    settings = {"batch_size": None, "packing_buffer_size": 6}
    batches, counts = one_lane(val(root, skipping(hook), **settings))
    keys = [key for batch in batches for key in batch]
    assert len(keys) == len(set(keys)) < 50
    assert len(keys) > 5
    assert counts["failed"] == 0
    # A list of keys does not say which dataset it came from.
    dataset = "data" if hook == "encode_batch" else "ds/val"
    assert 0 < counts[f"skipped: {hook}: {dataset}"] == counts["skipped"]


@pytest.mark.slow
@pytest.mark.parametrize("hook", some(HOOKS))
def test_what_a_hook_skips_is_the_same_after_resuming(root, hook):
    settings = {"batch_size": None, "packing_buffer_size": 6}
    assert len(resumable(train(root, skipping(hook), **settings), limit=15)) == 15


class Yielding(DefaultTaskEncoder):
    def encode_sample(self, sample):
        yield sample["__key__"] + "a"
        if sample["__key__"] in ("s3", "s7"):
            raise SkipSample
        yield sample["__key__"] + "b"

    def batch(self, samples):
        return samples


def test_a_generator_that_skips_keeps_what_it_has_yielded(root):
    batches, counts = one_lane(val(root, Yielding()), 6)
    keys = [key for batch in batches for key in batch]
    assert "s3a" in keys
    assert "s3b" not in keys
    assert "s4b" in keys
    assert counts["skipped"] == 2
    resumable(val(root, Yielding()))
