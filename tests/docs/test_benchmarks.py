"""Pages repeat the figures of the benchmarks as they were measured last."""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys

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


def test_the_other_pages_have_the_results_that_are_stored(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for script in (ROOT / "benchmarks").glob("*.py"):
        if "\nBENCHMARK = " in script.read_text():
            benchmark = runpy.run_path(str(script))["BENCHMARK"]
            page, stored = benchmark.page_in(ROOT / "docs"), benchmark.stored(ROOT / "docs")
            # Pages without stored results are from before 26 November 2026.
            if stored.exists():
                written = benchmark.written(page.read_text(), json.loads(stored.read_text()))
                assert page.read_text() == written, f"run {script.name} --page"


@pytest.mark.slow
def test_what_watching_costs_is_measured_for_all_kinds_of_workers():
    code = "import monitoring; monitoring.WARM_UP_SECONDS = 0.1; monitoring.main()"
    program = [sys.executable, "-c", code, "--blocks", "2"]
    folder = ROOT / "benchmarks"
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=True)
    assert [line.count("%") for line in done.stdout.splitlines()] == [4, 4, 4], done.stdout


def test_results_are_stored_merged_and_written_between_the_marks(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from results import Benchmark, rounds_of, shown

    def tables(results):
        return shown(rounds_of(results, case="a"), "value") + shown(
            rounds_of(results, case="b"), "value"
        )

    benchmark = Benchmark("benchmarks/some.py", tables, page="benchmarks_some.md")
    mark = "<!-- made by benchmarks/some.py -->"
    (tmp_path / "benchmarks_some.md").write_text(f"# Some\n\n{mark}\n\nold\n\n{mark}\n\nend\n")
    values = iter([9, 30, 31, 11, 10, 32, 1, 2])

    def run(*options):
        parser = benchmark.parser("about")
        arguments = parser.parse_args(["--docs", str(tmp_path), *options])
        cases = [{"case": "a"}, {"case": "b"}]
        benchmark.run(arguments, cases, lambda case: {"value": next(values)}, {"energon": "1"})
        return (tmp_path / "benchmarks_some.md").read_text()

    page = run("--rounds", "3")
    assert page.startswith(f"# Some\n\n{mark}\n\nMeasured on ")
    assert page.endswith(f"\n\n10 (±10%)31 (±3%)\n\n{mark}\n\nend\n")
    assert "energon 1. Load average" in page
    assert "medians of 3 interleaved rounds" in page
    page = run("--rounds", "2", "--only", "b")
    assert "10 (±10%)2 (±33%)" in page
    assert "medians of 2 or 3 interleaved rounds" in page


def test_a_case_that_fails_loses_its_own_round_only(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from results import TRIES, Benchmark, ProcessError, rounds_of, shown

    def tables(results):
        return " ".join(shown(rounds_of(results, case=each), "value") for each in "ab")

    benchmark = Benchmark("benchmarks/some.py", tables, page="benchmarks_some.md")
    (tmp_path / "benchmarks_some.md").write_text("<!-- made by benchmarks/some.py -->")
    arguments = benchmark.parser("about").parse_args(["--docs", str(tmp_path), "--rounds", "2"])
    cases, fails = [{"case": "a"}, {"case": "b"}], [True] * TRIES

    def measure(case):
        if case == {"case": "b"} and fails:
            fails.pop()
            raise ProcessError("a peer has died")
        return {"value": 7}

    benchmark.run(arguments, cases, measure, {"energon": "1"})
    page = (tmp_path / "benchmarks_some.md").read_text()
    assert "medians of 1 or 2 interleaved rounds" in page
    assert page.endswith("7 (±0%) 7 (±0%)\n")
    fails += [True] * 2 * TRIES
    with pytest.raises(SystemExit, match="failed in every round: .*b"):
        benchmark.run(arguments, cases, measure, {"energon": "1"})


def test_the_benchmark_of_packing_still_runs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = runpy.run_path(str(ROOT / "benchmarks/packing.py"))
    arguments = argparse.Namespace(windows=2, window=64, context=8192)
    padding = {
        name: script["measure"](arguments, settings)["padding"]
        for name, settings in script["PACKERS"].items()
    }
    assert padding["fill, carry-over"] < padding["fill, closed windows"] < 0.5
