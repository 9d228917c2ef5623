"""Measure the time from opening a loader to its first batch after a restore, far into a run.

    python benchmarks/restore.py PATH --workers N

Prints a JSON line with seconds by position: shares of an epoch, and epoch 1,000.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from typing import Any

from adapters.ours import loader

POSITIONS = {"start": 0.0, "1 %": 0.01, "50 %": 0.5, "99 %": 0.99, "epoch 1,000": 1000.0}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    state = state_after(arguments, 1)
    samples = next(iter(state["fingerprint"]["leaves"].values()))["samples"]
    if moved(state, 10) != state_after(arguments, 10):
        raise RuntimeError("a state that was moved differs from one that a run came to")
    seconds = {}
    for name, epochs in POSITIONS.items():
        far = moved(state, int(samples * epochs) // 32 // state["lanes"])
        start = time.perf_counter()
        resumed = loader(arguments.path, arguments.workers, 32, 1000, "cooker")
        resumed.restore_state_rank(far)
        next(iter(resumed))
        seconds[name] = time.perf_counter() - start
        resumed.close()
    sys.stdout.write(json.dumps({"seconds": seconds, "bytes": len(json.dumps(state))}) + "\n")


def state_after(arguments: argparse.Namespace, batches: int) -> dict[str, Any]:
    """Return the state when every lane has given `batches` batches."""
    with_lanes = loader(arguments.path, arguments.workers, 32, 1000, "cooker")
    iterator = iter(with_lanes)
    for _ in range(batches * max(1, arguments.workers)):
        next(iterator)
    state: dict[str, Any] = with_lanes.save_state_rank()
    with_lanes.close()
    return state


def moved(state: dict[str, Any], batches: int) -> dict[str, Any]:
    """Return `state` as it is when every lane has given `batches` batches.

    Going there would take minutes for the last of the positions.
    """
    state = copy.deepcopy(state)
    for position in state["positions"].values():
        position["batches"] = position["epoch_batches"] = batches
        position["state"]["read"] = batches * 32
        position["state"]["inner"]["inner"]["row"] = batches * 32
    return state


if __name__ == "__main__":
    main()
