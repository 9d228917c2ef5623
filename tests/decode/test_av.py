from __future__ import annotations

import io
import pickle
from functools import cache

import numpy as np
import pytest
import torch

from energon.decode.av import AVData, AVDecoder, get_clips_uniform, get_single_frames_uniform
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, DecodeError
from energon.formats.media import AVMetadata
from energon.sources.files.open import SystemFileStore
from tests.decode.videos import (
    KINDS,
    Kind,
    cut_segment,
    encode_lasting,
    encode_video,
    plain_audio,
    plain_frames,
    video_named,
)
from tests.effort import mixed, some

FRAMES = 45


@cache
def video(name="mp4"):
    data = video_named(name, frames=FRAMES)
    frames, times = plain_frames(data)
    return data, torch.from_numpy(frames.transpose(0, 3, 1, 2).copy()), times


@cache
def sound():
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, np.linspace(-0.5, 0.5, 32000).reshape(-1, 2), 8000, format="WAV")
    return buffer.getvalue()


def test_clips_come_in_the_order_in_which_they_are_asked_for():
    data, frames, _ = video()
    ranges = [(30, 33), (2, 2), (40, 60), (0, 44), (31, 31)]
    clips, times = AVDecoder(data).get_video_clips(ranges, "frames")
    for (first, last), clip, (start, stop) in zip(ranges, clips, times, strict=True):
        assert torch.equal(clip, frames[first : last + 1])
        assert start == pytest.approx(first / 10)
        assert stop == pytest.approx(min(last + 1, FRAMES) / 10)


def test_seconds_include_the_frames_at_both_ends():
    data, frames, _ = video()
    clips, times = AVDecoder(io.BytesIO(data)).get_video_clips([(0.25, 0.55), (0.3, 0.3)])
    assert torch.equal(clips[0], frames[2:6])
    assert torch.equal(clips[1], frames[3:4])
    assert times == [(pytest.approx(0.2), pytest.approx(0.6)), (0.3, 0.4)]


def test_clips_beyond_the_end_are_empty_and_logged(caplog):
    data, _, _ = video()
    decoder = AVDecoder(data)
    (clip,), _ = decoder.get_video_clips([(100, 101)])
    assert clip.shape == (0, 3, 32, 48)
    (clip,), _ = decoder.get_audio_clips([(100, 101)])
    assert clip.shape == (2, 0)
    assert caplog.text.count("beyond the end") == 2
    AVDecoder(data, suppress_warnings=True).get_video_clips([(100, 101)])
    assert caplog.text.count("beyond the end") == 2


def test_audio_clips_are_parts_of_the_whole():
    data, _, _ = video()
    decoder = AVDecoder(data)
    whole = torch.from_numpy(plain_audio(data))
    clips, times = decoder.get_audio_clips([(1.0, 2.5), (0.1, 0.2)])
    assert torch.allclose(clips[0], whole[:, 16000:40000], atol=1e-5)
    assert torch.allclose(clips[1], whole[:, 1600:3200], atol=1e-5)
    assert times == [(1.0, 2.5), (0.1, 0.2)]
    (clip,), _ = decoder.get_audio_clips([(5, 9)], "samples")
    assert torch.allclose(clip, whole[:, 5:9], atol=1e-5)


def test_video_and_audio_do_not_disturb_each_other():
    data, frames, _ = video()
    decoder = AVDecoder(data)
    for number in range(0, 40, 7):
        found = decoder.get_clips([(number, number)], [(0.1, 0.3)], "frames")
        assert torch.equal(found.video_clips[0], frames[number : number + 1])
        assert found.audio_clips[0].shape == (2, 3200)


def test_everything_is_there_at_once():
    data, frames, _ = video()
    found = AVDecoder(data).get_frames(video_decode_audio=True)
    assert torch.equal(found.video_clips[0], frames)
    assert np.array_equal(found.audio_clips[0].numpy(), plain_audio(data))
    assert AVDecoder(data).get_frames().audio_clips is None
    assert AVDecoder(sound()).get_frames().video_clips is None


def test_a_file_without_a_stream_has_no_clips_of_it():
    decoder = AVDecoder(sound())
    assert (decoder.has_video_stream(), decoder.has_audio_stream()) == (False, True)
    found = decoder.get_clips([(0, 1)], [(0, 1)])
    assert found.video_clips is None
    assert found.audio_clips[0].shape == (2, 8000)
    with pytest.raises(DecodeError, match="no video stream"):
        decoder.get_video_fps()
    silent = AVDecoder(video("mp4 of variable rate")[0])
    assert (silent.has_video_stream(), silent.has_audio_stream()) == (True, False)
    assert silent.get_clips(None, [(0, 1)]) == AVData(None, None, None, None)


