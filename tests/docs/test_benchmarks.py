"""Pages repeat the figures of the benchmarks as they were measured last."""

from __future__ import annotations

import argparse
import json
import runpy

import pytest

from benchmarks import headlines
from tests.docs.conftest import ROOT


@pytest.mark.parametrize("page", headlines.SENTENCES)
def test_sentences_repeat_the_figures_that_were_measured_last(page):
    assert (ROOT / page).read_text() == headlines.written(page), "run benchmarks/headlines.py"


def test_the_page_of_benchmarks_has_the_results_that_are_stored(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as its scripts see each other
    script = runpy.run_path(str(ROOT / "benchmarks/run.py"))
    results = json.loads(script["RESULTS"].read_text())
    assert script["PAGE"].read_text() == script["page"](results), "run benchmarks/run.py --page"


def test_the_benchmark_of_packing_still_runs():
    script = runpy.run_path(str(ROOT / "benchmarks/packing.py"))
    arguments = argparse.Namespace(windows=2, window=64, context=8192)
    padding = {
        name: float(script["measure"](arguments, settings)[0].removesuffix("%"))
        for name, settings in script["PACKERS"].items()
    }
    assert padding["fill, carry-over"] < padding["fill, closed windows"] < 50
