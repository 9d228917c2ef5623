"""Run the same programs on energon and the installed peers, and write docs/benchmarks.md.

The figures that README repeats are written, too (`headlines.py`).

    benchmarks/peers.sh
    python benchmarks/run.py [--rounds 5] [--scale 1.0] [--data FOLDER] [--peers PYTHON]
    python benchmarks/run.py --only text image    # these rows and sections; keeps the others
    python benchmarks/run.py --page    # from the results in docs/benchmarks.json

Every library runs the same programs, which are written once (`adapters/programs.py` and what it
names). Every figure comes from a fresh process. Rounds are interleaved, so that all libraries see
the same machine; the tables show medians over the rounds, and their spread.

A run in pieces replaces the results of its rows in docs/benchmarks.json, for all libraries of a
row or for those chosen with --libraries. So that a row never compares different machines, pieces
are only merged if the cores and Python of the results agree.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import headlines
from data import SAMPLES, SHARDS, write
from results import load_of, middle, ratio, shown, spread

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {
    "ours": "energon (this)",
    "megatron_energon": "Megatron-Energon",
    "web_dataset": "webdataset",
    "lit_data": "LitData",
}
KINDS = ("text", "image", "interleaved", "large")
TYPED = "captions"
"""The data of `image`, prepared as samples of a type."""


class Program(NamedTuple):
    """A line of the table, once in-line and once with workers.

    Args:
        name: Of the program in the adapters.
        kind: The data.
        libraries: Which have it.
        title: What it does, in words.
    """

    name: str
    kind: str
    libraries: tuple[str, ...]
    title: str


ALL = tuple(LIBRARIES)
WITH_ENCODER = ("ours", "megatron_energon")
WITH_STREAMS = ("ours", "web_dataset")
PROGRAMS = (
    *(Program("cooker", kind, ALL, f"{kind}: cooker that passes samples on") for kind in KINDS),
    Program("encode", "text", ALL, "text: cooker and encoder"),
    Program("packed", "text", WITH_ENCODER, "text: packs of 8 samples of a type"),
    Program(
        "typed",
        TYPED,
        (*WITH_ENCODER, "web_dataset"),
        "captions: decoded to float tensors, default batches",
    ),
    Program("stream", "text", WITH_STREAMS, "text: stream of plain shards, decoded, tuples"),
    *(
        Program("plain", kind, ("ours", "web_dataset", "lit_data"), f"{kind}: no hook at all")
        for kind in ("text", "image")
    ),
)
WORKERS = (0, 2)
DECODERS = LIBRARIES | {"bare": "the decoder alone"}
SECTIONS = ("decoded", "restores", "shards10k")
"""What is measured beside the programs."""
Rounds = list[dict[str, Any]]
"""What each process found that ran one program on one library."""
Results = dict[tuple[Program, int, str], Rounds]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "docs" / "benchmarks.json"
MARK = "<!-- made by benchmarks/run.py -->"


def main() -> None:
    """Measure, and write the results and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a window of measuring")
    parser.add_argument("--windows", type=int, default=3, help="in each process")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks" / "data-made")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help=f"programs or data of rows, or {', '.join(SECTIONS)}; other results are kept",
    )
    parser.add_argument("--libraries", nargs="+", choices=DECODERS, default=list(DECODERS))
    arguments = parser.parse_args()
    programs = chosen_programs(arguments.only)
    if unknown := set(arguments.only or ()) - known_words():
        parser.error(f"nothing is called {', '.join(sorted(unknown))}; choose of {known_words()}")
    if not arguments.page:
        before = None
        if arguments.only or len(arguments.libraries) < len(DECODERS):
            before = json.loads(RESULTS.read_text())
            check_comparable(before, measured_on(arguments))
        results = measure(arguments, programs)
        results = results if before is None else merged(before, results)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
    headlines.main()
    subprocess.run([sys.executable, "-m", "docs.site.diagrams"], cwd=ROOT, check=True)


def known_words() -> set[str]:
    """Return what rows and sections can be chosen by."""
    return {*SECTIONS, *(word for program in PROGRAMS for word in (program.name, program.kind))}


def chosen_programs(words: Sequence[str] | None) -> list[Program]:
    """Return the programs of which the name or the data is one of some words; None means all."""
    return [p for p in PROGRAMS if words is None or {p.name, p.kind} & set(words)]


