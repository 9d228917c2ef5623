"""Watch a loader: record how long the trainer waits, and report where a run spends its time."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from energon.loader.lane_worker import WorkerStatus
from energon.loader.monitoring.accounts import cpu_times, split_accounts
from energon.loader.monitoring.meter import (
    DrawnAt,
    LaneMark,
    LoaderMark,
    WorkerMark,
    figures_between,
    worker_figures,
)
from energon.loader.monitoring.verdict import KEEPS_UP, LoaderSetup, verdict_of
from energon.loader.options import LoaderOptions, logger
from energon.loader.pipeline import Pipeline, Reports
from energon.loader.state import LanePosition
from energon.messages import trainers
from energon.stages.hooks.failures import split_reasons
from energon.surroundings import cpu_quota, memory_bytes, usable_cpus

MARK_SECONDS = 5.0
MINUTE = 60.0
LONGEST_SILENCE = 16
"""A verdict already given is repeated after at most this many reports."""


class Watched(NamedTuple):
    """The parts of a loader that are observed.

    Args:
        dataset: Its pipeline.
        options: How lanes are hosted.
        num_lanes: How many lanes the run has.
        positions: The positions of the rank's lanes.
        workers: The workers that host them.
        delivered: How many batches the trainer has received.
    """

    dataset: Pipeline
    options: LoaderOptions
    num_lanes: int
    positions: Mapping[int, LanePosition]
    workers: Sequence[tuple[WorkerStatus, Sequence[int], Mapping[str, int]]]
    delivered: int


class Monitor:
    """What was recorded about one loader, which is passed to each call and not kept alive.

    Attributes:
        next_look: When to call `look` again, by `time.perf_counter`.
        waited: How long the trainer has waited for batches.
        waiting_since: When it asked for the batch that it waits for; None if it does not wait.
    """

    def __init__(self) -> None:
        self.next_look = 0.0
        self.waited = 0.0
        self.waiting_since: float | None = None
        trainers.add(self)
        self._first_wait = 0.0
        self._first: LoaderMark | None = None
        self._recent: deque[LoaderMark] = deque()
        # Figures may be requested in any thread.
        self._lock = threading.Lock()
        self._next_report = 0.0
        self._said = ""
        self._silent = self._silence = 0

    def look(self, watched: Watched, now: float) -> float:
        """Record the progress of the loader, and log what the trainer waits for if that is due.

        Called when the trainer asks for a batch, for the first time for its second one: everything
        before is start-up, not the run.

        Returns:
            The time after it.
        """
        mark = _mark(watched, now, self.waited)
        every = watched.options.verdict_seconds
        if self._first is None:
            self._first, self._first_wait = mark, self.waited
            self._next_report = now + (every or 0.0)
        with self._lock:
            self._recent.append(mark)
            while self._recent[0].time < now - 2 * MINUTE:
                self._recent.popleft()
        step = MARK_SECONDS
        if every is not None:
            step = min(step, every)
            if now >= self._next_report and len(self._recent) > 1:
                self._next_report = now + every
                self._report(watched, mark)
        ended = time.perf_counter()
        self.next_look = ended + step
        return ended

    def verdict(self, watched: Watched) -> str:
        """Return one sentence about what the trainer waited for in the last minute."""
        now = time.perf_counter()
        return self._verdict(watched, _mark(watched, now, self.waited))

    def stats(self, watched: Watched) -> dict[str, Any]:
        """Return everything that is known about the run."""
        now = _mark(watched, time.perf_counter(), self.waited)
        _, counts = split_accounts(now.counts())
        counts, failures, skips = split_reasons(counts)
        first = self._first or now
        draws = _draws(watched)
        minute = self._minute_ago(now.time) or now
        workers = worker_figures(minute, now)
        for worker in workers:
            worker["memory_bytes"] = memory_bytes(worker["pid"])
        own = memory_bytes(os.getpid())
        others = [each["memory_bytes"] or 0 for each in workers if each["pid"] != os.getpid()]
        return {
            **Counter(batches=watched.delivered),
            **counts,
            "skipped_rows": {
                v: list(p.skip_rows) for v, p in watched.positions.items() if p.skip_rows
            },
            "seconds_to_first_batch": self.waited if self._first is None else self._first_wait,
            "run": figures_between(first, now, draws),
            "last_minute": figures_between(minute, now, draws),
            "workers": workers,
            "failures": failures,
            "skips": skips,
            "memory": {"trainer_bytes": own, "worker_bytes": sum(others)},
        }

    def _report(self, watched: Watched, now: LoaderMark) -> None:
        text = self._verdict(watched, now)
        minute = self._minute_ago(now.time) or now
        if figures_between(minute, now, None)["wait_share"] < KEEPS_UP:
            self._said, self._silence = "", 0
            return
        # A recurring cause is logged less and less often; its figures differ a little each time.
        cause = "".join(each for each in text if not each.isdigit())
        self._silent += 1
        if cause == self._said and self._silent <= self._silence:
            return
        self._silence = min(LONGEST_SILENCE, 2 * self._silence + 1) if cause == self._said else 0
        self._said, self._silent = cause, 0
        logger.warning("%s", text)

    def _verdict(self, watched: Watched, now: LoaderMark) -> str:
        minute = self._minute_ago(now.time) or now
        config, cpus = watched.dataset.worker_config, usable_cpus()
        setup = LoaderSetup(
            workers=config.num_workers and len(watched.workers),
            kind=watched.options.workers,
            lanes=len(watched.positions) if config.lanes else None,
            cpus=cpus,
            has_quota=cpu_quota() == cpus,
        )
        figures = figures_between(minute, now, _draws(watched))
        return verdict_of(figures, worker_figures(minute, now), setup)

    def _minute_ago(self, now: float) -> LoaderMark | None:
        """Return the mark of a minute ago, or the one after the first batch if that is later."""
        with self._lock:
            recent = list(self._recent)
        found = self._first
        for mark in recent:
            if mark.time > now - MINUTE + MARK_SECONDS / 2:
                break
            found = mark
        return found


def flat_stats(stats: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return nested statistics as numbers by path, the form that metric loggers take.

    Example:
        >>> flat_stats({"run": {"wait_share": 0.5}, "workers": [{"pid": 7}], "note": "x"})
        {'run/wait_share': 0.5, 'workers/0/pid': 7}
    """
    found: dict[str, float] = {}
    for name, value in stats.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= flat_stats(value, f"{path}/")
        elif isinstance(value, list):
            items = {str(n): each for n, each in enumerate(value) if isinstance(each, Mapping)}
            found |= flat_stats(items, f"{path}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[path] = value
    return found


def _mark(watched: Watched, now: float, waited: float) -> LoaderMark:
    return LoaderMark(
        now,
        waited,
        watched.delivered,
        {
            lane: LaneMark({**each.counts, **each.times}, each.state)
            for lane, each in watched.positions.items()
        },
        [
            WorkerMark(
                status.name,
                tuple(lanes),
                status.pid,
                status.ready,
                dict(counts),
                status.thread,
                None if status.thread is None else cpu_times(status.thread),
            )
            for status, lanes, counts in watched.workers
        ],
        is_inline=not watched.dataset.worker_config.num_workers,
    )


def _draws(watched: Watched) -> DrawnAt | None:
    """Return a function from a mark to what was drawn of each dataset; None if that is unknown."""
    dataset = watched.dataset
    if not isinstance(dataset, Reports):
        return None

    def draws(mark: LoaderMark) -> Mapping[str, Mapping[str, Any]]:
        states = {
            lane: LanePosition(state=each.state).saved_state() for lane, each in mark.lanes.items()
        }
        try:
            report = dataset.report(lanes=watched.num_lanes, states=states, counts={})
        except Exception:
            # Figures by dataset must not end a run: custom pipelines have their own kinds of state.
            logger.debug("no figures by dataset", exc_info=True)
            return {}
        found: Mapping[str, Mapping[str, Any]] = report["datasets"]
        return found

    return draws
