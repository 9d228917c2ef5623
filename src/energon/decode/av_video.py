"""Frames of a video by time and by number, decoded from the key frame before them.

A frame is shown from its time stamp to that of the next one. Times are counted in ticks, the unit
of the stream. The key frames listed in containers are not trusted: if decoding starts after the
requested frame, it starts again further back.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.decode.av_container import (
    MediaStream,
    codec_options,
    decoding,
    import_av,
    open_container,
)
from energon.errors import DecodeError
from energon.limits import DECODED_BYTES, IMAGE_PIXELS, check_limit

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.frame import VideoFrame

TOLERANCE_SECONDS = Fraction(1, 1_000_000)
"""A time this close before a frame means that frame: 0.3 has no exact binary representation."""
FORWARD_SECONDS = 2
"""How far ahead to decode frames rather than seek, if the key frames are unknown."""

Frame = NDArray[np.uint8]
FrameSize = tuple[int, int]


class Clip(NamedTuple):
    """Consecutive frames."""

    frames: list[Frame]
    """Arrays of shape (height, width, 3)."""
    start: float
    """When the first frame is shown, in seconds from the beginning of the file."""
    stop: float
    """When the last frame ends."""


class VideoReader:
    """The frames of the first video stream of a file. For one thread at a time.

    Clips requested in ascending order are decoded in one pass as far as possible.

    Args:
        stream: The file.

    Raises:
        DecodeError: If it has no video stream.
    """

    def __init__(self, stream: MediaStream) -> None:
        self._file = stream
        self._times: list[int] | None = None
        self._keys: list[int] = []
        self._reformatter = import_av().video.reformatter.VideoReformatter()
        self._reopen()

    @property
    def frames_per_second(self) -> float:
        """The average frame rate of the stream."""
        return float(self._stream.average_rate or self._stream.guessed_rate or 0)

    @property
    def size(self) -> FrameSize:
        """Width and height of the frames."""
        return self._stream.codec_context.width, self._stream.codec_context.height

    @property
    def num_frames(self) -> int:
        """How many frames there are. Reads the whole file unless its header is exact."""
        # AVI counts empty places too.
        known = self._stream.frames if "mp4" in self._container.format.name else 0
        return known or len(self.times)

    @property
    def duration(self) -> float:
        """Seconds until the last frame ends, according to the headers."""
        if self._stream.duration:
            return float(self._stream.duration * self._tick)
        if self._container.duration and len(self._container.streams) == 1:
            return self._container.duration / 1_000_000
        return float((self.times[-1] - self._origin) * self._tick + self._frame_seconds)

    @property
    def times(self) -> list[int]:
        """The times of all frames in ticks, ascending. Reads all packets and decodes none."""
        if self._times is None:
            self._reopen()
            codec = self._stream.codec_context.name
            with decoding():
                packets = [
                    (_time(packet), packet.is_keyframe)
                    for packet in self._container.demux(self._stream)
                    if packet.size and _is_shown(packet, codec)
                ]
            if not packets:
                raise DecodeError("the video stream has no frames")
            self._times = sorted(time for time, _ in packets)
            self._keys = sorted(time for time, is_key in packets if is_key)
            self._reopen()
        return self._times

    def all(self, size: FrameSize | None = None) -> Clip:
        """Return all frames; see `by_time` for `size`."""
        self._reopen()
        return self._clip(_Cursor(self._frames()), math.inf, size)

    def check(self) -> float:
        """Decode and discard all frames, and return when the last one ends.

        Raises:
            DecodeError: If one is damaged.
        """
        self._reopen()
        self._stream.codec_context.options |= {"err_detect": "explode"}
        reached = 0.0
        for number, frame in enumerate(self._frames()):
            if frame.is_corrupt:
                raise DecodeError(f"frame {number} of the video is damaged")
            reached = self._to_seconds(self._end(frame))
        self._reopen()
        return reached

    def by_time(self, start: float, stop: float, size: FrameSize | None = None) -> Clip | None:
        """Return the frames shown at any time from `start` to `stop`, both inclusive.

        Args:
            start: In seconds from the beginning of the file.
            stop: In seconds from the beginning of the file.
            size: Height and width to scale frames to; None does not scale.

        Returns:
            None if the last frame ends before `start`.
        """
        return self._by_tick(self._to_tick(start), self._to_tick(stop), size)

    def by_number(self, first: int, last: int, size: FrameSize | None = None) -> Clip | None:
        """Return the frames from number `first` to `last`, both inclusive; see `by_time`."""
        times = self.times
        if first >= len(times) or last < 0:
            return None
        return self._by_tick(times[max(0, first)], times[min(last, len(times) - 1)], size)

    def close(self) -> None:
        """Free the decoder."""
        self._container.close()

    def _reopen(self) -> None:
        self._container = open_container(self._file)
        if not self._container.streams.video:
            raise DecodeError("the file has no video stream")
        self._stream = self._container.streams.video[0]
        # Loaders have many workers; threads in each would only get in one another's way.
        codec = self._stream.codec_context
        codec.thread_count = 1
        codec.options = codec_options()
        _check_size(codec.width, codec.height)
        self._tick = Fraction(self._stream.time_base or Fraction(1, 1_000_000))
        origin = max(0, self._container.start_time or 0)
        self._origin = int(Fraction(origin, 1_000_000) / self._tick)
        self._cursor: _Cursor | None = None

    @property
    def _frame_seconds(self) -> float:
        return 1 / self.frames_per_second if self.frames_per_second else 0.0

    def _to_tick(self, seconds: float) -> int:
        ticks = (Fraction(seconds) + TOLERANCE_SECONDS) / self._tick
        return math.floor(ticks) + self._origin

    def _to_seconds(self, tick: int) -> float:
        return float((tick - self._origin) * self._tick)

    def _by_tick(self, start: int, stop: int, size: FrameSize | None) -> Clip | None:
        cursor = self._go_to(start)
        last = cursor.present
        if last is None or (cursor.following is None and self._end(last) <= start):
            return None
        return self._clip(cursor, stop, size)

    def _clip(self, cursor: _Cursor, stop: float, size: FrameSize | None) -> Clip:
        """Return the frames from the present one on that start at `stop` or earlier."""
        frame = cursor.present
        if frame is None:
            raise DecodeError("the video stream has no frames")
        frames, start = [self._pixels(frame, size)], _time(frame)
        total = frames[0].nbytes
        while cursor.following is not None and _time(cursor.following) <= stop:
            frame = cursor.advance()
            frames.append(self._pixels(frame, size))
            total += frames[-1].nbytes
            check_limit(
                total,
                DECODED_BYTES,
                f"{len(frames)} frames of {frame.width} x {frame.height} pixels have {total} bytes "
                "already; ask for shorter clips or smaller frames",
            )
        end = self._end(frame) if cursor.following is None else _time(cursor.following)
        return Clip(frames, self._to_seconds(start), self._to_seconds(end))

    def _end(self, frame: VideoFrame) -> int:
        """Return when the last frame of the stream ends."""
        ticks = frame.duration or round(Fraction(self._frame_seconds) / self._tick)
        return _time(frame) + ticks

    def _pixels(self, frame: VideoFrame, size: FrameSize | None) -> Frame:
        # FFmpeg reduces MJPEG and MPEG while it decodes (lowres), but no newer format, and takes a
        # fifth longer for half the size than for the whole.
        height, width = size or (None, None)
        pixels: Frame = self._reformatter.reformat(frame, width, height, "rgb24").to_ndarray()
        return pixels

    def _go_to(self, tick: int) -> _Cursor:
        """Return a cursor whose present frame is shown at a time; before the first one, that."""
        cursor = self._cursor
        if cursor is None or not cursor.is_before(tick) or self._is_far(cursor, tick):
            cursor = self._cursor = self._seek(tick)
        while cursor.following is not None and _time(cursor.following) <= tick:
            cursor.advance()
        return cursor

    def _is_far(self, cursor: _Cursor, tick: int) -> bool:
        """Return whether there is a key frame to jump to on the way to a time."""
        present = 0 if cursor.present is None else _time(cursor.present)
        key = self._key_before(tick)
        if key is None:
            return (tick - present) * self._tick > FORWARD_SECONDS
        return key > present

    def _key_before(self, tick: int) -> int | None:
        if self._keys:
            at = bisect_right(self._keys, tick) - 1
            return self._keys[at] if at >= 0 else None
        entries = self._stream.index_entries
        if len(entries) < 2:
            return None
        at = entries.search_timestamp(tick, backward=True)
        return int(entries[at].timestamp) if at >= 0 else None

    def _seek(self, tick: int) -> _Cursor:
        """Return a cursor at a key frame that is shown at `tick` or before it, or at the first."""
        target, back = tick, max(1, int(Fraction(1, 4) / self._tick))
        while target > self._origin:
            try:
                with decoding():
                    self._container.seek(target, stream=self._stream, backward=True)
            except DecodeError:
                break
            cursor = _Cursor(self._frames(from_key=True))
            if cursor.is_before(tick):
                return cursor
            found = tick if cursor.present is None else _time(cursor.present)
            target, back = min(target, found) - back, 2 * back
        self._reopen()
        return _Cursor(self._frames())

    def _frames(self, *, from_key: bool = False) -> Iterator[VideoFrame]:
        """Yield decoded frames.

        Args:
            from_key: Whether to leave out what comes before the first key frame: after a seek,
                these lack the frames that they refer to.
        """
        waiting = from_key
        with decoding():
            for frame in self._container.decode(self._stream):
                waiting = waiting and not frame.key_frame
                if not waiting:
                    _check_size(frame.width, frame.height)
                    yield frame


class _Cursor:
    """A place in decoded frames: the present one and the following, None beyond the end."""

    def __init__(self, frames: Iterator[VideoFrame]) -> None:
        self._frames = frames
        self.present = next(frames, None)
        self.following = None if self.present is None else next(frames, None)

    def advance(self) -> VideoFrame:
        """Return the following frame, which is the present one then."""
        if self.following is None:
            raise IndexError("after the last frame")
        self.present = self.following
        self.following = next(self._frames, None)
        return self.present

    def is_before(self, tick: int) -> bool:
        """Return whether the present frame is shown at `tick` or before it."""
        return self.present is not None and _time(self.present) <= tick


def _check_size(width: int, height: int) -> None:
    check_limit(width * height, IMAGE_PIXELS, f"the video has {width} x {height} pixels")


def _time(timed: VideoFrame | Packet[Any]) -> int:
    """Return the time stamp; AVI files have that of decoding only, which is the same there."""
    time: int | None = timed.pts if timed.pts is not None else timed.dts
    if time is None:
        raise DecodeError("a frame of the video has no time stamp")
    return time


def _is_shown(packet: Packet[Any], codec: str) -> bool:
    """Return whether a packet becomes a frame; VP8 has some that others refer to, only."""
    if packet.is_discard:
        return False
    return codec != "vp8" or bool(bytes(packet)[0] & 0x10)
