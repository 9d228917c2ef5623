"""What is packed from datasets of MosaicML Streaming and LitData."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from energon.errors import FormatError, MissingExtraError
from energon.prepare.importers.row import RowRules
from tests.prepare.test_packing import kind_of, opened, pack, samples_of

DATA = Path(__file__).parent / "data"


def check_rows(found, *, count):
    """The samples of the datasets in tests/data, which other libraries have written."""
    assert list(found) == [f"{n:09}" for n in range(count)]
    for n, parts in enumerate(found.values()):
        about = json.loads(parts["json"])
        assert (about["id"], about["text"], about["score"]) == (n, f"text {n} ä", n / 4)
        assert parts["raw.bin"] == b"\0" * n + b"r"
        picture = Image.open(io.BytesIO(parts["image.jpg"]))
        assert (picture.format, picture.size) == ("JPEG", (6, 4))
        pixels = np.asarray(Image.open(io.BytesIO(parts["pixels.png"])))
        assert pixels.tolist() == [[[n, 1, 2]] * 3] * 2


@pytest.mark.parametrize("name", ["mds", "mds_zstd"])
def test_datasets_of_streaming_are_packed_without_encoding_pictures_again(tmp_path, name):
    assert kind_of(DATA / name) == "mds"
    pack(DATA / name, tmp_path / "out", maxcount=3)
    found = samples_of(tmp_path / "out")
    check_rows(found, count=7)
    last = found["000000006"]
    assert json.loads(last["json"])["tags"] == {"n": 6, "x": ["a"]}
    assert json.loads(last["json"])["small"] == 6
    assert np.asarray(Image.open(io.BytesIO(last["mask.png"]))).tolist() == [[6] * 6] * 4


@pytest.mark.parametrize("name", ["litdata", "litdata_zstd"])
def test_datasets_of_litdata_are_packed_without_encoding_pictures_again(tmp_path, name):
    assert kind_of(DATA / name) == "litdata"
    pack(DATA / name, tmp_path / "out", maxcount=3)
    found = samples_of(tmp_path / "out")
    check_rows(found, count=7)
    about = json.loads(found["000000005"]["json"])
    assert (about["ok"], about["meta"]) == (False, {"n": 5, "s": "x"})


def test_what_only_litdata_can_read_needs_it(tmp_path):
    if importlib.util.find_spec("litdata"):
        pytest.skip("litdata is installed")
    for file in (DATA / "litdata").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace('"float"', '"mesh"', 1))
    with pytest.raises(MissingExtraError, match="'mesh', which only LitData itself can read"):
        opened(tmp_path, kind="litdata")


@pytest.mark.parametrize("name", ["mds", "litdata"])
@pytest.mark.parametrize("start", [0, 2, 3, 6, 7])
def test_chunks_are_read_from_any_sample_on(name, start):
    source = opened(DATA / name)
    keys = [sample["__key__"] for sample in source.samples("", start)]
    assert keys == [f"{n:09}" for n in range(start, 7)]


@pytest.mark.parametrize("name", ["mds", "litdata"])
def test_rows_that_are_skipped_move_no_other_when_packing_continues(tmp_path, name):
    for n in (0, 1, 3, 4, 5, 6):
        (tmp_path / f"text {n} ä").write_text(str(n))
    rules = RowRules(file_columns=("text",), root=tmp_path, skip_missing=True)
    source = opened(DATA / name, rules=rules)
    keys = [sample["__key__"] for sample in source.samples("")]
    assert keys == [f"{n:09}" for n in (0, 1, 3, 4, 5, 6)]
    assert [sample["__key__"] for sample in source.samples("", 3)] == keys[3:]
    (skipped,) = source.skipped()
    assert "row 3" in skipped


@pytest.mark.parametrize("name", ["mds", "litdata"])
def test_damaged_chunks_are_refused(tmp_path, name):
    for file in (DATA / name).iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:400] if file.suffix != ".json" else content)
    with pytest.raises(FormatError, match=r"(offsets|do not fit|its fields)"):
        list(opened(tmp_path, kind=name).samples(""))
    (tmp_path / "index.json").write_text('{"shards": [{}], "chunks": [{}]}')
    with pytest.raises(FormatError, match="not an index of"):
        opened(tmp_path, kind=name)


@pytest.mark.parametrize("content", [b'{"shards": [', b'{"shards": "\xff"}'])
@pytest.mark.parametrize("kind", ["mds", "litdata"])
def test_an_index_that_is_damaged_is_named(tmp_path, kind, content):
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"index\.json"):
        opened(tmp_path, kind=kind)
