"""Say in a sentence whether the loader is the bottleneck, and what would change that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon.loader.monitoring.profiler import AUX, DECODE, OTHER, READ, TRANSFER
from energon.messages import counted

KEEPS_UP = 0.05
"""A trainer that waits for less than this share of the time has nothing to gain."""
IDLE = 0.5
"""Workers that are busy for less than this share are not what the trainer waits for."""
STARVED = 0.25
"""Workers that wait for a CPU for more than this share are too many for the machine."""
COMPUTES = 0.5
"""Workers that run for less than this share of the time in which they are busy wait for others."""
RUNS = 0.6
"""Workers that run or wait for a CPU for less than this share mostly wait for something else."""
SLACK = 1.1
"""Workers are never dealt their work quite evenly."""

_REMEDIES = {
    READ: "read larger slices (max_samples_per_sequence), or from a faster disk",
    DECODE: "decode to a smaller size (SampleDecoder(image_size=…)), or store smaller media",
    AUX: "cache what the hooks read (cache_pool), or store it with the samples",
    TRANSFER: "send less: uint8 instead of floats, and only what the trainer needs",
    OTHER: "use larger batches",
}
_TROUBLES = ("retries", "stalls", "cache_failed")


@dataclass(frozen=True)
class LoaderSetup:
    """How a loader is set up.

    Args:
        workers: How many workers it has; 0 makes batches in the training process.
        kind: "process" or "thread".
        lanes: How many lanes the rank has, at most one worker each.
        cpus: How many CPUs the process may keep busy.
        has_quota: Whether its control group has them limited.
    """

    workers: int
    kind: str
    lanes: int
    cpus: float
    has_quota: bool = False


def verdict_of(
    figures: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], setup: LoaderSetup
) -> str:
    """Return one sentence on whether the trainer waits, for what, and what would help.

    Args:
        figures: See `figures_between`.
        workers: See `worker_figures`.
        setup: How the loader is set up.
    """
    if not figures["batches"]:
        return "no verdict yet: there was no batch after the first"
    wait = figures["wait_share"]
    waits = f"trainer waits {wait:.0%} of the time"
    if wait < KEEPS_UP:
        return f"the loader keeps up: the {waits}"
    return "; ".join([waits, *_causes(figures, workers, setup)])


def needed_workers(figures: Mapping[str, Any]) -> int | None:
    """Return how many workers would let the trainer wait for nothing; None for any number.

    A trainer that does nothing but take batches is kept waiting by any.
    """
    works: float = figures["seconds"] * (1 - figures["wait_share"])
    if works < 0.02 * figures["seconds"]:
        return None
    return max(1, math.ceil(SLACK * float(figures["busy_seconds"]) / works))


def _causes(
    figures: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], setup: LoaderSetup
) -> list[str]:
    stages = figures["stages"]
    found = []
    if figures["restarts"]:
        found.append(
            f"workers died or hung {counted(figures['restarts'], 'time')} and were restarted; "
            "the log says where"
        )
    if store := _store_in_trouble(figures):
        found.append(store)
    if figures["cache"]["failed"]:
        found.append(
            "the disk of cache_pool takes no more files, so hooks read them from their stores: "
            "free some space, or name another parent_cache_dir"
        )
    if figures["rebuild_seconds"] > 0.5 * figures["wait_share"] * figures["seconds"]:
        share = figures["rebuild_seconds"] / figures["seconds"]
        return [
            *found,
            f"for {share:.0%} of the time it rebuilds what workers have sent: send arrays or "
            "tensors in place of many objects, or less of them, or use workers='thread'",
        ]
    used, starved = _mean(workers, "cpu_share"), _mean(workers, "cpu_wait_share")
    # Who sleeps or waits for data is kept by others, too, but not by them alone.
    if used is not None and starved is not None and starved > max(STARVED, RUNS - used):
        limit = "this job may use"
        if setup.has_quota:
            limit = "the quota of its control group (container) allows"
        found.append(
            f"{_who(setup)} wait {starved:.0%} of the time for a CPU, of "
            f"which {limit} {setup.cpus:g}: give it more, or take fewer workers"
        )
        return [*found, *_stage_of(stages, setup)]
    if setup.workers and figures["busy_share"] < IDLE and not found:
        slowest = max(workers, key=lambda each: each["busy_share"])
        if slowest["busy_share"] > 1.5 * figures["busy_share"]:
            return [
                f"{slowest['name']} is busy {slowest['busy_share']:.0%} of it, all of them "
                f"{figures['busy_share']:.0%}: the work is dealt unevenly, more lanes divide it "
                "better",
                *_stage_of(stages, setup),
            ]
        return [
            f"workers are busy only {figures['busy_share']:.0%} of it: what takes the time is "
            "the way of batches to the trainer, or batches that take unevenly long; send less, "
            "or raise prefetch_factor"
        ]
    found += _stage_of(stages, setup)
    found.append(_remedy(figures, workers, setup))
    return found


def _mean(workers: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return what workers have on average; None if that is not known of each."""
    found = [each[name] for each in workers]
    return None if not found or None in found else sum(found) / len(found)


