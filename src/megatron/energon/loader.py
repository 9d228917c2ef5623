"""Loaders."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.loader.getters": [
            "get_loader",
            "get_savable_loader",
        ],
    },
)
