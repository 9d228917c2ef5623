"""Measure how batches reach a GPU, and write docs/benchmarks_pinned.md. Needs CUDA.

    python benchmarks/pinned.py [--rounds 3] [--only WORD] [--data FOLDER] [--peers PYTHON]

One program for all loaders: workers decode images that are stored as arrays, batches of 64 are
stacked, and the trainer copies each batch to the device without waiting, and then queues a training
step there. The steps alone show what the GPU allows; copies of one pinned batch, what the bus does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from results import (
    Benchmark,
    Case,
    Results,
    in_fresh_process,
    middle,
    rounds_of,
    shown,
    versions_of,
)

SIDE, BATCH = 224, 64
SAMPLES, PER_SHARD = 2_000, 250
LOADERS = {
    "ours": "energon (this)",
    "ours-unpinned": "energon (this), `pin_memory=False`",
    "megatron_energon": "Megatron-Energon",
    "web_dataset": "webdataset",
    "limit": "no loader: one batch over and over",
}
PEERS = ("megatron_energon", "web_dataset")
WORKERS = (4, 8)
KINDS = {"uint8": "9.6 MB", "float32": "38.5 MB"}
STEPS_MS = {"copies": 0, "training": 30}
MEASURE = Path(__file__).parent / "adapters" / "on_device.py"


def main() -> None:
    """Measure, and write the results and the page."""
    parser = BENCHMARK.parser(__doc__)
    arguments = BENCHMARK.parsed(parser)
    folder = arguments.data / "arrays"
    if not folder.exists():
        write(folder)

    def measure(case: Case) -> dict[str, Any]:
        python = arguments.peers if case["loader"] in PEERS else sys.executable
        words = [str(each) for each in case.values()]
        step = str(STEPS_MS[case["what"]])
        return in_fresh_process(
            [python, str(MEASURE), str(folder), step, *words],
            peer=case["loader"] in PEERS,
            seconds=120,
        )

    import torch

    versions = versions_of(sys.executable, energon="energon-loader", torch="torch")
    versions |= versions_of(
        arguments.peers, **{"Megatron-Energon": "megatron-energon", "webdataset": "webdataset"}
    )
    BENCHMARK.run(arguments, cases(), measure, {torch.cuda.get_device_name(): "", **versions})


def cases() -> list[Case]:
    """Return what is measured."""
    return [
        {"what": what, "kind": kind, "workers": workers, "loader": loader}
        for what in STEPS_MS
        for kind in KINDS
        for workers in WORKERS
        for loader in LOADERS
    ]


def tables(results: Results) -> str:
    """Return the tables of the page."""
    parts = []
    for kind, size in KINDS.items():
        parts.append(
            f"Batches of {BATCH} images of {SIDE} x {SIDE} as {kind}, {size}:\n\n"
            "| loader | workers | to the device, GB/s | of a step of 30 ms, the trainer is "
            "blocked | training, of the speed without loading |\n|---|---:|---:|---:|---:|"
        )
        for workers in WORKERS:
            for loader, title in LOADERS.items():
                of = {"kind": kind, "workers": workers, "loader": loader}
                copies = rounds_of(results, what="copies", **of)
                training = rounds_of(results, what="training", **of)
                parts.append(
                    f"| {title} | {workers} | {shown(copies, 'gigabytes_per_second', 1)} | "
                    f"{shown(training, 'blocked_ms', 2, unit=' ms')} | "
                    f"{middle(training, 'of_the_steps'):.1%} |"
                )
        parts.append("")
    return "\n".join(parts).rstrip()


def write(folder: Path) -> None:
    """Write and prepare images as arrays."""
    import io

    import numpy as np

    from energon import ShardWriter
    from energon.prepare.dataset import prepare_dataset

    rng = np.random.default_rng(0)
    with ShardWriter(f"{folder}/shards/%04d.tar", maxcount=PER_SHARD) as writer:
        for number in range(SAMPLES):
            buffer = io.BytesIO()
            np.save(buffer, rng.integers(0, 255, (3, SIDE, SIDE), dtype=np.uint8))
            writer.write({"__key__": f"image_{number:05}", "npy": buffer.getvalue()})
    prepare_dataset(folder, split_parts=["train:.*"], sample_type="CrudeWebdataset")


BENCHMARK = Benchmark(__file__, tables)

if __name__ == "__main__":
    main()
