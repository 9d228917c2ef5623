"""Open a metadataset and draw batches, with whichever `megatron.energon` is installed.

    python benchmarks/blend_start.py METADATASET

Prints a JSON line: seconds from the call to the first batch and those of the CPU, then the open
descriptors and the peak of memory after 300 batches.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_train_dataset,
    stateless,
)

BATCHES = 300


@stateless
def cook(sample: dict) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


class Texts(DefaultTaskEncoder):
    cookers = (Cooker(cook),)


def main() -> None:
    """Run and print."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    start, start_cpu = time.perf_counter(), time.process_time()
    dataset = get_train_dataset(
        sys.argv[1],
        worker_config=config,
        batch_size=32,
        task_encoder=Texts(),
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
    )
    batches = iter(get_loader(dataset))
    next(batches)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    for _ in range(BATCHES):
        next(batches)
    found = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
