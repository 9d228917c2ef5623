"""Measure the time from opening a loader to its first batch after a restore, far into a run.

    python benchmarks/restore.py PATH --workers N

Prints a JSON line with seconds by position: shares of an epoch, and epoch 1,000.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from adapters.ours import loader
from energon.inspect.saved_state import skip_steps

POSITIONS = {"start": 0.0, "1 %": 0.01, "50 %": 0.5, "99 %": 0.99, "epoch 1,000": 1000.0}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    state = state_after(arguments, steps=24)
    samples = next(iter(state["fingerprint"]["leaves"].values()))["samples"]
    seconds = {}
    for name, epochs in POSITIONS.items():
        far = skip_steps(state, int(samples * epochs) // 32, world_size=1).state
        start = time.perf_counter()
        resumed = loader(arguments.path, arguments.workers, 32, 1000, "cooker")
        resumed.restore_state_rank(far)
        next(iter(resumed))
        seconds[name] = time.perf_counter() - start
        resumed.close()
    sys.stdout.write(json.dumps({"seconds": seconds, "bytes": len(json.dumps(state))}) + "\n")


def state_after(arguments: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Return the state of a run that has taken some steps."""
    with loader(arguments.path, arguments.workers, 32, 1000, "cooker") as run:
        for _, _ in zip(range(steps), run, strict=False):
            pass
        state: dict[str, Any] = run.save_state_rank()
    return state


if __name__ == "__main__":
    main()
