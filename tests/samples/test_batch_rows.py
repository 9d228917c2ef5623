"""Images are written into the batch: same batches, no copies where the sizes agree."""

from __future__ import annotations

import numpy as np
import pytest

from energon import (
    DefaultTaskEncoder,
    SampleDecoder,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_val_dataset,
)
from energon.prepare.dataset import prepare_dataset
from energon.samples.collate import BatchRows, empty_row, stacked_rows
from tests.datasets import jpeg, write_shard
from tests.effort import mixed

COUNT, BATCH, SIDE = 22, 4, 64
FORMS = ("torchrgb", "torchrgb8", "rgb", "rgb8")
KIND = ((2, 3), np.dtype(np.float32))


def images(folder, sizes):
    datas = [jpeg(number, size=sizes[number % len(sizes)]) for number in range(COUNT)]
    samples = [(f"s{number}", {"jpg": data}) for number, data in enumerate(datas)]
    write_shard(folder / "0.tar", samples)
    prepare_dataset(
        folder, split_parts=["val:.*"], sample_type="ImageSample", field_map={"image": "jpg"}
    )
    return folder, datas


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    return images(tmp_path_factory.mktemp("alike"), [(SIDE, SIDE + 8)])


class Encoder(DefaultTaskEncoder):
    """Records where the image of each sample is."""

    def __init__(self, form, **settings):
        super().__init__()
        self.decoder = SampleDecoder(form, **settings)
        self.places = {}

    def encode_sample(self, sample):
        self.places[sample.__key__] = address(sample.image)
        return sample


class Skipping(Encoder):
    def encode_sample(self, sample):
        if sample.__key__ == "s9":
            raise SkipSample
        return super().encode_sample(sample)


class Replacing(Encoder):
    def encode_sample(self, sample):
        if sample.__key__ == "s9":
            sample.image = sample.image * 1
        return super().encode_sample(sample)


def address(image):
    return np.asarray(image).__array_interface__["data"][0]


def batches(folder, encoder):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=1)
    dataset = get_val_dataset(folder, worker_config=config, batch_size=BATCH, task_encoder=encoder)
    with get_savable_loader(dataset) as loader:
        return list(loader)


def check(found, datas, decoder, *, without=()):
    """Check the images against those that are decoded one by one, padded to one size."""
    names = [name for batch in found for name in batch.__key__]
    assert names == [f"s{n}" for n in range(COUNT) if f"s{n}" not in without]
    for batch in found:
        for name, image in zip(batch.__key__, np.asarray(batch.image), strict=True):
            expected = np.asarray(decoder.decode("a.jpg", datas[int(name[1:])]))
            inside = tuple(map(slice, expected.shape))
            assert (image[inside] == expected).all()
            # The padding is zero: sums of floats depend on the shape.
            assert np.count_nonzero(image) == np.count_nonzero(expected)
            assert image.dtype == expected.dtype


class Batching(Encoder):
    def batch(self, samples):
        return super().batch(samples)


@pytest.mark.parametrize(("form", "kind"), mixed([*FORMS], [Encoder, Batching]))
def test_images_of_one_size_are_decoded_into_the_batch(alike, form, kind):
    folder, datas = alike
    encoder = kind(form)
    found = batches(folder, encoder)
    check(found, datas, encoder.decoder)
    first, *others, _ = found  # the last one is smaller
    assert address(first.image[0]) != encoder.places["s0"]
    for batch in others:
        assert [encoder.places[name] for name in batch.__key__] == list(map(address, batch.image))


@pytest.mark.parametrize("form", FORMS)
def test_resized_images_are_written_into_the_batch(alike, form):
    folder, datas = alike
    encoder = Encoder(form, image_size=SIDE)
    found = batches(folder, encoder)
    check(found, datas, encoder.decoder)
    assert encoder.places["s6"] == address(found[1].image[2])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "without"), [(Skipping, ["s9"]), (Replacing, [])])
def test_batches_are_the_same_if_a_hook_skips_or_replaces_images(alike, form, kind, without):
    folder, datas = alike
    encoder = kind(form)
    check(batches(folder, encoder), datas, encoder.decoder, without=without)


@pytest.mark.parametrize("form", FORMS)
def test_batches_are_the_same_if_sizes_differ_now_and_then(tmp_path, form):
    folder, datas = images(tmp_path, [(SIDE, SIDE)] * 10 + [(SIDE + 9, SIDE)])
    encoder = Encoder(form)
    check(batches(folder, encoder), datas, encoder.decoder)


KEEPS = {
    "the sample": lambda sample: sample,
    "its image": lambda sample: sample.image,
    "a part of its image": lambda sample: sample.image[1:],
}


@pytest.mark.parametrize(("form", "keep", "kind"), mixed([*FORMS], [*KEEPS], [Encoder, Batching]))
def test_what_a_hook_keeps_of_a_sample_is_apart_from_the_batch(alike, form, keep, kind):
    folder, datas = alike
    kept = []

    class Keeping(kind):
        def encode_sample(self, sample):
            if sample.__key__ in ("s6", "s13"):
                kept.append(KEEPS[keep](sample))
            return super().encode_sample(sample)

    encoder = Keeping(form)
    found = batches(folder, encoder)
    for each in kept:
        getattr(each, "image", each)[:] = 99
    check(found, datas, encoder.decoder)
    assert encoder.places["s6"] != address(found[1].image[2])
    # From then on, nothing that is kept has the memory of a batch.
    assert address(found[3].image[1]) != encoder.places["s13"]


def test_rows_exist_once_a_batch_was_full_of_one_kind():
    rows = BatchRows(2)
    for is_known in (False, True, True):
        with rows:
            arrays = [empty_row(*KIND) for _ in range(2)]
            whole = stacked_rows(arrays)
            assert (whole is not None) is is_known
            assert stacked_rows(arrays) is None, "two fields would be one array"
        if whole is not None:
            whole[:] = 7
            assert (np.stack(arrays) == 7).all()
    assert stacked_rows(arrays) is None


def test_arrays_that_are_no_rows_in_order_are_not_taken_for_such():
    rows = BatchRows(3)
    for _ in range(2):
        with rows:
            one, two, three = (empty_row(*KIND) for _ in range(3))
            assert stacked_rows([one, two, three, three]) is None
            assert stacked_rows([two, one, three]) is None
            assert stacked_rows([one, one.copy(), three]) is None
            assert stacked_rows([one, two[:, ::-1], three]) is None
            assert stacked_rows([one, two.view(np.int32), three]) is None
            part = stacked_rows([one, two])
    assert part.shape == (2, 2, 3)


def test_two_arrays_of_each_item_have_no_rows():
    rows = BatchRows(2)
    for _ in range(3):
        with rows:
            arrays = [empty_row(*KIND) for _ in range(4)]
            assert stacked_rows(arrays[::2]) is None
