from __future__ import annotations

import pytest

from energon.inspect.lint import lint_dataset
from energon.prepare.engines import Engine
from tests.datasets import make_captions, make_crude

ALONE = Engine(num_workers=1)
JOINER = f"joiner: {{__module__: {__name__}, __function__: put_together}}"


def put_together(first, second):
    return {**first, **second}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ENERGON_ALLOW", "code")
    make_crude(tmp_path / "a", [3, 2])
    make_crude(tmp_path / "b", [4])
    make_captions(tmp_path / "c", [2])
    return tmp_path


def problems(folder, text):
    path = folder / "m.yaml"
    path.write_text(text)
    found = lint_dataset(path, engine=ALONE).findings
    return [(each.split, each.reason.replace(f"{folder}/", "")) for each in found]


def test_says_what_is_wrong_with_weights_joins_and_auxiliary_data(folder):
    found = problems(
        folder,
        f"""
splits:
  train:
    blend:
      - {{path: a, weight: 0, aux: {{x: filesystem://none, y: ./gone}}}}
      - weight: {{0: 0, 5: 1, 9: 0}}
        join: [{{path: a}}, {{path: b}}]
        {JOINER.replace("put", "take")}
  val:
    blend: [{{path: c, weight: 0}}]
  test:
    path: c
    split_part: val
    subset: {{range: [0, 9]}}
""",
    )
    starts = [
        ("train", "m.yaml:4:5: all weights of the blend are 0"),
        ("train", f"m.yaml:8:9: module {__name__} has no 'take_together'"),
        (
            "train",
            "m.yaml:7:9: b (split train) lacks 1 of the 5 keys of a (split train), e.g. 's4'",
        ),
        ("train", "m.yaml:5:10: aux 'x': none: no such folder"),
        ("test", "m.yaml:12:5: subset [0, 9] does not lie within the 2 samples"),
    ]
    assert [
        (split, reason[: len(start)])
        for (split, reason), (_, start) in zip(found, starts, strict=True)
    ] == starts
    assert "m.yaml:5:10: aux 'y': gone does not exist" in found[3][1]


def test_finds_nothing_wrong_with_a_sound_document_and_leaves_nothing_behind(folder):
    text = f"splits: {{train: {{join: [{{path: a}}, {{path: b, nonmatch: skip}}], {JOINER}}}}}"
    before = {*folder.iterdir()}
    assert problems(folder, text) == []
    assert {*folder.iterdir()} - before == {folder / "m.yaml"}
