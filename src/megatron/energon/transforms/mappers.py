"""What transforms do to coordinates."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.transforms.mappers": [
            "CenterCropMapper",
            "RandomCropMapper",
            "RandomHorizontalFlipMapper",
            "RandomPerspectiveMapper",
            "RandomResizedCropMapper",
            "RandomRotationMapper",
            "RandomVerticalFlipMapper",
            "ResizeMapper",
            "TransformMapper",
        ],
    },
)
