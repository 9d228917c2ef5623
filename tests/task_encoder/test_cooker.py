from __future__ import annotations

import random

import pytest

from energon import (
    ConfigError,
    Cooker,
    DefaultTaskEncoder,
    FatalSampleError,
    SkipSample,
    TextSample,
    basic_sample_keys,
    cooker,
    stateless,
)
from tests.datasets import make_captions, make_crude
from tests.task_encoder.runs import flat, one_lane, resumable, train, val


def cook_text(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


def shout(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["txt"].upper())


class Cooking(DefaultTaskEncoder):
    """Cooks with the functions that it is given; batches are lists of texts."""

    def __init__(self, *cookers):
        super().__init__()
        self.cookers = [each if isinstance(each, Cooker) else Cooker(each) for each in cookers]

    def batch(self, samples):
        return [sample.text for sample in samples]


# Which cooker


@pytest.mark.parametrize(
    ("wanted", "found", "matches"),
    [
        (None, None, True),
        ({}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({"a": 1}, {"a": 2}, False),
        ({"a": None}, {}, False),
        ({"a": 1}, None, False),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}, True),
    ],
)
def test_a_cooker_is_for_datasets_with_its_subflavors(wanted, found, matches):
    assert Cooker(cook_text, has_subflavors=wanted).is_match(found) is matches


def test_a_dataset_without_a_cooker_says_what_there_is(root):
    encoder = Cooking(
        Cooker(cook_text, has_subflavors={"kind": "text"}),
        Cooker(shout, has_subflavors={"loud": 1}),
    )
    with pytest.raises(ConfigError) as caught:
        val(root, encoder, subflavors={"kind": "image"})
    text = str(caught.value)
    assert "no cooker for ds/val, which has subflavors {'kind': 'image'}" in text
    assert "cook_text requires {'kind': 'text'}; shout requires {'loud': 1}" in text
    assert "Add a Cooker" in text


def test_every_dataset_of_a_blend_gets_its_own_cooker(tmp_path):
    for name in "ab":
        make_crude(tmp_path / name, [4], prefix=name)
    make_captions(tmp_path / "c", [4], prefix="c")
    document = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {
            "val": {
                "blend": [
                    {"path": str(tmp_path / "a"), "subflavors": {"loud": True}},
                    {"path": str(tmp_path / "b")},
                ]
            }
        },
    }
    encoder = Cooking(Cooker(shout, has_subflavors={"loud": True}), Cooker(cook_text))
    batches, _ = one_lane(val(document, encoder))
    assert batches == [[f"TEXT {n}" for n in range(4)], [f"text {n}" for n in range(4)]]


# What a cooker gets and gives


def test_a_cooked_sample_keeps_what_names_it(root):
    samples, _ = one_lane(val(root, Cooking(cook_text), batch_size=None, subflavors={"a": 1}))
    assert [sample.text for sample in samples] == [f"text {n}" for n in range(20)]
    sample = samples[6]
    assert (sample.__key__, sample.__restore_key__) == ("s6", (0, 0, 6))
    assert sample.__subflavors__ == {"a": 1}
    (source,) = sample.__sources__
    assert (source.dataset_path, source.index, source.shard_name, source.file_names) == (
        str(root),
        6,
        "001.tar",
        ("s6.txt",),
    )
    resumable(val(root, Cooking(cook_text)))


def test_cookers_see_decoded_parts_unless_there_is_no_decoder(root):
    class Undecoded(Cooking):
        decoder = None

    def kind(sample):
        return TextSample(**basic_sample_keys(sample), text=type(sample["txt"]).__name__)

    assert one_lane(val(root, Cooking(kind)), 1)[0] == [["str"] * 4]
    assert one_lane(val(root, Undecoded(kind)), 1)[0] == [["bytes"] * 4]


def test_a_cooker_may_yield_several_samples_or_none(root):
    def letters(sample):
        number = int(sample["txt"].split()[1])
        for copy in range(number % 3):
            yield TextSample(**basic_sample_keys(sample), text=f"{number}/{copy}")

    dataset = val(root, Cooking(letters))
    assert flat(one_lane(dataset)[0]) == [f"{n}/{copy}" for n in range(20) for copy in range(n % 3)]
    resumable(dataset)


