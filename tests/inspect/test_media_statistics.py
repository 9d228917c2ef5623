from __future__ import annotations

import json

import pytest

from energon.prepare.engines import Engine
from energon.prepare.media import MediaFilter, prepare_media
from energon.sources.part_statistics import media_statistics
from tests.commands import run
from tests.datasets import jpeg, make_crude, write_crude
from tests.decode.videos import video_named


@pytest.fixture(params=["dataset", "folder"])
def place(request, tmp_path):
    video = video_named("mp4")
    if request.param == "folder":
        for name, data in (("a.jpg", jpeg(0)), ("b.jpg", jpeg(1, size=(20, 4))), ("c.mp4", video)):
            (tmp_path / name).write_bytes(data)
    else:
        samples = [("a", {"jpg": jpeg(0)}), ("b", {"jpg": jpeg(1, size=(20, 4)), "mp4": video})]
        write_crude(tmp_path, samples)
    prepare_media(tmp_path, MediaFilter("EXTENSION"), engine=Engine(num_workers=1))
    return tmp_path


def test_media_are_counted_added_up_and_shown(place):
    found = media_statistics(place)
    assert found["images"] == {
        "count": 2,
        "formats": {"JPEG": 2},
        "width": {"min": 12, "mean": 16.0, "max": 20},
        "height": {"min": 4, "mean": 6.0, "max": 8},
    }
    assert found["video"] == {
        "count": 1,
        "seconds": 4.5,
        "shortest": 4.5,
        "longest": 4.5,
        "frames": 45,
    }
    assert found["audio"]["samples"] == 72000
    assert json.loads(run("info", place, "--json").output)["media"] == found
    shown = run("info", place).output
    assert "- images: 2 (JPEG), 12 to 20 by 4 to 8 pixels" in shown
    assert "- video: 1 of 4.5 s in all, from 4.5 to 4.5 s" in shown


def test_without_metadata_nothing_is_said(tmp_path):
    root = make_crude(tmp_path / "ds", [2])
    assert media_statistics(root) is None
    assert "media" not in json.loads(run("info", root, "--json").output)
    (root / ".nv-meta" / "index.sqlite").unlink()
    assert media_statistics(root) is None
