"""Clips of audio and video in memory: by time, by frame and by sample.

Frames are uint8 tensors of shape (frames, channels, height, width), audio is float32 from -1 to
1 of shape (channels, samples); without torch they are arrays. Times are in seconds from the
beginning of the file, where its first frame is shown or its first sample is heard.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Rational
from operator import itemgetter
from typing import IO, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from energon.decode.av_container import (
    StreamView,
    as_stream,
    check_claims,
    check_size,
    clock_start,
    container_stop,
    decoding,
    open_container,
)
from energon.decode.av_streams import AudioReader, Clip, FrameSize, VideoReader
from energon.errors import ConfigError, DecodeError, is_whole
from energon.formats.media import AVMetadata, Piece
from energon.samples.collate import has_torch

logger = logging.getLogger("energon")


def as_frames(clip: Clip, size: FrameSize | None = None) -> Any:
    """Return the frames of a clip as (frames, channels, height, width).

    Args:
        clip: The clip.
        size: Height and width, for clips without a frame.
    """
    frames = clip.frames
    pixels = np.stack(frames) if frames else np.empty((0, *(size or (0, 0)), 3), np.uint8)
    return as_tensor(pixels.transpose(0, 3, 1, 2))


def as_tensor(array: Any) -> Any:
    """Return an array as a tensor that shares its memory; without torch, as it is."""
    if not has_torch():
        return array
    import torch

    return torch.from_numpy(array)


MISSING_SECONDS = 0.5
MISSING_SHARE = 0.02
"""How much may be missing at the end of a file, since headers are not exact."""

LASTING_FORMATS = ("avi", "flv")
"""Formats that do not store how long a frame lasts, so the last one may end much later. An AVI file
that is truncated is shorter than it states, and a truncated FLV file ends within a packet."""

TimeRange = tuple[float, float]
VideoUnit = Literal["seconds", "frames"]
AudioUnit = Literal["seconds", "samples"]


@dataclass
class AVData:
    """Decoded clips, and the start and end of each in seconds.

    Example:
        >>> from pathlib import Path
        >>> data = AVDecoder(Path("clip.mp4").read_bytes()).get_clips(
        ...     video_clip_ranges=[(0.0, 0.4)], audio_clip_ranges=[(0.0, 0.5)]
        ... )
        >>> data.video_clips[0].shape, data.audio_clips[0].shape, data.audio_timestamps
        (torch.Size([5, 3, 24, 32]), torch.Size([1, 4000]), [(0.0, 0.5)])
    """

    video_clips: list[Any] | None
    video_timestamps: list[TimeRange] | None
    audio_clips: list[Any] | None
    audio_timestamps: list[TimeRange] | None


class AVDecoder:
    """Decodes the requested clips of an audio or video file in memory, and nothing else.

    Decoding is lazy. Clips are returned in the order of the request, and are the same as if the
    whole file had been decoded. Picklable if the file is in memory or was opened by a file store;
    for one thread at a time.

    Args:
        stream: The file: bytes, or a seekable stream.
        suppress_warnings: Whether to skip the warning about clips beyond the end.

    Example:
        >>> from pathlib import Path
        >>> video = AVDecoder(Path("clip.mp4").read_bytes())
        >>> video.get_video_duration(get_frame_count=True), video.get_video_fps()
        ((2.0, 20), 10.0)
        >>> clips, times = video.get_video_clips([(0.5, 0.9), (1.2, 1.2)])
        >>> [tuple(clip.shape) for clip in clips], times
        ([(5, 3, 24, 32), (1, 3, 24, 32)], [(0.5, 1.0), (1.2, 1.3)])
    """

    def __init__(self, stream: IO[bytes] | bytes, suppress_warnings: bool = False) -> None:
        self.stream = as_stream(stream)
        self.suppress_warnings = suppress_warnings

    @decoding()
    def get_video(self) -> AVData:
        """Return all frames, as one clip."""
        clip = self._video.all()
        return AVData([as_frames(clip)], [(clip.start, clip.stop)], None, None)

    @decoding()
    def get_audio(self) -> AVData:
        """Return all samples of the audio, as one clip."""
        samples = self._audio.all()
        stop = self._audio.to_seconds(samples.shape[1])
        return AVData(None, None, [as_tensor(samples)], [(self._audio.start, stop)])

    @decoding()
    def sound(self) -> NDArray[np.float32]:
        """Return all samples of the audio as an array of shape (channels, samples)."""
        return self._audio.all()

    @decoding()
    def first_frame(self) -> NDArray[np.uint8] | None:
        """Return the first frame as an array of shape (height, width, 3); None if there is none."""
        clip = self._video.by_number(0, 0)
        return clip.frames[0] if clip is not None and clip.frames else None

    @decoding()
    def get_video_with_audio(self) -> AVData:
        """Return all frames and all samples of the audio, as one clip of each."""
        video, audio = self.get_video(), self.get_audio()
        return AVData(
            video.video_clips, video.video_timestamps, audio.audio_clips, audio.audio_timestamps
        )

    @decoding()
    def get_frames(self, video_decode_audio: bool = False) -> AVData | None:
        """Return all frames, and the audio if requested or if there are no frames.

        Returns:
            None if the file has neither.
        """
        if self.has_video_stream():
            with_audio = video_decode_audio and self.has_audio_stream()
            return self.get_video_with_audio() if with_audio else self.get_video()
        return self.get_audio() if self.has_audio_stream() else None

    @decoding()
    def check(self) -> None:
        """Decode everything and discard it, to find out whether the file is intact.

        Raises:
            DecodeError: If it is damaged or truncated, or has neither video nor audio.
        """
        check_size(self.stream)
        reached = []
        if self.has_video_stream():
            reached.append(self._video.check())
        if self.has_audio_stream():
            reached.append(self._audio.check())
        if not reached:
            raise DecodeError("the file has neither a video nor an audio stream")
        with open_container(self._view()) as container:
            if container.format.name in LASTING_FORMATS:
                return
            start = clock_start(container)
            expected = float(container_stop(container) - start)
        if max(reached) <= min(expected - MISSING_SECONDS, (1 - MISSING_SHARE) * expected):
            raise DecodeError(f"the file ends after {max(reached):.3f} of {expected:.3f} s")

    @decoding()
    def get_video_clips(
        self,
        video_clip_ranges: Sequence[TimeRange],
        video_unit: VideoUnit = "seconds",
        video_out_frame_size: FrameSize | None = None,
    ) -> tuple[list[Any], list[TimeRange]]:
        """Return clips of the video, and the start and end of each in seconds.

        Args:
            video_clip_ranges: First and last second (or frame) of each, both inclusive: all
                frames shown at some time in between.
            video_unit: Whether ranges are in seconds or frame numbers.
            video_out_frame_size: Height and width to scale frames to; None does not scale.

        Returns:
            Clips of at least one frame; empty ones beyond the end.
        """
        reader, size = self._video, _frame_size(video_out_frame_size)
        in_seconds = _checked(video_unit, ("seconds", "frames"), "video_unit") == "seconds"
        ranges = _plain_ranges(video_clip_ranges)
        by_number: dict[int, tuple[Any, TimeRange]] = {}
        # In ascending order, so that frames between two clips are decoded once.
        for number, (low, high) in sorted(enumerate(ranges), key=itemgetter(1)):
            if in_seconds:
                clip = reader.by_time(low, high, size)
            else:
                clip = reader.by_number(int(low), int(high), size)
            if clip is None:
                self._warn(low, high, video_unit)
                clip = Clip([], reader.duration, reader.duration)
            by_number[number] = (
                as_frames(clip, size or reader.size[::-1]),
                (clip.start, clip.stop),
            )
        in_order = [by_number[number] for number in range(len(by_number))]
        return [frames for frames, _ in in_order], [times for _, times in in_order]

    @decoding()
    def get_audio_clips(
        self, audio_clip_ranges: Sequence[TimeRange], audio_unit: AudioUnit = "seconds"
    ) -> tuple[list[Any], list[TimeRange]]:
        """Return clips of the audio, and the start and end of each in seconds.

        Args:
            audio_clip_ranges: Start (inclusive) and stop (exclusive) of each.
            audio_unit: Whether ranges are in seconds or sample numbers.

        Returns:
            Clips of at least one sample; empty ones beyond the end.
        """
        reader = self._audio
        in_seconds = _checked(audio_unit, ("seconds", "samples"), "audio_unit") == "seconds"
        clips, times = [], []
        for low, high in _plain_ranges(audio_clip_ranges):
            first = reader.to_number(low) if in_seconds else int(low)
            stop = reader.to_number(high) if in_seconds else int(high)
            samples = reader.by_number(first, stop)
            if not samples.shape[1] and first < stop:
                self._warn(low, high, audio_unit)
            clips.append(as_tensor(samples))
            times.append((reader.to_seconds(first), reader.to_seconds(first + samples.shape[1])))
        return clips, times

    @decoding()
    def get_clips(
        self,
        video_clip_ranges: Sequence[TimeRange] | None = None,
        audio_clip_ranges: Sequence[TimeRange] | None = None,
        video_unit: VideoUnit = "seconds",
        audio_unit: AudioUnit = "seconds",
        video_out_frame_size: FrameSize | None = None,
    ) -> AVData:
        """Return clips of video and audio, see `get_video_clips` and `get_audio_clips`.

        Ranges of None yield None for their clips, as does a file without such a stream.
        """
        data = AVData(None, None, None, None)
        if video_clip_ranges is not None and self.has_video_stream():
            data.video_clips, data.video_timestamps = self.get_video_clips(
                video_clip_ranges, video_unit, video_out_frame_size
            )
        if audio_clip_ranges is not None and self.has_audio_stream():
            data.audio_clips, data.audio_timestamps = self.get_audio_clips(
                audio_clip_ranges, audio_unit
            )
        return data

    @decoding()
    def has_video_stream(self) -> bool:
        """Return whether there is video."""
        return self._streams[0]

    @decoding()
    def has_audio_stream(self) -> bool:
        """Return whether there is audio."""
        return self._streams[1]

    @decoding()
    def get_video_fps(self) -> float:
        """Return frames per second, on average."""
        return self._video.frames_per_second

    @decoding()
    def get_audio_samples_per_second(self) -> int:
        """Return the sample rate of the audio."""
        return self._audio.rate

    @decoding()
    def get_video_duration(self, get_frame_count: bool = False) -> tuple[float, int | None]:
        """Return when the last frame ends, in seconds, and the number of frames.

        Args:
            get_frame_count: Whether to count frames, which may read the whole file; if False,
                their number is None.
        """
        return self._video.duration, self._video.num_frames if get_frame_count else None

    @decoding()
    def get_audio_duration(self) -> float:
        """Return when the audio ends, in seconds, from its header."""
        return self._audio.duration

    @decoding()
    def get_span(self, *, video: bool, audio: bool) -> TimeRange:
        """Return the seconds from and until which there is video, audio, or both."""
        spans = []
        if video:
            spans.append((self._video.start, self._video.duration))
        if audio:
            spans.append((self._audio.start, self._audio.duration))
        return max(start for start, _ in spans), min(stop for _, stop in spans)

    @decoding()
    def get_metadata(
        self,
        get_video: bool = True,
        get_video_duration: bool = True,
        get_video_frame_count: bool = True,
        get_video_frame_size: bool = True,
        get_audio: bool = True,
        get_audio_duration: bool = True,
        get_audio_num_samples: bool = False,
    ) -> AVMetadata:
        """Return the metadata of the file without decoding it.

        Args:
            get_video: Whether to include the video at all.
            get_video_duration: Whether to include its duration.
            get_video_frame_count: Whether to count its frames, which may read the whole file.
            get_video_frame_size: Whether to include width and height.
            get_audio: Whether to include the audio at all.
            get_audio_duration: Whether to include its duration.
            get_audio_num_samples: Whether to include its number of samples, from the header.
        """
        video = self._video if get_video and self.has_video_stream() else None
        audio = self._audio if get_audio and self.has_audio_stream() else None
        width, height = video.size if video and get_video_frame_size else (None, None)
        return AVMetadata(
            video_duration=video.duration if video and get_video_duration else None,
            video_num_frames=video.num_frames if video and get_video_frame_count else None,
            video_fps=video.frames_per_second if video else None,
            video_width=width,
            video_height=height,
            audio_duration=audio.duration if audio and get_audio_duration else None,
            audio_channels=audio.num_channels if audio else None,
            audio_sample_rate=audio.rate if audio else None,
            audio_num_samples=audio.num_samples if audio and get_audio_num_samples else None,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"stream": self.stream, "suppress_warnings": self.suppress_warnings}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.stream!r})"

    @cached_property
    def _streams(self) -> tuple[bool, bool]:
        with open_container(self._view()) as container:
            return bool(container.streams.video), bool(container.streams.audio)

    @cached_property
    def _video(self) -> VideoReader:
        return VideoReader(self._view())

    @cached_property
    def _audio(self) -> AudioReader:
        return AudioReader(self._view())

    @cached_property
    def _pieces(self) -> list[Piece]:
        return check_claims(self.stream)

    def _view(self) -> IO[bytes]:
        """Return a stream over the file, one per reader, since readers seek."""
        return cast(IO[bytes], StreamView(self.stream, self._pieces))

    def _warn(self, low: float, high: float, unit: str) -> None:
        if not self.suppress_warnings:
            logger.warning("a clip from %s to %s %s is beyond the end of the file", low, high, unit)


def _checked(value: str, units: tuple[str, ...], name: str) -> str:
    if value not in units:
        raise ConfigError(f"{name}={value!r}: expected {' or '.join(map(repr, units))}")
    return value


def _plain_ranges(ranges: Any) -> list[TimeRange]:
    """Return the starts and ends of clips as Python's own numbers.

    They often come from the data, so mistakes in them are those of a sample.

    Raises:
        DecodeError: If they are not numbers, or in the wrong order.
    """
    try:
        pairs = [(_plain(low), _plain(high)) for low, high in ranges]
    except (TypeError, ValueError) as error:
        raise DecodeError(
            f"clips {ranges!r:.200}: expected a list with the start and end of each, like "
            "[(0.0, 2.5)]"
        ) from error
    for low, high in pairs:
        if not 0 <= low <= high < math.inf:
            raise DecodeError(f"a clip from {low} to {high}: expected 0 <= start <= end < inf")
    return pairs


def _plain(number: Any) -> float:
    if isinstance(number, str | bytes):
        raise TypeError("text instead of a number")
    return number if isinstance(number, float | Rational) else float(number)  # type: ignore[return-value]


def _frame_size(size: Any) -> FrameSize | None:
    """Return a height and width, if they are valid."""
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, Iterable) else ()
    if len(sides) == 2 and all(is_whole(each) and each > 0 for each in sides):
        return sides
    raise ConfigError(
        f"video_out_frame_size={size!r}: expected the height and width in pixels, like (224, 320), "
        "or None"
    )


def decode_av(data: bytes, spec: str, *, with_audio: bool) -> Any:
    """Return a file in the form that the specification names.

    Raises:
        DecodeError: If the form is "torch" or "pyav" and the file is damaged.
        MissingExtraError: If PyAV is not installed.
    """
    if spec == "pyav":
        check_claims(io.BytesIO(data))
        return open_container(io.BytesIO(data))
    decoder = AVDecoder(io.BytesIO(data))
    return decoder if spec == "AVDecoder" else decoder.get_frames(with_audio)


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
    data = get_clips_uniform(
        av_decoder, 0, num_frames, request_video=True, video_out_frame_size=video_out_frame_size
    )
    clips, times = data.video_clips or [], data.video_timestamps or []
    if not all(len(clip) for clip in clips):
        raise DecodeError("the video ends before its header states: it is truncated")
    frames = as_tensor(np.concatenate([np.asarray(clip[:1]) for clip in clips]))
    return (frames, [start for start, _ in times]) if return_timestamps else frames