def test_metadata_are_those_of_the_headers():
    data, _, _ = video()
    metadata = AVDecoder(data).get_metadata(get_audio_num_samples=True)
    assert metadata == AVMetadata(
        video_duration=4.5,
        video_num_frames=45,
        video_fps=10.0,
        video_width=48,
        video_height=32,
        audio_duration=4.5,
        audio_channels=2,
        audio_sample_rate=16000,
        audio_num_samples=72000,
    )
    assert AVDecoder(data).get_metadata(get_video=False, get_audio_duration=False) == AVMetadata(
        audio_channels=2, audio_sample_rate=16000
    )
    assert AVDecoder(sound()).get_metadata().audio_duration == 2.0


def test_what_is_asked_of_headers_is_what_methods_say():
    decoder = AVDecoder(video()[0])
    assert decoder.get_video_fps() == 10
    assert decoder.get_audio_samples_per_second() == 16000
    assert decoder.get_video_duration() == (4.5, None)
    assert decoder.get_video_duration(get_frame_count=True) == (4.5, 45)
    assert decoder.get_audio_duration() == 4.5


def test_a_copy_that_was_pickled_decodes_the_same():
    data, frames, _ = video()
    decoder = AVDecoder(io.BytesIO(data))
    decoder.get_video_clips([(1, 1)], "frames")
    (clip,), _ = pickle.loads(pickle.dumps(decoder)).get_video_clips([(7, 8)], "frames")
    assert torch.equal(clip, frames[7:9])


def test_a_copy_of_a_decoder_over_a_store_opens_the_file_anew(tmp_path):
    data, frames, _ = video()
    (tmp_path / "a.mp4").write_bytes(data)
    with SystemFileStore(tmp_path).open("a.mp4") as file:
        decoder = AVDecoder(file)
        decoder.get_video_clips([(1, 1)], "frames")
        copy = pickle.loads(pickle.dumps(decoder))
    with copy.stream:
        (clip,), _ = copy.get_video_clips([(7, 8)], "frames")
    assert torch.equal(clip, frames[7:9])


def test_uniform_clips_reach_from_beginning_to_end():
    data, frames, _ = video()
    found = get_clips_uniform(AVDecoder(data), 0.5, 3, request_video=True, request_audio=True)
    assert found.video_timestamps[0][0] == 0
    assert found.video_timestamps[-1][1] == pytest.approx(4.5)
    assert torch.equal(found.video_clips[0], frames[:6])
    assert torch.equal(found.video_clips[-1], frames[40:])
    assert [clip.shape[1] for clip in found.audio_clips] == [8000] * 3
    assert get_clips_uniform(AVDecoder(data), 1, 2, request_audio=True).video_clips is None


@pytest.mark.parametrize(
    ("num_frames", "numbers"), [(1, [0]), (2, [0, 44]), (3, [0, 22, 44]), (45, list(range(45)))]
)
def test_uniform_frames_lie_half_a_frame_from_the_ends(num_frames, numbers):
    data, frames, times = video()
    found, starts = get_single_frames_uniform(AVDecoder(data), num_frames, return_timestamps=True)
    assert torch.equal(found, frames[numbers])
    assert starts == pytest.approx([times[number] for number in numbers])
    small = get_single_frames_uniform(AVDecoder(data), num_frames, video_out_frame_size=(16, 24))
    assert small.shape == (num_frames, 3, 16, 24)


def test_clips_longer_than_the_video_are_all_of_it():
    data, frames, _ = video()
    found = get_clips_uniform(AVDecoder(data), 99, 2, request_video=True)
    assert all(torch.equal(clip, frames) for clip in found.video_clips)


def test_arguments_that_make_no_sense_are_refused():
    decoder = AVDecoder(video()[0])
    with pytest.raises(ConfigError, match="nothing to return"):
        get_clips_uniform(decoder, 1, 1)
    with pytest.raises(ConfigError, match="0 clips"):
        get_clips_uniform(decoder, 1, 0, request_video=True)
    with pytest.raises(ConfigError, match="video_unit='minutes'"):
        decoder.get_video_clips([(0, 1)], "minutes")
    with pytest.raises(DecodeError, match="0 <= start <= end"):
        decoder.get_video_clips([(2, 1)])
    with pytest.raises(ConfigError, match="'3' clips"):
        get_single_frames_uniform(decoder, "3")


@pytest.mark.parametrize("ranges", [None, (0, 1), [0.5], [(0, None)], [("0", "1")], [(0, 1, 2)]])
def test_ranges_that_are_none_are_not_taken_for_damage(ranges):
    decoder = AVDecoder(video()[0])
    for clips in (decoder.get_video_clips, decoder.get_audio_clips):
        with pytest.raises(DecodeError, match="expected a list with the start and end of each"):
            clips(ranges)


