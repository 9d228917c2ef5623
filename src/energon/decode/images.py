"""Decode images to arrays, tensors or Pillow images, and crop and scale them on the way.

JPEGs in color or gray are decoded by simplejpeg where it is installed, which is faster than
Pillow; everything else is Pillow's. The result is a uint8 array first; numpy makes floats of it,
in one pass and one thread.

Images are scaled as early as the format allows. JPEG stores blocks of 8 x 8 frequencies, so a
decoder can produce 4 x 4, 2 x 2 or 1 x 1 pixels from a block for a fraction of the work. The factor
is the largest that keeps at least as many pixels as requested, or fewer if images may be enlarged
afterwards; a triangle filter over all pixels does the rest (bilinear with antialiasing, as in
Pillow and torchvision).
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from dataclasses import dataclass
from random import Random
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError, DecodeError, is_whole
from energon.formats.media import ImageMetadata
from energon.limits import IMAGE_PIXELS, JPEG_SCANS, check_limit
from energon.messages import bytes_in_words, warn_once
from energon.plan.randomness import derive_seed
from energon.samples.collate import empty_row, has_torch

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
            low, high = value if _is_pair(value) and all(map(_is_number, value)) else (0, 0)
            if not 0 < low <= high <= largest or high == math.inf:
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
    if not _is_number(max_enlargement) or not 1 <= max_enlargement < math.inf:
        raise ConfigError(
            f"{max_enlargement=!r}: expected a number >= 1 (1 never enlarges), such as 1.2"
        )
    enlargement = float(max_enlargement)
    if enlargement > 1 and (image_size is None or exact_resize):
        raise ConfigError(
            f"max_enlargement={enlargement!r}: expected with image_size, to which images are "
            "enlarged, and without exact_resize, which decodes them in full"
        )
    if not isinstance(crop, bool | RandomResizedCrop):
        raise ConfigError(f"random_resized_crop={crop!r}: expected True or a RandomResizedCrop")
    if crop and image_size is None:
        raise ConfigError("random_resized_crop requires image_size, the size of the crops")
    if min_size is not None and not _is_count(min_size):
        raise ConfigError(f"{min_size=!r}: expected a number of pixels, 1 or more")
    return Resize(
        size=None if image_size is None else _check_size(image_size),
        min_size=None if min_size is None else int(min_size),
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
    if not _is_pair(sides) or not all(map(_is_count, sides)):
        raise ConfigError(
            f"image_size={value!r}: expected the height and width in pixels, like (224, 320), or "
            "one number for a square"
        )
    return sides[0], sides[1]


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
        # Arrays that are read-only, which it warns of, are copied.
        planes = torch.from_numpy(np.require(np.atleast_3d(pixels), requirements=("C", "W")))
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


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return is_whole(value) and value > 0


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


logger = logging.getLogger("energon")

IMAGE_EXTENSIONS = frozenset(
    {
        *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "avif", "gif", "bmp", "dib", "tif"),
        *("tiff", "jp2", "j2k", "jpc", "jpf", "jpx", "j2c", "ppm", "pgm", "pbm", "pnm", "tga"),
        *("ico", "icns", "cur", "pcx", "dcx", "sgi", "bw", "rgb", "rgba", "icb", "vda", "vst"),
        *("psd", "dds", "blp", "xbm", "xpm", "msp", "im", "iim", "ras", "pcd", "pxr", "gbr"),
        *("fli", "flc", "ftc", "ftu"),
    }
)
"""Of all that Pillow registers, what it decodes on its own, and what holds nothing but images."""


def image_metadata(stream: IO[bytes]) -> ImageMetadata:
    """Return size, format and mode of an image, of which only the header is read."""
    from PIL import Image

    with warnings.catch_warnings():
        # Nothing is decompressed here, so the size of the image does no harm.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(stream) as image:
            if image.format is None:
                raise DecodeError("the format of the image is unknown")
            return ImageMetadata(
                width=image.width, height=image.height, format=image.format, mode=image.mode
            )


JPEG_START = b"\xff\xd8"
_MARKER, _SCAN, _RESTARTS = 0xFF, 0xDA, 0xDD
_BASELINE_FRAMES = frozenset({0xC0, 0xC1})
_SEQUENTIAL_FRAMES = _BASELINE_FRAMES | {0xC9}
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_HEIGHT = 5
"""Where the height is, from the start of a frame: two bytes."""
_LEFT_OVER = re.compile(r"\d+ extraneous bytes before marker 0xd9")
_COLOR_SPACES = {
    ("L", "Gray"): "Gray",
    **{("RGB", colors): "RGB" for colors in ("Gray", "YCbCr", "RGB")},
}
"""What simplejpeg decodes to as Pillow does, by mode and the colors of a JPEG."""
_ROWS_OF_BLOCKS = 16
"""The height of the blocks that are decoded together, in most files."""


class ImageSpec(NamedTuple):
    """What an image becomes."""

    library: str
    """numpy, torch or pil."""
    mode: str
    """Pillow's name of the channels: L, RGB or RGBA."""
    floats: bool
    """Whether values are float32 from 0 to 1 instead of uint8 from 0 to 255."""


