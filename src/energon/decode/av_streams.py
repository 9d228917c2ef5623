"""Frames of a video and samples of an audio stream, by time and by number.

**Frames** are decoded from the key frame before them. A frame is shown from its time stamp to that
of the next one, the last one until the stream ends. Times are counted in ticks, the unit of the
stream. The key frames listed in containers are not trusted: if decoding starts after the requested
frame, it starts again further back.

**Samples** are those of the whole stream. Decoding starts some time before the requested clip,
because lossy codecs need earlier data. Where time stamps are coarser than samples, as in Matroska,
they only identify the frame: all frames of such a stream but the first have the same number of
samples. If they do not, decoding starts at the beginning.

Ogg Vorbis with a single page of audio is trimmed here: FFmpeg takes the place of the last sample,
which is all that the page says, for that of a whole block, so its time stamps begin a block too
late, and it trims a block too much, or not at all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.decode.av_container import (
    MediaStream,
    clock_start,
    codec_options,
    decoding,
    import_av,
    is_matroska,
    open_container,
    stated_stop,
    tick_seconds,
)
from energon.errors import DecodeError
from energon.formats.media import count_missing_bytes
from energon.limits import DECODED_BYTES, IMAGE_PIXELS, check_limit

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
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


class _Packets(NamedTuple):
    """All shown packets of a stream, in ticks."""

    times: list[int]
    """Ascending."""
    keys: list[int]
    """The times of key frames, ascending."""
    stop: int
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
        self._packets: _Packets | None = None
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
        # Elsewhere headers are not exact: AVI, for one, counts empty places.
        if self._stream.frames and "mp4" in self._container.format.name:
            return sum(not entry.is_discard for entry in self._stream.index_entries)
        return len(self.times)

    @property
    def duration(self) -> float:
        """When the last frame ends, according to the headers or else to the packets."""
        return self._to_seconds(self._stop)

    @property
    def start(self) -> float:
        """When the first frame is shown, in seconds from the beginning of the file."""
        return self._to_seconds(self._first)

    @property
    def times(self) -> list[int]:
        """The times of all frames in ticks, ascending. Reads all packets and decodes none."""
        return self._read_packets().times

    def all(self) -> Clip:
        """Return all frames."""
        self._reopen()
        return self._clip(_Cursor(self._frames()), math.inf, None)

    def check(self) -> float:
        """Decode and discard all frames, and return when the last one ends.

        Raises:
            DecodeError: If one is damaged, or there are none.
        """
        self._reopen()
        self._stream.codec_context.options |= {"err_detect": "explode"}
        reached = None
        for number, frame in enumerate(self._frames()):
            if frame.is_corrupt:
                raise DecodeError(f"frame {number} of the video is damaged")
            reached = self._end(frame)
        self._reopen()
        if reached is None:
            raise DecodeError("the video stream has no frames")
        return self._to_seconds(reached)

    def by_time(self, start: float, stop: float, size: FrameSize | None = None) -> Clip | None:
        """Return the frames shown at any time from `start` to `stop`, both inclusive.

        Args:
            start: In seconds from the beginning of the file.
            stop: In seconds from the beginning of the file.
            size: Height and width to scale frames to; None does not scale.

        Returns:
            None if the stream ends before `start`.
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
        self._tick = tick_seconds(self._stream)
        self._origin = clock_start(self._container)
        self._first = self._stream.start_time or 0
        stop = stated_stop(self._container, self._stream)
        self._stated_stop = None if stop is None else round(stop / self._tick)
        self._cursor: _Cursor | None = None

    def _to_tick(self, seconds: float) -> int:
        return math.floor((Fraction(seconds) + TOLERANCE_SECONDS + self._origin) / self._tick)

    def _to_seconds(self, tick: int) -> float:
        return float(tick * self._tick - self._origin)

    def _by_tick(self, start: int, stop: int, size: FrameSize | None) -> Clip | None:
        cursor = self._go_to(start)
        last = cursor.present
        if last is None or (cursor.following is None and self._end_of_last(last) < start):
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
        following = cursor.following
        end = self._end_of_last(frame) if following is None else _time(following)
        return Clip(frames, self._to_seconds(start), self._to_seconds(end))

    @property
    def _stop(self) -> int:
        """When the last frame ends, in ticks."""
        return self._read_packets().stop if self._stated_stop is None else self._stated_stop

    def _read_packets(self) -> _Packets:
        if self._packets is None:
            self._reopen()
            codec = self._stream.codec_context.name
            with decoding():
                packets = [
                    (_time(packet), self._end(packet), packet.is_keyframe)
                    for packet in self._container.demux(self._stream)
                    if packet.size and _is_shown(packet, codec)
                ]
            if not packets:
                raise DecodeError("the video stream has no frames")
            times, stops, _ = zip(*packets, strict=True)
            keys = [time for time, _, is_key in packets if is_key]
            self._packets = _Packets(sorted(times), sorted(keys), max(stops))
            self._reopen()
        return self._packets

    def _end(self, timed: VideoFrame | Packet[Any]) -> int:
        """Return when a frame ends, by its own duration or the average one."""
        rate = self.frames_per_second
        return _time(timed) + (
            timed.duration or round(Fraction(1 / rate if rate else 0) / self._tick)
        )

    def _end_of_last(self, frame: VideoFrame) -> int:
        """Return when the last frame ends: its own duration is often unknown, or the average."""
        end = self._end(frame)
        if self._stated_stop is None or self._is_truncated:
            return end
        return max(end, self._stated_stop)

    @cached_property
    def _is_truncated(self) -> bool:
        offset = self._file.tell()
        missing = count_missing_bytes(self._file, after_header=False)
        self._file.seek(offset)  # where the decoder reads on
        return missing > 0

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
        if self._packets is not None:
            keys = self._packets.keys
            at = bisect_right(keys, tick) - 1
            return keys[at] if at >= 0 else None
        entries = self._stream.index_entries
        if len(entries) < 2:
            return None
        at = entries.search_timestamp(tick, backward=True)
        return int(entries[at].timestamp) if at >= 0 else None

    def _seek(self, tick: int) -> _Cursor:
        """Return a cursor at a key frame that is shown at `tick` or before it, or at the first."""
        target, back = tick, max(1, int(Fraction(1, 4) / self._tick))
        while target > self._first:
            try:
                with decoding():
                    self._container.seek(target, stream=self._stream, backward=True)
            except DecodeError:
                break
            cursor = _Cursor(self._frames(from_key=True))
            if cursor.is_before(tick):
                return cursor
            reached = tick if cursor.present is None else _time(cursor.present)
            target, back = min(target, reached) - back, 2 * back
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


