"""Lint runs the hooks of a task encoder, and looks for the files that samples name."""

from __future__ import annotations

import json

import pytest

from energon import Cooker, DefaultTaskEncoder, SkipSample, stateless
from energon.inspect.lint import lint_dataset
from energon.prepare.engines import Engine
from tests.commands import run
from tests.datasets import jpeg, write_crude

ALONE = Engine(num_workers=1)


@pytest.fixture
def blend(tmp_path):
    """Samples that name pictures in a folder, one of which is missing, and where they are from."""
    (tmp_path / "photos").mkdir()
    for n in range(7):
        (tmp_path / f"photos/{n}.jpg").write_bytes(jpeg(n))
    facts = [{"images": [f"{n}.jpg"], "n": n, "source": f"coco/{n}.jpg"} for n in range(8)]
    samples = [(f"s{n}", {"json": json.dumps(each).encode()}) for n, each in enumerate(facts)]
    write_crude(tmp_path / "ds", samples)
    blend = tmp_path / "blend.yaml"
    blend.write_text("splits:\n  train: {path: ds, aux: {photos: filesystem://photos}}\n")
    return blend


def cook(sample, photos):
    if sample["json"]["n"] == 1:
        raise KeyError("no such label")
    if sample["json"]["n"] == 2:
        raise SkipSample
    yield {**sample, "image": photos.get(sample["json"]["images"][0], sample)}


class Encoder(DefaultTaskEncoder):
    cookers = (Cooker(cook),)

    @stateless
    def encode_sample(self, sample):
        assert sample["json"]["n"] != 4, "four is too many"
        return sample


def test_failures_of_hooks_are_named_by_the_hook_and_the_sample(blend):
    report = lint_dataset(blend, task_encoder=Encoder, engine=ALONE)
    found = [(each.key, each.hook, each.reason) for each in report.findings if each.hook]
    assert [each[:2] for each in found] == [
        ("s1", "cook_crude_sample"),
        ("s4", "encode_sample"),
        ("s7", "cook_crude_sample"),
    ]
    assert "KeyError" in found[0][2]
    assert "encode_sample failed: AssertionError" in found[1][2]
    assert report.to_json()["problems"][0]["hook"] == "cook_crude_sample"


def test_files_that_no_store_has_are_reported_without_an_encoder(blend):
    report = lint_dataset(blend, engine=ALONE)
    (missing,) = report.findings
    assert (missing.key, missing.part, missing.hook) == ("s7", "json", None)
    assert "'7.jpg', which is in none of the aux stores: photos" in missing.reason


def test_the_command_runs_hooks_on_some_samples(blend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_hooks.py").write_text(
        "from energon import DefaultTaskEncoder, stateless\n\n\n"
        "class Fails(DefaultTaskEncoder):\n"
        "    @stateless\n"
        "    def encode_sample(self, sample):\n"
        "        raise ValueError('never')\n"
    )
    found = run("lint", blend, "--task-encoder", "own_hooks:Fails", "-n", "4", "--json")
    assert found.exit_code == 1
    problems = json.loads(found.stdout)["problems"]
    assert [each["hook"] for each in problems] == ["encode_sample"] * 4
