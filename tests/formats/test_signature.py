from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, features

from energon.decode.av import AVDecoder
from energon.formats.media import SIGNATURE_BYTES, guess_extension
from tests.decode.test_av_audio import written
from tests.decode.videos import video_named


@pytest.mark.parametrize(
    ("name", "extension"),
    [
        *((name, name) for name in ("png", "gif", "bmp", "tiff", "ico", "webp")),
        pytest.param(
            "avif",
            "avif",
            marks=pytest.mark.skipif(
                features.check("avif") is not True, reason="this Pillow cannot write AVIF"
            ),
        ),
        ("jpeg", "jpg"),
        ("jpeg2000", "jp2"),
    ],
)
def test_images_are_told_by_their_first_bytes(name, extension):
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, name)
    assert guess_extension(buffer.getvalue()[:SIGNATURE_BYTES]) == extension


@pytest.mark.parametrize("kind", ["wav", "aiff", "flac", "mp3", "ogg"])
def test_sounds_are_told_by_their_first_bytes(kind):
    data, _ = written(kind)
    assert guess_extension(data[:SIGNATURE_BYTES]) == kind


@pytest.mark.parametrize(
    ("name", "extension"),
    [
        ("mp4", "mp4"),
        ("mov", "mp4"),
        ("mkv", "mkv"),
        ("avi", "avi"),
        ("mpeg transport stream", "ts"),
    ],
)
def test_videos_are_told_by_their_first_bytes(name, extension):
    assert guess_extension(video_named(name)[:SIGNATURE_BYTES]) == extension


def test_transport_streams_with_times_between_packets_are_told_apart():
    data = video_named("mpeg transport stream")
    packets = (data[at : at + 188] for at in range(0, len(data), 188))
    timed = b"".join(b"\0\0\1\2" + packet for packet in packets)
    assert guess_extension(timed[:SIGNATURE_BYTES]) == "m2ts"
    assert AVDecoder(timed).get_video_duration(get_frame_count=True)[1] == 45
    assert guess_extension(b"GATTACA" * 100) is None
    assert guess_extension(b"G" * 1000) is None


@given(st.sampled_from(["", "BM", "ID3", "GIF8", "OggS", "FLV", "RIFF", "FORM", "fLaC"]), st.text())
def test_no_text_is_taken_for_something_else(start, text):
    data = (start + "".join(letter for letter in text if letter >= " ")).encode()
    real = data.startswith((b"GIF87a", b"GIF89a")) or data[4:8] == b"ftyp"
    if not real and data[8:12] not in (b"WEBP", b"AVI ", b"WAVE", b"AIFF", b"AIFC"):
        assert guess_extension(data) is None


@given(st.binary(max_size=30))
def test_anything_can_be_asked_about(data):
    guess_extension(data)
