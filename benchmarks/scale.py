"""Measure what grows with ranks, samples and datasets, and write the table of docs/reliability.md.

    python benchmarks/scale.py [--rounds 5]

The plan is arithmetic, so it is run at full size: 1,000 datasets with 10^12 samples on 4,096
ranks. Sizes of states and times to open are measured with few lanes and datasets, and continued
along a straight line. All times are CPU times, and each round has a fresh process. Five rounds
take about a minute.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from energon import ShardWriter, WorkerConfig, get_savable_loader, get_train_dataset
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe
from energon.prepare.dataset import prepare_dataset
from results import Benchmark, Case, Results, in_fresh_process, middle, spread, versions_of

RANKS, WORKERS, SAMPLES, DATASETS, BATCH_SIZE = 4096, 6, 10**12, 1000, 32
LANES = RANKS * WORKERS
FEW, ALL = range(8), range(200)
OTHERS = range(8, 200)


FIGURES = {
    "plan": ("building the plan", 1e3, 0, "ms"),
    "first": ("the first row of a lane, at the start", 1e3, 1, "ms"),
    "late": ("the first row of a lane, after 10¹² samples", 1e3, 1, "ms"),
    "bulk": ("each row, in bulk", 1e6, 2, "µs"),
    "state_of_lane": ("a state, for each lane", 1, 0, "bytes"),
    "state_of_dataset": ("a state, for each dataset", 1, 0, "bytes"),
    "state_of_rank": ("the state of one rank", 1e-3, 0, "kB"),
    "state_of_all": ("the state of all ranks in one file", 1e-6, 1, "MB"),
    "open_dataset": ("opening a dataset on a local disk", 1e3, 1, "ms"),
    "open_all": ("opening all datasets, in each rank", 1, 1, "s"),
}
"""Title, what the figure is multiplied by, digits and unit."""


def main() -> None:
    """Measure, and write the table behind the mark."""
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--one", action="store_true", help="a round, in this process")
    arguments = BENCHMARK.parsed(parser)
    if arguments.one:
        print(json.dumps({**of_plan(), **of_states()}))
        return

    def fresh(case: Case) -> dict[str, Any]:
        return in_fresh_process([sys.executable, __file__, "--one"])

    case = {"datasets": DATASETS, "samples": SAMPLES, "ranks": RANKS, "workers": WORKERS}
    versions = versions_of(sys.executable, energon="energon-loader")
    BENCHMARK.run(arguments, [case], fresh, versions)


def tables(results: Results) -> str:
    """Return the figures with their spread."""
    (case,) = results["cases"]
    found = case["rounds"]
    lines = [
        f"With {DATASETS:,} datasets, 10¹² samples, {RANKS:,} ranks with {WORKERS} workers "
        f"({LANES:,} lanes) and batches of {BATCH_SIZE}; times are CPU time of one core:",
        "",
        "| | |",
        "|---|---|",
    ]
    for name, (title, scale, digits, unit) in FIGURES.items():
        figure = f"{scale * middle(found, name):,.{digits}f} {unit}"
        lines.append(f"| {title} | {figure} ({spread(found, name)}) |")
    return "\n".join(lines)


def of_plan() -> dict[str, float]:
    """Run the plan of the whole run."""
    rng = np.random.default_rng(0)
    sizes = np.maximum(1, rng.dirichlet(np.ones(DATASETS)) * SAMPLES).astype(np.int64)
    leaves = [
        PlanLeaf(f"dataset {n}", int(size), weight=float(size), slice_samples=64)
        for n, size in enumerate(sizes)
    ]
    built, plan = clock(lambda: PlanRecipe("blend", tuple(leaves), 1)(LANES))
    plan.rows(0, 0, 20_000)  # what a process does only once, such as imports
    first, _ = clock(lambda: plan.rows(LANES - 1, 0, 1))
    far = SAMPLES // LANES
    late, _ = clock(lambda: plan.rows(LANES - 1, far, 1))
    bulk, _ = clock(lambda: plan.rows(7, far, 20_000))
    return {"plan": built, "first": first, "late": late, "bulk": bulk / 20_000}


def of_states() -> dict[str, float]:
    """Measure states and openings with few lanes and datasets."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in ALL:
            with ShardWriter(folder / f"{number}/shard-%d.tar") as writer:
                for sample in range(64):
                    writer.write({"__key__": f"{number}_{sample}", "txt": f"text {sample}"})
            prepare_dataset(
                folder / str(number), split_ratio={"train": 1.0}, sample_type="CrudeWebdataset"
            )
        small, _ = opened(folder, FEW, 24)
        wide, seconds = opened(folder, OTHERS, 24)
        many_lanes, _ = opened(folder, FEW, 240)
    per_dataset = (wide - small) / (len(OTHERS) - len(FEW))
    per_lane = (many_lanes - small) / (240 - 24)
    fixed = small - len(FEW) * per_dataset - 24 * per_lane
    rank = fixed + DATASETS * per_dataset + WORKERS * per_lane
    whole = fixed + DATASETS * per_dataset + LANES * per_lane
    each = seconds / len(OTHERS)
    return {
        "state_of_lane": per_lane,
        "state_of_dataset": per_dataset,
        "state_of_rank": rank,
        "state_of_all": whole,
        "open_dataset": each,
        "open_all": each * DATASETS,
    }


def opened(folder: Path, datasets: range, lanes: int) -> tuple[int, float]:
    """Return the bytes of a state of a blend, and the seconds to its first batch."""
    blend = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": [{"path": f"./{n}"} for n in datasets]}},
    }
    path = folder / f"blend-{len(datasets)}.yaml"
    path.write_text(yaml.safe_dump(blend))
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=lanes)

    def start() -> Any:
        loader = get_savable_loader(
            get_train_dataset(
                path, worker_config=config, batch_size=4, virtual_epoch_length=lanes * 4
            )
        )
        batches = iter(loader)
        next(batches)
        return loader, batches

    seconds, (loader, batches) = clock(start)
    for _ in range(lanes):
        next(batches)
    return len(json.dumps(loader.state_dict())), seconds


def clock(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and what it returned.

    It is called once: what has been opened is opened faster.
    """
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


BENCHMARK = Benchmark(
    __file__, tables, conditions="indexes were on a local disk", page="reliability.md"
)

if __name__ == "__main__":
    main()
