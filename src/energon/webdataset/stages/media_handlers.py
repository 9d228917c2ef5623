"""Decode audio and video to tensors."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

VIDEO_EXTENSIONS = frozenset(
    {"mp4", "ogv", "mjpeg", "avi", "mov", "h264", "mpg", "webm", "wmv", "mkv"}
)
AUDIO_EXTENSIONS = frozenset({"flac", "mp3", "sox", "wav", "m4a", "ogg", "wma", "opus", "aac"})


class _MediaHandler:
    """Decodes fields with certain extensions."""

    name: str
    extensions: frozenset[str]

    def claims(self, key: str) -> bool:
        """Return whether fields of that name are decoded."""
        return key.rpartition(".")[2].lower() in self.extensions

    def __call__(self, key: str, data: bytes) -> Any:
        if not self.claims(key):
            return None
        from energon.decode.av_container import check_claims, decoding

        with decoding():
            check_claims(io.BytesIO(data))
            return self.decode(data)

    def decode(self, data: bytes) -> Any:
        """Return what the file holds."""
        raise NotImplementedError

    def __reduce__(self) -> str:
        return self.name


class _VideoHandler(_MediaHandler):
    """Decodes videos to frames, sound, and a dict of `video_fps` and `audio_fps`.

    Frames are uint8 (time, height, width, 3), sound is float32 (channels, samples).
    """

    name = "torch_video"
    extensions = VIDEO_EXTENSIONS

    def decode(self, data: bytes) -> Any:
        import torch

        from energon.decode.av_video import VideoReader

        reader = VideoReader(io.BytesIO(data))
        try:
            frames = torch.from_numpy(np.stack(reader.all().frames))
            info: dict[str, Any] = {"video_fps": reader.frames_per_second}
        finally:
            reader.close()
        audio, rate = _audio(data)
        if audio is None:
            return frames, torch.empty((0, 0)), info
        return frames, torch.from_numpy(audio), {**info, "audio_fps": rate}


class _AudioHandler(_MediaHandler):
    """Decodes audio to a tensor (channels, samples) of float32 from -1 to 1, and its rate."""

    name = "torch_audio"
    extensions = AUDIO_EXTENSIONS

    def decode(self, data: bytes) -> Any:
        import torch

        from energon.decode.av_audio import AudioReader

        reader = AudioReader(io.BytesIO(data))
        try:
            return torch.from_numpy(reader.all().copy()), reader.rate
        finally:
            reader.close()


def _audio(data: bytes) -> tuple[Any, int]:
    """Return the sound of a video, or None if it has none."""
    from energon.decode.av_audio import AudioReader
    from energon.errors import DecodeError

    try:
        reader = AudioReader(io.BytesIO(data))
    except DecodeError:
        return None, 0
    try:
        return reader.all().copy(), reader.rate
    finally:
        reader.close()


torch_video = _VideoHandler()
torch_audio = _AudioHandler()
