"""Geometric transforms of torchvision, merged so that an image is resampled once.

A matrix takes homogeneous coordinates (x, y, 1) of the source to those of the result. The edges of
an image are at 0 and at its width or height.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError

__all__ = [
    "CenterCropMapper",
    "CustomTransform",
    "MergeTransform",
    "RandomCropMapper",
    "RandomHorizontalFlipMapper",
    "RandomPerspectiveMapper",
    "RandomResizedCropMapper",
    "RandomRotationMapper",
    "RandomVerticalFlipMapper",
    "ResizeMapper",
    "TransformMapper",
]


Matrix = NDArray[np.float64]
"""(3, 3)."""
Size = NDArray[np.int64]
"""Height and width."""
Mapped = tuple[Matrix, Size, Any]
"""A matrix, the size of the result, and what was drawn, for those who want to know."""


class TransformMapper:
    """The effect of a transform on coordinates, defined by `apply_transform` in subclasses.

    Args:
        transform: The transform of torchvision; None for your own.
    """

    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        """Return the matrix and the size of the result after this transform.

        Args:
            matrix: What the transforms before it do.
            dst_size: Height and width of their result.
        """
        raise NotImplementedError

    def interpolation(self) -> Any:
        """Return the interpolation of the transform; None if it has none."""
        return getattr(self.transform, "interpolation", None)

    def fill(self) -> Any:
        """Return the fill value of the transform; None if it has none."""
        return getattr(self.transform, "fill", None)


class CustomTransform(TransformMapper):
    """Your own transform for `MergeTransform`: override `apply_transform`.

    Example:
        >>> from PIL import Image
        >>> class Shift(CustomTransform):
        ...     def apply_transform(self, matrix, dst_size):
        ...         to_the_right = np.array([[1, 0, 8], [0, 1, 0], [0, 0, 1]], float)
        ...         return to_the_right @ matrix, dst_size, ("Shift", 8)
        >>> MergeTransform([Shift()])(Image.new("L", (16, 16), 255)).getpixel((7, 0))
        0
    """


class ResizeMapper(TransformMapper):
    """`Resize`."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        size, limit = self.transform.size, self.transform.max_size
        size = [size] if isinstance(size, int) else list(size)
        new = np.array(_resized(dst_size.tolist(), size, limit))
        height, width = new / dst_size
        return _scale(width, height) @ matrix, new, ("Resize", self.transform.size)


class RandomResizedCropMapper(TransformMapper):
    """`RandomResizedCrop`."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        transform = self.transform
        shape = _image(dst_size)
        top, left, height, width = transform.get_params(shape, transform.scale, transform.ratio)
        new = np.array(_pair(transform.size))
        matrix = _scale(new[1] / width, new[0] / height) @ _move(-left, -top) @ matrix
        return matrix, new, ("RandomResizedCrop", (top, left, height, width))


class CenterCropMapper(TransformMapper):
    """`CenterCrop`."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        new = np.array(_pair(self.transform.size))
        top, left = (round((own - cut) / 2) for own, cut in zip(dst_size, new, strict=True))
        return _move(-left, -top) @ matrix, new, ("CenterCrop", (-top, -left, *new.tolist()))


class RandomCropMapper(TransformMapper):
    """`RandomCrop`, with its padding."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        transform = self.transform
        cropped_size = np.array(_pair(transform.size))
        left, top, right, bottom = _padding(transform.padding)
        if transform.pad_if_needed:
            missing = np.maximum(0, cropped_size - dst_size - (top + bottom, left + right))
            top, bottom = top + missing[0], bottom + missing[0]
            left, right = left + missing[1], right + missing[1]
        padded = np.add(dst_size, (top + bottom, left + right))
        row, column, height, width = transform.get_params(
            _image(padded), tuple(cropped_size.tolist())
        )
        matrix = _move(left - column, top - row) @ matrix
        new = np.array((height, width))
        return matrix, new, ("RandomCrop", (column, row, height, width))


class _Flip(TransformMapper):
    axis: int
    """Of the size: 0 flips top and bottom, 1 left and right."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        flips = _draw() < self.transform.p
        if flips:
            flip = np.eye(3)
            flip[1 - self.axis] *= -1
            flip[1 - self.axis, 2] = dst_size[self.axis]
            matrix = flip @ matrix
        return matrix, dst_size, (type(self.transform).__name__, flips)


