from __future__ import annotations

import pickle
from itertools import chain

import numpy as np
import pytest
import torch

from energon import (
    ConfigError,
    Cooker,
    DefaultTaskEncoder,
    FatalSampleError,
    Sample,
    SampleDecoder,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
)
from energon.prepare.dataset import prepare_dataset
from tests.datasets import jpeg, make_captions, make_crude, write_shard
from tests.task_encoder.runs import config, flat, one_lane, resumable, train, val

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


def pickled(path, name):
    shards = path / "0.tar", path / "1.tar"
    for number, shard in enumerate(shards):
        write_shard(shard, [(str(number), {"pkl": pickle.dumps({name: number})})])
    prepare_dataset(path, split_parts=["train:0.*", "val:1.*"], sample_type="CrudeWebdataset")
    return path


@edataclass
class Both(Sample):
    found: object

    @classmethod
    def from_joined(cls, one, other):
        return cls(**basic_sample_keys(one), found=[one["pkl"], other["pkl"]])


def test_a_getter_allows_the_decoder_to_unpickle(tmp_path):
    pickled(tmp_path / "a", "a")
    pickled(tmp_path / "b", "b")
    joiner = f"{{__module__: {__name__}, __class__: Both}}"
    (tmp_path / "m.yaml").write_text(
        f"splits: {{val: {{join: [{{path: a}}, {{path: b}}], joiner: {joiner}}}}}"
    )
    for path, count in ((tmp_path / "a", 1), (tmp_path / "m.yaml", 2)):
        with pytest.raises(FatalSampleError, match=r'allow=\("pickle",\)'):
            flat(val(path, Listing(), batch_size=1))
        found = str(flat(val(path, Listing(), batch_size=1, allow=("pickle",))))
        assert [found.count(each) for each in ("{'a': 1}", "{'b': 1}")] == [1, count - 1]


def test_a_dataset_may_want_images_of_one_size(tmp_path):
    root = describe(
        make_captions(tmp_path / "ds", [2]),
        "decoder: {image_decode: rgb8, image_size: [6, 5], random_resized_crop: true, "
        "max_enlargement: 1.2}\n",
    )
    assert first(root).image.shape == (6, 5, 3)
    with pytest.raises(ConfigError, match="one number for a square"):
        first(describe(make_captions(tmp_path / "other", [2]), "decoder: {image_size: large}\n"))


class Cropping(Listing):
    # With 1.5, crops of at least 6 x 6 are decoded at half size, not only those of 8 x 8.
    decoder = SampleDecoder("rgb8", image_size=4, random_resized_crop=True, max_enlargement=1.5)

    def batch(self, samples):
        return [
            (sample.__key__, sample.__restore_key__, sample.image.tolist()) for sample in samples
        ]


def cropped(root, *, rank=0, world_size=1, num_workers=0, workers="process", count=8):
    worker_config = config(rank=rank, world_size=world_size, num_workers=num_workers, lanes=4)
    dataset = train(root, Cropping(), batch_size=3, worker_config=worker_config)
    with get_savable_loader(dataset, workers=workers) as loader:
        return [batch for batch, _ in zip(loader, range(count), strict=False)]


def test_crops_are_the_same_on_every_topology_and_new_in_each_epoch(tmp_path):
    root = make_captions(tmp_path / "ds", [7, 6])
    expected = cropped(root)
    for settings in ({"num_workers": 2}, {"num_workers": 3, "workers": "thread"}):
        assert cropped(root, **settings) == expected
    ranks = [cropped(root, rank=rank, world_size=2, count=4) for rank in (0, 1)]
    dealt = [batch for pair in zip(*ranks, strict=True) for batch in pair]
    assert dealt == expected
    images: dict[str, list[str]] = {}
    for key, _, image in chain.from_iterable(expected):
        images.setdefault(key, []).append(str(image))
    several = [each for each in images.values() if len(each) > 1]
    assert several
    assert any(len(set(each)) > 1 for each in several)


def test_crops_are_the_same_after_a_restore_and_in_single_samples(tmp_path):
    root = make_captions(tmp_path / "ds", [7, 6])
    dataset = train(root, Cropping(), batch_size=3)
    resumable(dataset, limit=6)
    with get_savable_loader(train(root, Cropping(), batch_size=3)) as loader:
        for batch, _ in zip(loader, range(6), strict=False):
            for _, restore_key, image in batch:
                again = loader.restore_sample(restore_key)
                assert again.image.tolist() == image


def test_files_that_cookers_look_up_get_the_size_but_are_not_cut(tmp_path):
    """They are cached, and several samples may ask for one."""
    make_captions(tmp_path / "images", [3])
    make_crude(tmp_path / "texts", [3])
    (tmp_path / "m.yaml").write_text("splits: {train: {path: texts, aux: {pics: images}}}")

    def look_up(sample, pics):
        return {"cut": sample["txt"], "whole": pics.get("s1.jpg", sample)}

    class Looking(DefaultTaskEncoder):
        cookers = (Cooker(look_up),)
        decoder = SampleDecoder("rgb8", image_size=4, random_resized_crop=True)

    batches = one_lane(train(tmp_path / "m.yaml", Looking(), batch_size=1), 4)[0]
    resized = SampleDecoder("rgb8", image_size=4).decode("s1.jpg", jpeg(1))
    assert all((batch["whole"][0] == resized).all() for batch in batches)
