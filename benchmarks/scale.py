"""Measure what grows with ranks, samples and datasets, and write the table of docs/scale.md.

    python benchmarks/scale.py

The plan is arithmetic, so it is run at full size: 1,000 datasets with 10^12 samples on 4,096
ranks. Sizes of states and times to open are measured with few lanes and datasets, and continued
along a straight line. All times are CPU times.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from energon import ShardWriter, WorkerConfig, get_savable_loader, get_train_dataset
from energon.plan.build import blend_plan
from energon.plan.leaves.leaf import PlanLeaf
from energon.prepare.dataset import prepare_dataset

PAGE = Path(__file__).parents[1] / "docs/scale.md"
MARK = "<!-- made by benchmarks/scale.py -->"
RANKS, WORKERS, SAMPLES, DATASETS, BATCH_SIZE = 4096, 6, 10**12, 1000, 32
LANES = RANKS * WORKERS
FEW, ALL = range(8), range(200)
OTHERS = range(8, 200)


def main() -> None:
    """Measure, and write the table behind the mark."""
    rows = {**of_plan(), **of_states()}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    head, _, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(
        f"{head}{MARK}\n\nMeasured on {date.today()} with {DATASETS:,} datasets, 10¹² "
        f"samples, {RANKS:,} ranks with {WORKERS} workers ({LANES:,} lanes) and batches of "
        f"{BATCH_SIZE}, in CPU time of one core.\n\n| | |\n|---|---|\n{table}\n"
    )


def of_plan() -> dict[str, str]:
    """Run the plan of the whole run."""
    rng = np.random.default_rng(0)
    sizes = np.maximum(1, rng.dirichlet(np.ones(DATASETS)) * SAMPLES).astype(np.int64)
    leaves = [
        PlanLeaf(f"dataset {n}", int(size), weight=float(size), slice_samples=64)
        for n, size in enumerate(sizes)
    ]
    built, plan = clock(lambda: blend_plan(leaves, lanes=LANES, seed=1), 1)
    first, _ = clock(lambda: plan.rows(LANES - 1, 0, 1))
    far = SAMPLES // LANES
    late, _ = clock(lambda: plan.rows(LANES - 1, far, 1))
    bulk, _ = clock(lambda: plan.rows(7, far, 20_000), 3)
    return {
        "building the plan": f"{built * 1e3:,.0f} ms",
        "the first row of a lane, at the start": f"{first * 1e3:.1f} ms",
        "the first row of a lane, after 10¹² samples": f"{late * 1e3:.1f} ms",
        "each row, in bulk": f"{bulk / 20_000 * 1e6:.2f} µs",
    }


def of_states() -> dict[str, str]:
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
        "a state, for each lane": f"{per_lane:,.0f} bytes",
        "a state, for each dataset": f"{per_dataset:,.0f} bytes",
        "the state of one rank": f"{rank / 1e3:,.0f} kB",
        "the state of all ranks in one file": f"{whole / 1e6:.1f} MB",
        "opening a dataset on a local disk": f"{each * 1e3:.1f} ms",
        "opening all datasets, in each rank": f"{each * DATASETS:.1f} s",
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

    # Once: what is opened again is opened faster.
    seconds, (loader, batches) = clock(start, 1)
    for _ in range(lanes):
        next(batches)
    return len(json.dumps(loader.state_dict())), seconds


def clock(function: Callable[[], Any], rounds: int = 5) -> tuple[float, Any]:
    """Return the median CPU seconds of a call, and what it returned last."""
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        result = function()
        taken.append(time.process_time() - start)
    return statistics.median(taken), result


if __name__ == "__main__":
    main()
