"""Watch a loader: record the waits of the trainer, and report or show where a run spends time."""

from __future__ import annotations

import io
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from energon.errors import ConfigError
from energon.loader.lane_worker import KnowsCosts, Pipeline, Reports, WorkerStatus
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
    cpu_times,
    split_accounts,
)
from energon.loader.monitoring.verdict import KEEPS_UP, LoaderSetup, verdict_of
from energon.loader.options import LoaderOptions, logger
from energon.loader.state import LanePosition
from energon.loader.workers import number_of_workers
from energon.messages import counted, trainers
from energon.stages.base import State
from energon.stages.hooks.failures import split_reasons
from energon.surroundings import cpu_quota, memory_bytes, usable_cpus

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    Draw = Callable[[RenderableType], None]


REFRESH_SECONDS = 0.5
"""The display is redrawn at most this often."""
DRAWING_SHARE = 0.01
"""It is also redrawn so seldom that drawing takes no larger share of the time than this."""
MAX_DATASETS = 20
"""If there are more datasets, those with the largest shares are shown."""


class ReportingLoader(Protocol):
    """A loader that reports its progress."""

    def __iter__(self) -> Iterator[Any]: ...

    def stats(self, *, flat: bool = False) -> dict[str, Any]:
        """Return statistics since it was created."""

    def report(self) -> dict[str, Any]:
        """Return the samples that it has drawn from each dataset."""


def with_progress(
    loader: ReportingLoader,
    console: Console | None = None,
    *,
    show: Callable[[str], Callable[[str], None]] | None = None,
) -> Iterator[Any]:
    """Yield the batches of a loader, and draw its progress between them.

    No other thread draws, and nothing is drawn into a file: logs have the verdict.

    Args:
        loader: Provides the batches.
        console: Where to draw; None for standard error, or the notebook cell.
        show: Shows HTML in a notebook, and returns a function that replaces it; None uses IPython.
    """
    from rich.console import Console

    console = console or Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield from loader
        return
    opened = _in_cell(show or _show_in_cell) if console.is_jupyter else _in_terminal(console)
    with opened as draw:
        next_at = 0.0
        try:
            for batch in loader:
                begun = time.perf_counter()
                if begun >= next_at:
                    draw(_rendered(loader))
                    now = time.perf_counter()
                    next_at = now + max(REFRESH_SECONDS, (now - begun) / DRAWING_SHARE)
                yield batch
        finally:
            draw(_rendered(loader))


@contextmanager
def _in_terminal(console: Console) -> Iterator[Draw]:
    """Yield a function that draws in a terminal, over what it drew before."""
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        yield lambda drawn: live.update(drawn, refresh=True)


@contextmanager
def _in_cell(show: Callable[[str], Callable[[str], None]]) -> Iterator[Draw]:
    """Yield a function that draws in a notebook cell, where rich itself would need ipywidgets."""
    shown: list[Callable[[str], None]] = []

    def draw(drawn: RenderableType) -> None:
        page = _html(drawn)
        if shown:
            shown[0](page)
        else:
            shown.append(show(page))

    yield draw


def _show_in_cell(html: str) -> Callable[[str], None]:
    from IPython.display import HTML, display

    cell = display(HTML(html), display_id=True)
    return lambda html: cell.update(HTML(html))


def _html(drawn: RenderableType) -> str:
    from rich.console import Console

    console = Console(
        file=io.StringIO(), record=True, width=100, force_jupyter=False, highlight=False
    )
    console.print(drawn)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _rendered(loader: ReportingLoader) -> RenderableType:
    """Return the figures of the last minute, and the progress in each dataset."""
    from rich.console import Group
    from rich.table import Table

    stats = loader.stats()
    minute = stats["last_minute"]
    line = [
        counted(stats["batches"], "batch"),
        f"{minute['samples_per_second']:,.0f} samples/s",
        f"trainer waits {minute['wait_share']:.0%} of the time",
    ]
    for name, causes in (("skipped", stats["skips"]), ("failed", stats["failures"])):
        if total := sum(cause["count"] for cause in causes):
            line.append(f"{counted(total, 'sample')} {name}")
    table = Table("dataset", box=None, pad_edge=False)
    for name in ("epochs", "samples", "share"):
        table.add_column(name, justify="right")
    datasets = _datasets(loader)
    largest = sorted(datasets, key=lambda name: -datasets[name]["share"])[:MAX_DATASETS]
    for name in largest:
        of_dataset = datasets[name]
        table.add_row(
            name,
            f"{of_dataset['epochs']:.2f}",
            f"{of_dataset['samples']:,}",
            f"{of_dataset['share']:.1%}",
        )
    if len(largest) < len(datasets):
        table.add_row(f"… and {len(datasets) - len(largest)} more")
    return Group(" · ".join(line), *([table] if datasets else []))


