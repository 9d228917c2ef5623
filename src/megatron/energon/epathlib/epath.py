"""Paths here and in object stores."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.io.epath": [
            "DEFAULT_PROFILE_NAME",
            "EPath",
        ],
    },
)
