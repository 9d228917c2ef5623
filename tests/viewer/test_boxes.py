from __future__ import annotations

import json
import re

import pytest

from energon.prepare.dataset import prepare_dataset
from tests.datasets import jpeg, write_shard
from tests.viewer.pages import browse

BOXES = [[4, 8, 24, 9], [1.5, 2, 3, 4]]


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        (
            BOXES,
            [
                ("4.0", "8.0", "24.0", "9.0", "words STOP"),
                ("1.5", "2.0", "3.0", "4.0", "words &lt;b&gt;"),
            ],
        ),
        ([[*BOXES[0], 0.5]], [("4.0", "8.0", "24.0", "9.0", "words")]),
        ([[1, 2, 3]], []),
        ([[1, 2], [3]], []),
        ([[1, 2, 3, "x"]], []),
        ("boxes", []),
        ([], []),
        (None, []),
    ],
)
def test_boxes_of_the_sample_type_are_drawn_over_its_image(tmp_path, boxes, expected):
    about = {"words": boxes, "text": ["STOP", "<b>"]}
    parts = {"jpg": jpeg(1, size=(40, 30)), "json": json.dumps(about).encode()}
    write_shard(tmp_path / "ds/0.tar", [("a", parts), ("b", {"jpg": parts["jpg"]})])
    fields = {"image": "jpg", "text": "json[text]", "words_boxes": "json[words]"}
    prepare_dataset(
        tmp_path / "ds",
        split_parts=["train:.*"],
        sample_type="OCRSample",
        field_map=fields | {"words_text": "json[text]"},
    )
    client = browse(tmp_path / "ds")
    text = client.get("/s/0/0/0").text
    pattern = r'<rect x="(.*?)" y="(.*?)" width="(.*?)" height="(.*?)"><title>(.*?)</title>'
    assert re.findall(pattern, text) == expected
    assert ('viewBox="0 0 40 30"' in text) == bool(expected)
    assert 'class="boxes"' not in client.get("/s/0/0/1").text
