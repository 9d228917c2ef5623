from __future__ import annotations

import base64
import io
import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from energon import (
    get_loader,
    get_savable_loader,
    get_train_dataset,
)
from energon.cli.main import main
from energon.cli.preview import half_blocks
from energon.prepare.dataset import prepare_dataset
from megatron.energon import (
    LogSampleDataset,
)
from tests.datasets import jpeg, make_captions, make_crude, write_shard
from tests.task_encoder.runs import config, val


def invoke(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_shows_the_fields_of_typed_samples(tmp_path):
    root = make_captions(tmp_path / "ds", [3, 2])
    output = invoke("preview", root, "--start", 1, "--count", 2).output
    first, second = output.strip().split("\n\n")
    assert first.startswith("CaptioningSample 's1'\n")
    assert "  image: ndarray (8, 12, 3) uint8" in first
    assert "  caption: 'caption 1'" in first
    assert str(root) in first
    assert second.startswith("CaptioningSample 's2'\n")


def test_shows_the_parts_of_crude_samples(tmp_path):
    output = invoke("preview", make_crude(tmp_path / "ds", [3]), "--split-part", "val").output
    assert output.count("CrudeSample") == 3
    assert "  txt: 'text 2'" in output


def test_a_missing_dataset_is_said_to_be_missing(tmp_path):
    result = invoke("preview", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "nothing" in result.output


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "{worker_id}.jsonl"
    worker_config = config(worker_debug_path=str(path), lanes=1)
    batches = val(make_crude(tmp_path / "ds", [4]), batch_size=3, worker_config=worker_config)
    logged = LogSampleDataset(batches, "train", worker_config)
    with get_loader(logged) as loader:
        for _ in range(2):
            assert len(list(loader)) == 2
    return tmp_path / "0.jsonl"


def test_counts_the_samples_of_logs(log):
    output = invoke("analyze-debug", log).output
    assert "batches" in output
    assert "rank 0: " in output
    assert "4 different ones" in output
    assert " s3" in output


def test_logs_without_samples_are_refused(log):
    result = invoke("analyze-debug", log, "--include-modality", "val")
    assert "no line of the modes val" in result.output
    log.write_text("x\n")
    assert "0.jsonl:1: no line of JSON" in invoke("analyze-debug", log).output
    log.write_text(json.dumps([1]) + "\n")
    assert invoke("analyze-debug", log).exit_code == 1


def test_shows_the_samples_with_a_key(tmp_path):
    make_captions(tmp_path / "a", [30])
    make_crude(tmp_path / "b", [30])
    (tmp_path / "m.yaml").write_text("splits: {train: {blend: [{path: a}, {path: b}]}}\n")
    done = invoke("preview", tmp_path / "m.yaml", "--key", "s7", "--key", "s29")
    found = re.findall(r"^(\w+) '(\w+)'$", done.output, re.MULTILINE)
    assert found == [
        *(("CaptioningSample", "s7"), ("CrudeSample", "s7")),
        *(("CaptioningSample", "s29"), ("CrudeSample", "s29")),
    ]
    assert invoke("preview", tmp_path / "m.yaml", "--key", "nothing").exit_code == 2


def test_shows_samples_that_fulfil_conditions(tmp_path):
    root = make_captions(tmp_path / "ds", [30])
    done = invoke("preview", root, "--where", "json.n>=10 json.n!=11", "--count", 3, "--json")
    assert [each["key"] for each in json.loads(done.output)] == ["s10", "s12", "s13"]
    done = invoke("preview", root, "--where", "json.n>=10", "--start", 20, "--count", 1, "--json")
    assert [each["key"] for each in json.loads(done.output)] == ["s20"]
    assert invoke("preview", root, "--where", "json").exit_code == 2


def test_shows_the_samples_of_a_step(tmp_path):
    root = make_captions(tmp_path / "ds", [30])
    dataset = get_train_dataset(root, worker_config=config(seed_offset=3), batch_size=4)
    with get_savable_loader(dataset) as loader:
        batches = iter(loader)
        expected = [next(batches).__key__ for _ in range(3)][2]
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    options = ("--state", tmp_path / "state.json", "--world-size", 1)
    done = invoke("preview", root, *options, "--step", 2, "--json")
    assert [each["key"] for each in json.loads(done.output)] == list(expected)
    assert invoke("preview", root, *options).exit_code == 2
    assert invoke("preview", root, "--step", 2).exit_code == 2
    assert invoke("preview", root, *options, "--step", 2, "--key", "s1").exit_code == 2


def test_draws_images_with_half_blocks(tmp_path):
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[:2] = (255, 0, 0)
    lines = list(half_blocks(pixels, columns=4))
    assert len(lines) == 2
    assert lines[0].count("▀") == 4
    assert lines[0].startswith("\x1b[38;2;255;0;0;48;2;255;0;0m▀")
    assert lines[1].startswith("\x1b[38;2;0;0;0;48;2;0;0;0m▀")
    root = make_captions(tmp_path / "ds", [1])
    assert "▀" in invoke("preview", root, "--images").output
    # Where nobody looks at a terminal, nothing is drawn.
    assert "▀" not in invoke("preview", root).output


def test_writes_a_page_that_needs_nothing_else(tmp_path):
    script = b"<script>alert(1)</script>"
    write_shard(tmp_path / "ds/0.tar", [("<b>", {"jpg": jpeg(1), "txt": script})])
    prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    done = invoke("preview", tmp_path / "ds", "--html", tmp_path / "out.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "out.html").read_text()
    assert "<h2>&lt;b&gt;</h2>" in page
    assert "<script" not in page
    assert re.findall(r"(?:src|href)=\"(.{5})", page) == ["data:"]
    data = base64.b64decode(re.search(r'src="data:image/jpeg;base64,(.*?)"', page)[1])
    assert Image.open(io.BytesIO(data)).size == (12, 8)
