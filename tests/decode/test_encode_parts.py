from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from energon.decode.sample_decoder import SampleDecoder
from energon.decode.values import encode_part
from energon.errors import ConfigError

DECODE = SampleDecoder(image_decode="rgb8", allow=("pickle",)).decode
PIXELS = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("txt", "text: ä"),
        ("cls", 7),
        ("count", np.int64(3)),
        ("json", {"a": [1, None, "ä"]}),
        ("seg.json", [1]),
        ("mp", {"a": 1}),
        ("cbor", {"a": [1.5]}),
        ("pyd", {1, 2}),
        ("json.gz", {"a": 1}),
        ("txt.gz", "packed"),
    ],
)
def test_values_come_back_from_the_decoder(part, value):
    assert DECODE(f"key.{part}", encode_part(part, value)) == value


@pytest.mark.parametrize("part", ["npy", "ten", "tb", "npz"])
def test_arrays_come_back_from_the_decoder(part):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = DECODE(f"a.{part}", encode_part(part, {"x": array} if part == "npz" else array))
    found = found["x"] if part == "npz" else found[0] if part in ("ten", "tb") else found
    assert np.array_equal(found, array)


@pytest.mark.parametrize("part", ["png", "webp", "ppm", "bmp", "tiff"])
def test_pictures_come_back_without_loss(part):
    for value in (PIXELS, Image.fromarray(PIXELS)):
        found = Image.open(io.BytesIO(encode_part(part, value)))
        assert np.array_equal(np.asarray(found.convert("RGB")), PIXELS)


def test_pictures_of_one_channel_are_written():
    for pixels in (PIXELS[:, :, 0], PIXELS[:, :, :1]):
        assert np.asarray(Image.open(io.BytesIO(encode_part("png", pixels)))).shape == (6, 4)


def test_bytes_and_paths_are_taken_as_they_are():
    assert encode_part("json", b"no json") == b"no json"
    assert encode_part("x", memoryview(b"abc")) == b"abc"
    assert encode_part("mp4", Path("a.mp4")) == Path("a.mp4")


def test_the_same_value_is_the_same_bytes():
    assert encode_part("json.gz", {"a": 1}) == encode_part("json.gz", {"a": 1})


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("bin", 3, "the extension 'bin' does not say how to write it"),
        ("cls", 1.5, "1.5 is not a whole number"),
        ("cls", None, "cannot be written as cls"),
        ("json", {1, 2}, "a set cannot be written as json"),
        ("png", np.zeros((2, 2)), "array of uint8, found float64"),
        ("npy", np.array([object()]), "cannot be written as npy"),
        ("jpg", None, "cannot be written as jpg"),
    ],
)
def test_values_that_cannot_be_written_are_refused(part, value, message):
    with pytest.raises(ConfigError, match=message):
        encode_part(part, value)