def _datasets(loader: ReportingLoader) -> Mapping[str, Mapping[str, Any]]:
    try:
        datasets: Mapping[str, Mapping[str, Any]] = loader.report()["datasets"]
    except ConfigError:
        return {}  # a custom pipeline without such figures
    return datasets


@dataclass(frozen=True)
class WorkerMark:
    """What is known about a worker at some moment.

    Args:
        status: Its status.
        lanes: The lanes that it hosts.
        counts: Counts of its events, by name.
        cpu: CPU times of the thread that makes its batches, which may be the trainer's; None if the
            system does not report them.
    """

    status: WorkerStatus
    lanes: tuple[int, ...]
    counts: Mapping[str, int]
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
        for lane, mark in self.lanes.items():
            if lanes is None or lane in lanes:
                total.update(mark.counts)
        for worker in self.workers if lanes is None else ():
            total.update(worker.counts)
        return total


DrawnAt = Callable[[LoaderMark], Mapping[str, Mapping[str, Any]]]
"""Returns the samples drawn from each dataset up to a mark, ordered by dataset number."""


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
    rebuilt = times.pop(Spent(REBUILD), Times()).seconds
    spent, idle = _times_by_stage(times, before, after, after.workers)
    busy = sum(each.seconds for each in spent.values())
    if rebuilt:
        spent.setdefault(Spent(TRANSFER), Times()).seconds += rebuilt
    datasets = {} if draws is None else _drawn(draws(before), draws(after))
    samples = counted.get("samples", 0)
    num_bytes = sum(each["bytes"] for each in datasets.values())
    waited = _waited(before, after)
    figures: dict[str, Any] = {
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
    return figures


def _waited(before: LoaderMark, after: LoaderMark) -> float:
    return min(after.time - before.time, after.waited - before.waited)


def _times_by_stage(
    times: Mapping[Spent, Times],
    before: LoaderMark,
    after: LoaderMark,
    workers: Sequence[WorkerMark],
) -> tuple[dict[Spent, Times], float]:
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
    made = times.get(Spent(BATCHES), Times()).seconds
    spent = _divided(times, made)
    sent = times.get(Spent(TRANSFER), Times()).seconds
    if sent:
        spent[Spent(TRANSFER)] = Times(sent)
    return spent, max(0.0, len(workers) * seconds - made - sent)


def _divided(times: Mapping[Spent, Times], made: float) -> dict[Spent, Times]:
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
    chosen = measured.pop(Spent(CHOSEN), Times()).seconds
    read = min(made, measured.pop(Spent(READ), Times()).seconds)
    factor = (made - read) / chosen if chosen else 0.0
    total = {Spent(READ): Times(read)} | {
        spent: Times(*(factor * each for each in (own.seconds, own.slow_calls, own.slow_seconds)))
        for spent, own in measured.items()
    }
    measured_seconds = sum(each.seconds for each in total.values())
    total[Spent(OTHER)] = Times(max(0.0, made - measured_seconds))
    for each in total.values():  # measured times may add up to a little more than there was
        each.seconds *= min(1.0, _ratio(made, measured_seconds)) if measured_seconds else 1.0
    return total


def _cpu_times(worker: WorkerMark, before: LoaderMark) -> CpuTimes | None:
    """Return the CPU times of a worker since a mark; None if they are not known."""
    for then in before.workers:
        own, past = worker.status, then.status
        if (past.name, past.thread) == (own.name, own.thread) and then.cpu and worker.cpu:
            return CpuTimes(worker.cpu.used - then.cpu.used, worker.cpu.waited - then.cpu.waited)
    return None


def worker_figures(before: LoaderMark, after: LoaderMark) -> list[dict[str, Any]]:
    """Return for each worker how busy it was between two marks, and its current status."""
    seconds = after.time - before.time
    figures = []
    for worker in after.workers:
        counts = after.counts(worker.lanes)
        counts.subtract(before.counts(worker.lanes))
        of_worker, _ = split_accounts(counts)
        spent, idle = _times_by_stage(of_worker, before, after, [worker])
        busy = sum(each.seconds for each in spent.values())
        times = _cpu_times(worker, before)
        figures.append(
            {
                "name": worker.status.name,
                "pid": worker.status.pid,
                "ready_batches": worker.status.ready,
                "busy_share": _ratio(busy, busy + idle),
                "busy_seconds": busy,
                "cpu_share": None if times is None else _ratio(times.used, seconds),
                "cpu_wait_share": None if times is None else _ratio(times.waited, seconds),
            }
        )
    return figures


def _drawn(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, int]]:
    return {
        name: {
            each: int(draws[each]) - int(before.get(name, {}).get(each, 0))
            for each in ("samples", "bytes")
        }
        for name, draws in after.items()
    }


