"""Samples of an audio stream by time and by number, as if all had been decoded.

Decoding starts some time before the requested clip, because lossy codecs need earlier data. Where
time stamps are coarser than samples, as in Matroska, they only identify the frame: all frames of
such a stream but the first have the same number of samples. If they do not, decoding starts at
the beginning.

Ogg Vorbis with a single page of audio is trimmed here: FFmpeg takes the place of the last sample,
which is all that the page says, for that of a whole block, so its time stamps begin a block too
late, and it trims a block too much, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.decode.av_container import (
    MediaStream,
    clock_start,
    decoding,
    is_matroska,
    open_container,
    stated_stop,
    tick_seconds,
)
from energon.errors import DecodeError
from energon.limits import DECODED_BYTES, check_limit

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame

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
