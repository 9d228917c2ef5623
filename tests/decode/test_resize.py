from __future__ import annotations

import io
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from energon.decode import images as resizing
from energon.decode.images import Box, RandomResizedCrop
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, DecodeError
from tests.effort import mixed

SPECS = ["rgb8", "torchrgb8", "l8", "torchl8", "pil"]


def scene(width, height):
    """An image with smooth areas, edges and some noise, as photographs have them."""
    random = np.random.default_rng(width)
    coarse = Image.fromarray(random.integers(0, 255, (9, 12, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    rows, columns = np.mgrid[:height, :width]
    edges = np.where((columns // 61 + rows // 47) % 2, 30, -30)[..., None]
    pixels = smooth + edges + random.normal(0, 4, (height, width, 1))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def encoded(image, file_format="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


LARGE = encoded(scene(1024, 768), quality=90)
SMALL = encoded(scene(500, 375), quality=90)
PNG = encoded(scene(500, 375), "PNG")


def as_pillow_would(data, size, box=None, mode="RGB"):
    image = Image.open(io.BytesIO(data)).convert(mode).crop(box)
    return np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR), np.int32)


def pixels_of(found):
    """Height, width and channels of whatever an image became."""
    if isinstance(found, torch.Tensor):
        return (found.permute(1, 2, 0) if found.ndim == 3 else found).numpy().astype(np.int32)
    return np.asarray(found, np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [(224, 224), (224, 320), (500, 700)])
@pytest.mark.parametrize("data", [SMALL, PNG, LARGE])
def test_images_decoded_in_full_differ_from_those_of_pillow_by_rounding_only(spec, size, data):
    found = SampleDecoder(spec, image_size=size, exact_resize=True).decode("a.jpg", data)
    expected = as_pillow_would(data, size, mode="L" if "l8" in spec else "RGB")
    assert pixels_of(found).shape == expected.shape
    assert np.abs(pixels_of(found) - expected).max() <= 1


@pytest.mark.parametrize("spec", SPECS)
def test_images_that_are_less_than_twice_as_large_are_the_same_without_exact_resize(spec):
    found, exact = (
        SampleDecoder(spec, image_size=224, exact_resize=exact).decode("a.jpg", SMALL)
        for exact in (False, True)
    )
    assert np.array_equal(pixels_of(found), pixels_of(exact))


@pytest.mark.parametrize("spec", SPECS)
def test_reduced_decoding_stays_near_to_full_decoding(spec):
    found = pixels_of(SampleDecoder(spec, image_size=224).decode("a.jpg", LARGE))
    expected = as_pillow_would(LARGE, (224, 224), mode="L" if "l8" in spec else "RGB")
    error = np.square(found - expected).mean()
    assert error > 0
    assert 10 * math.log10(255**2 / error) > 38


def recorded_shapes(monkeypatch):
    shapes, resize = [], resizing.resize_pixels

    def recorded(pixels, *arguments, **settings):
        shapes.append(pixels.shape[:2])
        return resize(pixels, *arguments, **settings)

    monkeypatch.setattr(resizing, "resize_pixels", recorded)
    return shapes


@pytest.mark.parametrize(
    ("data", "max_enlargement", "decoded"),
    [
        (SMALL, 1, (375, 500)),
        (SMALL, 1.19, (375, 500)),
        (SMALL, 1.2, (188, 250)),
        (SMALL, 2.3, (188, 250)),
        (SMALL, 2.5, (94, 125)),
        (LARGE, 1.1, (384, 512)),
        (LARGE, 1.2, (192, 256)),
        (LARGE, 2.4, (96, 128)),
    ],
)
def test_decoding_may_go_below_the_size_by_as_much_as_images_may_be_enlarged(
    monkeypatch, data, max_enlargement, decoded
):
    shapes = recorded_shapes(monkeypatch)
    decoder = SampleDecoder("torchrgb8", image_size=224, max_enlargement=max_enlargement)
    assert decoder.decode("a.jpg", data).shape == (3, 224, 224)
    assert shapes == [decoded]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("data", "least"), [(SMALL, 33), (LARGE, 31)])
def test_enlarged_images_stay_near_to_full_decoding(spec, data, least):
    found = pixels_of(
        SampleDecoder(spec, image_size=224, max_enlargement=1.2).decode("a.jpg", data)
    )
    expected = as_pillow_would(data, (224, 224), mode="L" if "l8" in spec else "RGB")
    assert 10 * math.log10(255**2 / np.square(found - expected).mean()) > least


@pytest.mark.parametrize("spec", SPECS)
def test_only_reduced_jpegs_depend_on_how_much_images_may_be_enlarged(spec):
    for data, size in ((PNG, 224), (SMALL, 300), (SMALL, (100, 600))):
        default, enlarged = (
            SampleDecoder(spec, image_size=size, max_enlargement=each).decode("a.jpg", data)
            for each in (1, 1.2)
        )
        assert np.array_equal(pixels_of(default), pixels_of(enlarged))


SMALLEST = {1: (96, 128), 96: (96, 128), 97: (192, 256), 384: (384, 512), 385: (768, 1024)}


@pytest.mark.parametrize(
    ("spec", "simplejpeg", "min_size"),
    [*mixed([*SPECS], [True], [*SMALLEST]), *mixed([*SPECS], [False], [*SMALLEST])],
)
def test_min_size_halves_while_both_sides_keep_as_many(monkeypatch, spec, simplejpeg, min_size):
    if not simplejpeg:
        monkeypatch.setitem(sys.modules, "simplejpeg", None)
    found = SampleDecoder(spec, min_size=min_size).decode("a.jpg", LARGE)
    assert pixels_of(found).shape[:2] == SMALLEST[min_size]


def test_min_size_reduces_other_formats_by_the_same_factors():
    decoder = SampleDecoder("rgb8", min_size=93)
    assert (
        decoder.decode("a.png", PNG).shape == decoder.decode("a.jpg", SMALL).shape == (94, 125, 3)
    )


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.booleans(),
    st.sampled_from(["JPEG", "PNG"]),
    st.sampled_from(SPECS),
    st.integers(0, 99),
)
def test_every_image_gets_the_size_that_is_asked_for(
    width, height, size, crop, file_format, spec, seed
):
    data = encoded(scene(width, height), file_format)
    decoder = SampleDecoder(spec, image_size=size, random_resized_crop=crop)
    assert pixels_of(decoder.decode("a.jpg", data, seed=seed)).shape[:2] == size


@pytest.mark.parametrize("spec", ["rgb", "torchrgb"])
def test_floats_are_those_of_the_bytes(spec):
    floats = SampleDecoder(spec, image_size=224).decode("a.jpg", LARGE)
    numbers = SampleDecoder(f"{spec}8", image_size=224).decode("a.jpg", LARGE)
    assert floats.dtype in (np.float32, torch.float32)
    assert np.array_equal(np.asarray(floats), np.asarray(numbers, np.float32) / np.float32(255))
    if spec == "torchrgb":
        assert floats.is_contiguous()
        assert numbers.is_contiguous()


def test_transparency_is_scaled_as_pillow_scales_it():
    image = scene(300, 200)
    image.putalpha(image.convert("L").point(lambda value: 255 * (value > 90)))
    data = encoded(image, "PNG")
    found = SampleDecoder("torchrgba8", image_size=(50, 60)).decode("a.png", data)
    expected = as_pillow_would(data, (50, 60), mode="RGBA")
    assert np.abs(pixels_of(found) - expected).max() <= 1


@pytest.mark.parametrize(("spec", "data"), mixed([*SPECS], [LARGE, PNG]))
def test_a_crop_is_the_part_of_the_image_that_its_seed_names(spec, data):
    width, height = Image.open(io.BytesIO(data)).size
    decoder = SampleDecoder(
        spec, image_size=100, random_resized_crop=RandomResizedCrop((0.2, 0.9)), exact_resize=True
    )
    found = [pixels_of(decoder.decode("a.jpg", data, seed=seed)) for seed in range(3)]
    for seed, pixels in enumerate(found):
        box = decoder._resize.box(width, height, seed, "a.jpg")
        left, top = box.left, box.top
        corners = (left, top, left + box.width, top + box.height)
        mode = "L" if "l8" in spec else "RGB"
        expected = as_pillow_would(data, (100, 100), corners, mode)
        assert np.abs(pixels - expected).max() <= 1
    assert not np.array_equal(found[0], found[1])


def test_crops_of_reduced_images_are_the_same_part_of_them():
    settings = {"image_size": 100, "random_resized_crop": True}
    reduced, exact = (
        SampleDecoder("rgb8", exact_resize=exact, **settings) for exact in (False, True)
    )
    for seed in range(12):
        difference = pixels_of(reduced.decode("a.jpg", LARGE, seed=seed)) - pixels_of(
            exact.decode("a.jpg", LARGE, seed=seed)
        )
        assert 10 * math.log10(255**2 / max(1e-9, np.square(difference).mean())) > 24


@pytest.mark.parametrize("spec", SPECS)
def test_crops_are_the_same_without_simplejpeg(monkeypatch, spec):
    decoder = SampleDecoder(spec, image_size=100, random_resized_crop=True)
    found = [pixels_of(decoder.decode("a.jpg", LARGE, seed=seed)) for seed in range(3)]
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    for seed, pixels in enumerate(found):
        again = pixels_of(decoder.decode("a.jpg", LARGE, seed=seed))
        assert np.abs(pixels - again).max() <= 1


def test_parts_of_a_sample_have_crops_of_their_own():
    decoder = SampleDecoder("rgb8", image_size=20, random_resized_crop=True)
    sample = decoder({"__key__": "a", "jpg": SMALL, "left.jpg": SMALL}, seed=3)
    assert not np.array_equal(sample["jpg"], sample["left.jpg"])
    again = decoder({"__key__": "a", "left.jpg": SMALL, "jpg": SMALL}, seed=3)
    assert np.array_equal(sample["jpg"], again["jpg"])


def test_boxes_are_distributed_as_those_of_torchvision():
    """Its figures: area uniform in `scale`, logarithm of the ratio uniform, places uniform."""
    crop = RandomResizedCrop(scale=(0.1, 0.4))
    boxes = np.array([crop.box(1000, 800, seed) for seed in range(4000)], float)
    left, top, width, height = boxes.T
    area, ratio = width * height / 800_000, np.log(width / height)
    for found, low, high in (
        (area, 0.1, 0.4),
        (ratio, math.log(3 / 4), math.log(4 / 3)),
        (left / (1000 - width), 0, 1),
        (top / (800 - height), 0, 1),
    ):
        quantiles = np.quantile(found, [0, 0.25, 0.5, 0.75, 1])
        assert quantiles == pytest.approx(np.linspace(low, high, 5), abs=0.03 * (high - low))


def test_where_no_box_fits_the_middle_is_taken():
    wide = RandomResizedCrop(scale=(1, 1), ratio=(1, 1)).box(400, 100, 0)
    assert wide == Box(150, 0, 100, 100)
    tall = RandomResizedCrop(scale=(1, 1), ratio=(2, 3)).box(100, 400, 0)
    assert tall == Box(0, 175, 100, 50)
    assert RandomResizedCrop(scale=(1, 1), ratio=(1, 2)).box(100, 100, 0) == Box(0, 0, 100, 100)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"image_size": 0}, "one number for a square"),
        ({"image_size": (1, 2, 3)}, "height and width"),
        ({"image_size": "224"}, "height and width"),
        ({"image_size": True}, "height and width"),
        ({"min_size": 1.5}, "min_size=1.5: expected a number of pixels"),
        ({"min_size": 9, "image_size": 9}, "expected one of them"),
        ({"min_size": 9, "exact_resize": True}, "image_size resizes them"),
        ({"max_enlargement": 0.9, "image_size": 9}, "max_enlargement=0.9: expected a number >= 1"),
        ({"max_enlargement": "2", "image_size": 9}, "max_enlargement='2': expected a number >= 1"),
        ({"max_enlargement": True, "image_size": 9}, "max_enlargement=True: expected"),
        ({"max_enlargement": 1.2}, "expected with image_size"),
        ({"max_enlargement": 1.2, "min_size": 9}, "expected with image_size"),
        ({"max_enlargement": 2, "image_size": 9, "exact_resize": True}, "without exact_resize"),
        ({"random_resized_crop": True}, "requires image_size"),
        ({"random_resized_crop": (0.1, 1), "image_size": 9}, "RandomResizedCrop"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        SampleDecoder(**setting)


@pytest.mark.parametrize(
    "setting", [{"scale": (0, 1)}, {"scale": (0.5, 2)}, {"ratio": (2, 1)}, {"ratio": (1, math.inf)}]
)
def test_crops_that_make_no_sense_are_refused(setting):
    with pytest.raises(ConfigError, match="two numbers above 0"):
        RandomResizedCrop(**setting)


@pytest.mark.parametrize(
    ("data", "setting"), mixed([LARGE, SMALL], [{"image_size": 64}, {"min_size": 64}])
)
def test_damaged_images_are_errors_at_any_size(data, setting):
    for spec in SPECS:
        with pytest.raises(DecodeError, match="not a complete image"):
            SampleDecoder(spec, **setting).decode("a.jpg", data[: len(data) // 2])


@pytest.mark.slow
def test_images_become_tensors_without_threads_that_spin():
    """Those of OpenMP wait busily after each tensor, while the next image is decoded."""
    program = """
import os, sys
import numpy as np, torch
from energon.decode.sample_decoder import SampleDecoder
data = sys.stdin.buffer.read()
torch.set_num_threads(4)
torch.ones(3)
before = len(os.listdir("/proc/self/task"))
for spec in ("torchrgb", "torchrgb8", "torchl"):
    for setting in ({}, {"image_size": 512}, {"min_size": 512}):
        for crop in {False, "image_size" in setting}:
            decoder = SampleDecoder(spec, random_resized_crop=crop, **setting)
            decoder.decode("a.jpg", data)
assert len(os.listdir("/proc/self/task")) == before
torch.ones(3, 2048, 2048).div_(3)
assert len(os.listdir("/proc/self/task")) > before  # so that this test can fail
"""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("threads of a process are counted in /proc, which only Linux has")
    subprocess.run([sys.executable, "-c", program], input=LARGE, check=True)


UPPER, LOWER = Box(50, 20, 400, 150), Box(50, 20, 400, 340)


def decoded_part(monkeypatch, data, box, spec="rgb8", **settings):
    monkeypatch.setattr(RandomResizedCrop, "box", lambda *_: box)
    decoder = SampleDecoder(spec, random_resized_crop=True, **settings)
    return pixels_of(decoder.decode("a.jpg", data))


SIZES = [(140, 200), (75, 200), (60, 60)]


@pytest.mark.parametrize(
    ("spec", "subsampling", "size"),
    [
        *mixed(["rgb8", "torchrgb8", "l8"], [0, 1, 2], SIZES),
        *mixed(["rgb8", "torchrgb8", "l8"], [2, 0, 1], SIZES[::-1]),
    ],
)
def test_what_is_below_a_crop_is_not_decoded(monkeypatch, spec, subsampling, size):
    image = scene(500, 375).convert("L" if spec == "l8" else "RGB")
    data, heights = encoded(image, quality=90, subsampling=subsampling), []
    decode_jpeg = simplejpeg.decode_jpeg

    def recorded(data, **settings):
        heights.append(simplejpeg.decode_jpeg_header(data)[0])
        return decode_jpeg(data, **settings)

    monkeypatch.setattr(simplejpeg, "decode_jpeg", recorded)
    upper = decoded_part(monkeypatch, data, UPPER, spec, image_size=size)
    # With restarts, it is decoded in full.
    start = data.index(b"\xff\xda")
    data = data[:start] + b"\xff\xdd\0\4\xff\xff" + data[start:]
    whole = decoded_part(monkeypatch, data, UPPER, spec, image_size=size)
    assert heights == [176, 375]
    assert np.array_equal(upper, whole)


@pytest.mark.parametrize(("box", "share"), mixed([UPPER, LOWER], [0.2, 0.9]))
def test_truncated_images_are_errors_wherever_their_crops_end(monkeypatch, box, share):
    with pytest.raises(DecodeError, match="not a complete image"):
        decoded_part(monkeypatch, SMALL[: int(share * len(SMALL))], box, image_size=60)


def test_damage_above_the_end_of_a_crop_is_found(monkeypatch):
    """Pillow decodes it again, and accepts it as for whole images: the rest is gray."""
    image = SMALL[: len(SMALL) // 5] + b"\xff\xd9"
    found = decoded_part(monkeypatch, image, UPPER, image_size=(150, 400), exact_resize=True)
    assert np.array_equal(found, np.asarray(Image.open(io.BytesIO(image)))[20:170, 50:450])


@pytest.mark.parametrize(
    "settings", [{"progressive": True}, {"restart_marker_rows": 1}, {"optimize": True}, {}]
)
@pytest.mark.parametrize("box", [UPPER, LOWER, Box(0, 374, 500, 1), Box(7, 0, 1, 1)])
def test_crops_of_any_kind_of_jpeg_are_those_of_the_decoded_image(monkeypatch, settings, box):
    data = encoded(scene(500, 375), quality=90, **settings)
    found = decoded_part(
        monkeypatch, data, box, image_size=(box.height, box.width), exact_resize=True
    )
    pixels = np.asarray(Image.open(io.BytesIO(data)), np.int32)
    expected = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    assert np.array_equal(found, expected)
