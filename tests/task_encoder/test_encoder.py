from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from energon import (
    Batch,
    CaptioningSample,
    DefaultTaskEncoder,
    FatalSampleError,
    SampleDecoder,
    SkipSample,
    TaskEncoder,
    edataclass,
    stateless,
)
from tests.datasets import make_captions, make_crude
from tests.task_encoder.runs import flat, one_lane, resumable, train, val

TEXTS = [f"text {n}" for n in range(20)]


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    return make_captions(tmp_path_factory.mktemp("captions") / "ds", [6, 5])


class Texts(DefaultTaskEncoder):
    """Batches are lists of texts."""

    def batch(self, samples):
        return [sample["txt"] for sample in samples]


class Raw(DefaultTaskEncoder):
    decoder = None


# Each hook


def test_a_plain_task_encoder_works_as_it_is(root):
    batches, _ = one_lane(val(root, TaskEncoder(), batch_size=8))
    assert [batch["txt"] for batch in batches] == [TEXTS[:8], TEXTS[8:16], TEXTS[16:]]


# Each hook


def test_encode_sample_makes_the_samples_of_batches(root):
    class Encoder(Texts):
        def encode_sample(self, sample):
            return {**sample, "txt": sample["txt"].upper()}

    dataset = val(root, Encoder())
    batches, _ = one_lane(dataset)
    assert flat(batches) == [text.upper() for text in TEXTS]
    resumable(dataset)


def test_encode_sample_may_yield_several_samples_or_none(root):
    class Encoder(Texts):
        def encode_sample(self, sample):
            number = int(sample["txt"].split()[1])
            for copy in range(number % 3):
                yield {**sample, "txt": (number, copy)}

    dataset = val(root, Encoder())
    batches, _ = one_lane(dataset)
    assert flat(batches) == [(n, copy) for n in range(20) for copy in range(n % 3)]
    assert all(len(batch) == 4 for batch in batches[:-1])
    resumable(dataset)
    resumable(val(root, Encoder(), batch_size=None))


@pytest.mark.parametrize("hook", ["preencode_sample", "postencode_sample"])
def test_the_hooks_of_packing_run_also_where_nothing_is_packed(root, hook):
    Encoder = type("Encoder", (Texts,), {hook: lambda self, sample: {"txt": sample["txt"] + "!"}})
    dataset = val(root, Encoder())
    assert flat(one_lane(dataset)[0]) == [f"{text}!" for text in TEXTS]
    resumable(dataset)


def test_batch_makes_a_batch_of_consecutive_samples(root):
    dataset = val(root, Texts(), batch_size=6)
    batches, counts = one_lane(dataset)
    assert batches == [TEXTS[:6], TEXTS[6:12], TEXTS[12:18], TEXTS[18:]]
    assert counts["samples"] == 20
    assert resumable(dataset) == [TEXTS[:6], TEXTS[12:18]]


def test_batch_may_yield_several_batches(root):
    class Encoder(Texts):
        def batch(self, samples):
            for sample in samples:
                if sample["txt"] != "text 5":
                    yield sample["txt"]

    dataset = val(root, Encoder(), batch_size=3)
    assert one_lane(dataset)[0] == [text for text in TEXTS if text != "text 5"]
    resumable(dataset)


def test_encode_batch_makes_what_the_loader_yields(root):
    class Encoder(Texts):
        def encode_batch(self, batch):
            return " ".join(batch)

    dataset = val(root, Encoder(), batch_size=10)
    assert one_lane(dataset)[0] == [" ".join(TEXTS[:10]), " ".join(TEXTS[10:])]
    resumable(dataset)


def test_encode_batch_may_yield_several_batches(root):
    class Encoder(Texts):
        def batch(self, samples):
            yield from (super().batch(samples[:3]), super().batch(samples[3:]))

        def encode_batch(self, batch):
            yield from ((text, copy) for text in batch for copy in range(2))

    dataset = val(root, Encoder(), batch_size=5)
    assert one_lane(dataset)[0] == [(text, copy) for text in TEXTS for copy in range(2)]
    resumable(dataset)


def test_without_a_batch_size_samples_come_and_no_hook_of_batches_runs(root):
    class Encoder(Texts):
        def encode_sample(self, sample):
            return sample["txt"]

        def encode_batch(self, batch):
            raise AssertionError("there is no batch")

    dataset = val(root, Encoder(), batch_size=None)
    assert one_lane(dataset)[0] == TEXTS
    resumable(dataset)


# Decoding


def test_without_a_decoder_parts_stay_bytes(root):
    class Encoder(Texts):
        decoder = None

    dataset = val(root, Encoder())
    assert flat(one_lane(dataset)[0]) == [text.encode() for text in TEXTS]
    resumable(dataset)


