"""The progress of a loader at some moments, and figures for the time between two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from energon.loader.monitoring.accounts import (
    BATCHES,
    CHOSEN,
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
    """The progress of a loader at some moment.

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
    rebuilt = times.pop(Spent(REBUILD), Times()).timed
    spent, idle = _times_by_stage(times, before, after, after.workers)
    busy = sum(each.seconds for each in spent.values())
    if rebuilt:
        spent.setdefault(Spent(TRANSFER), StageTimes()).seconds += rebuilt
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
        "restarts": counted.get("worker_deaths", 0) + counted.get("worker_timeouts", 0),
        "stages": _stages(spent, busy + rebuilt, samples, datasets),
        "stores": _stores(counted),
        "cache": {name: counted.get(f"cache {name}", 0) for name in ("hits", "misses", "failed")},
    }
    return found


def _waited(before: LoaderMark, after: LoaderMark) -> float:
    return min(after.time - before.time, after.waited - before.waited)


@dataclass
class StageTimes:
    """The time of a stage.

    Args:
        seconds: All of it.
        slow_calls: Number of calls of a hook that took very long.
        slow_seconds: How long these took in total.
    """

    seconds: float = 0.0
    slow_calls: float = 0.0
    slow_seconds: float = 0.0


def _times_by_stage(
    times: Mapping[Spent, Times],
    before: LoaderMark,
    after: LoaderMark,
    workers: Sequence[WorkerMark],
) -> tuple[dict[Spent, StageTimes], float]:
    """Return the time of each stage, and the seconds without work.

    Args:
        times: What was measured.
        before: The earlier mark.
        after: The later one.
        workers: Whose time it is, as of the later mark.
    """
    seconds = after.time - before.time
    if after.is_inline:
        waited = _waited(before, after)
        return _divided(times, waited), seconds - waited
    made = times.get(Spent(BATCHES), Times()).timed
    spent = _divided(times, made)
    sent = times.get(Spent(TRANSFER), Times()).timed
    if sent:
        spent[Spent(TRANSFER)] = StageTimes(sent)
    return spent, max(0.0, len(workers) * seconds - made - sent)


def _divided(times: Mapping[Spent, Times], made: float) -> dict[Spent, StageTimes]:
    """Return the time of each stage within the time in which batches were made.

    Reading blocks is measured in all batches, and hooks in some of them.

    Args:
        times: What was measured.
        made: How long making batches took.
    """
    if not made:
        return {}
    measured = dict(times)
    measured.pop(Spent(BATCHES), None)
    measured.pop(Spent(TRANSFER), None)
    chosen = measured.pop(Spent(CHOSEN), Times()).timed
    read = min(made, measured.pop(Spent(READ), Times()).timed)
    factor = (made - read) / chosen if chosen else 0.0
    total = {Spent(READ): StageTimes(read)} | {
        spent: StageTimes(*(factor * each for each in (own.timed, own.calls, own.slow)))
        for spent, own in measured.items()
    }
    known = sum(each.seconds for each in total.values())
    total[Spent(OTHER)] = StageTimes(max(0.0, made - known))
    for each in total.values():  # measured times may add up to a little more than there was
        each.seconds *= min(1.0, _ratio(made, known)) if known else 1.0
    return total


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
        spent, idle = _times_by_stage(of_worker, before, after, [worker])
        busy = sum(each.seconds for each in spent.values())
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
    spent: Mapping[Spent, StageTimes],
    busy: float,
    samples: int,
    datasets: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Return what each stage took, the longest first.

    Args:
        spent: The time of each stage and dataset.
        busy: All seconds of work.
        samples: Number of samples.
        datasets: What was drawn of each dataset.
    """
    names = list(datasets)
    found: dict[str, Any] = {}
    for (stage, leaf), times in spent.items():
        if stage == READ and len(names) == 1:
            leaf = 0  # samples of a block are built for all datasets together
        about = found.setdefault(stage, {**asdict(StageTimes()), "datasets": {}})
        places = [about]
        if 0 <= leaf < len(names):
            places.append(about["datasets"].setdefault(names[leaf], asdict(StageTimes())))
        for place in places:
            for name, number in asdict(times).items():
                place[name] += number
    for about in found.values():
        about["share"] = _ratio(about["seconds"], busy)
        about["seconds_per_sample"] = _ratio(about["seconds"], samples)
        for name, of_dataset in about["datasets"].items():
            if datasets[name]["samples"] > 0:
                per_sample = of_dataset["seconds"] / datasets[name]["samples"]
                of_dataset["seconds_per_sample"] = per_sample
    return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))


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
