"""Apply several geometric transforms with one resampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from energon.errors import ConfigError
from energon.transforms import mappers
from energon.transforms.mappers import Matrix, Size, TransformMapper

_MAPPERS: dict[str, type[TransformMapper]] = {
    name.removesuffix("Mapper"): kind
    for name, kind in vars(mappers).items()
    if name.endswith("Mapper") and name != "TransformMapper"
}
_DEFAULT = "bilinear"
_RANK = ("nearest", "bilinear", "bicubic")


class MergeTransform:
    """Does what several geometric transforms of torchvision do, but resamples the image once.

    That is faster, and sharper, than one after the other. Random numbers are drawn as the
    transforms draw them. Call it with an image of Pillow or a tensor (channels, height, width).

    Args:
        transforms: Of the classes Resize, RandomResizedCrop, CenterCrop, RandomCrop,
            RandomHorizontalFlip, RandomVerticalFlip, RandomRotation and RandomPerspective of
            `torchvision.transforms`, or `CustomTransform`.

    Raises:
        ConfigError: If another transform is among them.
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
        """Return the best of the interpolations that the transforms want."""
        wanted = [mapper.interpolation() for mapper in self._mappers]
        names = [getattr(each, "value", each) for each in wanted if each is not None]
        known = [name for name in names if name in _RANK]
        return max(known, key=_RANK.index) if known else _DEFAULT

    def _fill(self) -> Any:
        """Return what the first transform that says so puts where there is no source."""
        return next((fill for m in self._mappers if (fill := m.fill()) is not None), 0)

    def _apply_to_image(self, image: Any, matrix: Matrix, size: Size) -> Any:
        from PIL import Image

        inverse = np.linalg.inv(matrix)
        coefficients = (inverse / inverse[2, 2]).flatten()[:8].tolist()
        fill = self._fill()
        bands = len(image.getbands())
        colour = tuple(map(int, fill)) if isinstance(fill, tuple | list) else (int(fill),) * bands
        return image.transform(
            (int(size[1]), int(size[0])),
            Image.Transform.PERSPECTIVE,
            coefficients,
            resample=Image.Resampling[self._interpolation().upper()],
            fillcolor=colour if bands > 1 else colour[0],
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
