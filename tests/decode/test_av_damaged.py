"""Damaged audio and video: whatever is asked of them, the answer is a DecodeError or a result."""

from __future__ import annotations

import contextlib
import random

import pytest

from energon.decode.av import AVDecoder, get_clips_uniform, get_single_frames_uniform
from energon.errors import DecodeError
from energon.webdataset.autodecode import torch_audio, torch_video
from tests.decode.videos import KINDS, encode_video
from tests.effort import mixed, some
from tests.media_files import damaged

QUESTIONS = {
    "get_video": lambda av: av.get_video(),
    "get_audio": lambda av: av.get_audio(),
    "get_video_with_audio": lambda av: av.get_video_with_audio(),
    "get_frames": lambda av: av.get_frames(video_decode_audio=True),
    "check": lambda av: av.check(),
    "get_video_clips": lambda av: av.get_video_clips([(0, 1), (2, 100)]),
    "get_video_clips by number": lambda av: av.get_video_clips([(3, 9)], "frames"),
    "get_audio_clips": lambda av: av.get_audio_clips([(0, 1), (2, 100)]),
    "get_audio_clips by number": lambda av: av.get_audio_clips([(20, 3000)], "samples"),
    "get_clips": lambda av: av.get_clips([(0.1, 0.3)], [(1, 2)], video_out_frame_size=(9, 9)),
    "has_video_stream": lambda av: av.has_video_stream(),
    "has_audio_stream": lambda av: av.has_audio_stream(),
    "get_video_fps": lambda av: av.get_video_fps(),
    "get_audio_samples_per_second": lambda av: av.get_audio_samples_per_second(),
    "get_video_duration": lambda av: av.get_video_duration(get_frame_count=True),
    "get_audio_duration": lambda av: av.get_audio_duration(),
    "get_metadata": lambda av: av.get_metadata(get_audio_num_samples=True),
    "get_clips_uniform": lambda av: get_clips_uniform(av, 0.5, 3, True, True),
    "get_single_frames_uniform": lambda av: get_single_frames_uniform(av, 3),
}


def ask(question, data):
    """Return the answer, or the error if that is one of those that are expected."""
    try:
        return question(AVDecoder(data, suppress_warnings=True))
    except DecodeError as error:
        return error


@pytest.mark.parametrize(
    ("question", "data"),
    mixed([*QUESTIONS], [b"", b"\0" * 100, b"RIFF\xff\xff\xff\xffWAVE", b"ID3", b"GIF89a"]),
)
def test_what_is_no_media_file_at_all_is_a_decode_error(question, data):
    with pytest.raises(DecodeError):
        QUESTIONS[question](AVDecoder(data, suppress_warnings=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(KINDS), ids=lambda kind: kind.name)
def test_damaged_files_give_a_result_or_a_decode_error(kind):
    rng = random.Random(kind.name)
    video = encode_video(kind, frames=12)
    failed = 0
    for _ in range(15):
        data = damaged(video, rng)
        for question in rng.sample([*QUESTIONS.values()], 6):
            failed += isinstance(ask(question, data), DecodeError)
        for handler, part in ((torch_video, "mp4"), (torch_audio, "wav")):
            with contextlib.suppress(DecodeError):
                handler(f".{part}", data)
    assert failed