IMAGE_SPECS: dict[str, ImageSpec] = {
    **{
        f"{prefix}{channels}{suffix}": ImageSpec(library, channels.upper(), not suffix)
        for prefix, library in (("", "numpy"), ("torch", "torch"))
        for channels in ("l", "rgb", "rgba")
        for suffix in ("8", "")
    },
    **{
        f"pil{channels}": ImageSpec("pil", channels.upper(), False)
        for channels in ("l", "rgb", "rgba")
    },
    "torch": ImageSpec("torch", "RGB", True),
    "pil": ImageSpec("pil", "RGB", False),
}
"""Names of what images may become. Tensors are (C, H, W), arrays (H, W, C); gray ones (H, W).

Without torch, arrays of the same layout take the place of tensors.
"""


def image_spec(name: str) -> ImageSpec:
    """Return the specification of that name.

    Raises:
        ConfigError: If there is none.
    """
    if name not in IMAGE_SPECS:
        raise ConfigError(
            f"image_decode={name!r}: expected one of {', '.join(sorted(IMAGE_SPECS))}"
        )
    return IMAGE_SPECS[name]


def decode_image(
    data: bytes,
    spec: ImageSpec,
    resize: Resize | None = None,
    *,
    seed: int = 0,
    name: str = "",
    max_pixels: int | None = None,
) -> Any:
    """Decode an image. The orientation in its metadata is ignored.

    Args:
        data: The file.
        spec: The form of the result.
        resize: The part to cut out and its final size; None keeps the image as it is.
        seed: Determines the part, together with `name`, if it is random.
        name: Distinguishes the image from others of its sample.
        max_pixels: The largest image to accept; None for the limit of the environment.

    Raises:
        DecodeError: If the data are damaged, truncated or not an image.
    """
    is_jpeg = data[:2] == JPEG_START
    frame = _check_scans(data) if is_jpeg else 0
    if max_pixels is None:
        max_pixels = IMAGE_PIXELS.value
    pixels: NDArray[Any] | None = None
    if is_jpeg and spec.library != "pil":
        pixels = _jpeg_pixels(data, frame, spec, resize, max_pixels, seed=seed, name=name)
    if pixels is None:
        image = _open(data, spec.mode, resize, max_pixels, is_jpeg=is_jpeg, seed=seed, name=name)
        if spec.library == "pil":
            return image
        pixels = np.asarray(image)
    is_planar = spec.library == "torch"
    if is_planar and pixels.ndim == 3:
        pixels = pixels.transpose(2, 0, 1)
    if spec.floats:
        # Without torch, whose threads would spin while the next image is decoded.
        planes = np.ascontiguousarray(pixels)  # faster than to divide them out of order
        row = empty_row(planes.shape, np.float32)
        pixels = np.divide(planes, np.float32(255), out=row, dtype=np.float32)
    elif is_planar or not (pixels.flags.c_contiguous and pixels.flags.writeable):
        planes, pixels = pixels, empty_row(pixels.shape, np.uint8)
        np.copyto(pixels, planes)
    if not is_planar or not has_torch():
        return pixels
    import torch

    return torch.from_numpy(pixels)