def _who(setup: LoaderSetup) -> str:
    if not setup.workers:
        return "the training process"
    return counted(setup.workers, "thread" if setup.kind == "thread" else "worker")


def _stage_of(stages: Mapping[str, Any], setup: LoaderSetup) -> list[str]:
    if not stages:
        return []
    stage, about = next(iter(stages.items()))
    spend = "spend" if setup.workers > 1 else "spends"
    where = _in_words(stage)
    datasets = sorted(about["datasets"].items(), key=lambda item: -item[1]["seconds"])
    per_sample = about["seconds_per_sample"]
    if datasets and datasets[0][1]["seconds"] > 0.5 * about["seconds"]:
        name, of_dataset = datasets[0]
        where += f" of {name!r}"
        per_sample = of_dataset.get("seconds_per_sample", per_sample)
    return [
        f"{_who(setup)} {spend} {about['share']:.0%} in {where} ({_seconds(per_sample)}/sample)"
    ]


def _in_words(stage: str) -> str:
    return {
        READ: "reading",
        DECODE: "decoding",
        AUX: "reading files that hooks ask for",
        TRANSFER: "sending batches",
        OTHER: "the loader itself",
    }.get(stage, stage)


def _remedy(
    figures: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], setup: LoaderSetup
) -> str:
    stage = next(iter(figures["stages"]), "")
    remedy = _REMEDIES.get(stage, f"move work out of {stage}")
    needed, used = needed_workers(figures), _mean(workers, "cpu_share")
    if needed is None:
        return f"the trainer does hardly anything else; {remedy}"
    if setup.workers and needed <= setup.workers:
        return f"batches take unevenly long: raise prefetch_factor, or {remedy}"
    would = f"{counted(needed, 'worker')} would keep up"
    if needed > setup.lanes:
        would += f" (of lanes there are {setup.lanes}, so set lanes, too)"
    if needed > setup.cpus and stage not in (READ, AUX):
        if used is None:
            would += f" (if they compute, on as many CPUs; there are {setup.cpus:g})"
        elif used > COMPUTES * figures["busy_share"]:
            return f"{would}, if there were more than {setup.cpus:g} CPUs for them; {remedy}"
    return f"{would}, or {remedy}"


def _store_in_trouble(figures: Mapping[str, Any]) -> str | None:
    worst = max(
        figures["stores"].items(),
        key=lambda item: sum(item[1].get(name, 0) for name in _TROUBLES),
        default=None,
    )
    if worst is None:
        return None
    origin, about = worst
    retries, stalls = about.get("retries", 0), about.get("stalls", 0)
    requests = about.get("requests", 0)
    found = []
    if retries and retries >= 0.05 * requests:
        found.append(f"{retries} of {counted(requests, 'request')} were made again")
    if stalls:
        found.append(f"{counted(stalls, 'request')} took more than 10 s")
    if refused := about.get("cache_failed", 0):
        found.append(
            f"{counted(refused, 'range')} could not be kept, because the disk of the cache is full "
            "(free some space there, or set ENERGON_STORAGE_CACHE_DIR)"
        )
    return f"{origin} is in trouble: {' and '.join(found)}" if found else None


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 0.1 or unit == "us":
            return f"{seconds * factor:.2g} {unit}"
    raise AssertionError
