"""Measure cases in interleaved rounds, store the results, and write a section of a page.

A script defines its cases, their measurement, and its tables. This module has the parts that all
scripts share: options, interleaved rounds, `docs/benchmarks_*.json` with the results of every
round, medians with their spread, and the conditions of the measurement. Each script writes
between its own two marks, so a page can have sections of several scripts. A test compares the
pages with the stored results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import headlines

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
DATA = ROOT / "benchmarks" / "data-made"
PEERS = ROOT / ".venv-peers" / "bin" / "python"
TRIES = 3

Case = dict[str, Any]
"""What tells a measurement from others, such as the data, the workers and the library."""
Rounds = list[dict[str, Any]]
"""What each round found for a case."""
Results = dict[str, Any]
"""What is stored: `measured_on`, and `cases`, each with its date and its rounds."""


class ProcessError(RuntimeError):
    """A measuring process has failed."""


@dataclass(frozen=True)
class Benchmark:
    """A script and its section of a page.

    Args:
        script: The file of the script.
        tables: Returns the tables of stored results, in Markdown.
        conditions: Further conditions of the measurement, as the end of a sentence.
        page: The page in docs/ that has the marks of the script.
    """

    script: str
    tables: Callable[[Results], str]
    conditions: str = "the data were in the page cache"
    page: str = "benchmarks_parts.md"

    @property
    def name(self) -> str:
        return Path(self.script).stem

    def parser(self, about: str | None, *, data: str = "") -> argparse.ArgumentParser:
        """Return the options that all scripts share."""
        parser = argparse.ArgumentParser(
            description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--rounds", type=int, default=5)
        parser.add_argument(
            "--only",
            metavar="WORD",
            help="only cases that have this word in their description; keeps the other results",
        )
        parser.add_argument("--data", type=Path, default=DATA / data)
        parser.add_argument("--peers", default=str(PEERS), help="Python that has the peers")
        parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page")
        parser.add_argument(
            "--page", action="store_true", help="only write the page, from the stored results"
        )
        return parser

    def parsed(self, parser: argparse.ArgumentParser) -> argparse.Namespace:
        """Return the options given; with `--page`, write the page and exit instead."""
        arguments = parser.parse_args()
        if arguments.page:
            self.write_page(arguments.docs)
            raise SystemExit
        return arguments

    def run(
        self,
        arguments: argparse.Namespace,
        cases: Iterable[Case],
        measure: Callable[[Case], dict[str, Any]],
        versions: Mapping[str, str],
        **settings: float,
    ) -> None:
        """Measure the chosen cases in interleaved rounds; store the results, and write the page."""
        known = {_named(case): case for case in cases}
        words = {name: " ".join(map(str, case.values())) for name, case in known.items()}
        chosen = [known[name] for name in known if (arguments.only or "") in words[name]]
        if not chosen:
            raise SystemExit(f"no case of benchmarks/{self.name}.py has {arguments.only!r}")
        measured_on = {
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "versions": dict(versions),
            **settings,
        }
        path = self.stored(arguments.docs)
        found = _earlier(path, measured_on) if arguments.only and path.exists() else {}
        found |= {_named(each): each for each in _interleaved(chosen, measure, arguments.rounds)}
        complete = [found[name] for name in known if name in found]
        path.write_text(
            json.dumps({"measured_on": measured_on, "cases": complete}, indent=1) + "\n"
        )
        if len(complete) == len(known):
            self.write_page(arguments.docs)
        else:
            missing = [words[name] for name in known if name not in found]
            print(f"the page needs {len(missing)} cases more: {', '.join(missing)}")

    def stored(self, docs: Path) -> Path:
        """Return the file of the results."""
        return docs / f"benchmarks_{self.name}.json"

    def page_in(self, docs: Path) -> Path:
        """Return the file of the page."""
        return docs / self.page

    def write_page(self, docs: Path) -> None:
        """Write the page from the stored results, and the sentences that repeat its figures."""
        path = self.page_in(docs)
        path.write_text(self.written(path.read_text(), json.loads(self.stored(docs).read_text())))
        if docs == DOCS:
            headlines.main()

    def written(self, page: str, results: Results) -> str:
        """Return a page with the tables of `results` between its marks."""
        mark = f"<!-- made by benchmarks/{self.name}.py -->"
        head, _, rest = page.partition(mark)
        _, end, tail = rest.partition(mark)
        tables = f"{self._how(results)}\n\n{self.tables(results)}\n"
        return f"{head}{mark}\n\n{tables}" + (f"\n{end}{tail}" if end else "")

    def _how(self, results: Results) -> str:
        on, cases = results["measured_on"], results["cases"]
        days = " to ".join(sorted({f([each["date"] for each in cases]) for f in (min, max)}))
        counts = " or ".join(map(str, sorted({len(each["rounds"]) for each in cases})))
        load = load_of([found for each in cases for found in each["rounds"]])
        versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items())
        return (
            f"Measured on {days} with {on['cores']} cores ({on['machine']}), Python "
            f"{on['python']}: {versions}. {load}; {self.conditions}. Figures are medians of "
            f"{counts} interleaved rounds, ± half the range. "
            f"`docs/{self.stored(Path()).name}` has the results of each round."
        )


def surroundings() -> dict[str, Any]:
    """Return the load average, and the priority of this process."""
    return {
        "load_before": os.getloadavg()[0],
        "priority": -os.getpriority(os.PRIO_PROCESS, 0),
    }


def load_of(rounds: Rounds) -> str:
    """Return the beginning of a sentence on the load average and the priority."""
    load = max(each["load_before"] for each in rounds)
    first = all(each.get("priority", 0) > 0 for each in rounds)
    return (
        f"Load average stayed below {math.floor(load * 10 + 1) / 10:.1f}, including the benchmark"
        f"{', which ran at top priority' if first else ''}"
    )


def _interleaved(
    cases: Sequence[Case], measure: Callable[[Case], dict[str, Any]], rounds: int
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {**case, "date": str(date.today()), "rounds": []} for case in cases
    ]
    for number in range(rounds):
        # The second case may meet warm caches, or a hot machine.
        turns = list(zip(cases, rows, strict=True))
        for case, row in turns[:: -1 if number % 2 else 1]:
            before = surroundings()
            found = _measured(measure, case)
            print(number, *case.values(), found, file=sys.stderr, flush=True)
            if found is not None:
                row["rounds"].append({**before, **found})
    if failed := [_named(row) for row in rows if not row["rounds"]]:
        raise SystemExit(f"failed in every round: {', '.join(failed)}")
    return rows


def _measured(measure: Callable[[Case], dict[str, Any]], case: Case) -> dict[str, Any] | None:
    """Return what a case takes; one that fails is tried again, because peers do now and then.

    None if it fails again and again: the case lacks this round, which others must not lose.
    """
    for failures in range(TRIES):
        try:
            found = measure(case)
        except (ProcessError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr, flush=True)
        else:
            return {**found, "failures": failures} if failures else found
    return None


def _earlier(path: Path, measured_on: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the stored results, unless new ones cannot stand beside them."""
    stored = json.loads(path.read_text())
    if stored["measured_on"] != measured_on:
        raise SystemExit(
            f"{path.name} has results of {stored['measured_on']}, these are of {measured_on}; "
            "measure all cases again, without --only"
        )
    return {_named(each): each for each in stored["cases"]}


