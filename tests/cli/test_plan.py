from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from energon.cli.main import main
from energon.cli.plan import sparkline
from tests.datasets import make_crude


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("plan")
    make_crude(root / "a", [30])
    make_crude(root / "b", [20], prefix="b")
    (root / "m.yaml").write_text(
        "splits: {train: {blend: [{path: a, weight: {0: 3, 100: 0}}, {path: b}, "
        "{path: b, max_epochs: 1}]}}"
    )
    return str(root / "m.yaml")


def invoke(*arguments):
    result = CliRunner().invoke(main, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_shows_what_a_run_reads(path):
    output = invoke(path, "--batch-size", "5", "--world-size", "2", "--batches", "100")
    assert "500 samples in 100 batches of 5, 50 steps of 2 ranks" in output
    assert "The data continues after that." in output
    assert "b/train#2 is exhausted in batch" in output
    assert "b/train and b/train#2 have 20 samples in common." in output
    (line,) = [line for line in output.splitlines() if line.startswith("a/train ")]
    assert "▅" in line


def test_plans_one_pass_unless_told_otherwise(path):
    assert "70 samples in 14 batches of 5" in invoke(path, "--batch-size", "5")


def test_json_is_for_scripts(path):
    about = json.loads(invoke(path, "--batch-size", "5", "--batches", "20", "--json"))
    assert about["samples"] == 100
    (where, *_) = json.loads(invoke(path, "--key", "b3", "--json"))
    assert where["key"] == "b3"
    step = json.loads(invoke(path, "--step", str(where["step"]), "--json"))
    assert where in step


def test_tells_when_a_sample_is_seen(path):
    output = invoke(path, "--key", "s3", "--batch-size", "2", "--batches", "40")
    assert output.startswith("step ")
    assert "a/train  epoch 0  sample 3  s3  000.tar" in output
    assert "not read in these batches" in invoke(path, "--key", "s3", "--batches", "1")


def test_an_unknown_dataset_is_an_error_without_a_traceback():
    result = CliRunner().invoke(main, ["plan", "/nowhere.yaml"])
    assert result.exit_code == 2
    assert "/nowhere.yaml does not exist" in result.output


def test_bars_are_full_where_a_dataset_is_all_there_is():
    assert sparkline([0, 0.01, 0.5, 1]) == " ▁▄█"


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_draws_a_picture(path, tmp_path, ending):
    target = tmp_path / f"plan.{ending}"
    invoke(path, "--batch-size", "5", "--batches", "40", "--plot", str(target))
    content = target.read_bytes()
    assert content.startswith(b"\x89PNG") if ending == "png" else b"</svg>" in content


def test_draws_small_datasets_together(tmp_path):
    make_crude(tmp_path / "a", [9])
    entries = ", ".join(f"{{path: a, weight: {weight}}}" for weight in range(1, 31))
    (tmp_path / "m.yaml").write_text(f"splits: {{train: {{blend: [{entries}]}}}}")
    target = tmp_path / "plan.svg"
    invoke(str(tmp_path / "m.yaml"), "--batches", "500", "--plot", str(target))
    text = target.read_text()
    assert "<!-- 18 others -->" in text
    assert "<!-- a/train#30 -->" in text
    assert "<!-- a/train#10 -->" not in text


def test_a_picture_of_no_kind_is_refused(path):
    result = CliRunner().invoke(main, ["plan", path, "--plot", "/nowhere/plan.docx"])
    assert result.exit_code == 2
    assert "/nowhere/plan.docx: cannot be written" in result.output


def test_looking_for_a_step_and_listing_one_exclude_each_other(path):
    result = CliRunner().invoke(main, ["plan", path, "--key", "s1", "--step", "2"])
    assert result.exit_code == 2
    assert "pass --key or --step, not both" in result.output
