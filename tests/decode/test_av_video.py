from __future__ import annotations

import io
import random
import struct
from functools import cache

import av
import numpy as np
import pytest

from energon.decode.av_streams import VideoReader
from energon.errors import DecodeError
from tests.decode.videos import KINDS, plain_frames, video_named
from tests.effort import mixed, some


@cache
def video(kind):
    data = video_named(kind)
    frames, times = plain_frames(data)
    assert len({frame.tobytes() for frame in frames}) == len(frames)
    return data, frames, times


@pytest.fixture(params=some([kind.name for kind in KINDS], 2))
def case(request):
    data, frames, times = video(request.param)
    return VideoReader(io.BytesIO(data)), frames, times


def same(clip, frames):
    return len(clip.frames) == len(frames) and all(map(np.array_equal, clip.frames, frames))


@pytest.mark.slow
def test_all_frames_are_those_of_a_plain_decoder(case):
    reader, frames, times = case
    clip = reader.all()
    assert same(clip, frames)
    assert clip.start == pytest.approx(times[0], abs=1e-4)


def test_every_frame_is_found_by_its_number(case):
    reader, frames, _ = case
    numbers = list(range(len(frames)))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        assert same(reader.by_number(number, number), frames[number : number + 1])


def test_every_frame_is_found_by_its_time(case):
    reader, frames, times = case
    numbers = list(range(len(frames) - 1))
    random.Random(2).shuffle(numbers)
    for number in numbers:
        for part in (0.0, 0.4, 0.9):
            time = times[number] + part * (times[number + 1] - times[number])
            clip = reader.by_time(time, time)
            assert same(clip, frames[number : number + 1])
            assert clip.start == pytest.approx(times[number], abs=1e-4)
            assert clip.stop == pytest.approx(times[number + 1], abs=1e-4)


def test_clips_are_found_by_number_in_any_order(case):
    reader, frames, _ = case
    rng = random.Random(3)
    for _ in range(12):
        first = rng.randrange(len(frames))
        last = rng.randrange(first, min(len(frames) + 3, first + 15))
        assert same(reader.by_number(first, last), frames[first : last + 1])


def test_clips_are_found_by_time_in_ascending_order(case):
    reader, frames, times = case
    rng = random.Random(4)
    starts = sorted(rng.uniform(0, times[-1]) for _ in range(8))
    for start in starts:
        stop = start + rng.uniform(0, 1.5)
        shown = [
            frame
            for frame, begin, end in zip(frames, times, [*times[1:], times[-1] + 9], strict=True)
            if begin <= stop and end > start
        ]
        assert same(reader.by_time(start, stop), shown)


def test_the_number_of_frames_is_exact(case):
    reader, frames, times = case
    assert reader.num_frames == len(frames)
    assert len(reader.times) == len(frames)
    assert reader.size == (48, 32)
    assert reader.duration == pytest.approx(times[-1] + (times[-1] - times[-2]), abs=0.4)


def test_behind_the_end_there_is_nothing(case):
    reader, frames, times = case
    assert reader.by_number(len(frames), len(frames) + 5) is None
    assert reader.by_number(-5, -1) is None
    assert reader.by_time(times[-1] + 9, times[-1] + 10) is None
    assert same(reader.by_number(-5, 0), frames[:1])


def test_frames_are_scaled_when_they_are_decoded():
    data, _, _ = video("mp4")
    clip = VideoReader(io.BytesIO(data)).by_number(3, 4, size=(16, 24))
    assert [frame.shape for frame in clip.frames] == [(16, 24, 3)] * 2


def test_frames_are_as_stored_whatever_rotation_the_header_asks_for():
    data, frames, _ = video("mp4")
    upright, turned = (
        struct.pack(">9i", *(each << 16 for each in corner), 0, 0, 0, 1 << 30)
        for corner in ((1, 0, 0, 0, 1), (0, 1, 0, -1, 0))
    )
    place = data.index(upright, data.index(b"tkhd"))
    data = data[:place] + turned + data[place + len(turned) :]
    assert abs(next(av.open(io.BytesIO(data)).decode(video=0)).rotation) == 90
    reader = VideoReader(io.BytesIO(data))
    assert reader.size == (48, 32)
    assert same(reader.all(), frames)


@pytest.mark.parametrize("cut", [0, 10, 100, 0.5])
def test_a_file_that_is_cut_off_is_an_error_or_has_fewer_frames(cut):
    data, frames, _ = video("mkv")
    data = data[: cut if isinstance(cut, int) else int(cut * len(data))]
    try:
        clip = VideoReader(io.BytesIO(data)).all()
    except DecodeError:
        return
    assert same(clip, frames[: len(clip.frames)])


def test_pictures_that_are_never_shown_do_not_count():
    data, _, _ = video("webm of VP8")
    buffer = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(buffer, "w", format="webm") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.size:
                content = bytearray(bytes(packet))
                if number in (4, 20):
                    content[0] &= ~0x10  # the bit that says that the picture is shown
                hidden = av.Packet(bytes(content))
                hidden.pts, hidden.dts, hidden.time_base = packet.pts, packet.dts, packet.time_base
                hidden.is_keyframe, hidden.stream = packet.is_keyframe, stream
                target.mux(hidden)
    frames, _ = plain_frames(buffer.getvalue())
    reader = VideoReader(buffer)
    assert reader.num_frames == len(frames) == 43
    for number in (3, 4, 5, 19, 20, 21, 42):
        assert same(reader.by_number(number, number), frames[number : number + 1])


class CountingReader(VideoReader):
    """Counts the frames that are decoded, and those of which arrays are made."""

    decoded = converted = 0

    def _frames(self, **settings):
        for frame in super()._frames(**settings):
            self.decoded += 1
            yield frame

    def _pixels(self, *settings):
        self.converted += 1
        return super()._pixels(*settings)


@pytest.mark.parametrize(
    ("kind", "unit"), mixed(["mp4 with leading pictures", "mkv", "avi"], ["seconds", "frames"])
)
def test_decoding_begins_at_the_key_frame_before_a_clip(kind, unit):
    """Two more frames than the clip has: its end is known when the next one is."""
    data, frames, times = video(kind)
    keys = [
        number
        for number, frame in enumerate(av.open(io.BytesIO(data)).decode(video=0))
        if frame.key_frame
    ]
    reader = CountingReader(io.BytesIO(data))

    def clip(low, high):
        if unit == "frames":
            return reader.by_number(low, high)
        return reader.by_time(times[low] + 0.01, times[high] + 0.01)

    first = len(frames) - 3
    key = max(number for number in keys if number <= first)
    assert key > 0
    assert same(clip(first, first + 1), frames[first : first + 2])
    assert reader.decoded <= first + 2 - key + 2
    # The next clip continues where this one ended.
    before = reader.decoded
    assert same(clip(first + 2, first + 2), frames[first + 2 :])
    assert reader.decoded <= before + 2
    assert reader.converted == 3
