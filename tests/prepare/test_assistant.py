from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from energon.errors import ConfigError
from energon.prepare.assistant import Assistant, Choices, Prompt, preview, show_sample
from energon.prepare.index import find_shards
from energon.prepare.sample_fields import (
    check_field,
    first_samples,
    known_ways,
    loader_template,
    part_names,
    suggest,
)
from energon.prepare.splits import SplitRequest
from energon.samples.sample_types import CaptioningSample, OCRSample, VQASample
from tests.datasets import jpeg, write_shard

ABOUT = {"caption": "a cat", "label": 3, "boxes": [[1, 2]], "deep": {"er": {"est": {"x": 1}}}}


def look_at(tmp_path, *samples):
    """Write each sample to a shard of its own, and look at all of them."""
    names = []
    for number, parts in enumerate(samples):
        names.append(f"{number}.tar")
        write_shard(tmp_path / names[-1], [(f"k{number}", parts)])
    return first_samples(tmp_path, names, 3)


def test_looks_at_the_first_samples_and_at_one_of_some_other_shards(tmp_path):
    for shard in range(9):
        write_shard(tmp_path / f"{shard}.tar", [(f"{shard}{n}", {"txt": b""}) for n in range(5)])
    samples = first_samples(tmp_path, [f"{shard}.tar" for shard in range(9)], 2)
    assert [sample.key for sample in samples] == ["00", "01", "10", "30", "50", "80"]


def test_skips_shards_without_samples(tmp_path):
    write_shard(tmp_path / "0.tar", [])
    write_shard(tmp_path / "1.tar", [("a", {"txt": b"x"})])
    assert [sample.key for sample in first_samples(tmp_path, ["0.tar", "1.tar"], 2)] == ["a"]


def test_a_part_that_cannot_be_decoded_is_shown_as_such(tmp_path):
    (sample,) = look_at(tmp_path, {"json": b"{", "txt": b"fine"})
    console = Console(file=io.StringIO(), width=100)
    console.print(show_sample(sample))
    shown = console.file.getvalue()
    assert "cannot be decoded" in shown
    assert "'fine'" in shown


@pytest.mark.parametrize("value", ["x" * 999, b"\x00" * 999, list(range(999)), np.zeros((2, 3))])
def test_a_description_is_one_short_line(value):
    shown = preview(value).plain
    assert len(shown) <= 200
    assert "\n" not in shown


@pytest.mark.parametrize("shape", [(1, 900, 3), (900, 1, 3), (2, 2, 3), (500, 400, 3)])
def test_images_of_any_shape_fit_into_the_terminal(shape):
    console = Console(file=io.StringIO(), width=80, color_system="truecolor", force_terminal=True)
    console.print(preview(np.zeros(shape, np.uint8)))
    assert len(console.file.getvalue().splitlines()) <= 15


def test_completes_parts_and_what_lies_in_them(tmp_path):
    ways = known_ways(look_at(tmp_path, {"jpg": jpeg(0), "json": json.dumps(ABOUT).encode()}))
    assert list(ways)[:2] == ["jpg", "json"]
    assert {"json[caption]", "json[boxes][0]", "json[boxes][0][0]", "json[deep][er]"} <= set(ways)
    assert ways["json[label]"] == 3


@pytest.mark.parametrize(
    ("field", "way"),
    [
        ("image", "jpg"),
        ("caption", "json[caption]"),
        ("label", "json[label]"),
        ("context", "txt"),
        ("video", None),
        ("choices", None),
    ],
)
def test_proposes_what_the_name_of_a_field_makes_likely(tmp_path, field, way):
    parts = {"txt": b"a text", "jpg": jpeg(0), "json": json.dumps(ABOUT).encode()}
    assert suggest(field, look_at(tmp_path, parts)) == way


