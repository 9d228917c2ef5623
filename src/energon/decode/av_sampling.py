"""Clips and single frames that are evenly spaced over a file."""

from __future__ import annotations

from typing import Any

import numpy as np

from energon.decode.av import AVData, AVDecoder, as_tensor
from energon.decode.av_container import decoding
from energon.decode.av_video import FrameSize
from energon.errors import ConfigError, DecodeError, is_whole


@decoding()
def get_clips_uniform(
    av_decoder: AVDecoder,
    clip_duration_seconds: float,
    num_clips: int,
    request_video: bool = False,
    request_audio: bool = False,
    video_out_frame_size: FrameSize | None = None,
) -> AVData:
    """Return clips of equal length, evenly spaced from beginning to end.

    Args:
        av_decoder: The file.
        clip_duration_seconds: Length of each; 0 for single frames, half a frame away from
            beginning and end.
        num_clips: Number of clips.
        request_video: Whether to return video.
        request_audio: Whether to return audio.
        video_out_frame_size: Height and width to scale frames to; None does not scale.

    Raises:
        ConfigError: If neither video nor audio is requested, or numbers are invalid.
        DecodeError: If the file lacks what is requested.

    Example:
        >>> from pathlib import Path
        >>> video = AVDecoder(Path("clip.mp4").read_bytes())
        >>> data = get_clips_uniform(video, 0.2, num_clips=3, request_video=True)
        >>> [(round(start, 2), round(stop, 2)) for start, stop in data.video_timestamps]
        [(0.0, 0.3), (0.9, 1.2), (1.8, 2.0)]
    """
    if not request_video and not request_audio:
        raise ConfigError("request_video and request_audio are both False: nothing to return")
    if not is_whole(num_clips) or num_clips < 1 or not clip_duration_seconds >= 0:
        raise ConfigError(
            f"{num_clips!r} clips of {clip_duration_seconds} s: expected 1 or more, of 0 s or more"
        )
    start, stop = av_decoder.get_span(video=request_video, audio=request_audio)
    margin = 0.5 / (av_decoder.get_video_fps() or 1) if request_video else 0.0
    first = start if clip_duration_seconds else start + margin
    last = max(first, stop - (clip_duration_seconds or margin))
    starts = np.linspace(first, last, num_clips).tolist()
    ranges = [(start, start + clip_duration_seconds) for start in starts]
    return av_decoder.get_clips(
        video_clip_ranges=ranges if request_video else None,
        audio_clip_ranges=ranges if request_audio else None,
        video_out_frame_size=video_out_frame_size,
    )


@decoding()
def get_single_frames_uniform(
    av_decoder: AVDecoder,
    num_frames: int,
    *,
    video_out_frame_size: FrameSize | None = None,
    return_timestamps: bool = False,
) -> Any:
    """Return single frames, evenly spaced from beginning to end, as one tensor.

    Args:
        av_decoder: The file.
        num_frames: Number of frames.
        video_out_frame_size: Height and width to scale frames to; None does not scale.
        return_timestamps: Whether to return a pair: the frames, and their times in seconds.

    Returns:
        Shape (frames, channels, height, width).

    Example:
        >>> from pathlib import Path
        >>> frames = get_single_frames_uniform(AVDecoder(Path("clip.mp4").read_bytes()), 4)
        >>> tuple(frames.shape)
        (4, 3, 24, 32)
    """
    found = get_clips_uniform(
        av_decoder, 0, num_frames, request_video=True, video_out_frame_size=video_out_frame_size
    )
    clips, times = found.video_clips or [], found.video_timestamps or []
    if not all(len(clip) for clip in clips):
        raise DecodeError("the video ends before its header states: it is truncated")
    frames = as_tensor(np.concatenate([np.asarray(clip[:1]) for clip in clips]))
    return (frames, [start for start, _ in times]) if return_timestamps else frames