def measured_on(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return where and how is measured."""
    return {
        "date": str(date.today()),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "scale": arguments.scale,
        "seconds": arguments.seconds,
        "windows": arguments.windows,
    }


def measure(arguments: argparse.Namespace, programs: Sequence[Program]) -> dict[str, Any]:
    """Return the figures chosen, for the page, for plots and for scripts of readers."""
    pythons = dict.fromkeys(DECODERS, arguments.peers) | {"ours": sys.executable}
    pythons = {name: pythons[name] for name in arguments.libraries}
    make_data(arguments.data, arguments.scale, arguments.peers)
    found = measure_programs(arguments, programs, pythons)
    wanted = arguments.only or SECTIONS
    results: dict[str, Any] = {
        "measured_on": measured_on(arguments),
        "programs": [
            {"program": program.name, "data": program.kind, "title": program.title}
            | {"workers": workers, "library": library}
            | {"date": str(date.today()), "rounds": rounds}
            for (program, workers, library), rounds in found.items()
        ],
    }
    if "decoded" in wanted:
        images = arguments.data / "image"
        results["decoded"] = measure_decoded(images, pythons, arguments.rounds)
    if "restores" in wanted and "ours" in pythons:
        results["restores"] = {
            str(workers): [
                restore(arguments.data / "text", workers) for _ in range(arguments.rounds)
            ]
            for workers in WORKERS
        }
    if "shards10k" in wanted:
        results["first_batch_of_10000_shards"] = {
            library: [
                run(python, library, arguments.data / "shards10k", 0, 0.1)
                for _ in range(arguments.rounds)
            ]
            for library, python in pythons.items()
            if library in LIBRARIES and library != "lit_data"
        }
    return results


def check_comparable(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that new results can stand beside earlier ones.

    Raises:
        SystemExit: If they were measured on another machine or in another way.
    """
    for name, value in now.items():
        known = before["measured_on"].get(name, 1.0)  # older results have no scale: it was 1
        if name != "date" and known != value:
            raise SystemExit(
                f"the results in {RESULTS.name} have {name} {known}, these have {value}; measure "
                "all rows again"
            )


def merged(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return earlier results with those of some rows and libraries replaced."""
    rows = {row_name(each): each for each in before["programs"]}
    rows |= {row_name(each): each for each in new["programs"]}
    sections = {
        name: {**found, **new.get(name, {})}
        for name, found in before.items()
        if name not in ("measured_on", "programs")
    }
    return {"measured_on": new["measured_on"], "programs": list(rows.values()), **sections}


def row_name(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a result of a program apart from others."""
    return row["program"], row["data"], row["workers"], row["library"]


def page(results: dict[str, Any]) -> str:
    """Return the page with the tables of `results` between the marks of this script."""
    found: Results = {}
    for each in results["programs"]:
        program = next(p for p in PROGRAMS if (p.name, p.kind) == (each["program"], each["data"]))
        found[program, each["workers"], each["library"]] = each["rounds"]
    days = {each.get("date", results["measured_on"]["date"]) for each in results["programs"]}
    head, _, tail = PAGE.read_text().split(MARK)
    tables = [
        machine(results["measured_on"], days, found),
        speed_table(found),
        cpu_table(found),
        memory_table(found),
        decoded_table(results["decoded"]),
        restore_table(results["restores"]),
        start_table(results["first_batch_of_10000_shards"], found),
    ]
    return f"{MARK}\n\n".join((head, "\n\n".join([*tables, ""]))) + MARK + tail


def make_data(folder: Path, scale: float, peers: str) -> None:
    """Write, prepare and convert what is not there yet."""
    for kind in (*KINDS, "shards10k"):
        source = "text" if kind == "shards10k" else kind
        count = int((20_000 if kind == "shards10k" else SAMPLES[kind]) * scale)
        shards = int(SHARDS[kind] * scale) if kind == "shards10k" else SHARDS[kind]
        write(folder / kind, source, num_samples=max(100, count), num_shards=max(1, shards))
        prepare(folder / kind, "--sample-type", "CrudeWebdataset")
        if kind in KINDS:
            convert = [peers, str(ROOT / "benchmarks/adapters/lit_data.py"), str(folder / kind)]
            paths = {"PYTHONPATH": str(ROOT / "benchmarks")}
            subprocess.run(
                convert, check=True, capture_output=True, env=environment("lit_data") | paths
            )
    make_typed(folder / "image", folder / TYPED)


def prepare(folder: Path, *choices: str) -> None:
    """Prepare a dataset, for both energons."""
    if not (folder / ".nv-meta" / "dataset.yaml").exists():
        command = [sys.executable, "-m", "energon.cli.main", "prepare", str(folder)]
        command += ["--non-interactive", "--split-parts", "train:.*", *choices]
        subprocess.run(command, check=True, capture_output=True)


def make_typed(images: Path, folder: Path) -> None:
    """Prepare the same shards with a sample type and a field map."""
    folder.mkdir(exist_ok=True)
    for shard in images.glob("*.tar"):
        if not (folder / shard.name).exists():
            os.link(shard, folder / shard.name)
    fields = json.dumps({"image": "jpg", "caption": "txt"})
    prepare(folder, "--sample-type", "CaptioningSample", "--field-map", fields)


def measure_programs(
    arguments: argparse.Namespace, programs: Sequence[Program], pythons: dict[str, str]
) -> Results:
    """Return the results of all rounds."""
    results: Results = {}
    for number in range(arguments.rounds):
        for program, workers in product(programs, WORKERS):
            for library in (each for each in program.libraries if each in pythons):
                path = arguments.data / program.kind
                seconds, windows = arguments.seconds, arguments.windows
                found = run(
                    pythons[library], library, path, workers, seconds, program.name, windows
                )
                results.setdefault((program, workers, library), []).append(found)
                line = [number, program.name, program.kind, workers, library, found]
                print(json.dumps(line), flush=True)
    return results


def measure_decoded(path: Path, pythons: dict[str, str], rounds: int) -> dict[str, Rounds]:
    """Return the results by library."""
    results: dict[str, Rounds] = {}
    for number in range(rounds):
        for library, python in pythons.items():
            found = run(python, library, path, 2, 5.0, "thumbnail")
            results.setdefault(library, []).append(found)
            print(number, "decoded", library, f"{found['samples_per_second']:,.0f}", flush=True)
    return results


def run(
    python: str,
    library: str,
    path: Path,
    workers: int,
    seconds: float,
    program: str = "cooker",
    windows: int = 1,
) -> dict[str, Any]:
    """Measure one library in a fresh process."""
    large = path.name == "large"
    command = [python, str(ROOT / "benchmarks/measure.py"), library, str(path)]
    command += ["--workers", str(workers), "--seconds", str(seconds), "--program", program]
    command += ["--windows", str(windows)]
    command += ["--batch-size", "4" if large else "32", "--shuffle", "16" if large else "1000"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(library)
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{library} on {path}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def environment(library: str) -> dict[str, str]:
    """Return the environment for a library: peers must not find our `megatron.energon`."""
    ours = library == "ours"
    return {key: value for key, value in os.environ.items() if ours or key != "PYTHONPATH"}


def restore(path: Path, workers: int) -> dict[str, Any]:
    """Measure the first batch after a restore."""
    command = [sys.executable, str(ROOT / "benchmarks/restore.py"), str(path)]
    done = subprocess.run(
        [*command, "--workers", str(workers)], capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def machine(measured_on: dict[str, Any], days: set[str], found: Results) -> str:
    """Return what was measured where and when."""
    versions: dict[str, set[str]] = {name: set() for name in LIBRARIES}
    for (_, _, library), rounds in found.items():
        versions[library] |= {each["version"] for each in rounds}
    listed = ", ".join(f"{LIBRARIES[n]} {' and '.join(sorted(v))}" for n, v in versions.items())
    when = " to ".join(sorted({min(days), max(days)}))
    load = load_of([each for rounds in found.values() for each in rounds])
    counts = sorted({len(rounds) for rounds in found.values()})
    processes = " or ".join(map(str, counts))
    return (
        f"Measured on {when} with {measured_on['cores']} cores "
        f"({measured_on['machine']}), Python {measured_on['python']}: {listed}. {load}; the data "
        "were in the page cache. "
        f"Figures are medians of {processes} fresh processes, each the median of "
        f"{measured_on['windows']} windows of {measured_on['seconds']:g} s. "
        "`docs/benchmarks.json` has the results of each process."
    )


def speed_table(found: Results) -> str:
    """Return the table of samples per second."""
    return _program_table(
        found,
        "## The same program on every loader",
        "Samples per second, ± half the range over the processes. Samples are shuffled, undecoded "
        "and in batches of 32 (4 for large) unless noted. LitData reads data converted to its own "
        "format. The ratio is energon to Megatron-Energon. Real programs have hooks, and "
        'Megatron-Energon requires one; "no hook at all" is for comparison with the others.',
        _speed,
        lambda ours, theirs: ratio(ours, theirs, "samples_per_second"),
    )


def cpu_table(found: Results) -> str:
    """Return the table of CPU time."""
    return _program_table(
        found,
        "## CPU time of the same program",
        "CPU milliseconds per thousand samples, over all processes: time that your hooks and "
        "decoders cannot use.",
        _cpu_time,
        lambda ours, theirs: ratio(theirs, ours, "cpu_seconds_per_1000"),
    )


def _program_table(
    found: Results,
    title: str,
    about: str,
    cell: Callable[[Rounds], str],
    times: Callable[[Rounds, Rounds], float],
) -> str:
    names = " | ".join(LIBRARIES.values())
    rows = [
        title,
        "",
        about,
        "",
        f"| program | workers | {names} | ratio |",
        "|---|---|" + "---|" * (len(LIBRARIES) + 1),
    ]
    for program, workers in product(PROGRAMS, WORKERS):
        cells = [
            cell(found[program, workers, library]) if library in program.libraries else "-"
            for library in LIBRARIES
        ]
        if "megatron_energon" in program.libraries:
            ours, theirs = (found[program, workers, name] for name in WITH_ENCODER)
            cells.append(f"**{times(ours, theirs):.1f} x**")
        else:
            cells.append("-")
        rows.append(f"| {program.title} | {workers} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _speed(found: Rounds) -> str:
    return shown(found, "samples_per_second")


def _cpu_time(found: Rounds) -> str:
    figure = f"{_cpu(found):,.3g}" if _cpu(found) < 1000 else f"{_cpu(found):,.0f}"
    return f"{figure} ({spread(found, 'cpu_seconds_per_1000')})"


def _cpu(found: Rounds) -> float:
    return 1000 * middle(found, "cpu_seconds_per_1000")


def memory_table(found: Results) -> str:
    """Return the table of memory."""
    rows = [
        "## Memory",
        "",
        "Proportional set size of all processes in MB, with the cooker that passes samples on.",
        "",
        "| data | workers | " + " | ".join(LIBRARIES.values()) + " |",
        "|---|---|" + "---|" * len(LIBRARIES),
    ]
    for program, workers in product(PROGRAMS, WORKERS):
        if program.name == "cooker":
            rounds = (found[program, workers, library] for library in LIBRARIES)
            cells = " | ".join(shown(each, "pss_mb") for each in rounds)
            rows.append(f"| {program.kind} | {workers} | {cells} |")
    return "\n".join(rows)


def decoded_table(decoded: dict[str, Rounds]) -> str:
    """Return the table of images per second."""
    base = decoded["megatron_energon"]
    rows = [
        "## Decoded images per second",
        "",
        "The same function (simplejpeg, Pillow) decodes JPEGs of about 70 kB to arrays of "
        f"224 x 224 in a hook, with 2 workers. Medians of {len(decoded['ours'])} rounds. The last "
        "column is the function alone in 2 processes.",
        "",
        "| " + " | ".join(DECODERS.values()) + " |",
        "|" + "---|" * len(DECODERS),
    ]
    cells = [
        f"{_speed(decoded[library])} {ratio(decoded[library], base, 'samples_per_second'):.2f} x"
        for library in DECODERS
    ]
    rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def restore_table(restores: dict[str, Rounds]) -> str:
    """Return the table of restores."""
    names = list(restores["0"][0]["seconds"])
    rows = [
        "## Time to the first batch after a restore, in seconds",
        "",
        f"Text dataset; the state has {restores['0'][0]['bytes']:,} bytes in-line. Includes the "
        f"start of workers. Medians of {len(restores['0'])} processes.",
        "",
        "| workers | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for workers, found in restores.items():
        seconds = [each["seconds"] for each in found]
        cells = " | ".join(shown(seconds, name, 3) for name in names)
        rows.append(f"| {workers} | {cells} |")
    return "\n".join(rows)


def start_table(shards: dict[str, Rounds], programs: Results) -> str:
    """Return the table of start-up times."""
    rows = [
        "## Start",
        "",
        "| | import, s | first batch of 32 from 10,000 shards, s |",
        "|---|---|---|",
    ]
    for library, found in shards.items():
        imported = shown(programs[PROGRAMS[0], 0, library], "import_seconds", 2)
        first = shown(found, "first_batch_seconds", 3)
        rows.append(f"| {LIBRARIES[library]} | {imported} | {first} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
