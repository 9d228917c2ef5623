"""The command `energon preview`."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.cli.preview": [
            "command",
        ],
    },
)
