"""Measure the time from opening a loader to its first batch after a restore, far into a run.

    python benchmarks/restore.py PATH --workers N

Prints a JSON line with seconds by position: shares of an epoch, and epoch 1,000.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from adapters.ours import loader

POSITIONS = {"start": 0.0, "1 %": 0.01, "50 %": 0.5, "99 %": 0.99, "epoch 1,000": 1000.0}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    first = loader(arguments.path, arguments.workers, 32, 1000)
    next(iter(first))
    state = first.state_dict()
    first.close()
    samples = next(iter(state["fingerprint"]["leaves"].values()))["samples"]
    seconds = {}
    for name, epochs in POSITIONS.items():
        batches = int(samples * epochs) // 32 // state["lanes"]
        for position in state["positions"].values():
            position["batches"] = batches
            _set_row(position["state"], batches * 32)
        start = time.perf_counter()
        resumed = loader(arguments.path, arguments.workers, 32, 1000)
        resumed.load_state_dict(state)
        next(iter(resumed))
        seconds[name] = time.perf_counter() - start
        resumed.close()
    sys.stdout.write(json.dumps({"seconds": seconds, "bytes": len(json.dumps(state))}) + "\n")


def _set_row(state: dict, row: int) -> None:
    while "inner" in state:
        state = state["inner"]
    state["row"] = row


if __name__ == "__main__":
    main()
