"""Run all benchmarks side by side with the installed peers, and write docs/benchmarks.md.

    benchmarks/peers.sh
    python benchmarks/run.py [--rounds 3] [--scale 1.0] [--data FOLDER] [--peers PYTHON]

Every figure comes from a fresh process. The libraries take turns within a round, so that all
see the same machine; the table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from data import SAMPLES, SHARDS, write

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {
    "ours": "energon (this)",
    "megatron_energon": "Megatron-Energon",
    "web_dataset": "webdataset",
    "lit_data": "LitData",
}
KINDS = ("text", "image", "interleaved", "large")
DECODERS = LIBRARIES | {"bare": "the decoder alone"}
MARK = "<!-- made by benchmarks/run.py -->"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks" / "data-made")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    arguments = parser.parse_args()
    pythons = dict.fromkeys(DECODERS, arguments.peers) | {"ours": sys.executable}
    prepare_seconds = make_data(arguments.data, arguments.scale, arguments.peers)
    raw = measure_raw(arguments.data, pythons, arguments.rounds)
    decoded = measure_decoded(arguments.data / "image", pythons, arguments.rounds)
    restores = {workers: restore(arguments.data / "text", workers) for workers in (0, 2)}
    shards = {
        library: run(pythons[library], library, arguments.data / "shards10k", 0, 1.0)
        for library in LIBRARIES
        if library != "lit_data"
    }
    page = ROOT / "docs" / "benchmarks.md"
    head = page.read_text().partition(MARK)[0] if page.exists() else "# Benchmarks\n\n"
    tables = [
        machine(raw),
        raw_table(raw),
        decoded_table(decoded),
        restore_table(restores),
        start_table(shards, raw),
        prepare_table(prepare_seconds),
    ]
    page.write_text(head + MARK + "\n\n" + "\n\n".join(tables) + "\n")


def make_data(folder: Path, scale: float, peers: str) -> dict[str, dict[str, float]]:
    """Write and prepare the datasets; return seconds of `prepare` by kind and library."""
    seconds: dict[str, dict[str, float]] = {}
    for kind in (*KINDS, "shards10k"):
        source = "text" if kind == "shards10k" else kind
        count = int((20_000 if kind == "shards10k" else SAMPLES[kind]) * scale)
        shards = int(SHARDS[kind] * scale) if kind == "shards10k" else SHARDS[kind]
        write(folder / kind, source, num_samples=max(100, count), num_shards=max(1, shards))
        shutil.rmtree(folder / kind / ".nv-meta", ignore_errors=True)
        for index in [*(folder / kind).glob("*.idx"), *(folder / kind).glob("*.parts")]:
            index.unlink()
        arguments = ["prepare", str(folder / kind), "--non-interactive", "--num-workers", "2"]
        arguments += ["--split-parts", "train:.*", "--sample-type", "CrudeWebdataset"]
        theirs = [str(Path(peers).parent / "energon"), *arguments, "--force-overwrite"]
        ours = [sys.executable, "-m", "energon.cli.main", *arguments, "--force-overwrite"]
        seconds[kind] = {}
        for library, command in (("megatron_energon", theirs), ("ours", ours)):
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, env=environment(library))
            seconds[kind][library] = time.perf_counter() - start
        if kind in KINDS:
            convert = [peers, str(ROOT / "benchmarks/adapters/lit_data.py"), str(folder / kind)]
            subprocess.run(convert, check=True, capture_output=True, env=environment("lit_data"))
    return seconds


def measure_raw(
    folder: Path, pythons: dict[str, str], rounds: int
) -> dict[tuple[str, int, str], list[dict[str, Any]]]:
    """Return the results by kind, workers and library."""
    results: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for number in range(rounds):
        for kind in KINDS:
            for workers in (0, 2):
                for library in LIBRARIES:
                    found = run(pythons[library], library, folder / kind, workers, 3.0)
                    results.setdefault((kind, workers, library), []).append(found)
                    rate = found["samples_per_second"]
                    print(number, kind, workers, library, f"{rate:,.0f}", flush=True)
    return results


def measure_decoded(
    path: Path, pythons: dict[str, str], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the results by library."""
    results: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for library in DECODERS:
            found = run(pythons[library], library, path, 2, 5.0, "--decode")
            results.setdefault(library, []).append(found)
            print(number, "decoded", library, f"{found['samples_per_second']:,.0f}", flush=True)
    return results