class RandomHorizontalFlipMapper(_Flip):
    """`RandomHorizontalFlip`."""

    axis = 1


class RandomVerticalFlipMapper(_Flip):
    """`RandomVerticalFlip`."""

    axis = 0


class RandomRotationMapper(TransformMapper):
    """`RandomRotation`, counter-clockwise about the center or a given point."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        transform = self.transform
        degrees = transform.get_params(transform.degrees)
        angle = math.radians(degrees)
        cos, sin = math.cos(angle), math.sin(angle)
        height, width = dst_size.tolist()
        x, y = transform.center or (width / 2, height / 2)
        turn = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1.0]])
        turned = _move(x, y) @ turn @ _move(-x, -y)
        if transform.expand:
            corners = turned @ np.array([[0, width, width, 0], [0, 0, height, height], [1] * 4])
            # Rounded, so that a quarter turn is not a pixel wider than the image.
            edges = corners[:2].round(6)
            low, high = np.floor(edges.min(axis=1)), np.ceil(edges.max(axis=1))
            new = (high - low).astype(np.int64)[::-1]
            turned = _move((new[1] - width) / 2, (new[0] - height) / 2) @ turned
            dst_size = new
        return turned @ matrix, dst_size, ("RandomRotation", degrees)


class RandomPerspectiveMapper(TransformMapper):
    """`RandomPerspective`."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        transform = self.transform
        if _draw() >= transform.p:
            return matrix, dst_size, ("RandomPerspective",)
        height, width = dst_size.tolist()
        start, end = transform.get_params(width, height, transform.distortion_scale)
        return _homography(start, end) @ matrix, dst_size, ("RandomPerspective", start, end)


def _move(x: float, y: float) -> Matrix:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]], float)


def _scale(x: float, y: float) -> Matrix:
    return np.diag([x, y, 1.0])


