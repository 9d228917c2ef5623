"""The names of what decoders make, as types for annotations."""

from typing import Literal

AVDecoderType = Literal["torch", "AVDecoder", "pyav"]
"""What audio and video may become."""

ImageDecoderType = Literal[
    "l8", "rgb8", "rgba8", "l", "rgb", "rgba",
    "torchl8", "torchrgb8", "torchrgba8", "torchl", "torchrgb", "torch", "torchrgba",
    "pill", "pil", "pilrgb", "pilrgba",
]  # fmt: skip
"""What images may become."""
