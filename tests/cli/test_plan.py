from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from energon import prepare_dataset
from energon.cli.main import main
from energon.cli.plan import sparkline
from tests.datasets import CRUDE, make_crude, write_shard


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
    return result.stdout  # not what threads of other tests log meanwhile


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


def test_bars_are_full_where_a_dataset_is_all_there_is():
    assert sparkline([0, 0.01, 0.5, 1]) == " ▁▄█"


def test_looking_for_a_step_and_listing_one_exclude_each_other(path):
    result = CliRunner().invoke(main, ["plan", path, "--key", "s1", "--step", "2"])
    assert result.exit_code == 2
    assert "pass --key or --step, not both" in result.output


def longest(measures):
    """A cost for `--with`."""
    return measures["txt:bytes"] ** 2


@pytest.mark.slow
def test_compares_steps_without_balancing_and_with_every_pool(tmp_path):
    samples = [(f"s{number}", {"txt": b"x" * 300 * (10 + number**3 % 97)}) for number in range(300)]
    write_shard(tmp_path / "000.tar", samples)
    prepare_dataset(tmp_path, **CRUDE)
    of_run = [str(tmp_path), "--batch-size", "2", "--world-size", "4", "--lanes", "4"]
    output = invoke(*of_run, "--balance", "txt:bytes", "--window", "8")
    assert "64 steps of 4 micro-batches of 2, by the cost 'txt:bytes'" in output
    assert [line.split()[:2] for line in output.splitlines()[2:]] == [
        ["window", "pool"],
        ["unbalanced", "-"],
        *(["8", pool] for pool in ("1", "2", "4")),
    ]
    cost = ["--balance", "square", "--with", "tests.cli.test_plan:longest"]
    about = json.loads(invoke(*of_run, *cost, "--batches", "40", "--json"))
    assert (about["cost"], about["window"], about["steps"]) == ("square", "step", 10)
    unbalanced, whole = about["unbalanced"], about["pools"]["4"]
    assert 1 <= whole["slowest_over_mean"] < unbalanced["slowest_over_mean"]
    assert len(whole["steps"]) == 10
    assert 0 < whole["padding"] < 1
    assert whole["bytes_per_sample"] > 0
    about = json.loads(invoke(*of_run, *cost, "--speeds", "2,1", "--json"))
    assert (about["speeds"], [*about["pools"]]) == ([1.0, 0.5], ["2", "4"])
    assert about["unbalanced"]["slowest_over_mean"] > unbalanced["slowest_over_mean"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "3"], "require --balance"),
        (["--balance", "bytes", "--window", "few"], "expected 'step' or a number"),
        (["--balance", "bytes", "--speeds", "1,slow"], "expected numbers, such as 1,1,0.5"),
        (["--balance", "bytes", "--step", "3"], "pass --balance, or one of"),
        (["--balance", "bytes", "--batches", "1", "--world-size", "2"], "larger --batches"),
    ],
)
def test_options_of_balancing_that_do_not_fit_are_refused(path, options, message):
    result = CliRunner().invoke(main, ["plan", path, *options])
    assert result.exit_code
    assert message in result.output + str(result.exception)