def test_proposes_all_formats_that_images_have(tmp_path):
    png = io.BytesIO()
    from PIL import Image

    Image.new("RGB", (4, 4)).save(png, "PNG")
    samples = look_at(tmp_path, {"jpg": jpeg(0)}, {"png": png.getvalue()}, {"jpg": jpeg(1)})
    assert part_names(samples) == ["jpg", "png"]
    assert suggest("image", samples) == "jpg,png"


def test_a_field_has_to_be_there_in_every_sample_that_is_looked_at(tmp_path):
    samples = look_at(tmp_path, {"json": b'{"a": 1}'}, {"json": b'{"b": 2}'})
    assert check_field("f", "json[a],json[b]", samples) == [1, 2]
    with pytest.raises(ConfigError, match="'k1'"):
        check_field("f", "json[a]", samples)
    with pytest.raises(ConfigError, match="no sample has a part 'txt'"):
        check_field("f", "txt", samples)


@pytest.mark.parametrize("sample_type", [CaptioningSample, VQASample, OCRSample])
def test_the_template_of_a_sample_loader_runs(tmp_path, sample_type):
    parts = {"a'b": b"", "txt": b"a text", "jpg": jpeg(0), "json": json.dumps(ABOUT).encode()}
    samples = look_at(tmp_path, parts)
    code: dict = {}
    exec(loader_template(sample_type, samples), code)
    made = code["sample_loader"]({"__key__": "k0", **samples[0].parts})
    assert made["__key__"] == "k0"
    assert made["image"].shape == (8, 12, 3)
    assert code["part_filter"]("jpg")
    assert not code["part_filter"]("other")


def answered(root, *answers, **given):
    """Return the choices after these answers, and the questions that they answer."""
    rest, questions = list(answers), []

    def read(question):
        questions.append(question)
        return rest.pop(0)

    console = Console(file=io.StringIO(), width=120)
    assistant = Assistant(root, find_shards(root), Prompt(console, read))
    choices = assistant.run(Choices(**given))
    assert not rest
    return choices, questions, console.file.getvalue()


def test_offers_folders_named_like_splits_and_proposes_crude_samples_first(tmp_path):
    for name in ("val/0", "train/1", "train/2"):
        write_shard(tmp_path / f"shards/{name}.tar", [(name[-1], {"txt": b"x"})])
    choices, questions, _ = answered(tmp_path, "", "", "")
    assert questions[:2] == [
        "Are the folders train, val the splits? (y/n) [y]: ",
        "Sample type, by number or name [CrudeWebdataset]: ",
    ]
    assert choices.split == SplitRequest(by_folder=True)
    assert choices.sample_type == "CrudeWebdataset"


def test_offers_names_that_begin_with_splits(tmp_path):
    for name in ("train_0", "train_1", "val_0"):
        write_shard(tmp_path / f"{name}.tar", [(name, {"txt": b"x"})])
    choices, questions, _ = answered(tmp_path, "y", "", sample_type="CrudeWebdataset")
    assert "start with the split name: train, val?" in questions[0]
    assert [part.partition(":")[0] for part in choices.split.parts] == ["train", "val"]


def test_writes_a_template_of_a_sample_loader(tmp_path):
    write_shard(tmp_path / "0.tar", [("k", {"jpg": jpeg(0), "json": b'{"about": "cat"}'})])
    split = SplitRequest(ratio={"train": 1})
    choices, _, shown = answered(tmp_path, "n", "y", split=split, sample_type="CaptioningSample")
    assert "def sample_loader" in shown
    assert 'raw["jpg"]' in choices.sample_loader


def test_nothing_is_chosen_after_a_no(tmp_path):
    write_shard(tmp_path / "0.tar", [("k", {"txt": b"x"})])
    choices, questions, _ = answered(tmp_path, "8,1,1", "99", "", "perhaps", "n")
    assert choices is None
    assert questions[1] == questions[2], "asked again after an invalid answer"
    assert "write this to" in questions[-1]
