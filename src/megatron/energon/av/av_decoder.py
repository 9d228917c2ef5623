"""A decoder of audio and video."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.decode.av": [
            "AVDecoder",
        ],
        "energon.decode.av_parts": [
            "AVWebdatasetDecoder",
        ],
    },
)
