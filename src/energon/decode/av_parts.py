"""Decode parts with audio and video, for pipelines that call decoders with a name and bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from energon.decode.av_container import EXTENSIONS
from energon.decode.av_spec import check_av_spec, decode_av
from energon.decode.spec_names import AVDecoderType

if TYPE_CHECKING:
    from energon.decode.av import AVDecoder


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
