from __future__ import annotations

import numpy as np
import pytest
import torch

from energon import (
    ConfigError,
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    basic_sample_keys,
    edataclass,
)
from tests.datasets import make_captions, make_crude
from tests.task_encoder.runs import flat, val

TENSORS = SampleDecoder(image_decode="torchrgb8")


class Listing(DefaultTaskEncoder):
    decoder = TENSORS

    def batch(self, samples):
        return samples


def first(path, encoder=None):
    return flat(val(path, encoder or Listing(), batch_size=1))[0]


def describe(root, text):
    path = root / ".nv-meta/dataset.yaml"
    path.write_text(path.read_text() + text)
    return root


@pytest.mark.parametrize("named", ["", "__module__: megatron.energon, __class__: SampleDecoder, "])
def test_a_dataset_may_have_a_decoder_of_its_own(tmp_path, named):
    root = make_captions(tmp_path / "ds", [2])
    assert isinstance(first(root).image, torch.Tensor)
    describe(root, f"decoder: {{{named}image_decode: rgb8}}\n")
    assert isinstance(first(root).image, np.ndarray)


def test_a_dataset_may_want_no_decoder(tmp_path):
    root = describe(make_captions(tmp_path / "ds", [2]), "decoder: null\n")
    assert first(root).image[:2] == b"\xff\xd8"
    assert first(root).caption == b"caption 0"


def test_each_dataset_of_a_mixture_has_its_own(tmp_path):
    describe(make_crude(tmp_path / "a", [1]), "decoder: null\n")
    make_crude(tmp_path / "b", [1])
    (tmp_path / "m.yaml").write_text(
        "splits: {val: {blend: [{path: a}, {path: b}]}, train: {path: a}}"
    )
    found = flat(val(tmp_path / "m.yaml", Listing(), batch_size=1))
    assert [sample["txt"] for sample in found] == [b"text 0", "text 0"]


def test_cookers_get_what_the_decoder_of_the_dataset_makes(tmp_path):
    @edataclass
    class Text(Sample):
        text: object

    class Cooking(Listing):
        cookers = (Cooker(lambda raw: Text(**basic_sample_keys(raw), text=raw["txt"])),)

    root = describe(make_crude(tmp_path / "ds", [1]), "decoder: null\n")
    assert first(root, Cooking()).text == b"text 0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{__module__: os, __class__: system}", r"decoder os\.system is not known"),
        ("{image_decode: RGB}", "decoder: image_decode='RGB'"),
        ("{allow: [pickle]}", "no setting 'allow'"),
        ("{decoders: {x: y}}", "no setting 'decoders'"),
    ],
)
def test_a_decoder_that_makes_no_sense_or_asks_for_code_is_refused(tmp_path, text, message):
    root = describe(make_captions(tmp_path / "ds", [1]), f"decoder: {text}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        val(root)
    assert "dataset.yaml" in str(caught.value)