# Skips, failures and marks


def test_a_cooker_may_skip_samples(root):
    def odd(sample):
        if sample["txt"][-1] in "02468":
            raise SkipSample
        return cook_text(sample)

    dataset = val(root, Cooking(odd))
    batches, counts = one_lane(dataset)
    assert flat(batches) == [f"text {n}" for n in range(1, 20, 2)]
    assert counts["skipped"] == 10
    resumable(dataset)


def broken(sample):
    raise ValueError("this is broken")


def test_a_failing_cooker_names_key_shard_and_offset(root):
    encoder = Cooking(broken)
    encoder.__default_failure_tolerance__ = 6
    text = r"cook_crude_sample failed on sample 's5' of .*ds \(number 5; 001\.tar at byte 0\)"
    with pytest.raises(FatalSampleError, match=f"{text}: ValueError: this is broken"):
        one_lane(val(root, encoder))


def test_a_cooker_may_have_a_tolerance_of_its_own(root):
    with pytest.raises(FatalSampleError, match="3 failures in a row"):
        one_lane(val(root, Cooking(stateless(failure_tolerance=3)(lambda sample: broken(sample)))))


def test_marks_of_an_overridden_cook_crude_sample_count_too(root):
    class Encoder(Cooking):
        @stateless(failure_tolerance=2)
        def cook_crude_sample(self, sample, cooker, aux):
            raise ValueError("this is broken")

    with pytest.raises(FatalSampleError, match="2 failures in a row"):
        one_lane(val(root, Encoder(cook_text)))


def test_restored_seeds_make_what_a_cooker_draws_a_function_of_the_sample(root):
    @stateless(restore_seeds=True)
    def draw(sample):
        return TextSample(**basic_sample_keys(sample), text=(sample["txt"], random.random()))

    def epoch(batch_size, **settings):
        dataset = train(root, Cooking(draw), batch_size=batch_size, **settings)
        return set(flat(one_lane(dataset, 20 // batch_size)[0]))

    first = epoch(4)
    assert len({drawn for _, drawn in first}) == len(first) == 20
    assert epoch(5) == first
    assert epoch(2, shuffle_buffer_size=10) == first
    assert epoch(4, subflavors={"a": 1}) == first


def test_what_a_cooker_draws_without_marks_is_the_same_after_resuming(root):
    def draw(sample):
        return TextSample(**basic_sample_keys(sample), text=random.random())

    drawn = resumable(train(root, Cooking(draw)), limit=10)
    assert len(set(flat(drawn))) == 40


def test_a_mark_says_how_a_hook_is_run_and_returns_it():
    def plain(sample):
        return sample

    assert stateless(plain) is plain
    assert (plain.__restore_seeds__, plain.__failure_tolerance__) == (False, None)
    assert stateless(restore_seeds=True, failure_tolerance=4)(plain) is plain
    assert (plain.__restore_seeds__, plain.__failure_tolerance__) == (True, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("failure_tolerance", n) for n in (True, 2.5, "3", -1)), ("failure_rate", 1.5)],
)
def test_a_tolerance_is_a_number_of_failures_or_a_share(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be"):
        stateless(**{name: value})


def test_static_methods_keep_their_marks_in_either_order_of_decorators():
    class Encoder(DefaultTaskEncoder):
        @stateless(restore_seeds=True)
        @staticmethod
        def encode_sample(sample):
            return sample

        @staticmethod
        @stateless(restore_seeds=True)
        def encode_batch(batch):
            return batch

        @staticmethod
        @cooker(need_primary=True)
        def cook(sample, primary):
            return sample

        @cooker(need_cache=True)
        @staticmethod
        def cook_cached(sample, cache):
            return sample

        cookers = (Cooker(cook), Cooker(cook_cached))

    encoder = Encoder()
    assert encoder.encode_sample.__restore_seeds__
    assert encoder.encode_batch.__restore_seeds__
    assert [each.need_primary for each in encoder.cookers] == [True, False]
    assert [each.need_cache for each in encoder.cookers] == [False, True]
