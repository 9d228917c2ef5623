"""Audio and video."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.decode.av": [
            "AVData",
            "AVDecoder",
        ],
        "energon.decode.av_parts": [
            "AVWebdatasetDecoder",
        ],
        "energon.decode.av_uniform": [
            "get_clips_uniform",
            "get_single_frames_uniform",
        ],
    },
)
