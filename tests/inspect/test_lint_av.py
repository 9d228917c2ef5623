from __future__ import annotations

from energon.inspect.lint import lint_dataset
from energon.prepare.engines import Engine
from tests.datasets import write_crude
from tests.decode.videos import KINDS, encode_video


def test_videos_are_decoded_to_their_end(tmp_path):
    kind = next(kind for kind in KINDS if kind.name == "mkv")
    data = encode_video(kind)
    write_crude(
        tmp_path,
        [("whole", {"mkv": data}), ("half", {"mkv": data[: len(data) // 2]}), ("no", {"mp4": b""})],
    )
    report = lint_dataset(tmp_path, engine=Engine(num_workers=1))
    assert {(each.key, each.part) for each in report.findings} == {("half", "mkv"), ("no", "mp4")}
