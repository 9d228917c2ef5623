"""Geometric transforms, merged."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.transforms.mappers": [
            "CenterCropMapper",
            "CustomTransform",
            "RandomCropMapper",
            "RandomHorizontalFlipMapper",
            "RandomPerspectiveMapper",
            "RandomResizedCropMapper",
            "RandomRotationMapper",
            "RandomVerticalFlipMapper",
            "ResizeMapper",
            "TransformMapper",
        ],
        "energon.transforms.merge": [
            "MergeTransform",
        ],
    },
)