def run(
    python: str, library: str, path: Path, workers: int, seconds: float, *more: str
) -> dict[str, Any]:
    """Measure one library in a fresh process."""
    large = path.name == "large"
    command = [python, str(ROOT / "benchmarks/measure.py"), library, str(path)]
    command += ["--workers", str(workers), "--seconds", str(seconds)]
    command += [
        "--batch-size",
        "4" if large else "32",
        "--shuffle",
        "16" if large else "1000",
        *more,
    ]
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


def machine(raw: dict[tuple[str, int, str], list[dict[str, Any]]]) -> str:
    """Return what was measured where."""
    versions = {name: raw[("text", 0, name)][0]["version"] for name in LIBRARIES}
    listed = ", ".join(f"{LIBRARIES[name]} {version}" for name, version in versions.items())
    return (
        f"Measured on {date.today()} with {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}: {listed}. Medians of "
        f"{len(raw[('text', 0, 'ours')])} rounds; every figure from a fresh process; data in the "
        "page cache."
    )


def raw_table(raw: dict[tuple[str, int, str], list[dict[str, Any]]]) -> str:
    """Return the table of samples per second."""
    rows = [
        "## Raw samples per second",
        "",
        "Undecoded samples as dicts of bytes, shuffled, in lists of 32 (4 for large). In brackets: "
        "multiple of Megatron-Energon, and peak proportional memory of all processes.",
        "",
        "| data | workers | " + " | ".join(LIBRARIES.values()) + " |",
        "|---|---|" + "---|" * len(LIBRARIES),
    ]
    for kind in KINDS:
        for workers in (0, 2):
            cells = []
            base = _median(raw[(kind, workers, "megatron_energon")], "samples_per_second")
            for library in LIBRARIES:
                found = raw[(kind, workers, library)]
                rate = _median(found, "samples_per_second")
                memory = _median(found, "pss_mb")
                cells.append(f"{rate:,.0f} ({rate / base:.1f} x, {memory:.0f} MB)")
            rows.append(f"| {kind} | {workers} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def decoded_table(decoded: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table of pictures per second."""
    base = _median(decoded["megatron_energon"], "samples_per_second")
    rows = [
        "## Decoded pictures per second",
        "",
        "JPEG of about 70 kB to arrays of 224 x 224, by the same function (simplejpeg, Pillow) in "
        "a hook of each library, with 2 workers. The last column is the function in 2 processes "
        "that neither load nor send anything.",
        "",
        "| " + " | ".join(DECODERS.values()) + " |",
        "|" + "---|" * len(DECODERS),
    ]
    rates = [_median(decoded[library], "samples_per_second") for library in DECODERS]
    rows.append("| " + " | ".join(f"{rate:,.0f} ({rate / base:.2f} x)" for rate in rates) + " |")
    return "\n".join(rows)


def restore_table(restores: dict[int, dict[str, Any]]) -> str:
    """Return the table of restores."""
    names = list(restores[0]["seconds"])
    rows = [
        "## Time to the first batch after a restore, in seconds",
        "",
        f"Text dataset; the state has {restores[0]['bytes']} bytes in-line. With workers, the time "
        "includes starting them.",
        "",
        "| workers | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for workers, found in restores.items():
        cells = " | ".join(f"{found['seconds'][name]:.3f}" for name in names)
        rows.append(f"| {workers} | {cells} |")
    return "\n".join(rows)


def start_table(
    shards: dict[str, dict[str, Any]], raw: dict[tuple[str, int, str], list[dict[str, Any]]]
) -> str:
    """Return the table of start-up times."""
    rows = [
        "## Start",
        "",
        "| | import, s | first batch of 32 from 10,000 shards, s |",
        "|---|---|---|",
    ]
    for library, found in shards.items():
        imported = _median(raw[("text", 0, library)], "import_seconds")
        rows.append(
            f"| {LIBRARIES[library]} | {imported:.2f} | {found['first_batch_seconds']:.3f} |"
        )
    return "\n".join(rows)


def prepare_table(seconds: dict[str, dict[str, float]]) -> str:
    """Return the table of preparation times."""
    rows = [
        "## `energon prepare`, whole command with 2 processes, in seconds",
        "",
        "| data | energon (this) | Megatron-Energon |",
        "|---|---|---|",
    ]
    for kind, found in seconds.items():
        rows.append(f"| {kind} | {found['ours']:.2f} | {found['megatron_energon']:.2f} |")
    return "\n".join(rows)


def _median(results: list[dict[str, Any]], name: str) -> float:
    return median(result[name] for result in results)


if __name__ == "__main__":
    main()
