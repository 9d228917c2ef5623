"""Geometric transforms of torchvision, merged so that an image is resampled once."""

from energon.transforms.mappers import (
    CenterCropMapper,
    CustomTransform,
    RandomCropMapper,
    RandomHorizontalFlipMapper,
    RandomPerspectiveMapper,
    RandomResizedCropMapper,
    RandomRotationMapper,
    RandomVerticalFlipMapper,
    ResizeMapper,
    TransformMapper,
)
from energon.transforms.merge import MergeTransform

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
