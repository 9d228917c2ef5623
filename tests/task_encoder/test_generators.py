"""Hooks that yield several outputs: resuming between two of them repeats what came before."""

from __future__ import annotations

import functools
import random

import pytest

from energon import (
    Cooker,
    DefaultTaskEncoder,
    FatalSampleError,
)
from energon.task_encoder.cooker import is_generator_function
from megatron.energon import (
    AugmentTaskEncoder,
)
from tests.task_encoder.runs import one_lane, resumable, train


def cook(sample):
    return {**sample, "drawn": [random.random()]}


def cook_twice(sample):
    yield {**sample, "drawn": [random.random()]}
    yield {**sample, "drawn": [random.random()]}


class Encoder(DefaultTaskEncoder):
    cookers = (Cooker(cook),)

    def batch(self, samples):
        return [sample["drawn"] for sample in samples] + [random.random()]


class YieldsSamples(Encoder):
    def encode_sample(self, sample):
        for _ in range(3):
            yield {**sample, "drawn": [*sample["drawn"], random.random()]}

    def postencode_sample(self, sample):
        return {**sample, "drawn": [*sample["drawn"], random.random()]}


class YieldsBatches(Encoder):
    def encode_batch(self, batch):
        for _ in range(3):
            yield [*batch, random.random()]


class YieldsInCooker(Encoder):
    cookers = (Cooker(cook_twice),)


class Delegates(AugmentTaskEncoder):
    """Returns what a generator of the inner encoder gives, and draws before."""

    def encode_sample(self, sample):
        sample = {**sample, "drawn": [*sample["drawn"], random.random()]}
        return super().encode_sample(sample)


ENCODERS = [YieldsSamples(), YieldsBatches(), YieldsInCooker(), Delegates(YieldsSamples())]


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda encoder: type(encoder).__name__)
def test_what_comes_before_a_generator_draws_the_same_after_resuming(root, encoder):
    items = resumable(train(root, encoder, batch_size=4), limit=18)
    assert len({str(item) for item in items}) == 18


class ReturnsAGenerator(Encoder):
    def encode_sample(self, sample):
        return (sample for _ in range(2))


def test_a_generator_that_cannot_be_known_beforehand_is_refused(root):
    with pytest.raises(FatalSampleError, match="`yield from` instead of `return`"):
        one_lane(train(root, ReturnsAGenerator()), 1)


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda encoder: type(encoder).__name__)
def test_encoders_know_which_of_their_hooks_may_yield(encoder):
    found = {
        name for name in ("encode_sample", "encode_batch", "batch") if encoder._may_yield(name)
    }
    expected = {
        "YieldsSamples": {"encode_sample"},
        "Delegates": {"encode_sample"},
        "YieldsBatches": {"encode_batch"},
    }
    assert found == expected.get(type(encoder).__name__, set())


class CallMe:
    def __call__(self, sample):
        yield sample


@functools.wraps(cook_twice)
def wrapped(sample):
    return cook_twice(sample)


@pytest.mark.parametrize(
    ("function", "yields"),
    [
        (cook, False),
        (cook_twice, True),
        (functools.partial(cook_twice, {}), True),
        (wrapped, True),
        (CallMe(), True),
        (CallMe, False),
        (staticmethod(cook_twice), True),
        (YieldsSamples().encode_sample, True),
        (None, False),
    ],
)
def test_functions_that_yield_are_known_however_they_are_wrapped(function, yields):
    assert is_generator_function(function) is yields
