"""Let the examples of docstrings run where a small dataset is."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestItem
from PIL import Image

from energon import ShardWriter
from energon.prepare.dataset import prepare_dataset


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the dataset `photos`: 10 images with captions, 8 of them to train."""
    folder = tmp_path_factory.mktemp("doctest")
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
    return folder


@pytest.fixture(autouse=True)
def in_the_folder_of_photos(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run examples beside the dataset; leave other tests alone."""
    if not isinstance(request.node, DoctestItem):
        yield
        return
    before = Path.cwd()
    os.chdir(request.getfixturevalue("photos"))
    try:
        yield
    finally:
        os.chdir(before)
