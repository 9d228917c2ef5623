"""How far a loader has come at some moments, and figures for the time between two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from energon.loader.monitoring.profiler import IDLE, REBUILD, TRANSFER, Spent, split_accounts
from energon.stages.base import State
from energon.surroundings import CpuTimes


@dataclass(frozen=True)
class WorkerMark:
    """What is known of a worker at some moment.

    Args:
        name: How messages call it.
        lanes: Those that it hosts.
        pid: Of its process; None before it is started.
        ready: How many batches wait to be taken.
        counts: What happened to it, by name.
        cpu: The CPU times of its process; None if they are those of the trainer, too, or the
            system does not tell.
    """

    name: str
    lanes: tuple[int, ...]
    pid: int | None
    ready: int
    counts: Mapping[str, int]
    cpu: CpuTimes | None


class LaneMark(NamedTuple):
    """Statistics and state of a lane at some moment."""

    counts: Mapping[str, int]
    state: State | bytes | None


@dataclass(frozen=True)
class LoaderMark:
    """How far a loader was at some moment. Holds what others have made, and copies nothing.

    Args:
        time: The moment, in seconds.
        waited: How long the trainer had waited for batches.
        batches: How many it had received.
        lanes: Statistics and state of each lane.
        workers: What is known of each worker.
    """

    time: float
    waited: float
    batches: int
    lanes: Mapping[int, LaneMark]
    workers: Sequence[WorkerMark]

    def counts(self, lanes: Sequence[int] | None = None) -> Counter[str]:
        """Return the statistics of some lanes, or of all that is known of the loader."""
        total: Counter[str] = Counter()
        for lane, about in self.lanes.items():
            if lanes is None or lane in lanes:
                total.update(about.counts)
        for worker in self.workers if lanes is None else ():
            total.update(worker.counts)
        return total


DrawnAt = Callable[[LoaderMark], Mapping[str, Mapping[str, Any]]]
"""Returns for each dataset what was drawn up to a mark, in the order of their numbers."""


def figures_between(before: LoaderMark, after: LoaderMark, draws: DrawnAt | None) -> dict[str, Any]:
    """Return the figures for the time between two marks, as JSON.

    Args:
        before: The earlier mark.
        after: The later one.
        draws: Tells what was drawn of each dataset; None if nobody can.
    """
    seconds = after.time - before.time
    counts = after.counts()
    counts.subtract(before.counts())
    spent, counted = split_accounts(counts)
    idle, rebuilt = spent.pop(Spent(IDLE), 0.0), spent.pop(Spent(REBUILD), 0.0)
    busy = sum(spent.values())
    if rebuilt:
        spent[Spent(TRANSFER)] = spent.get(Spent(TRANSFER), 0.0) + rebuilt
    datasets = {} if draws is None else _drawn(draws(before), draws(after))
    samples = counted.get("samples", 0)
    num_bytes = sum(each["bytes"] for each in datasets.values())
    waited = min(seconds, after.waited - before.waited)
    found: dict[str, Any] = {
        "seconds": seconds,
        "batches": after.batches - before.batches,
        "samples": samples,
        "bytes": num_bytes,
        "batches_per_second": _ratio(after.batches - before.batches, seconds),
        "samples_per_second": _ratio(samples, seconds),
        "bytes_per_second": _ratio(num_bytes, seconds),
        "wait_share": _ratio(waited, seconds),
        "busy_seconds": busy,
        "idle_seconds": idle,
        "rebuild_seconds": rebuilt,
        "busy_share": _ratio(busy, busy + idle),
        "restarts": counted.get("worker_deaths", 0) + counted.get("worker_timeouts", 0),
        "stages": _stages(spent, busy + rebuilt, samples, datasets),
        "stores": _stores(counted),
        "cache": {name: counted.get(f"cache {name}", 0) for name in ("hits", "misses", "failed")},
    }
    return found


def worker_figures(before: LoaderMark, after: LoaderMark) -> list[dict[str, Any]]:
    """Return for each worker how busy it was between two marks, and how it is now."""
    seconds = after.time - before.time
    earlier = {worker.name: worker for worker in before.workers}
    found = []
    for worker in after.workers:
        counts = after.counts(worker.lanes)
        counts.subtract(before.counts(worker.lanes))
        spent, _ = split_accounts(counts)
        idle = spent.pop(Spent(IDLE), 0.0)
        busy = sum(spent.values())
        then = earlier.get(worker.name)
        used = waits = None
        if then and then.pid == worker.pid and worker.cpu and then.cpu:
            used = _ratio(worker.cpu.used - then.cpu.used, seconds)
            waits = _ratio(worker.cpu.waited - then.cpu.waited, seconds)
        found.append(
            {
                "name": worker.name,
                "pid": worker.pid,
                "ready_batches": worker.ready,
                "busy_share": _ratio(busy, busy + idle),
                "busy_seconds": busy,
                "cpu_share": used,
                "cpu_wait_share": waits,
            }
        )
    return found


def _drawn(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, int]]:
    return {
        name: {
            each: int(about[each]) - int(before.get(name, {}).get(each, 0))
            for each in ("samples", "bytes")
        }
        for name, about in after.items()
    }


def _stages(
    spent: Mapping[Spent, float],
    busy: float,
    samples: int,
    datasets: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Return what each stage has taken, the longest first."""
    names = list(datasets)
    found: dict[str, Any] = {}
    for (stage, leaf), seconds in spent.items():
        about = found.setdefault(stage, {"seconds": 0.0, "datasets": {}})
        about["seconds"] += seconds
        if 0 <= leaf < len(names):
            of_dataset = {"seconds": seconds}
            drawn = datasets[names[leaf]]["samples"]
            if drawn > 0:
                of_dataset["seconds_per_sample"] = seconds / drawn
            about["datasets"][names[leaf]] = of_dataset
    for about in found.values():
        about["share"] = _ratio(about["seconds"], busy)
        about["seconds_per_sample"] = _ratio(about["seconds"], samples)
    return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))


def _stores(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return what was asked of each store."""
    found: dict[str, dict[str, int]] = {}
    for name, count in counts.items():
        if name.startswith("storage ") and "://" in name and count:
            origin, _, what = name.removeprefix("storage ").partition(" ")
            found.setdefault(origin, {})[what] = count
    return found


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