def _open(
    data: bytes,
    mode: str,
    resize: Resize | None,
    max_pixels: int,
    *,
    is_jpeg: bool,
    seed: int,
    name: str,
) -> Image:
    from PIL import Image

    try:
        # Reads the header only, without allocating pixels.
        image = Image.open(io.BytesIO(data))
        width, height = image.size
        if width * height > max_pixels:
            raise IMAGE_PIXELS.exceeded(f"the image has {width} x {height} pixels")
        if resize is None:
            image.load()
            return _in_8_bits(image).convert(mode)
        box = resize.box(width, height, seed, name)
        factor = resize.factor(box)
        if is_jpeg and factor > 1:
            image.draft(None, (width // factor, height // factor))
        image.load()
        converted = _in_8_bits(image).convert(mode)
        if factor > 1 and converted.size == (width, height):
            if resize.size is None:
                converted = converted.reduce(factor)
            else:
                factor = 1
        return resize_image(converted, resize.size, reduced(box, factor, *converted.size))
    except DecodeError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DecodeError(
            f"{error}; {IMAGE_PIXELS.hint}, and PIL.Image.MAX_IMAGE_PIXELS as well"
        ) from error
    except Exception as error:
        # Some messages end with the address of the stream in memory.
        reason = str(error).partition(" <")[0]
        held = bytes_in_words(data, 8)
        raise DecodeError(f"{held}: not a complete image: {reason}") from error


_UP_TO_16 = ("PNG", "PPM")
"""Formats in which white is the highest of 16 bits also where Pillow takes 32 for them."""


def _in_8_bits(image: Image) -> Image:
    """Return an image whose gray values have 8 bits: of 16, the upper ones.

    Of colors with 16 bits, Pillow keeps these; gray values above 255 it would turn into white.
    """
    if not (image.mode.startswith("I;16") or (image.mode == "I" and image.format in _UP_TO_16)):
        if image.mode in ("I", "F"):
            warn_once(
                logger,
                "32 bits",
                "an image has 32 bits per pixel; its values are clipped to 0 to 255 and their "
                "fractions dropped; if they are numbers and not brightness, have the decoder "
                "leave them as bytes, and decode those in a cooker",
            )
        return image
    from PIL.Image import fromarray

    values = np.asarray(image)
    if values.size and 0 < values.max() < 1 << 8:
        warn_once(
            logger,
            "16 bits without upper ones",
            "an image has 16 bits per pixel and no value above %d, so its upper 8 bits, which "
            "become the image, are black; if its values are numbers and not brightness, have the "
            "decoder leave them as bytes, and decode those in a cooker",
            values.max(),
        )
    return fromarray((values >> 8).astype(np.uint8))


def _jpeg_pixels(
    data: bytes,
    frame: int,
    spec: ImageSpec,
    resize: Resize | None,
    max_pixels: int,
    *,
    seed: int,
    name: str,
) -> NDArray[np.uint8] | None:
    """Decode with simplejpeg if it yields the same pixels as Pillow, else return None.

    Args:
        data: The file.
        frame: What `_check_scans` has returned.
        spec: The form of the result.
        resize: The part to cut out and its final size; None keeps the image as it is.
        max_pixels: The largest image to accept.
        seed: Determines the part, together with `name`, if it is random.
        name: Distinguishes the image from others of its sample.
    """
    if spec.mode == "RGBA":
        return None
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        if width * height > max_pixels:
            raise IMAGE_PIXELS.exceeded(f"the image has {width} x {height} pixels")
        space = _COLOR_SPACES.get((spec.mode, colors))
        if space is None:
            return None
        if resize is None:
            is_final = spec.library == "numpy" and not spec.floats and space == "RGB"
            row = empty_row((height, width, 3), np.uint8) if is_final else None
            whole: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colorspace=space, buffer=row)
            return whole[:, :, 0] if space == "Gray" else whole
        box = resize.box(width, height, seed, name)
        factor = resize.factor(box)
        # Decoders smooth colors over the row below, and reduced boxes are rounded up.
        end = box.top + box.height + 2 * factor
        pixels = _upper_pixels(data, frame, (height, width), end, space, factor)
    except DecodeError:
        raise
    except ValueError:
        # Pillow has the better message, or accepts the file.
        return None
    return resize.scaled_pixels(pixels, box, factor, library=spec.library)


def _upper_pixels(
    data: bytes, frame: int, size: tuple[int, int], end: int, space: str, factor: int
) -> NDArray[np.uint8]:
    """Decode a JPEG of a size down to row `end` at least, reduced by a factor.

    A JPEG is a sequence of Huffman codes without entry points: what is above a part must be
    decoded, but nothing below it.
    """
    import simplejpeg

    height, width = size
    rows = -(-end // _ROWS_OF_BLOCKS) * _ROWS_OF_BLOCKS
    ends_early = frame > 0 and rows < height
    if ends_early:
        # Decoders stop at the height that the frame states.
        offset = frame + _HEIGHT
        height, data = rows, data[:offset] + rows.to_bytes(2, "big") + data[offset + 2 :]
    shape = -(-height // factor), -(-width // factor), 1 if space == "Gray" else 3
    pixels = np.empty(shape, np.uint8)
    least = {"min_height": shape[0], "min_width": shape[1]} if factor > 1 else {}
    try:
        simplejpeg.decode_jpeg(data, colorspace=space, buffer=pixels, **least)
    except ValueError as error:
        # Codes are left where decoding stopped. Any other report means damage, and only the first
        # of several is shown, so everything before it was in order.
        if not (ends_early and _LEFT_OVER.search(str(error))):
            raise
    return pixels[:, :, 0] if space == "Gray" else pixels


def _check_scans(data: bytes) -> int:
    """Return where the frame of a JPEG is; 0 if decoding cannot end early, see `_upper_pixels`.

    Raises:
        DecodeError: If it has more scans than `JPEG_SCANS`. A few bytes add a scan, and each one
            takes time proportional to the number of pixels.
    """
    offset, frame, has_restarts = 2, 0, False
    while offset + 10 <= len(data) and data[offset] == _MARKER:
        marker = data[offset + 1]
        if marker in _FRAMES:
            frame = offset
        elif marker == _RESTARTS:
            has_restarts = True
        elif marker == _SCAN:
            if not frame:
                break
            kind, components = data[frame + 1], data[frame + 9]
            if kind in _SEQUENTIAL_FRAMES and data[offset + 4] >= components:
                return frame if kind in _BASELINE_FRAMES and not has_restarts else 0
            scans = data.count(bytes((_MARKER, _SCAN)))
            check_limit(scans, JPEG_SCANS, f"the image has {scans} scans")
            return 0
        # A marker may have any number of these before it.
        is_fill = marker == _MARKER
        offset += 1 if is_fill else 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    return 0
