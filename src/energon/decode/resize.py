"""Crop and scale images to a requested size, as early as the format allows.

JPEG stores blocks of 8 x 8 frequencies, so a decoder can produce 4 x 4, 2 x 2 or 1 x 1 pixels from
a block for a fraction of the work. The factor is the largest that keeps at least as many pixels
as requested, or fewer if images may be enlarged afterwards; a triangle filter over all pixels does
the rest (bilinear with antialiasing, as in Pillow and torchvision).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError, is_whole
from energon.plan.randomness import derive_seed
from energon.samples.collate import has_torch

if TYPE_CHECKING:
    from PIL.Image import Image

FACTORS = (8, 4, 2)
"""Factors by which JPEGs are reduced; other factors of the format, like 8/5, only slow it down."""

_ATTEMPTS = 10


class Box(NamedTuple):
    """A rectangle of pixels; the upper left corner of the image is (0, 0)."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True)
class RandomResizedCrop:
    """A random rectangle of an image, drawn as torchvision's RandomResizedCrop draws it.

    Args:
        scale: Smallest and largest share of the image's area.
        ratio: Smallest and largest aspect ratio, width by height.

    Raises:
        ConfigError: If one of them is not a pair of ascending numbers.

    Example:
        >>> from energon import DefaultTaskEncoder, SampleDecoder
        >>> class Encoder(DefaultTaskEncoder):
        ...     decoder = SampleDecoder(
        ...         image_size=(16, 16), random_resized_crop=RandomResizedCrop(scale=(0.5, 1.0))
        ...     )
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, value, largest in (("scale", self.scale, 1.0), ("ratio", self.ratio, math.inf)):
            if not _is_range(value, largest):
                limit = "" if largest == math.inf else ", none above 1"
                raise ConfigError(
                    f"RandomResizedCrop({name}={value!r}): expected two numbers above 0, the "
                    f"smaller one first{limit}"
                )
            object.__setattr__(self, name, tuple(value))

    def box(self, width: int, height: int, seed: int) -> Box:
        """Return the rectangle for an image of this size, a function of `seed`.

        If none of ten attempts fits into the image, it is the largest rectangle in the middle
        with an allowed ratio.
        """
        draw = Random(seed).random
        low, high = self.ratio
        for _ in range(_ATTEMPTS):
            area = width * height * _between(*self.scale, draw())
            ratio = math.exp(_between(math.log(low), math.log(high), draw()))
            box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < box_width <= width and 0 < box_height <= height:
                top = int(draw() * (height - box_height + 1))
                left = int(draw() * (width - box_width + 1))
                return Box(left, top, box_width, box_height)
        ratio = min(max(width / height, low), high)
        box_width = min(width, max(1, round(height * ratio)))
        box_height = min(height, max(1, round(width / ratio)))
        return Box((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)


@dataclass(frozen=True)
class Resize:
    """The part of images to cut out, and its final size.

    Args:
        size: Height and width; None keeps the size after reducing.
        min_size: Both sides keep at least this many pixels when the image is reduced by 2, 4 or
            8; None does not reduce it, unless there is a `size`.
        crop: The part to cut out; None for the whole image.
        exact: Whether to decode all pixels first.
        max_enlargement: By how much a reduced image may be enlarged to `size`.
    """

    size: tuple[int, int] | None = None
    min_size: int | None = None
    crop: RandomResizedCrop | None = None
    exact: bool = False
    max_enlargement: float = 1.0

    def box(self, width: int, height: int, seed: int, name: str) -> Box:
        """Return the part of an image to cut out."""
        if self.crop is None:
            return Box(0, 0, width, height)
        return self.crop.box(width, height, derive_seed(seed, "random_resized_crop", name))

    def factor(self, box: Box) -> int:
        """Return the factor by which an image can be reduced before `box` is cut out."""
        height, width = self.size or (self.min_size or math.inf,) * 2
        if self.exact:
            return 1
        width, height = width / self.max_enlargement, height / self.max_enlargement
        fitting = (
            each for each in FACTORS if box.width // each >= width and box.height // each >= height
        )
        return next(fitting, 1)

    def scaled_pixels(
        self, pixels: NDArray[np.uint8], box: Box, factor: int, *, library: str
    ) -> NDArray[np.uint8]:
        """Return `box` of an image at its final size.

        Args:
            pixels: The image, reduced by `factor`.
            box: The part, in the coordinates of the whole image.
            factor: The factor.
            library: See `resize_pixels`.
        """
        part = reduced(box, factor, *pixels.shape[1::-1])
        pixels = pixels[part.top : part.top + part.height, part.left : part.left + part.width]
        return pixels if self.size is None else resize_pixels(pixels, self.size, library=library)

    def scaled_image(self, image: Image, box: Box, factor: int) -> Image:
        """Resize and crop an image of Pillow."""
        return resize_image(image, self.size, reduced(box, factor, *image.size))


def make_resize(
    image_size: Any, min_size: Any, crop: Any, *, exact_resize: bool, max_enlargement: Any
) -> Resize:
    """Return how a `SampleDecoder` with these arguments crops and scales images.

    Raises:
        ConfigError: If one is invalid, or they do not go together.
    """
    if image_size is not None and min_size is not None:
        raise ConfigError(
            f"{image_size=!r} and {min_size=!r}: expected one of them; image_size gives all images "
            "one size, min_size reduces large ones"
        )
    if exact_resize and min_size is not None:
        raise ConfigError(
            f"exact_resize and {min_size=!r}: min_size only reduces images while they are decoded, "
            "so expected one of them; image_size resizes them"
        )
    enlargement = _check_enlargement(max_enlargement)
    if enlargement > 1 and (image_size is None or exact_resize):
        raise ConfigError(
            f"max_enlargement={enlargement!r}: expected with image_size, to which images are "
            "enlarged, and without exact_resize, which decodes them in full"
        )
    if not isinstance(crop, bool | RandomResizedCrop):
        raise ConfigError(f"random_resized_crop={crop!r}: expected True or a RandomResizedCrop")
    if crop and image_size is None:
        raise ConfigError("random_resized_crop requires image_size, the size of the crops")
    return Resize(
        size=None if image_size is None else _check_size(image_size),
        min_size=None if min_size is None else _check_min_size(min_size),
        crop=(RandomResizedCrop() if crop is True else crop) or None,
        exact=exact_resize,
        max_enlargement=enlargement,
    )


def _check_size(value: Any) -> tuple[int, int]:
    """Return height and width: two numbers, or one for a square.

    Raises:
        ConfigError: If it is neither.
    """
    sides = (value, value) if isinstance(value, int) else value
    if not isinstance(sides, tuple | list) or len(sides) != 2 or not all(map(_is_count, sides)):
        raise ConfigError(
            f"image_size={value!r}: expected the height and width in pixels, like (224, 320), or "
            "one number for a square"
        )
    return sides[0], sides[1]


def _check_min_size(value: Any) -> int:
    """Return a number of pixels.

    Raises:
        ConfigError: If it is not valid.
    """
    if not _is_count(value):
        raise ConfigError(f"min_size={value!r}: expected a number of pixels, 1 or more")
    return int(value)


def _check_enlargement(value: Any) -> float:
    """Return by how much images may be enlarged.

    Raises:
        ConfigError: If it is not valid.
    """
    if not _is_number(value) or not 1 <= value < math.inf:
        raise ConfigError(
            f"max_enlargement={value!r}: expected a number from 1, which reduces no image below "
            "image_size, like 1.2"
        )
    return float(value)


def reduced(box: Box, factor: int, width: int, height: int) -> Box:
    """Return `box` in the coordinates of an image of `width` x `height` reduced by `factor`."""
    if factor == 1:
        return box
    left, top = box.left // factor, box.top // factor
    return Box(
        left,
        top,
        min(width - left, math.ceil(box.width / factor)),
        min(height - top, math.ceil(box.height / factor)),
    )


def resize_pixels(
    pixels: NDArray[np.uint8], size: tuple[int, int], *, library: str
) -> NDArray[np.uint8]:
    """Scale pixels to a height and width.

    Args:
        pixels: Of shape (height, width) or (height, width, 3).
        size: Height and width.
        library: "torch", where it is installed, is several times as fast as Pillow; pixels differ
            by at most 1.
    """
    if pixels.shape[:2] == size:
        return pixels
    if library == "torch" and has_torch():
        import torch

        # Torch copies non-contiguous pixels with threads that spin afterwards.
        planes = torch.from_numpy(_writeable(np.ascontiguousarray(np.atleast_3d(pixels))))
        scaled = torch.nn.functional.interpolate(
            planes.permute(2, 0, 1)[None], size, mode="bilinear", antialias=True
        )[0]
        resized: NDArray[np.uint8] = scaled.permute(1, 2, 0).numpy()
        return resized[:, :, 0] if pixels.ndim == 2 else resized
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(resize_image(image, size, Box(0, 0, *image.size)))


def resize_image(image: Image, size: tuple[int, int] | None, box: Box) -> Image:
    """Cut out `box` and scale it to a height and width; None does not scale it."""
    from PIL import Image as images

    corners = (box.left, box.top, box.left + box.width, box.top + box.height)
    # Not `resize(box=…)`, whose filter looks at pixels outside of the box.
    part = image if corners == (0, 0, *image.size) else image.crop(corners)
    if size is None or size == (box.height, box.width):
        return part
    return part.resize(size[::-1], images.Resampling.BILINEAR)


def _is_range(value: Any, largest: float) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    if not all(map(_is_number, value)):
        return False
    low, high = value
    return bool(0 < low <= high <= largest and high < math.inf)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return is_whole(value) and value > 0


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _writeable(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pixels if pixels.flags.writeable else pixels.copy()