RUN_UP_SECONDS = 0.5
"""How long before a clip decoding starts."""
PROBED_FRAMES = 4

AudioSamples = NDArray[np.float32]


class _Grid(NamedTuple):
    """The starts of regular frames: 0, `first`, `first + step` and so on."""

    first: int
    step: int

    def snap(self, sample: float) -> int:
        """Return the beginning of the frame next to a sample."""
        number = round((sample - self.first) / self.step)
        return self.first + number * self.step if sample > self.first / 2 else 0


class _DecodedPieces:
    """A collection of samples of up to `DECODED_BYTES`."""

    def __init__(self) -> None:
        self._pieces: list[AudioSamples] = []
        self._bytes = 0

    def add(self, samples: AudioSamples) -> None:
        self._bytes += samples.nbytes
        check_limit(self._bytes, DECODED_BYTES, "the audio is long; ask for shorter clips")
        self._pieces.append(samples)

    def joined(self, nothing: AudioSamples) -> AudioSamples:
        return np.concatenate(self._pieces, axis=1) if self._pieces else nothing


class AudioReader:
    """The samples of the first audio stream of a file. For one thread at a time.

    Args:
        stream: The file.

    Raises:
        DecodeError: If it has no audio stream.
    """

    def __init__(self, stream: MediaStream) -> None:
        self._file = stream
        self._end: int | None = None
        """How many samples there are, if FFmpeg does not trim them correctly."""
        self._reopen()
        self._probe()

    @property
    def rate(self) -> int:
        """Samples per second of each channel."""
        return self._stream.codec_context.sample_rate

    @property
    def num_channels(self) -> int:
        """How many channels there are."""
        return self._stream.codec_context.channels

    @property
    def duration(self) -> float:
        """When the last sample ends, according to the headers or else to the packets."""
        return self._start + float(self._length)

    @property
    def num_samples(self) -> int:
        """How many samples each channel has, according to the headers."""
        return round(self._length * self.rate)

    @property
    def start(self) -> float:
        """When the first sample is heard, in seconds from the beginning of the file."""
        return self._start

    def all(self) -> AudioSamples:
        """Return all samples, with shape (channels, samples) and values from -1 to 1."""
        pieces = _DecodedPieces()
        for _, samples in self._from(0):
            pieces.add(samples)
        return pieces.joined(self._nothing())

    def check(self) -> float:
        """Decode and discard all samples, and return when the last one ends.

        Raises:
            DecodeError: If they are damaged.
        """
        count, stated = self._count(), self._stream.duration
        if self._is_flac and stated and stated != count:
            raise DecodeError(f"the file has {count} samples, and its header states {stated}")
        return self.to_seconds(count)

    def by_number(self, first: int, stop: int) -> AudioSamples:
        """Return samples `first` to `stop` (exclusive); see `all`."""
        first = max(0, first)
        if stop <= first:
            return self._nothing()
        pieces = _DecodedPieces()
        for number, samples in self._from(first):
            low, high = max(0, first - number), min(samples.shape[1], stop - number)
            if low < high:
                pieces.add(samples[:, low:high])
            if number + samples.shape[1] >= stop:
                break
        return pieces.joined(self._nothing())

    def to_number(self, seconds: float) -> int:
        """Return the number of the sample heard at a time, or of the nearest one."""
        return max(0, round((seconds - self._start) * self.rate))

    def to_seconds(self, number: int) -> float:
        """Return when a sample is heard."""
        return self._start + number / self.rate

    def close(self) -> None:
        """Free the decoder."""
        self._container.close()

    def _reopen(self) -> None:
        self._container = open_container(self._file)
        if not self._container.streams.audio:
            raise DecodeError("the file has no audio stream")
        self._stream = self._container.streams.audio[0]
        self._stream.codec_context.thread_count = 1
        if self._end is not None:
            self._stream.codec_context.options = {"flags2": "+skip_manual"}
        self._is_flac = self._container.format.name == "flac"
        if self._is_flac:
            # Checksums are ignored otherwise, and damaged frames are played.
            self._stream.codec_context.options = {"err_detect": "crccheck+explode"}
        self._tick = tick_seconds(self._stream)
        self._origin = clock_start(self._container)

    def _probe(self) -> None:
        """Derive from the first frames how times map to samples."""
        frames = []
        for frame in self._frames():
            frames.append(frame)
            if len(frames) == PROBED_FRAMES:
                break
        lengths = [frame.samples for frame in frames]
        self._is_exact = self._tick * self.rate <= 1
        regular = len(lengths) == PROBED_FRAMES and len(set(lengths[1:])) == 1
        self._grid = _Grid(lengths[0], lengths[1]) if regular else None
        times = [frame.pts or 0 for frame in frames] or [0]
        codec = self._container.format.name, self._stream.codec_context.name
        if times[0] > 0 == self._stream.start_time and codec == ("ogg", "vorbis"):
            self._is_exact, self._grid, self._start = False, None, 0.0
            self._end = self._stream.duration
            return
        self._first_tick, self._first_sample = times[0], 0
        if regular and self._has_gap(times[1] - times[0], lengths[0]):
            # Some files have one after the first frame, and the later one counts.
            self._first_tick, self._first_sample = times[1], lengths[0]
        start: Fraction = self._first_tick * self._tick - Fraction(self._first_sample, self.rate)
        self._start = max(0.0, float(start - self._origin))

    @cached_property
    def _length(self) -> Fraction:
        """For how many seconds there is audio."""
        start = self._origin + Fraction(self._start)
        stop = stated_stop(self._container, self._stream)
        if stop is None:
            stop = self._stop_of_packets()
        elif self._container.format.name == "ogg" or is_matroska(self._container):
            # They count the samples that only start the decoder, too.
            stop -= Fraction(self._stream.codec_context.delay, self.rate)
        return max(Fraction(0), stop - start)

    def _stop_of_packets(self) -> Fraction:
        self._reopen()
        with decoding():
            stops = [
                packet.pts + (packet.duration or 0)
                for packet in self._container.demux(self._stream)
                if packet.size and packet.pts is not None
            ]
        self._reopen()
        return max(stops, default=0) * self._tick

    def _count(self) -> int:
        """Return the number of samples, decoding and discarding all."""
        self._reopen()
        total = sum(frame.samples for _, frame in self._numbered_frames())
        self._reopen()
        return total if self._end is None else self._end

    def _has_gap(self, ticks: int, samples: int) -> bool:
        between = ticks * self._tick * self.rate
        return abs(float(between) - samples) > max(1.0, float(self._tick * self.rate))

    def _nothing(self) -> AudioSamples:
        return np.empty((self.num_channels, 0), np.float32)

    def _from(self, first: int) -> Iterator[tuple[int, AudioSamples]]:
        """Yield runs of samples with the number of their first, from `first` or before it."""
        target = first - int(RUN_UP_SECONDS * self.rate)
        if target > 0 and (self._is_exact or self._grid is not None):
            back = target
            while back > 0:
                sought = self._sought(back)
                head = next(sought, None)
                if head is not None and head[0] <= target:
                    yield head
                    yield from sought
                    return
                back -= max(1, 4 * int(RUN_UP_SECONDS * self.rate))
        self._reopen()
        for number, frame in self._numbered_frames():
            samples = _to_floats(frame)
            yield number, samples if self._end is None else samples[:, : max(0, self._end - number)]

    def _numbered_frames(self) -> Iterator[tuple[int, AudioFrame]]:
        """Yield all frames with the number of their first sample, from the beginning.

        Raises:
            DecodeError: If there is a gap in a FLAC file, whose frames are numbered: they are lost.
        """
        number = 0
        for frame in self._frames():
            if self._is_flac and frame.pts is not None and frame.pts != number:
                raise DecodeError(f"samples {number} to {frame.pts} are missing")
            yield number, frame
            number += frame.samples

    def _sought(self, target: int) -> Iterator[tuple[int, AudioSamples]]:
        ahead = Fraction(target - self._first_sample, self.rate) / self._tick
        tick = self._first_tick + int(ahead)
        try:
            with decoding():
                self._container.seek(tick, stream=self._stream, backward=True)
        except DecodeError:
            return
        number = -1
        for frame in self._frames():
            samples = _to_floats(frame)
            if number < 0:
                if frame.pts is None:
                    return
                number = self._sample_at(frame.pts)
            yield number, samples
            number += samples.shape[1]

    def _sample_at(self, tick: int) -> int:
        number = (tick - self._first_tick) * self._tick * self.rate + self._first_sample
        if self._is_exact or self._grid is None:
            return round(number)
        return self._grid.snap(float(number))

    def _frames(self) -> Iterator[AudioFrame]:
        with decoding():
            frames = self._container.decode(self._stream)
            if self._end is not None:
                next(frames, None)  # not trimmed either: the block that starts the decoder
            yield from frames


def _to_floats(frame: AudioFrame) -> AudioSamples:
    """Return the samples of a frame as (channels, samples), from -1 to 1."""
    samples: NDArray[Any] = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    kind = samples.dtype
    if kind.kind == "u":
        return (samples.astype(np.float32) - 128) / np.float32(128)
    if kind.kind == "i":
        # In double precision: 32-bit samples have more digits than float32.
        return np.asarray(samples / 2.0 ** (8 * kind.itemsize - 1), np.float32)
    return np.ascontiguousarray(samples, np.float32)