def test_typed_samples_without_a_decoder_have_fields_of_bytes(captions):
    batches, _ = one_lane(val(captions, Raw()))
    assert batches[0].caption == [b"caption 0", b"caption 1", b"caption 2", b"caption 3"]
    assert batches[0].image[0].startswith(b"\xff\xd8")


def test_samples_are_decoded_as_the_decoder_says(captions):
    class Encoder(DefaultTaskEncoder):
        decoder = SampleDecoder(image_decode="rgb8")

    batches, _ = one_lane(val(captions, Encoder(), batch_size=3))
    assert (batches[0].image.shape, batches[0].image.dtype) == ((3, 8, 12, 3), np.uint8)


def test_typed_samples_know_where_they_came_from(captions):
    samples, _ = one_lane(val(captions, batch_size=None, subflavors={"a": 1}))
    assert all(type(sample) is CaptioningSample for sample in samples)
    assert [sample.__key__ for sample in samples] == [f"s{n}" for n in range(11)]
    assert samples[7].__restore_key__ == (0, 0, 7)
    (batch, *_) = one_lane(val(captions, batch_size=2))[0]
    assert batch.__restore_key__ == ("batch", ((0, 0, 0), (0, 0, 1)), 0)
    assert samples[7].__subflavors__ == {"a": 1}
    (source,) = samples[7].__sources__
    assert (source.dataset_path, source.index) == (str(captions), 7)
    assert source.shard_name == "shards/001.tar"
    assert source.file_names == ("s7.jpg", "s7.txt")


# Skips and failures


@pytest.mark.parametrize("hook", ["encode_sample", "preencode_sample", "postencode_sample"])
def test_skipped_samples_are_left_out_and_batches_stay_full(root, hook):
    def skip(self, sample):
        if sample["txt"].endswith(("3", "7")):
            raise SkipSample
        return sample

    dataset = val(root, type("Encoder", (Texts,), {hook: skip})())
    batches, counts = one_lane(dataset)
    assert flat(batches) == [text for text in TEXTS if text[-1] not in "37"]
    assert [len(batch) for batch in batches] == [4] * 4
    assert (counts["skipped"], counts["failed"]) == (4, 0)
    resumable(dataset)


@pytest.mark.parametrize("hook", ["batch", "encode_batch"])
def test_skipped_batches_are_left_out(root, hook):
    def skip(self, batch):
        if "text 5" in str(batch):
            raise SkipSample
        return batch

    dataset = val(root, type("Encoder", (Texts,), {hook: skip})())
    batches, counts = one_lane(dataset)
    texts = [sample if hook == "encode_batch" else sample["txt"] for sample in flat(batches)]
    assert texts == TEXTS[:4] + TEXTS[8:]
    assert counts["skipped"] == 1
    resumable(dataset)


def fail(self, argument):
    raise ValueError("this is broken")


def encoder_failing_in(hook, tolerance=1):
    attributes = {hook: fail, "__default_failure_tolerance__": tolerance}
    return type("Encoder", (DefaultTaskEncoder,), attributes)()


@pytest.mark.parametrize("hook", ["encode_sample", "preencode_sample", "postencode_sample"])
def test_a_failure_names_hook_key_shard_and_offset(root, hook):
    with pytest.raises(FatalSampleError) as caught:
        one_lane(val(root, encoder_failing_in(hook, 7)))
    text = str(caught.value)
    assert text.startswith(
        f"{hook} failed on sample 's6' of {root} (number 6; 001.tar at byte 1024)"
    )
    assert "7 failures in a row" in text
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("hook", ["batch", "encode_batch"])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 6])
def test_a_failure_with_a_batch_names_its_samples(captions, hook, batch_size):
    with pytest.raises(FatalSampleError) as caught:
        one_lane(val(captions, encoder_failing_in(hook), batch_size=batch_size))
    text = str(caught.value)
    assert text.startswith(f"{hook} failed on sample 's0' of {captions} (number 0; shards/000.tar")
    assert text.count("at byte") == min(batch_size, 4)
    assert ("…" in text) == (batch_size > 4)
    assert "ValueError: this is broken" in text


def test_a_failure_with_a_batch_of_dicts_names_its_samples(root):
    with pytest.raises(FatalSampleError, match=r"encode_batch failed on sample 's0'.*sample 's3'"):
        one_lane(val(root, encoder_failing_in("encode_batch")))


@pytest.mark.parametrize(
    "key", [None, (), 5, "s1", ("a", 1, 2), (9, 0, 0), (0, 0, 99), (0, 0), [1]]
)
def test_a_failure_with_a_changed_restore_key_is_still_told(root, key):
    class Encoder(Texts):
        __default_failure_tolerance__ = 1

        def encode_sample(self, sample):
            return {**sample, "__restore_key__": key}

        def batch(self, samples):
            raise ValueError("this is broken")

    with pytest.raises(FatalSampleError, match=r"batch failed on a sample of unknown.*is broken"):
        one_lane(val(root, Encoder(), batch_size=1))


