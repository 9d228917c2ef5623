"""What transforms of torchvision do to coordinates: a matrix each.

A matrix takes homogeneous coordinates (x, y, 1) of the source to those of the result. The edges of
an image are at 0 and at its width or height.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
"""(3, 3)."""
Size = NDArray[np.int64]
"""Height and width."""
Mapped = tuple[Matrix, Size, Any]
"""A matrix, the size of the result, and what was drawn, for those who want to know."""


class TransformMapper:
    """What a transform does to coordinates. Subclasses say it in `apply_transform`.

    Args:
        transform: The transform of torchvision.
    """

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        """Return the matrix and the size of the result after this transform.

        Args:
            matrix: What the transforms before it do.
            dst_size: Height and width of their result.
        """
        raise NotImplementedError

    def interpolation(self) -> Any:
        """Return how the transform wants pixels interpolated; None if it does not say."""
        return None

    def fill(self) -> Any:
        """Return what the transform puts where there is no source; None if it does not say."""
        return None


class CustomTransform(TransformMapper):
    """A transform of one's own for `MergeTransform`: override `apply_transform`."""

    def __init__(self, transform: Any = None) -> None:
        super().__init__(transform)


class ResizeMapper(TransformMapper):
    """`Resize`."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        size, limit = self.transform.size, self.transform.max_size
        size = [size] if isinstance(size, int) else list(size)
        new = np.array(_resized(dst_size.tolist(), size, limit))
        height, width = new / dst_size
        return _scale(width, height) @ matrix, new, ("Resize", self.transform.size)

    def interpolation(self) -> Any:
        return self.transform.interpolation


class RandomResizedCropMapper(TransformMapper):
    """`RandomResizedCrop`."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        transform = self.transform
        shape = _image(dst_size)
        top, left, height, width = transform.get_params(shape, transform.scale, transform.ratio)
        new = np.array(_pair(transform.size))
        matrix = _scale(new[1] / width, new[0] / height) @ _move(-left, -top) @ matrix
        return matrix, new, ("RandomResizedCrop", (top, left, height, width))

    def interpolation(self) -> Any:
        return self.transform.interpolation


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
        wanted = np.array(_pair(transform.size))
        left, top, right, bottom = _padding(transform.padding)
        if transform.pad_if_needed:
            missing = np.maximum(0, wanted - dst_size - (top + bottom, left + right))
            top, bottom = top + missing[0], bottom + missing[0]
            left, right = left + missing[1], right + missing[1]
        padded = np.add(dst_size, (top + bottom, left + right))
        row, column, height, width = transform.get_params(_image(padded), tuple(wanted.tolist()))
        matrix = _move(left - column, top - row) @ matrix
        new = np.array((height, width))
        return matrix, new, ("RandomCrop", (column, row, height, width))

    def fill(self) -> Any:
        return self.transform.fill


class RandomHorizontalFlipMapper(TransformMapper):
    """`RandomHorizontalFlip`."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        flips = _draw() < self.transform.p
        if flips:
            matrix = _move(float(dst_size[1]), 0) @ _scale(-1, 1) @ matrix
        return matrix, dst_size, ("RandomHorizontalFlip", flips)


class RandomVerticalFlipMapper(TransformMapper):
    """`RandomVerticalFlip`."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        flips = _draw() < self.transform.p
        if flips:
            matrix = _move(0, float(dst_size[0])) @ _scale(1, -1) @ matrix
        return matrix, dst_size, ("RandomVerticalFlip", flips)


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
            # Rounded, so that a quarter turn is no pixel wider than the image.
            edges = corners[:2].round(6)
            low, high = np.floor(edges.min(axis=1)), np.ceil(edges.max(axis=1))
            new = (high - low).astype(np.int64)[::-1]
            turned = _move((new[1] - width) / 2, (new[0] - height) / 2) @ turned
            dst_size = new
        return turned @ matrix, dst_size, ("RandomRotation", degrees)

    def interpolation(self) -> Any:
        return self.transform.interpolation

    def fill(self) -> Any:
        return self.transform.fill


class RandomPerspectiveMapper(TransformMapper):
    """`RandomPerspective`."""

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Mapped:
        transform = self.transform
        if _draw() >= transform.p:
            return matrix, dst_size, ("RandomPerspective",)
        height, width = dst_size.tolist()
        start, end = transform.get_params(width, height, transform.distortion_scale)
        return _homography(start, end) @ matrix, dst_size, ("RandomPerspective", start, end)

    def interpolation(self) -> Any:
        return self.transform.interpolation

    def fill(self) -> Any:
        return self.transform.fill


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
    """Return how much is added at the left, top, right and bottom."""
    if padding is None:
        return 0, 0, 0, 0
    numbers = [padding] if isinstance(padding, int) else list(padding)
    left, top = numbers[0], numbers[-1] if len(numbers) == 2 else numbers[min(1, len(numbers) - 1)]
    if len(numbers) == 4:
        return left, top, numbers[2], numbers[3]
    return left, top, left, top


def _image(size: Size) -> Any:
    """Return something with the size of an image, which is all that is asked of it."""
    import torch

    return torch.empty((1, int(size[0]), int(size[1])), device="meta")


def _draw() -> float:
    import torch

    return float(torch.rand(1))
