from __future__ import annotations

import io
import random
from functools import cache

import av
import numpy as np
import pytest
import soundfile

from energon.decode.av_streams import AudioReader
from energon.errors import DecodeError
from tests.decode.videos import KINDS, encode_audio, plain_audio, tones, video_named
from tests.effort import mixed, some

RATE = 16000
SECONDS = 7.3
WRITTEN = {
    "wav": {"format": "WAV", "subtype": "PCM_16"},
    "wav of 24 bits": {"format": "WAV", "subtype": "PCM_24"},
    "wav of 8 bits": {"format": "WAV", "subtype": "PCM_U8"},
    "wav of floats": {"format": "WAV", "subtype": "FLOAT"},
    "aiff": {"format": "AIFF", "subtype": "PCM_16"},
    "aiff of floats": {"format": "AIFF", "subtype": "FLOAT"},
    "flac": {"format": "FLAC", "subtype": "PCM_16"},
    "flac of 24 bits": {"format": "FLAC", "subtype": "PCM_24"},
    "mp3": {"format": "MP3", "bitrate_mode": "CONSTANT"},
    "mp3 of variable rate": {"format": "MP3", "bitrate_mode": "VARIABLE"},
    "ogg": {"format": "OGG", "subtype": "VORBIS"},
}
ENCODED = {
    "m4a": ("mp4", "aac"),
    "aac": ("adts", "aac"),
    "opus": ("ogg", "libopus"),
    "mka": ("matroska", "aac"),
    "weba": ("webm", "libopus"),
}


@cache
def written(kind):
    buffer = io.BytesIO()
    soundfile.write(buffer, tones(RATE, SECONDS).T, RATE, **WRITTEN[kind])
    samples, _ = soundfile.read(io.BytesIO(buffer.getvalue()), dtype="float32", always_2d=True)
    return buffer.getvalue(), samples.T


@cache
def encoded(kind):
    if kind in ENCODED:
        form, codec = ENCODED[kind]
        rate = 48000 if codec == "libopus" else 44100
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=form) as container:
            stream = container.add_stream(codec, rate=rate, layout="stereo")
            for packet in encode_audio(stream, rate, SECONDS):
                container.mux(packet)
        data = buffer.getvalue()
    else:
        data = video_named(kind, frames=70)
    return data, plain_audio(data)


WITH_AUDIO = [kind.name for kind in KINDS if kind.audio]


def clips(length):
    rng = random.Random(0)
    for _ in range(12):
        first = rng.randrange(length)
        yield first, first + rng.randrange(1, 9000)
    yield from ((0, 1), (length - 5, length + 5), (length, length + 1), (0, length), (7, 7), (9, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITTEN)
def test_samples_are_those_that_soundfile_reads(kind):
    data, expected = written(kind)
    reader = AudioReader(io.BytesIO(data))
    lossy = kind.startswith(("mp3", "ogg"))
    tolerance = 1e-4 if lossy else 0
    found = reader.all()
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)
    for first, stop in clips(expected.shape[1]):
        clip = reader.by_number(first, stop)
        np.testing.assert_allclose(
            clip, expected[:, first : max(first, stop)], atol=tolerance, rtol=0
        )


@pytest.mark.parametrize(
    ("length", "rate"), mixed([1, 100, 7744, 8000, 8192, 20000], [8000, 44100])
)
def test_short_ogg_files_have_as_many_samples_as_were_written(rate, length):
    buffer = io.BytesIO()
    soundfile.write(buffer, tones(rate, 3)[0, :length], rate, format="OGG", subtype="VORBIS")
    expected, _ = soundfile.read(io.BytesIO(buffer.getvalue()), dtype="float32", always_2d=True)
    reader = AudioReader(io.BytesIO(buffer.getvalue()))
    assert (reader.start, reader.num_samples) == (0, length)
    assert reader.check() == length / rate
    assert reader.all().shape == (1, length)
    np.testing.assert_allclose(reader.all(), expected.T, atol=1e-4, rtol=0)
    for first, stop in clips(max(length, 6)):
        clip = reader.by_number(first, stop)
        np.testing.assert_allclose(clip, expected.T[:, first : max(first, stop)], atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", some([*ENCODED, *WITH_AUDIO]))
def test_clips_are_those_of_a_full_decode(kind):
    data, expected = encoded(kind)
    reader = AudioReader(io.BytesIO(data))
    np.testing.assert_array_equal(reader.all(), expected)
    lossy_without_end = "opus" in kind or "web" in kind
    for first, stop in clips(expected.shape[1]):
        clip = reader.by_number(first, stop)
        wanted = expected[:, first : max(first, stop)]
        assert clip.shape == wanted.shape
        # Opus decoders converge, and never quite forget what came before.
        np.testing.assert_allclose(clip, wanted, atol=2e-2 if lossy_without_end else 4e-5, rtol=0)


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3"])
def test_headers_tell_rate_channels_and_duration(kind):
    data, expected = written(kind)
    reader = AudioReader(io.BytesIO(data))
    assert (reader.rate, reader.num_channels) == (RATE, 2)
    assert reader.duration == pytest.approx(SECONDS, abs=0.1)
    assert reader.num_samples == pytest.approx(expected.shape[1], abs=1600)
    if kind != "mp3":
        assert reader.num_samples == expected.shape[1]


@pytest.mark.parametrize(("kind", "tolerance"), [("opus", 0), ("weba", 150), ("mka", 1100)])
def test_samples_that_only_start_the_decoder_do_not_count(kind, tolerance):
    data, expected = encoded(kind)
    reader = AudioReader(io.BytesIO(data))
    assert reader.num_samples == pytest.approx(expected.shape[1], abs=tolerance)
    assert reader.duration == pytest.approx(expected.shape[1] / reader.rate, abs=0.03)
    assert reader.start == 0


@pytest.mark.parametrize("damage", [bytes(40), b"", bytes(range(200, 240))])
def test_damaged_flac_is_an_error_and_not_shorter_or_noise(damage):
    data, _ = written("flac")
    middle = len(data) // 2
    reader = AudioReader(io.BytesIO(data[:middle] + damage + data[middle + 40 :]))
    for question in (reader.all, reader.check):
        with pytest.raises(DecodeError, match="missing|not a complete"):
            question()


@pytest.mark.parametrize("stated", [10**5, 10**6])
def test_a_flac_file_must_have_as_many_samples_as_its_header_states(stated):
    data = bytearray(written("flac")[0])
    data[22:26] = stated.to_bytes(4, "big")
    with pytest.raises(DecodeError, match=f"samples, and its header states {stated}"):
        AudioReader(io.BytesIO(bytes(data))).check()


def test_a_file_without_audio_is_an_error():
    with pytest.raises(DecodeError, match="no audio stream"):
        AudioReader(io.BytesIO(video_named("mp4 of variable rate")))