def _named(row: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in row.items() if k not in ("date", "rounds")})


def rounds_of(results: Results, **case: Any) -> Rounds:
    """Return what the rounds of the one case found that has these values."""
    (rounds,) = (each["rounds"] for each in results["cases"] if case.items() <= each.items())
    return list(rounds)


def middle(rounds: Rounds, name: str) -> float:
    """Return the median of a figure over the rounds."""
    return float(median(found[name] for found in rounds))


def spread(rounds: Rounds, name: str) -> str:
    """Return half the range of a figure, as a share of its median."""
    values = [found[name] for found in rounds]
    half = (max(values) - min(values)) / 2
    return f"±{half / (median(values) or 1):.0%}"


def shown(rounds: Rounds, name: str, digits: int = 0, *, scale: float = 1, unit: str = "") -> str:
    """Return the median of a figure with its unit and spread."""
    return f"{scale * middle(rounds, name):,.{digits}f}{unit} ({spread(rounds, name)})"


def ratio(ours: Rounds, theirs: Rounds, name: str) -> float:
    """Return the median of a figure as a multiple of that of another case."""
    return middle(ours, name) / middle(theirs, name)


def in_fresh_process(
    command: Sequence[str], *, peer: bool = False, seconds: float = 300, **environment: str
) -> dict[str, Any]:
    """Run a command that prints a line of JSON last, and return its object.

    Args:
        command: The program and its arguments.
        peer: Whether it is another library that runs.
        seconds: It is stopped after these.
        environment: Variables that are added.

    Raises:
        ProcessError: If it fails.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        # Workers that outlive their parent must not keep us waiting, nor busy.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=errors,
            env=inherited(peer) | environment,
            start_new_session=True,
        )
        try:
            process.wait(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        lines = [line for line in output if line.startswith("{")]
        if process.returncode or not lines:
            errors.seek(0)
            raise ProcessError(
                f"{' '.join(command)} ended with status {process.returncode}:\n"
                f"{errors.read()[-3000:]}"
            )
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def inherited(peer: bool) -> dict[str, str]:
    """Return our environment; that for a peer does not lead it to our `megatron.energon`."""
    return {name: v for name, v in os.environ.items() if not peer or name != "PYTHONPATH"}


def versions_of(python: str, **distributions: str) -> dict[str, str]:
    """Return the versions of distributions that a Python has, by the names they are shown with."""
    ask = (
        "import importlib.metadata as m, json, sys;"
        "print(json.dumps({n: m.version(d) for n, d in json.loads(sys.argv[1]).items()}))"
    )
    peer = python != sys.executable
    return in_fresh_process([python, "-c", ask, json.dumps(distributions)], peer=peer)
