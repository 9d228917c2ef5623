"""Say in one sentence whether the loader is the bottleneck, and what would change that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from energon.loader.monitoring.accounts import OTHER, READ, TRANSFER
from energon.messages import counted

KEEPS_UP = 0.05
"""A trainer that waits for a smaller share of the time than this has nothing to gain."""
IDLE_SHARE = 0.5
"""The trainer does not wait for workers that are busy for a smaller share than this."""
UNEVEN = 1.5
"""A worker that is this many times as busy as the average has more to do than the others."""
STARVED = 0.25
"""If workers wait for a CPU for a larger share than this, the machine has too many of them."""
COMPUTES = 0.5
"""Workers that run for a smaller share of their busy time than this wait for others."""
RUNS = 0.6
"""Workers that run or wait for a CPU for a smaller share than this mostly wait for others."""
RARE = 0.1
"""Slow calls are exceptions if a hook has them for a smaller share of its samples than this."""
LONGEST_QUEUE = 64
"""No larger prefetch_factor is recommended: that many batches take much memory."""
QUICK_SECONDS = 0.0005
"""Handing over a batch that was made in less time takes about as long as making it."""
SLACK = 1.1
"""Work is never dealt to workers quite evenly."""
UNEVEN_SLACK, GAPS = 1.5, 2
"""Rare slow samples need this many times the workers that the average does, to catch up, and queues
that bridge this many of them in a row."""
IDLE_TRAINER = 0.02
"""A trainer that does something else for a smaller share of the time waits for any loader."""

_REMEDIES = {
    READ: "read larger slices (max_samples_per_sequence), or from a faster disk",
    **dict.fromkeys(
        ("decode", "load_sample"),
        "decode to a smaller size (SampleDecoder(image_size=…)), or store smaller media",
    ),
    "cook_crude_sample": "move work out of cook_crude_sample, decode to a smaller size "
    "(SampleDecoder(image_size=…)), or cache the files that cookers read (cache_pool)",
    TRANSFER: "send less: uint8 instead of floats, and only what the trainer needs",
    OTHER: "use larger batches",
}
_READ_REMOTE = (
    "read larger slices (max_samples_per_sequence), or keep what was read on local disk "
    "(ENERGON_STORAGE_CACHE_SHARDS=1)"
)
_IN_WORDS = {
    READ: "reading",
    **dict.fromkeys(("decode", "load_sample"), "decoding"),
    TRANSFER: "sending batches",
    OTHER: "the loader itself",
}
_TOO_SHORT = "the cause will be known after a few more batches"
_TROUBLES = ("retries", "stalls", "cache_failed")


@dataclass(frozen=True)
class LoaderSetup:
    """How a loader is set up.

    Args:
        workers: How many workers it has; 0 makes batches in the training process.
        kind: "process" or "thread".
        lanes: How many lanes the rank has, at most one worker each; None if the number of workers
            determines it.
        cpus: How many CPUs the process may keep busy.
        has_quota: Whether that is the quota of its control group.
    """

    workers: int
    kind: str
    lanes: int | None
    cpus: float
    has_quota: bool = False

    def does(self, verb: str) -> str:
        """Return a verb with its subject: "spend" becomes "2 workers spend"."""
        if not self.workers:
            return f"the training process {verb}s"
        who = counted(self.workers, "thread" if self.kind == "thread" else "worker")
        return f"{who} {verb}{'' if self.workers > 1 else 's'}"


@dataclass(frozen=True)
class _Case:
    """What is known about a loader for a verdict."""

    figures: Mapping[str, Any]
    workers: Sequence[Mapping[str, Any]]
    setup: LoaderSetup

    @property
    def stage(self) -> str:
        """The stage that takes the most time."""
        return next(iter(self.figures["stages"]), "")

    def mean(self, name: str) -> float | None:
        """Return the average of a figure over workers; None if it is unknown for any of them."""
        values = [each[name] for each in self.workers]
        return None if not values or None in values else sum(values) / len(values)


def verdict_of(
    figures: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], setup: LoaderSetup
) -> str:
    """Return one sentence about whether the trainer waits, for what, and what would help.

    Args:
        figures: See `figures_between`.
        workers: See `worker_figures`.
        setup: How the loader is set up.
    """
    if not figures["batches"]:
        return "no verdict yet: only the first batch was delivered"
    wait = figures["wait_share"]
    waits = f"trainer waits {wait:.0%} of the time"
    if wait < KEEPS_UP:
        return f"the loader keeps up: the {waits}"
    case = _Case(figures, workers, setup)
    troubles = list(_troubles(case))
    # The first cause that applies explains the wait; any further one would be misleading.
    causes = _rebuilding(case) or (_starved(case) if case.stage else [_TOO_SHORT])
    if not causes and not troubles:
        causes = _slow_calls(case) or _idle(case)
    if not causes:
        causes = _where(case)
        if not troubles:
            causes.append(_remedy(case))
    return "; ".join([waits, *troubles, *causes])


def needed_workers(figures: Mapping[str, Any], slack: float = SLACK) -> int | None:
    """Return how many workers would end the trainer's wait; None if no number would.

    A trainer that does nothing but take batches waits for any number of workers.

    Args:
        figures: See `figures_between`.
        slack: How much more they should be able to do than is needed on average.
    """
    works: float = figures["seconds"] * (1 - figures["wait_share"])
    if works < IDLE_TRAINER * figures["seconds"]:
        return None
    return max(1, math.ceil(slack * float(figures["busy_seconds"]) / works))


def remedy_for(stage: str, *, is_remote: bool) -> str:
    """Return the remedy for a slow stage.

    Args:
        stage: Its name.
        is_remote: Whether data comes from a store.
    """
    if stage == READ and is_remote:
        return _READ_REMOTE
    return _REMEDIES.get(stage, f"move work out of {stage}")


def _troubles(case: _Case) -> Iterator[str]:
    """Yield defects that must be repaired before any other change is worthwhile."""
    figures = case.figures
    if figures["restarts"]:
        yield (
            f"workers died or hung {counted(figures['restarts'], 'time')} and were restarted; "
            "the log says where"
        )
    if store := _store_in_trouble(figures["stores"]):
        yield store
    if figures["cache"]["failed"]:
        yield (
            "the disk of cache_pool takes no more files, so hooks read them from their stores: "
            "free some space, or choose another parent_cache_dir"
        )


def _rebuilding(case: _Case) -> list[str]:
    """Name rebuilding of batches by the trainer as the cause, if it is most of the wait."""
    figures = case.figures
    if figures["rebuild_seconds"] <= 0.5 * figures["wait_share"] * figures["seconds"]:
        return []
    share = figures["rebuild_seconds"] / figures["seconds"]
    return [
        f"for {share:.0%} of the time it rebuilds what workers have sent: send arrays or "
        "tensors instead of many objects, send less, or use workers='thread'"
    ]


def _starved(case: _Case) -> list[str]:
    """Name a lack of CPUs as the cause, if those who make batches wait for one."""
    used, starved = case.mean("cpu_share"), case.mean("cpu_wait_share")
    if used is None or starved is None:
        return []
    setup = case.setup
    # Sleeping or waiting for data is delayed by others as well, but not by them alone.
    if starved <= STARVED or used + starved <= RUNS:
        return []
    waits = f"{setup.does('wait')} for a CPU {starved:.0%} of the time"
    makers = max(1, setup.workers)
    if makers <= setup.cpus and makers * used < RUNS * setup.cpus:
        return [
            f"{waits}: other work takes the {setup.cpus:g} CPUs that this job may use, such as "
            "training steps, threads that hooks start, or other programs",
            *_where(case),
        ]
    limit = f"this job may use only {setup.cpus:g}"
    if setup.has_quota:
        limit = f"the quota of its control group (container) allows only {setup.cpus:g}"
    fewer = ", or use fewer workers" if setup.workers > 1 else ""
    return [f"{waits}, and {limit}: give it more{fewer}", *_where(case)]


def _slow_calls(case: _Case) -> list[str]:
    """Name rare samples that take much longer than others, if they are what the trainer waits for.

    Batches are delivered in order, so that one of them can keep all workers waiting.
    """
    figures, setup = case.figures, case.setup
    slowest = max(_hook_calls(case), key=lambda each: each.slow_seconds, default=None)
    if slowest is None or not 0 < slowest.slow_calls < RARE * slowest.calls:
        return []
    others_wait = setup.workers and figures["busy_share"] < IDLE_SHARE
    waited = figures["wait_share"] * figures["seconds"]
    if slowest.slow_seconds < 0.5 * (waited if others_wait else figures["busy_seconds"]):
        return []
    seconds = slowest.slow_seconds / slowest.slow_calls
    rest = max(0.0, slowest.seconds - slowest.slow_seconds) / (slowest.calls - slowest.slow_calls)
    step = figures["seconds"] * (1 - figures["wait_share"]) / figures["batches"]
    remedy = "skip such samples, or limit their time"
    needed = needed_workers(figures, UNEVEN_SLACK)
    if needed is not None:
        needed = max(needed, setup.workers)
        queue = math.ceil(GAPS * seconds / step / needed)
        if queue <= LONGEST_QUEUE:
            workers = counted(needed, "worker")
            remedy += f"; {workers} with prefetch_factor={max(2, queue)} would bridge most of them"
    frequency = f"1 {slowest.unit} in {slowest.calls / slowest.slow_calls:.0f}"
    return [
        f"{frequency} takes {_seconds(seconds)} in {slowest.where} (the others {_seconds(rest)})",
        remedy,
    ]


class _HookCalls(NamedTuple):
    """The calls of a hook, for one dataset or for batches of several.

    Args:
        where: The hook, and its dataset.
        unit: What a call is for.
        calls: How many calls there were.
        seconds: How long they took in total.
        slow_calls: How many of them took very long.
        slow_seconds: How long these took in total.
    """

    where: str
    unit: str
    calls: float
    seconds: float
    slow_calls: float
    slow_seconds: float


def _hook_calls(case: _Case) -> Iterator[_HookCalls]:
    """Yield the calls of each hook and dataset in which some were slow."""
    for stage, of_stage in case.figures["stages"].items():
        where = _IN_WORDS.get(stage, stage)
        for name, each in of_stage["datasets"].items():
            if each["slow_calls"] and each.get("seconds_per_sample"):
                calls = each["seconds"] / each["seconds_per_sample"]
                numbers = each["seconds"], each["slow_calls"], each["slow_seconds"]
                yield _HookCalls(f"{where} of {name!r}", "sample", calls, *numbers)
        if of_stage["slow_calls"] and not of_stage["datasets"]:
            numbers = of_stage["seconds"], of_stage["slow_calls"], of_stage["slow_seconds"]
            yield _HookCalls(where, "batch", case.figures["batches"], *numbers)


def _idle(case: _Case) -> list[str]:
    """Say why the trainer waits although workers are not busy."""
    figures = case.figures
    if not case.setup.workers or figures["busy_share"] >= IDLE_SHARE:
        return []
    slowest = max(case.workers, key=lambda each: each["busy_share"])
    if slowest["busy_share"] > UNEVEN * figures["busy_share"]:
        return [
            f"{slowest['name']} is busy {slowest['busy_share']:.0%} of the time, and the "
            f"workers on average {figures['busy_share']:.0%}: the work is distributed unevenly; "
            "use more lanes",
            *_where(case),
        ]
    made = figures["busy_seconds"] / figures["batches"]
    if made < QUICK_SECONDS:
        return [
            f"workers make a batch in {_seconds(made)}, and handing it over takes longer: use "
            "larger batches, or num_workers=0"
        ]
    return [
        f"workers are busy only {figures['busy_share']:.0%} of the time: the rest goes into "
        "transferring batches to the trainer, or some batches take much longer than others; "
        "send less, or raise prefetch_factor"
    ]


def _where(case: _Case) -> list[str]:
    """Name the stage with the most work, and its dataset if most of it is for one."""
    stages = case.figures["stages"]
    if not stages:
        return []
    of_stage = stages[case.stage]
    where = _IN_WORDS.get(case.stage, case.stage)
    datasets = sorted(of_stage["datasets"].items(), key=lambda item: -item[1]["seconds"])
    per_sample = of_stage["seconds_per_sample"]
    of_datasets = sum(each["seconds"] for each in of_stage["datasets"].values())
    if datasets and datasets[0][1]["seconds"] > max(0.5 * of_datasets, 0.25 * of_stage["seconds"]):
        name, of_dataset = datasets[0]
        where += f" of {name!r}"
        per_sample = of_dataset.get("seconds_per_sample", per_sample)
    return [
        f"{case.setup.does('spend')} {of_stage['share']:.0%} in {where} "
        f"({_seconds(per_sample)}/sample)"
    ]


def _remedy(case: _Case) -> str:
    """Say how many workers would keep up, or what would take less time."""
    figures, setup = case.figures, case.setup
    is_remote = any(each.get("requests") for each in figures["stores"].values())
    remedy = remedy_for(case.stage, is_remote=is_remote)
    needed = needed_workers(figures)
    if needed is None:
        return f"the trainer does little else, so it would wait for any loader; {remedy}"
    if setup.workers and needed <= setup.workers:
        return f"some batches take much longer than others: raise prefetch_factor, or {remedy}"
    would = f"{counted(needed, 'worker')} would keep up"
    if setup.lanes is not None and needed > setup.lanes:
        would += f" (each hosts at least one lane, and this rank has {setup.lanes}: set lanes, too)"
    if needed > setup.cpus and case.stage != READ:
        used = case.mean("cpu_share") if setup.workers else None  # else the trainer's is in it
        if used is None:
            would += f" (with as many CPUs if they compute; there are {setup.cpus:g})"
        elif used > COMPUTES * figures["busy_share"]:
            return f"{would}, given more than {setup.cpus:g} CPUs; {remedy}"
    return f"{would}, or {remedy}"


def _store_in_trouble(stores: Mapping[str, Mapping[str, int]]) -> str | None:
    """Describe the requests to the store that has the most trouble."""
    troubles = {
        origin: [counts.get(name, 0) for name in _TROUBLES] for origin, counts in stores.items()
    }
    if not troubles:
        return None
    origin = max(troubles, key=lambda each: sum(troubles[each]))
    retries, stalls, refused = troubles[origin]
    requests = stores[origin].get("requests", 0)
    lines = []
    if retries and retries >= 0.05 * requests:
        lines.append(f"{retries} of {counted(requests, 'request')} were retried")
    if stalls:
        lines.append(f"{counted(stalls, 'request')} took more than 10 s")
    if refused:
        lines.append(
            f"{counted(refused, 'range')} could not be cached, because the cache disk is full "
            "(free some space, or set ENERGON_STORAGE_CACHE_DIR)"
        )
    return f"{origin} is in trouble: {' and '.join(lines)}" if lines else None


def _seconds(seconds: float) -> str:
    unit, factor = ("s", 1) if seconds >= 0.1 else ("ms", 1e3) if seconds >= 1e-4 else ("us", 1e6)
    return f"{seconds * factor:.2g} {unit}"
