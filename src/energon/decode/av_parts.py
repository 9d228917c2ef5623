"""What parts with audio and video become: the names of decoders, and the decoder for pipelines."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from energon.errors import ConfigError

if TYPE_CHECKING:
    from energon.decode.av import AVDecoder


EXTENSIONS = frozenset(
    {
        *("mp4", "m4v", "mov", "mkv", "webm", "avi", "flv", "mpg", "mpeg", "3gp", "ogv"),
        *("mp3", "wav", "flac", "m4a", "aac", "ogg", "oga", "opus"),
    }
)

AV_SPECS = ("AVDecoder", "torch", "pyav")


def check_av_spec(name: str) -> None:
    """Raise ConfigError unless there is a specification of that name."""
    if name not in AV_SPECS:
        raise ConfigError(f"av_decode={name!r}: expected one of {', '.join(AV_SPECS)}")


def decode_av(data: bytes, spec: str, *, with_audio: bool) -> Any:
    """Return what the specification makes of a file.

    Raises:
        DecodeError: If "torch" or "pyav" is wanted, and the file is damaged.
        MissingExtraError: If PyAV is not installed.
    """
    from energon.decode.av import AVDecoder
    from energon.decode.av_container import check_claims, open_container

    if spec == "pyav":
        check_claims(io.BytesIO(data))
        return open_container(io.BytesIO(data))
    decoder = AVDecoder(io.BytesIO(data))
    return decoder if spec == "AVDecoder" else decoder.get_frames(with_audio)


AVDecoderType = Literal["torch", "AVDecoder", "pyav"]
"""What audio and video may become."""

ImageDecoderType = Literal[
    "l8", "rgb8", "rgba8", "l", "rgb", "rgba",
    "torchl8", "torchrgb8", "torchrgba8", "torchl", "torchrgb", "torch", "torchrgba",
    "pill", "pil", "pilrgb", "pilrgba",
]  # fmt: skip
"""What images may become."""


@dataclass(frozen=True)
class AVWebdatasetDecoder:
    """Turns parts with audio or video into what `av_decode` says. Call it with name and bytes.

    Args:
        video_decode_audio: Whether "torch" decodes the audio of videos, too.
        av_decode: "AVDecoder", which decodes the clips that it is asked for; "torch" for all
            frames as `AVData`; "pyav" for a container of PyAV.

    Raises:
        ConfigError: If `av_decode` is unknown.
    """

    video_decode_audio: bool
    av_decode: AVDecoderType = "AVDecoder"

    def __post_init__(self) -> None:
        check_av_spec(self.av_decode)

    def read_av_data(self, data: bytes) -> AVDecoder:
        """Return a decoder for the content of a file."""
        from energon.decode.av import AVDecoder

        return AVDecoder(io.BytesIO(data))

    def __call__(self, key: str, data: bytes) -> Any:
        """Return what `data` become; None if the name is not one of audio or video.

        Raises:
            DecodeError: If "torch" or "pyav" is wanted, and the file is damaged.
        """
        if key.rpartition(".")[2].lower() not in EXTENSIONS:
            return None
        return decode_av(data, self.av_decode, with_audio=self.video_decode_audio)
