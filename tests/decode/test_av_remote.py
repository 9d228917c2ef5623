"""Clips of long videos in an object store."""

from __future__ import annotations

import re

import numpy as np
import pytest

from energon.decode.av import AVDecoder
from energon.io.files import write_bytes
from energon.sources.files.open import open_file_store
from tests.datasets import write_crude
from tests.decode.videos import KINDS, encode_video, plain_frames
from tests.sources.distant import upload


@pytest.fixture(scope="module")
def video():
    kind = next(kind for kind in KINDS if kind.name == "mov")
    return encode_video(kind._replace(rate=48000, fps=2), frames=160, size=(480, 320))


@pytest.fixture(params=["shard", "folder"])
def store(request, s3, tmp_path, video):
    if request.param == "folder":
        write_bytes(f"{s3.address}/videos/a.mov", video)
        return open_file_store(f"filesystem+{s3.address}/videos")
    write_crude(tmp_path / "ds", [("a", {"mov": video})])
    return open_file_store(upload(tmp_path / "ds", s3.address))


@pytest.mark.slow
def test_of_a_distant_video_only_what_clips_need_is_fetched(s3, store, video):
    s3.proxy.plan([])
    with store.open("a.mov") as file:
        (clip,), _ = AVDecoder(file).get_video_clips([(30.0, 31.4)])
    frames, times = plain_frames(video)
    shown = [frame for frame, time in zip(frames, times, strict=True) if 29.5 < time <= 31.4]
    assert np.array_equal(clip.numpy().transpose(0, 2, 3, 1), np.stack(shown))
    ranges = [
        re.fullmatch(r"bytes=(\d+)-(\d+)", request.range)
        for request in s3.proxy.requests
        if request.is_data
    ]
    assert 0 < sum(int(found[2]) + 1 - int(found[1]) for found in ranges) < len(video) / 3
