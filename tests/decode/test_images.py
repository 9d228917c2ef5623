from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from energon.decode.images import IMAGE_SPECS, decode_image, image_spec
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, DecodeError

MODES = {"jpg": ["RGB", "L", "CMYK"], "png": ["RGB", "RGBA", "L", "P", "1", "LA", "I;16"]}


def picture(mode="RGB", size=(21, 13)):
    pixels = np.random.default_rng(1).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    if mode == "I;16":
        return Image.fromarray(pixels[:, :, 0] * np.uint16(257))
    return image.convert(mode)


def encoded(mode, file_format, **settings):
    buffer = io.BytesIO()
    picture(mode).save(buffer, "JPEG" if file_format == "jpg" else file_format, **settings)
    return buffer.getvalue()


FILES = [
    *(encoded(mode, name) for name, modes in MODES.items() for mode in modes),
    encoded("RGB", "jpg", progressive=True),
    encoded("RGB", "jpg", subsampling=0),
    encoded("RGB", "jpg", subsampling=2, quality=30),
    encoded("RGB", "webp"),
    encoded("RGB", "bmp"),
]


@pytest.mark.parametrize("data", FILES)
def test_every_spec_gives_the_image_of_pillow(data):
    for spec in IMAGE_SPECS:
        check_against_pillow(data, spec)


def check_against_pillow(data, spec):
    library, mode, floats = image_spec(spec)
    found = decode_image(data, image_spec(spec))
    image = Image.open(io.BytesIO(data))
    if image.mode.startswith("I"):  # of which Pillow makes white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    expected = np.asarray(image.convert(mode))
    if library == "pil":
        assert found.mode == mode
        assert np.array_equal(np.asarray(found), expected)
        return
    if floats:
        expected = expected.astype(np.float32) / np.float32(255)
    if library == "torch":
        assert found.is_contiguous()
        assert found.dtype == (torch.float32 if floats else torch.uint8)
        found = found.numpy()
        expected = expected.transpose(2, 0, 1) if expected.ndim == 3 else expected
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", ["icns", "dds", "pcx", "rgb", "psd", "xbm"])
def test_formats_of_old_programs_are_images_too(name):
    assert SampleDecoder("rgb8").decode(f"a.{name}", encoded("RGB", "png")).shape == (13, 21, 3)


@pytest.mark.parametrize("name", ["eps", "ps", "h5", "wmf", "fits"])
def test_files_that_may_hold_anything_else_are_not_taken_for_images(name):
    assert SampleDecoder("rgb8").decode(f"a.{name}", b"data") == b"data"


@pytest.mark.parametrize("spec", ["torchrgb8", "rgb8", "torchl8", "l8", "rgba8", "rgb"])
@pytest.mark.parametrize("file_format", ["png", "jpg"])
@pytest.mark.parametrize("size", [None, 5])
def test_images_can_be_written_to(spec, file_format, size):
    image = SampleDecoder(spec, image_size=size).decode("a.png", encoded("RGB", file_format))
    image += 1


def test_tensors_of_images_have_channels_first():
    assert decode_image(encoded("RGB", "png"), image_spec("torchrgb8")).shape == (3, 13, 21)


def test_damaged_and_truncated_images_are_errors():
    for data in (encoded("RGB", "jpg"), encoded("RGB", "png")):
        for wrong in (data[: len(data) // 2], data[:20], b"", b"\xff\xd8no image", b"text"):
            for spec in ("torchrgb", "pil", "l8"):
                with pytest.raises(DecodeError, match="bytes.*: not a complete image"):
                    decode_image(wrong, image_spec(spec))


def test_image_bombs_are_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DecodeError, match="MAX_IMAGE_PIXELS"):
        decode_image(encoded("RGB", "png"), image_spec("rgb8"))


def test_unknown_specs_are_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="torchrgb8"):
        image_spec("RGB")


def grey(values, file_format):
    if file_format == "PPM":  # which Pillow writes from 16 bits only since version 11
        height, width = values.shape
        return b"P5 %d %d 65535\n" % (width, height) + values.astype(">u2").tobytes()
    buffer = io.BytesIO()
    Image.fromarray(values.astype(np.uint16)).save(buffer, file_format)
    return buffer.getvalue()


@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_grey_values_of_16_bits_keep_their_brightness(file_format, caplog):
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    data = grey(ramp, file_format)
    found = decode_image(data, image_spec("l8")).astype(int)
    assert np.abs(found - (ramp >> 8)).max() <= (1 if file_format == "JPEG2000" else 0)
    assert np.array_equal(decode_image(data, image_spec("rgb8"))[:, :, 1], found)
    assert decode_image(data, image_spec("torchrgb")).max() == 1
    assert np.asarray(decode_image(data, image_spec("pill"))).max() == 255
    assert SampleDecoder("l8", image_size=16).decode("a.png", data).shape == (16, 16)
    assert caplog.messages == []


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_numbers_in_32_bits_that_are_clipped_are_said(monkeypatch, caplog, kind):
    monkeypatch.setattr("energon.messages._given", {})  # what was said once
    buffer = io.BytesIO()
    Image.fromarray(np.array([[0.5, 7, 300]]).astype(kind)).save(buffer, "TIFF")
    assert decode_image(buffer.getvalue(), image_spec("l8")).tolist() == [[0, 7, 255]]
    assert "32 bits per pixel" in caplog.text


def test_numbers_in_16_bits_that_become_black_are_said(caplog):
    labels = np.arange(16).reshape(4, 4)
    assert not decode_image(grey(labels, "PNG"), image_spec("l8")).any()
    assert "no value above 15, so its upper 8 bits" in caplog.text
    caplog.clear()
    decode_image(grey(np.zeros((4, 4)), "PNG"), image_spec("l8"))
    assert caplog.messages == []
