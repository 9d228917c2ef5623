"""Where samples came from."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.source_info": [
            "SourceInfo",
            "add_source_info",
            "get_source_info",
        ],
    },
)