def test_a_failure_is_told_although_its_shard_has_gone(tmp_path):
    root = make_crude(tmp_path / "ds", [5])

    class Encoder(Texts):
        __default_failure_tolerance__ = 1

        def encode_sample(self, sample):
            for name in ("000.tar", "000.tar.idx", "000.tar.parts"):
                (root / name).unlink()
            dataset.reader.sources[0]._pool._shards.clear()
            raise ValueError("this is broken")

    dataset = val(root, Encoder())
    text = r"failed on sample number 0 of .*ds, not located: .*000\.tar: no .*this is broken"
    with pytest.raises(FatalSampleError, match=text):
        one_lane(dataset)


def test_tolerated_failures_are_logged_and_counted(root, caplog):
    class Encoder(Texts):
        def encode_sample(self, sample):
            if sample["txt"] == "text 9":
                raise ValueError("this is broken")
            return sample

    dataset = val(root, Encoder())
    batches, counts = one_lane(dataset)
    assert flat(batches) == [text for text in TEXTS if text != "text 9"]
    assert counts["failed"] == 1
    assert "ValueError: this is broken (sample 's9' of" in caplog.text
    assert "001.tar at byte 4096" in caplog.text


def test_a_hook_may_have_a_tolerance_of_its_own(root):
    class Encoder(Texts):
        @stateless(failure_tolerance=3)
        def encode_sample(self, sample):
            raise ValueError("this is broken")

    with pytest.raises(FatalSampleError, match="'s2'.*3 failures in a row"):
        one_lane(val(root, Encoder()))


def test_a_tolerance_of_nothing_never_ends_the_run(root):
    batches, counts = one_lane(val(root, encoder_failing_in("encode_sample", 0)))
    assert batches == []
    assert counts["failed"] == 20


# Types


@edataclass
class Caption(Batch):
    caption: list[str]


class Pair(NamedTuple):
    image: object
    caption: object


@dataclass
class Small:
    caption: object


@pytest.mark.parametrize("kind", [dict, Pair, Small, CaptioningSample])
def test_samples_become_the_type_that_is_asked_for(captions, kind):
    encoder = DefaultTaskEncoder(encoded_sample_type=kind)
    samples, _ = one_lane(val(captions, encoder, batch_size=None))
    read = dict.__getitem__ if kind is dict else getattr
    assert all(type(sample) is kind for sample in samples)
    assert [read(sample, "caption") for sample in samples] == [f"caption {n}" for n in range(11)]


@pytest.mark.parametrize("kind", [dict, Pair, Small, Caption])
@pytest.mark.parametrize("argument", ["raw_batch_type", "batch_type"])
def test_batches_become_the_type_that_is_asked_for(captions, kind, argument):
    batches, counts = one_lane(val(captions, DefaultTaskEncoder(**{argument: kind})))
    read = dict.__getitem__ if kind is dict else getattr
    assert [type(batch) for batch in batches] == [kind] * 3
    assert read(batches[2], "caption") == ["caption 8", "caption 9", "caption 10"]
    assert counts["failed"] == 0


def test_types_may_follow_one_another(captions):
    encoder = DefaultTaskEncoder(encoded_sample_type=Pair, raw_batch_type=dict, batch_type=Small)
    batches, _ = one_lane(val(captions, encoder))
    assert batches[0] == Small([f"caption {n}" for n in range(4)])


def test_samples_without_fields_are_batched_as_they_are():
    encoder = DefaultTaskEncoder()
    assert encoder.batch(["a", "b"]) == ["a", "b"]
    assert encoder.batch([np.zeros(2), np.ones(3)]).tolist() == [[0, 0, 0], [1, 1, 1]]


# Randomness


@pytest.mark.parametrize("hook", ["encode_sample", "postencode_sample", "batch", "encode_batch"])
def test_what_a_hook_draws_is_the_same_after_resuming(root, hook):
    def draw(self, argument):
        return np.random.random(), __import__("random").random()

    encoder = type("Encoder", (DefaultTaskEncoder,), {hook: draw})()
    dataset = train(root, encoder)
    drawn = resumable(dataset, limit=12)
    assert len({str(batch) for batch in drawn}) == 12


def test_hooks_see_where_crude_samples_are_from(tmp_path):
    class Shards(DefaultTaskEncoder):
        def encode_sample(self, sample):
            return sample["__sources__"]

    root = make_crude(tmp_path / "ds", [3, 2])
    found, _ = one_lane(train(root, Shards(), batch_size=None, repeat=False))
    sources = [source for (source,) in found]
    assert sorted(source.index for source in sources) == list(range(5))
    assert {source.shard_name for source in sources} == {"000.tar", "001.tar"}
    # Nothing is recorded where no code of the program could look.
    samples, _ = one_lane(train(root, batch_size=None, repeat=False))
    assert all("__sources__" not in sample for sample in samples)
