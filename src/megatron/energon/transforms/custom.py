"""Transforms of one's own."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.transforms.mappers": [
            "CustomTransform",
        ],
    },
)
