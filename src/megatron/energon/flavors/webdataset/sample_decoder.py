"""The decoder of samples."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.decode.sample_decoder": [
            "SampleDecoder",
        ],
        "energon.decode.spec_names": [
            "AVDecoderType",
            "ImageDecoderType",
        ],
    },
)