@pytest.mark.parametrize("size", [10, "ab", (10,), (0, 0), (10, -1), (10.5, 3)])
def test_sizes_of_frames_that_are_none_are_not_taken_for_damage(size):
    with pytest.raises(ConfigError, match=r"video_out_frame_size=.*expected the height and width"):
        AVDecoder(video()[0]).get_video_clips([(0, 1)], video_out_frame_size=size)


def test_numbers_of_numpy_and_torch_are_those_of_python():
    decoder = AVDecoder(video()[0])
    (expected,), _ = decoder.get_video_clips([(0.5, 1)], video_out_frame_size=(16, 24))
    size = np.array([16, 24])
    for one in (np.float32, np.float16, torch.tensor):
        (clip,), _ = decoder.get_video_clips([(one(0.5), one(1.0))], video_out_frame_size=size)
        assert torch.equal(clip, expected)


def test_what_is_neither_bytes_nor_a_file_is_named():
    with pytest.raises(DecodeError, match="'holiday.mp4': expected the bytes of"):
        AVDecoder("holiday.mp4")


@pytest.mark.parametrize("data", [b"", b"no video", bytes(1000)])
def test_what_is_no_media_file_is_an_error_of_the_sample(data):
    with pytest.raises(DecodeError, match="not a complete audio or video file"):
        AVDecoder(data).get_video()
    with pytest.raises(DecodeError):
        SampleDecoder(av_decode="torch").decode("x.mp4", data)


def test_a_sample_decoder_makes_of_videos_what_it_is_told():
    data, frames, _ = video()
    decoder = SampleDecoder().decode("x.mp4", data)
    assert isinstance(decoder, AVDecoder)
    assert torch.equal(decoder.get_video().video_clips[0], frames)
    found = SampleDecoder(av_decode="torch").decode("a/x.MP4", data)
    assert torch.equal(found.video_clips[0], frames)
    assert found.audio_clips is None
    found = SampleDecoder(av_decode="torch", video_decode_audio=True).decode("x.mov", data)
    assert found.audio_clips[0].shape[0] == 2
    with SampleDecoder(av_decode="pyav").decode("x.mkv", data) as container:
        assert len(list(container.decode(video=0))) == FRAMES
    with pytest.raises(ConfigError, match="av_decode='decord'"):
        SampleDecoder(av_decode="decord")


@pytest.mark.slow
def test_the_content_tells_videos_from_other_files():
    data, _, _ = video()
    decoder = SampleDecoder(guess_content=True)
    assert isinstance(decoder.decode("x.bin", data), AVDecoder)
    assert isinstance(decoder.decode("x.bin", sound()), AVDecoder)
    for name in ("mkv", "avi", "flv", "webm of VP8"):
        assert isinstance(decoder.decode("x.bin", video(name)[0]), AVDecoder)


@pytest.mark.slow
@pytest.mark.parametrize("name", [kind.name for kind in KINDS])
def test_whole_files_pass_the_check(name):
    AVDecoder(video(name)[0]).check()


@pytest.mark.parametrize(
    ("name", "share"),
    some(
        mixed(
            ["mp4", "mov", "mkv", "webm of VP8", "webm of VP9", "avi", "flv", "fragmented mp4"],
            [0.3, 0.6],
        ),
        2,
    ),
)
def test_files_that_are_cut_off_fail_the_check(name, share):
    data = video(name)[0]
    with pytest.raises(DecodeError):
        AVDecoder(data[: int(share * len(data))]).check()


def test_sounds_that_are_cut_off_or_empty_fail_the_check():
    AVDecoder(sound()).check()
    with pytest.raises(DecodeError, match="bytes"):
        AVDecoder(sound()[:-1000]).check()


def test_a_picture_that_was_overwritten_fails_the_check():
    data = bytearray(video("mkv")[0])
    middle = len(data) // 2
    data[middle : middle + 200] = bytes(200)
    with pytest.raises(DecodeError):
        AVDecoder(bytes(data)).check()


def test_a_file_with_neither_audio_nor_video_fails_the_check():
    with pytest.raises(DecodeError, match="neither a video nor an audio stream"):
        AVDecoder(b"1\n00:00:00,000 --> 00:00:01,000\nwords\n\n" * 9).check()


