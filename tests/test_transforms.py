"""Merged transforms do what they do one after the other, but for the resampling.

torchvision has builds for the torch that tests run with on few machines; where it is not
installed, objects with the same attributes stand for its transforms.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from energon import ConfigError
from energon.transforms import (
    CenterCropMapper,
    CustomTransform,
    MergeTransform,
    RandomCropMapper,
    RandomPerspectiveMapper,
    RandomRotationMapper,
    ResizeMapper,
)

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 10, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS)
TENSOR = torch.from_numpy(PIXELS.copy()).permute(2, 0, 1)


class Flip(CustomTransform):
    def apply_transform(self, matrix, dst_size):
        flip = np.array([[-1, 0, dst_size[1]], [0, 1, 0], [0, 0, 1.0]])
        return flip @ matrix, dst_size, "flip"


class Crop(CustomTransform):
    """Cuts 4 by 3 pixels at (2, 1)."""

    def apply_transform(self, matrix, dst_size):
        move = np.array([[1, 0, -2], [0, 1, -1], [0, 0, 1.0]])
        return move @ matrix, np.array([3, 4]), "crop"


class Resize:
    interpolation = "nearest"

    def __init__(self, size, max_size=None):
        self.size, self.max_size = size, max_size


class CenterCrop:
    def __init__(self, size):
        self.size = size


class RandomRotation:
    interpolation, fill, center = "nearest", 7, None

    def __init__(self, degrees, expand=False):
        self.degrees, self.expand = degrees, expand

    def get_params(self, degrees):
        return degrees


class RandomCrop:
    fill = 0

    def __init__(self, size, padding=None, pad_if_needed=False, at=(0, 0)):
        self.size, self.padding, self.pad_if_needed, self.at = size, padding, pad_if_needed, at

    def get_params(self, image, size):
        assert image.shape[-2] >= size[0]
        return (*self.at, *size)


class RandomPerspective:
    interpolation, fill, p, distortion_scale = "bilinear", 0, 1.0, 0.5

    def get_params(self, width, height, scale):
        start = [[0, 0], [width, 0], [width, height], [0, height]]
        return start, [[1, 1], [width - 1, 0], [width, height - 2], [0, height]]


def image(transforms):
    return np.asarray(MergeTransform(transforms)(IMAGE))


def tensor(transforms):
    return MergeTransform(transforms)(TENSOR).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("apply", [image, tensor])
def test_flips_and_crops_are_exact_in_any_order(apply):
    assert (apply([Flip()]) == np.asarray(ImageOps.mirror(IMAGE))).all()
    assert (apply([Flip(), Crop()]) == PIXELS[:, ::-1][1:4, 2:6]).all()
    assert (apply([Crop(), Flip()]) == PIXELS[1:4, 2:6][:, ::-1]).all()
    assert (apply([CenterCrop((2, 4)), Flip()]) == PIXELS[2:4, 3:7][:, ::-1]).all()
    assert (apply([]) == PIXELS).all()


@pytest.mark.parametrize("apply", [image, tensor])
def test_resizing_by_whole_numbers_repeats_pixels(apply):
    twice = PIXELS.repeat(2, axis=0).repeat(2, axis=1)
    assert (apply([Resize((12, 20))]) == twice).all()
    assert (apply([Resize(12), Resize((6, 10))]) == PIXELS).all()


@pytest.mark.parametrize("apply", [image, tensor])
def test_rotations_turn_counter_clockwise(apply):
    assert (apply([RandomRotation(180)]) == PIXELS[::-1, ::-1]).all()
    assert (apply([RandomRotation(90, expand=True)]) == np.rot90(PIXELS)).all()
    turned = apply([RandomRotation(90)])
    assert turned.shape == PIXELS.shape
    assert (turned[:, :2] == 7).all()


@pytest.mark.parametrize("apply", [image, tensor])
def test_crops_may_be_padded(apply):
    found = apply([RandomCrop((6, 10), padding=2)])
    assert (found[2:, 2:] == PIXELS[:4, :8]).all()
    assert not found[:2].any()
    assert apply([RandomCrop(12, pad_if_needed=True)]).shape == (12, 12, 3)


@pytest.mark.parametrize(
    ("size", "limit", "expected"),
    [((10, 24), None, (10, 24)), ([3], None, (3, 5)), (12, 13, (7, 13)), (3, None, (3, 5))],
)
def test_sizes_after_a_resize(size, limit, expected):
    mapper = ResizeMapper(Resize(size, limit))
    matrix, found, _ = mapper.apply_transform(np.eye(3), np.array((6, 10)))
    assert tuple(found) == expected
    assert np.allclose(matrix @ (10, 6, 1), (*found[::-1], 1))


def test_a_perspective_takes_points_to_points():
    mapper = RandomPerspectiveMapper(RandomPerspective())
    matrix, _, (_, start, end) = mapper.apply_transform(np.eye(3), np.array((6, 10)))
    for (x, y), goal in zip(start, end, strict=True):
        u, v, w = matrix @ (x, y, 1)
        assert np.allclose((u / w, v / w), goal)


def test_what_came_before_is_kept():
    before = np.array([[1, 0.1, 2], [0, 1.2, 1], [0, 0, 1]])
    size = np.array((6, 10))
    mappers = (
        CenterCropMapper(CenterCrop(4)),
        RandomCropMapper(RandomCrop((3, 3), at=(1, 2))),
        RandomRotationMapper(RandomRotation(30, expand=True)),
    )
    for mapper in mappers:
        alone, _, _ = mapper.apply_transform(np.eye(3), size)
        assert np.allclose(mapper.apply_transform(before, size)[0], alone @ before)


def test_floats_stay_floats_and_types_are_kept():
    assert MergeTransform([Flip()])(TENSOR).dtype == torch.uint8
    floats = MergeTransform([Flip()])(TENSOR / 255)
    assert torch.allclose(floats, (TENSOR / 255).flip(-1), atol=1e-6)


def test_other_transforms_and_other_things_are_refused():
    class ColorJitter:
        pass

    with pytest.raises(ConfigError, match="ColorJitter cannot be merged; known are CenterCrop"):
        MergeTransform([ColorJitter()])
    with pytest.raises(ConfigError, match="cannot transform list"):
        MergeTransform([])([1])
