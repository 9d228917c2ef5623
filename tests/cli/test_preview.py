from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from energon import (
    get_loader,
)
from energon.cli.main import main
from megatron.energon import (
    LogSampleDataset,
)
from tests.datasets import make_captions, make_crude
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