def _homography(start: Any, end: Any) -> Matrix:
    """Return the matrix that takes four points to four others."""
    rows, values = [], []
    for (x, y), (u, v) in zip(start, end, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    solved = np.linalg.solve(np.array(rows, float), np.array(values, float))
    return np.append(solved, 1.0).reshape(3, 3)


def _resized(old: list[int], size: list[int], limit: int | None) -> list[int]:
    """Return height and width after a resize; one number is that of the shorter edge."""
    if len(size) == 2:
        return size
    short, long = min(old), max(old)
    new_short, new_long = size[0], int(size[0] * long / short)
    if limit is not None and new_long > limit:
        new_short, new_long = int(limit * new_short / new_long), limit
    return [new_short, new_long] if old[0] <= old[1] else [new_long, new_short]


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


def _padding(padding: Any) -> tuple[int, int, int, int]:
    """Return the padding at the left, top, right and bottom."""
    if padding is None:
        return 0, 0, 0, 0
    numbers = [padding] if isinstance(padding, int) else list(padding)
    left, top = numbers[0], numbers[-1] if len(numbers) == 2 else numbers[min(1, len(numbers) - 1)]
    if len(numbers) == 4:
        return left, top, numbers[2], numbers[3]
    return left, top, left, top


def _image(size: Size) -> Any:
    """Return a stand-in that has the size of an image, all that is needed of it."""
    import torch

    return torch.empty((1, int(size[0]), int(size[1])), device="meta")


def _draw() -> float:
    import torch

    return float(torch.rand(1))


_MAPPERS: dict[str, type[TransformMapper]] = {
    name.removesuffix("Mapper"): kind
    for name, kind in globals().items()
    if name.endswith("Mapper") and name != "TransformMapper"
}
_DEFAULT = "bilinear"
_RANK = ("nearest", "bilinear", "bicubic")


class MergeTransform:
    """Applies several geometric transforms of torchvision, resampling the image only once.

    That is faster, and sharper, than one after another. Random numbers are drawn as the
    transforms draw them. Call it with a Pillow image or a tensor (channels, height, width).

    Args:
        transforms: Of the classes Resize, RandomResizedCrop, CenterCrop, RandomCrop,
            RandomHorizontalFlip, RandomVerticalFlip, RandomRotation and RandomPerspective of
            `torchvision.transforms`, or `CustomTransform`.

    Raises:
        ConfigError: If another transform is among them.

    Example:
        >>> from PIL import Image
        >>> class Half(CustomTransform):
        ...     def apply_transform(self, matrix, dst_size):
        ...         return np.diag([0.5, 0.5, 1]) @ matrix, dst_size // 2, "Half"
        >>> MergeTransform([Half(), Half()])(Image.new("RGB", (64, 48))).size
        (16, 12)
    """

    def __init__(self, transforms: Sequence[Any]) -> None:
        self.transforms = list(transforms)
        self._mappers = [_mapper(transform) for transform in self.transforms]

    def __call__(self, x: Any) -> Any:
        """Return the image after all transforms."""
        return self.forward(x)

    def forward(self, x: Any) -> Any:
        """Return the image after all transforms."""
        if hasattr(x, "transform") and hasattr(x, "size") and not callable(x.size):
            width, height = x.size
            return self._apply_to_image(x, *self._merge(np.array((height, width))))
        if hasattr(x, "shape") and hasattr(x, "new_tensor"):
            return self._apply_to_tensor(x, *self._merge(np.array(tuple(x.shape[-2:]))))
        raise ConfigError(
            f"cannot transform {type(x).__name__}; expected an image of Pillow or a tensor "
            "(channels, height, width)"
        )

    def _merge(self, size: Size) -> tuple[Matrix, Size]:
        matrix: Matrix = np.eye(3)
        for mapper in self._mappers:
            matrix, size, _ = mapper.apply_transform(matrix, size)
        return matrix, size

    def _interpolation(self) -> str:
        """Return the best of the transforms' interpolations."""
        chosen = [mapper.interpolation() for mapper in self._mappers]
        names = [getattr(each, "value", each) for each in chosen if each is not None]
        ranked = [name for name in names if name in _RANK]
        return max(ranked, key=_RANK.index) if ranked else _DEFAULT

    def _fill(self) -> Any:
        """Return the fill value of the first transform that has one."""
        return next((fill for m in self._mappers if (fill := m.fill()) is not None), 0)

    def _apply_to_image(self, image: Any, matrix: Matrix, size: Size) -> Any:
        from PIL import Image

        inverse = np.linalg.inv(matrix)
        coefficients = (inverse / inverse[2, 2]).flatten()[:8].tolist()
        fill = self._fill()
        bands = len(image.getbands())
        color = tuple(map(int, fill)) if isinstance(fill, tuple | list) else (int(fill),) * bands
        return image.transform(
            (int(size[1]), int(size[0])),
            Image.Transform.PERSPECTIVE,
            coefficients,
            resample=Image.Resampling[self._interpolation().upper()],
            fillcolor=color if bands > 1 else color[0],
        )

    def _apply_to_tensor(self, tensor: Any, matrix: Matrix, size: Size) -> Any:
        import torch

        height, width = (int(edge) for edge in size)
        inverse = torch.from_numpy(np.linalg.inv(matrix))
        y, x = torch.meshgrid(
            torch.arange(height, dtype=torch.float64) + 0.5,
            torch.arange(width, dtype=torch.float64) + 0.5,
            indexing="ij",
        )
        points = torch.stack((x, y, torch.ones_like(x)), dim=-1) @ inverse.T
        edges = torch.tensor([tensor.shape[-1], tensor.shape[-2]], dtype=torch.float64)
        grid = (points[..., :2] / points[..., 2:] / edges * 2 - 1).float()[None].to(tensor.device)
        values = tensor.float() if not tensor.is_floating_point() else tensor
        fill = torch.as_tensor(self._fill(), dtype=values.dtype, device=values.device)
        fill = fill.reshape(-1, 1, 1) if fill.ndim else fill
        # What is outside becomes 0, so the image is moved to where 0 is the fill.
        moved = torch.nn.functional.grid_sample(
            (values - fill)[None], grid.to(values.dtype), self._interpolation(), "zeros", False
        )[0]
        moved = moved + fill
        if tensor.is_floating_point():
            return moved
        limits = torch.iinfo(tensor.dtype)
        return moved.round().clamp(limits.min, limits.max).to(tensor.dtype)


def _mapper(transform: Any) -> TransformMapper:
    if isinstance(transform, TransformMapper):
        return transform
    name = type(transform).__name__
    if name not in _MAPPERS:
        raise ConfigError(
            f"{name} cannot be merged; known are {', '.join(sorted(_MAPPERS))} of "
            "torchvision.transforms, and CustomTransform. Put it after the MergeTransform"
        )
    return _MAPPERS[name](transform)
