"""Fields that samples lack."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.errors": [
            "FieldAccessError",
        ],
    },
)
