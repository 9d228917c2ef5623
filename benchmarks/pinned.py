"""Measure how batches reach a GPU, for docs/benchmarks_parts.md. Needs CUDA.

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
    rounds_of,
    shown,
    versions_of,
)

SIDE, BATCH = 224, 64
SAMPLES, PER_SHARD = 2_000, 250
STEP_MS = 30
LOADERS = {
    "ours": "energon (this)",
    "megatron_energon": "Megatron-Energon",
    "web_dataset": "webdataset",
    "none": "no loader: one pinned batch over and over",
}
PEERS = ("megatron_energon", "web_dataset")
KINDS = {"uint8": ("9.6 MB", 4), "float32": ("38.5 MB", 8)}
"""Their size, and with how many workers they are loaded."""
PROGRAM = Path(__file__).parent / "adapters" / "on_device.py"


def main() -> None:
    """Measure, and write the results and the page."""
    arguments = BENCHMARK.parsed(BENCHMARK.parser(__doc__))
    folder = arguments.data / "arrays"
    if not folder.exists():
        write(folder)

    def measure(case: Case) -> dict[str, Any]:
        is_peer = case["loader"] in PEERS
        python = arguments.peers if is_peer else sys.executable
        words = [str(each) for each in case.values()]
        command = [python, str(PROGRAM), str(folder), str(STEP_MS), *words]
        return in_fresh_process(command, peer=is_peer, seconds=120)

    versions = versions_of(sys.executable, energon="energon-loader", torch="torch")
    peers = {"Megatron-Energon": "megatron-energon", "webdataset": "webdataset"}
    BENCHMARK.run(arguments, cases(), measure, versions | versions_of(arguments.peers, **peers))


def cases() -> list[Case]:
    """Return what is measured."""
    return [
        {"kind": kind, "workers": workers, "loader": loader}
        for kind, (_, workers) in KINDS.items()
        for loader in LOADERS
    ]


def tables(results: Results) -> str:
    """Return the tables of the page."""
    parts = []
    for kind, (size, workers) in KINDS.items():
        parts.append(
            f"Batches of {BATCH} images of {SIDE} x {SIDE} as {kind}, {size}, {workers} workers:"
            "\n\n| loader | to the device without a step, GB/s | trainer blocked, per step "
            "| speed of training, of that without loading |\n|---|---:|---:|---:|"
        )
        for loader, title in LOADERS.items():
            rounds = rounds_of(results, kind=kind, loader=loader)
            parts.append(
                f"| {title} | {shown(rounds, 'gigabytes_per_second', 1)} | "
                f"{shown(rounds, 'blocked_ms', 2, unit=' ms')} | "
                f"{shown(rounds, 'of_the_speed', 1, scale=100, unit='%')} |"
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


BENCHMARK = Benchmark(
    __file__, tables, conditions="the GPU was an NVIDIA H200, and the data were in the page cache"
)

if __name__ == "__main__":
    main()
