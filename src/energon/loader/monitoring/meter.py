"""The progress of a loader at some moments, and figures for the time between two of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from energon.loader.monitoring.accounts import (
    BATCHES,
    CHOSEN,
    ELSEWHERE,
    GIL,
    IDLE,
    OTHER,
    READ,
    REBUILD,
    TRANSFER,
    CpuTimes,
    Spent,
    Times,
    split_accounts,
)
from energon.stages.base import State


@dataclass(frozen=True)
class WorkerMark:
    """What is known about a worker at some moment.

    Args:
        name: Its name in messages.
        lanes: The lanes that it hosts.
        pid: Its process id; None before it is started.
        ready: How many finished batches are ready to be taken.
        counts: Counts of its events, by name.
        thread: System id of the thread that makes its batches.
        cpu: CPU times of that thread, which may be the trainer's; None if the system does not
            report them.
    """

    name: str
    lanes: tuple[int, ...]
    pid: int | None
    ready: int
    counts: Mapping[str, int]
    thread: int | None
    cpu: CpuTimes | None


class LaneMark(NamedTuple):
    """Statistics and state of a lane at some moment."""

    counts: Mapping[str, int]
    state: State | bytes | None


@dataclass(frozen=True)
class LoaderMark:
    """The progress of a loader at some moment. It refers to existing objects and copies nothing.

    Args:
        time: The moment, in seconds.
        waited: How long the trainer had waited for batches.
        batches: How many batches it had received.
        lanes: Statistics and state of each lane.
        workers: What is known about each worker.
        is_inline: Whether the trainer makes batches itself while it waits for them.
    """

    time: float
    waited: float
    batches: int
    lanes: Mapping[int, LaneMark]
    workers: Sequence[WorkerMark]
    is_inline: bool

    def counts(self, lanes: Sequence[int] | None = None) -> Counter[str]:
        """Return the statistics of some lanes, or of the whole loader."""
        total: Counter[str] = Counter()
        for lane, about in self.lanes.items():
            if lanes is None or lane in lanes:
                total.update(about.counts)
        for worker in self.workers if lanes is None else ():
            total.update(worker.counts)
        return total


DrawnAt = Callable[[LoaderMark], Mapping[str, Mapping[str, Any]]]
"""Returns what was drawn of each dataset up to a mark, ordered by dataset number."""


def figures_between(before: LoaderMark, after: LoaderMark, draws: DrawnAt | None) -> dict[str, Any]:
    """Return the figures for the time between two marks, as JSON.

    Args:
        before: The earlier mark.
        after: The later one.
        draws: Returns what was drawn of each dataset; None if that is unknown.
    """
    seconds = after.time - before.time
    counts = after.counts()
    counts.subtract(before.counts())
    times, counted = split_accounts(counts)
    rebuilt = times.pop(Spent(REBUILD), Times()).seen
    gil = times.pop(Spent(GIL), Times()).seen
    gil_share = _ratio(gil, sum(each.seen for each in times.values()))
    spent, idle = _seconds_by_stage(times, before, after, after.workers)
    busy = sum(spent.values())
    if rebuilt:
        spent[Spent(TRANSFER)] = spent.get(Spent(TRANSFER), 0.0) + rebuilt
    datasets = {} if draws is None else _drawn(draws(before), draws(after))
    samples = counted.get("samples", 0)
    num_bytes = sum(each["bytes"] for each in datasets.values())
    waited = _waited(before, after)
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
        "gil_share": gil_share,
        "restarts": counted.get("worker_deaths", 0) + counted.get("worker_timeouts", 0),
        "stages": _stages(spent, times, busy + rebuilt, samples, datasets),
        "stores": _stores(counted),
        "cache": {name: counted.get(f"cache {name}", 0) for name in ("hits", "misses", "failed")},
    }
    return found


def _waited(before: LoaderMark, after: LoaderMark) -> float:
    return min(after.time - before.time, after.waited - before.waited)


def _seconds_by_stage(
    times: Mapping[Spent, Times],
    before: LoaderMark,
    after: LoaderMark,
    workers: Sequence[WorkerMark],
) -> tuple[dict[Spent, float], float]:
    """Return the seconds that were spent on what, and those without work.

    Args:
        times: What looks have found, and what was measured.
        before: The earlier mark,
        after: and the later one.
        workers: Whose time it is, as of the later mark.
    """
    seen = {spent: each.seen for spent, each in times.items() if each.seen}
    outside = {spent: seen.pop(spent, 0.0) for spent in (Spent(IDLE), Spent(TRANSFER))}
    seen.pop(Spent(ELSEWHERE), None)
    seconds = after.time - before.time
    if after.is_inline:
        known = _waited(before, after)
        found = _divided(times, seen, known)
        return found, seconds - known
    known = times.get(Spent(BATCHES), Times()).timed or sum(seen.values())
    found = _divided(times, seen, known)
    rest = _scaled(outside, max(0.0, len(workers) * seconds - known), Spent(IDLE))
    idle = rest.pop(Spent(IDLE), 0.0)
    return found | rest, idle


def _divided(
    times: Mapping[Spent, Times], seen: Mapping[Spent, float], known: float
) -> dict[Spent, float]:
    """Return how the time in which batches were made is divided among stages.

    Reading blocks is measured, and hooks in some of the batches. Looks say how each of these times
    is divided further, and what is done in the rest of the time.

    Args:
        times: What was measured.
        seen: What looks have found in batches.
        known: The sum.
    """
    measured = {spent: each.timed for spent, each in times.items() if each.timed}
    measured.pop(Spent(BATCHES), None)
    chosen = measured.pop(Spent(CHOSEN), 0.0)
    if known <= 0 or chosen <= 0:
        return _scaled(seen, known, Spent(OTHER))
    read = min(known, measured.pop(Spent(READ), 0.0))
    factor = (known - read) / chosen
    parts = {Spent(hook, leaf): factor * taken for (hook, leaf, _), taken in measured.items()}
    parts[Spent(READ)] = read
    parts[Spent(OTHER)] = max(0.0, known - sum(parts.values()))
    looks: dict[Spent, dict[Spent, float]] = {}
    for spent, found in seen.items():
        part = Spent(spent.within, -1 if spent.within == READ else spent.leaf)
        looks.setdefault(part if part in parts else Spent(OTHER), {})[spent] = found
    total: defaultdict[Spent, float] = defaultdict(float)
    for part, taken in parts.items():
        for spent, share in _scaled(looks.get(part, {}), taken, part).items():
            total[spent._replace(within="")] += share
    return _scaled(total, known, Spent(OTHER))


def _scaled(found: Mapping[Spent, float], known: float, default: Spent) -> dict[Spent, float]:
    """Return times in the same proportion that have a known sum."""
    sum_found = sum(found.values())
    if not sum_found:
        return {default: known} if known else {}
    return {spent: known * each / sum_found for spent, each in found.items()}


def _cpu_times(worker: WorkerMark, before: LoaderMark) -> CpuTimes | None:
    """Return the CPU times of a worker since a mark; None if they are not known."""
    for then in before.workers:
        if then.name == worker.name and then.thread == worker.thread and then.cpu and worker.cpu:
            return CpuTimes(worker.cpu.used - then.cpu.used, worker.cpu.waited - then.cpu.waited)
    return None


def worker_figures(before: LoaderMark, after: LoaderMark) -> list[dict[str, Any]]:
    """Return for each worker how busy it was between two marks, and its current status."""
    seconds = after.time - before.time
    found = []
    for worker in after.workers:
        counts = after.counts(worker.lanes)
        counts.subtract(before.counts(worker.lanes))
        of_worker, _ = split_accounts(counts)
        of_worker.pop(Spent(GIL), None)
        spent, idle = _seconds_by_stage(of_worker, before, after, [worker])
        busy = sum(spent.values())
        times = _cpu_times(worker, before)
        found.append(
            {
                "name": worker.name,
                "pid": worker.pid,
                "ready_batches": worker.ready,
                "busy_share": _ratio(busy, busy + idle),
                "busy_seconds": busy,
                "cpu_share": None if times is None else _ratio(times.used, seconds),
                "cpu_wait_share": None if times is None else _ratio(times.waited, seconds),
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
    times: Mapping[Spent, Times],
    busy: float,
    samples: int,
    datasets: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Return what each stage took, the longest first.

    Args:
        spent: The seconds of each stage and dataset.
        times: What looks have found, including slow calls.
        busy: All seconds of work.
        samples: Number of samples.
        datasets: What was drawn of each dataset.
    """
    names = list(datasets)
    slow: defaultdict[tuple[str, int], Times] = defaultdict(Times)
    for (stage, leaf, _), each in times.items():
        slow[stage, leaf].calls += each.calls
        slow[stage, leaf].slow += each.slow
    found: dict[str, Any] = {}
    for (stage, leaf, _), seconds in spent.items():
        if stage == READ and len(names) == 1:
            leaf = 0  # samples of a block are built for all datasets together
        about = found.setdefault(stage, {**_NOTHING, "datasets": {}})
        places = [about]
        if 0 <= leaf < len(names):
            places.append(about["datasets"].setdefault(names[leaf], {**_NOTHING}))
        for place in places:
            place["seconds"] += seconds
            place["slow_calls"] += slow[stage, leaf].calls
            place["slow_seconds"] += slow[stage, leaf].slow
    for about in found.values():
        about["share"] = _ratio(about["seconds"], busy)
        about["seconds_per_sample"] = _ratio(about["seconds"], samples)
        for name, of_dataset in about["datasets"].items():
            if datasets[name]["samples"] > 0:
                per_sample = of_dataset["seconds"] / datasets[name]["samples"]
                of_dataset["seconds_per_sample"] = per_sample
    return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))


_NOTHING = {"seconds": 0.0, "slow_calls": 0, "slow_seconds": 0.0}


def _stores(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the requests made to each store."""
    found: dict[str, dict[str, int]] = {}
    for name, count in counts.items():
        if name.startswith("storage ") and "://" in name and count:
            origin, _, what = name.removeprefix("storage ").partition(" ")
            found.setdefault(origin, {})[what] = count
    return found


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
