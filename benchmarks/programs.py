"""Measure a whole vision-language program, for docs/benchmarks.md.

    benchmarks/peers.sh
    python benchmarks/programs.py [--rounds 3] [--only WORD] [--data FOLDER] [--peers PYTHON]

Both libraries run `adapters/vision_language.py` in the environment of the peers, so that the
processor of Hugging Face, torch and Pillow are the same, each time in a fresh process. Three
rounds take about five minutes.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import data
from energon.prepare.dataset import prepare_dataset
from results import (
    ROOT,
    Benchmark,
    Case,
    Results,
    in_fresh_process,
    ratio,
    rounds_of,
    shown,
    versions_of,
)

OURS, PEER, HOOKS = "energon (this)", "Megatron-Energon", "the hooks alone"
CASES = [(0, HOOKS), *product((0, 2), (OURS, PEER))]
SAMPLES, SHARDS, SECONDS = 3000, 6, 5.0
COLUMNS = (
    *("workers", "library", "first batch, s", "images per second", "CPU ms per image"),
    *("speed, relative to Megatron-Energon", "time to the first batch, relative"),
)


def main() -> None:
    """Measure, and write the page."""
    arguments = BENCHMARK.parsed(BENCHMARK.parser(__doc__, data="programs"))
    images = make_images(arguments.data)

    def measure(case: Case) -> dict[str, Any]:
        is_peer = case["library"] == PEER
        command = [arguments.peers, "-W", "ignore"]
        command += [str(ROOT / "benchmarks/adapters/vision_language.py"), str(images)]
        command += ["--workers", str(case["workers"]), "--seconds", str(SECONDS)]
        command += ["--by-hand"] * (case["library"] == HOOKS)
        ours = {} if is_peer else {"PYTHONPATH": str(ROOT / "src")}
        return in_fresh_process(command, peer=is_peer, **ours)

    distributions = {"Megatron-Energon": "megatron-energon"}
    distributions |= {name: name for name in ("torch", "transformers", "pillow")}
    versions = versions_of(arguments.peers, **distributions)
    cases = [{"workers": workers, "library": library} for workers, library in CASES]
    BENCHMARK.run(arguments, cases, measure, versions, seconds=SECONDS)


def make_images(folder: Path) -> Path:
    """Return a prepared dataset of JPEGs with captions, made on first use."""
    path = folder / "image"
    if not (path / ".nv-meta/dataset.yaml").exists():
        data.write(path, "image", num_samples=SAMPLES, num_shards=SHARDS)
        prepare_dataset(path, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    return path


def tables(results: Results) -> str:
    """Return a row for each library and number of workers."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    measured = {(case["workers"], case["library"]) for case in results["cases"]}
    for workers, library in filter(measured.__contains__, CASES):
        rounds, peer = (
            rounds_of(results, workers=workers, library=name) for name in (library, PEER)
        )
        cells = [
            str(workers),
            library,
            shown(rounds, "first_batch_seconds", 1),
            shown(rounds, "images_per_second"),
            shown(rounds, "cpu_seconds_per_image", 1, scale=1000),
            f"{ratio(rounds, peer, 'images_per_second'):.1f} x",
            f"{ratio(rounds, peer, 'first_batch_seconds'):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


BENCHMARK = Benchmark(__file__, tables, page="benchmarks.md")

if __name__ == "__main__":
    main()
