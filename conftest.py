"""Let the examples of docstrings run where a small dataset and a video are."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from _pytest.doctest import DoctestItem
from PIL import Image

from energon import ShardWriter
from energon.prepare.dataset import prepare_dataset


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what examples read: the dataset `photos`, and `clip.mp4`."""
    folder = tmp_path_factory.mktemp("doctest")
    make_photos(folder)
    make_clip(folder / "clip.mp4")
    return folder


def make_photos(folder: Path) -> None:
    """Write the dataset `photos`: 10 images with captions, 8 of them to train."""
    with ShardWriter(folder / "photos/shard-%d.tar") as writer:
        for number in range(10):
            image = io.BytesIO()
            Image.new("RGB", (32, 24), (number, number, number)).save(image, "PNG")
            writer.write(
                {"__key__": f"{number}", "png": image.getvalue(), "txt": f"grey number {number}"}
            )
    prepare_dataset(
        folder / "photos",
        split_ratio={"train": 8.0, "val": 2.0},
        split_unit="sample",
        sample_type="CaptioningSample",
        field_map={"image": "png", "caption": "txt"},
    )


def make_clip(path: Path) -> None:
    """Write a video of 2 seconds, 20 frames of 32 x 24 pixels that grow brighter, with a tone."""
    av = pytest.importorskip("av")
    with av.open(path, "w") as container:
        video = container.add_stream("mpeg4", rate=10)
        video.width, video.height, video.pix_fmt = 32, 24, "yuv420p"
        audio = container.add_stream("aac", rate=8000, layout="mono")
        for number in range(20):
            pixels = np.full((24, 32, 3), 10 * number, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels)))
        wave = np.sin(np.arange(16_000, dtype=np.float32) / 3)[None]
        sound = av.AudioFrame.from_ndarray(wave, format="fltp", layout="mono")
        sound.sample_rate = 8000
        container.mux([*audio.encode(sound), *audio.encode(None), *video.encode(None)])


@pytest.fixture(autouse=True)
def in_the_folder_of_examples(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run examples beside what they read; leave other tests alone."""
    if not isinstance(request.node, DoctestItem):
        yield
        return
    before = Path.cwd()
    os.chdir(request.getfixturevalue("examples"))
    try:
        yield
    finally:
        os.chdir(before)