@pytest.mark.parametrize("name", ["mp4", "fragmented mp4", "mov"])
def test_files_that_end_within_their_header_cannot_be_read(name):
    data = video(name)[0]
    start = data.index(b"moov") - 4
    size = int.from_bytes(data[start : start + 4], "big")
    for part in range(1, 20):
        cut = data[: start + size * part // 20]
        with pytest.raises(DecodeError, match="header|not a complete|bytes"):
            AVDecoder(cut).get_metadata()
        with pytest.raises(DecodeError, match="header|not a complete|bytes"):
            AVDecoder(cut).check()


SEGMENTS = {
    "mp4": ("mp4", "libx264", "aac"),
    "mov": ("mov", "libx264", "aac"),
    "matroska": ("matroska", "libx264", "aac"),
    "webm": ("webm", "libvpx", "libopus"),
    "mpegts": ("matroska", "libx264", "aac"),
    "flv": ("matroska", "libx264", "aac"),
}


@cache
def segment(name, *, audio):
    origin, codec, sound = SEGMENTS[name]
    rate = 48000 if sound == "libopus" else 44100
    bframes = {"x264-params": "bframes=3:keyint=11:scenecut=0"} if codec == "libx264" else {}
    whole = encode_video(Kind(name, origin, codec, sound, bframes, rate=rate), frames=70)
    return cut_segment(whole, name, 3.3, 6.3, audio=audio)


@pytest.mark.slow
@pytest.mark.parametrize(("audio", "name"), mixed([True, False], [*SEGMENTS]))
def test_time_begins_with_a_segment_that_was_cut_out(name, audio):
    data = segment(name, audio=audio)
    frames, times = plain_frames(data)
    decoder = AVDecoder(data)
    decoder.check()
    (clip,), (span,) = (found := decoder.get_video()).video_clips, found.video_timestamps
    duration, count = decoder.get_video_duration(get_frame_count=True)
    assert count == len(frames) == clip.shape[0]
    assert (times[0], duration) == pytest.approx((0, times[-1] + 0.1), abs=2e-3)
    assert span == pytest.approx((0, duration), abs=2e-3)
    middle = [0.05 + each for each in times]
    found, _ = decoder.get_video_clips([(time, time) for time in middle])
    assert all(
        np.array_equal(one[0].numpy().transpose(1, 2, 0), frame)
        for one, frame in zip(found, frames, strict=True)
    )
    assert len(get_single_frames_uniform(decoder, 9)) == 9
    if audio:
        (heard,) = decoder.get_audio().audio_timestamps
        assert heard[1] == pytest.approx(decoder.get_audio_duration(), abs=0.03)
        assert heard[0] == pytest.approx(3.3 - (6.3 - duration), abs=0.05)


@pytest.mark.parametrize(
    ("format", "codec"),
    [
        ("mp4", "mpeg4"),
        ("mov", "mpeg4"),
        ("matroska", "mpeg4"),
        ("webm", "libvpx"),
        ("avi", "mpeg4"),
    ],
)
def test_a_last_frame_that_lasts_is_shown_until_the_end(format, codec):
    data, times = encode_lasting(format, codec, last_seconds=3)
    decoder = AVDecoder(data)
    decoder.check()
    end = times[-1] + 3
    assert decoder.get_video_duration(get_frame_count=True) == (pytest.approx(end, abs=2e-3), 20)
    assert decoder.get_video().video_timestamps == [pytest.approx((0, end), abs=2e-3)]
    clips, _ = decoder.get_video_clips([(time, time) for time in (times[-1] + 0.01, end - 1, end)])
    last = decoder.get_video().video_clips[0][-1]
    assert all(torch.equal(clip[0], last) for clip in clips)
    frames, shown = get_single_frames_uniform(decoder, 8, return_timestamps=True)
    assert len(frames) == len(shown) == 8
    assert shown[-1] == pytest.approx(times[-1], abs=2e-3)


def test_a_file_that_lacks_its_end_has_no_frames_there():
    data, _ = encode_lasting("matroska", "mpeg4", last_seconds=3)
    decoder = AVDecoder(data[: len(data) // 2], suppress_warnings=True)
    clips, _ = decoder.get_video_clips([(4, 4)])
    assert clips[0].shape[0] == 0
    with pytest.raises(DecodeError, match="truncated"):
        get_single_frames_uniform(decoder, 8)


class _Counting(io.BytesIO):
    count = 0

    def read(self, size=-1):
        data = super().read(size)
        self.count += len(data)
        return data


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mp4", "mkv"])
def test_only_what_clips_need_is_read(name):
    kind = next(kind for kind in KINDS if kind.name == name)
    data = encode_video(kind, frames=250, size=(96, 64))
    stream = _Counting(data)
    decoder = AVDecoder(stream)
    (clip,), _ = decoder.get_video_clips([(12.0, 12.2)])
    assert clip.shape[0] == 3
    (sound_clip,), _ = decoder.get_audio_clips([(3.0, 3.1)])
    assert sound_clip.shape == (2, 1600)
    assert stream.count < 0.75 * len(data)