def _stages(
    spent: Mapping[Spent, Times],
    busy: float,
    samples: int,
    datasets: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Return the time of each stage, the longest first.

    Args:
        spent: The time of each stage and dataset.
        busy: All seconds of work.
        samples: Number of samples.
        datasets: What was drawn of each dataset.
    """
    names = list(datasets)
    figures: dict[str, Any] = {}
    for (stage, leaf), times in spent.items():
        if stage == READ and len(names) == 1:
            leaf = 0  # samples of a block are built for all datasets together
        of_stage = figures.setdefault(stage, {**asdict(Times()), "datasets": {}})
        entries = [of_stage]
        if 0 <= leaf < len(names):
            entries.append(of_stage["datasets"].setdefault(names[leaf], asdict(Times())))
        for each in entries:
            for name, number in asdict(times).items():
                each[name] += number
    for of_stage in figures.values():
        of_stage["share"] = _ratio(of_stage["seconds"], busy)
        of_stage["seconds_per_sample"] = _ratio(of_stage["seconds"], samples)
        for name, of_dataset in of_stage["datasets"].items():
            if datasets[name]["samples"] > 0:
                per_sample = of_dataset["seconds"] / datasets[name]["samples"]
                of_dataset["seconds_per_sample"] = per_sample
    return dict(sorted(figures.items(), key=lambda item: -item[1]["seconds"]))


def _stores(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the requests made to each store."""
    stores: dict[str, dict[str, int]] = {}
    for name, count in counts.items():
        if name.startswith("storage ") and "://" in name and count:
            origin, _, what = name.removeprefix("storage ").partition(" ")
            stores.setdefault(origin, {})[what] = count
    return stores


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


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

    @property
    def last(self) -> LoaderMark | None:
        """What was recorded last; None before the second batch."""
        return self._recent[-1] if self._recent else None

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
            **_balance(watched),
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
            workers=number_of_workers(watched.options, config) and len(watched.workers),
            kind=watched.options.kind,
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
        chosen = self._first
        for mark in recent:
            if mark.time > now - MINUTE + MARK_SECONDS / 2:
                break
            chosen = mark
        return chosen


def flat_stats(stats: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return nested statistics as numbers by path, the form that metric loggers take.

    Example:
        >>> flat_stats({"run": {"wait_share": 0.5}, "workers": [{"pid": 7}], "note": "x"})
        {'run/wait_share': 0.5, 'workers/0/pid': 7}
    """
    numbers: dict[str, float] = {}
    for name, value in stats.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            numbers |= flat_stats(value, f"{path}/")
        elif isinstance(value, list):
            items = {str(n): each for n, each in enumerate(value) if isinstance(each, Mapping)}
            numbers |= flat_stats(items, f"{path}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[path] = value
    return numbers


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
                status,
                tuple(lanes),
                dict(counts),
                None if status.thread is None else cpu_times(status.thread),
            )
            for status, lanes, counts in watched.workers
        ],
        is_inline=not number_of_workers(watched.options, watched.dataset.worker_config),
    )


def _balance(watched: Watched) -> dict[str, dict[str, float]]:
    """Return the cost of the last batch and of its step, if batches are balanced."""
    dataset, lanes = watched.dataset, watched.num_lanes
    begun = [(each.batches, lane) for lane, each in watched.positions.items() if each.batches]
    if not begun or not isinstance(dataset, KnowsCosts):
        return {}
    _, lane = max(begun)
    step = dataset.costs_of_step(lane, lanes, watched.positions[lane].saved_state())
    if step is None:
        return {}
    return {
        "balance": {
            "batch_cost": float(step.costs[step.own]),
            "mean_cost": float(step.costs.mean()),
            "slowest_over_mean": _ratio(float(step.times.max()), float(step.times.mean())),
        }
    }


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
        datasets: Mapping[str, Mapping[str, Any]] = report["datasets"]
        return datasets

    return draws
