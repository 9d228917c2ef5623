"""Measure the limits of a run on this machine; `diagnosis` recommends settings.

Reading alone (with slices of several lengths, one sample and many at a time), the whole pipeline in
this process, the transfer of its batches alone, and workers of both kinds are measured one after
the other for a few seconds each, over the same data in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

from energon.errors import ConfigError
from energon.inspect.diagnosis import (
    LONG_PREFETCH,
    PREFETCH,
    Confirmation,
    Diagnosis,
    Measured,
    advice_for,
    surroundings,
)
from energon.loader.getters import get_loader
from energon.loader.loader import BasicDataLoader
from energon.loader.memory import keep_heap
from energon.loader.options import LoaderOptions
from energon.plan.recipe import PlanRecipe
from energon.stages.base import DatasetIterator, State
from energon.stages.lane import Lane
from energon.surroundings import CGROUP, usable_cpus
from energon.task_encoder.dataset import SavableDataset
from energon.worker import WorkerConfig

SLICE_FACTOR = 8
"""Slices longer and shorter by this factor are tried."""
SEEN = 0.01
"""Stages that take a smaller share of the time than this are seen too rarely to be measured."""
SINGLE_READS = 20
FEWEST_BATCHES, MOST_PERIODS = 10, 4
"""Fewer batches than this tell little about a rate; their measurement is extended this much."""
ALONE_BYTES, MAX_READ_ROWS = 8 << 20, 1024
"""Reading alone takes this many bytes of samples at a time, and at most this many samples."""

MakeDataset = Callable[[WorkerConfig], SavableDataset]


def diagnose(
    make: MakeDataset,
    *,
    seconds: float = 3.0,
    workers: Sequence[int] | None = None,
    kinds: Sequence[Literal["process", "thread"]] = ("process", "thread"),
    cgroup: Path = CGROUP,
) -> Diagnosis:
    """Return the limits of a run on this machine, and settings to change.

    Args:
        make: Returns the dataset of the run for a worker config.
        seconds: How long to measure each way of loading.
        workers: Numbers of workers; None for 0, 1, 2 and the number of CPUs.
        kinds: Kinds of workers.
        cgroup: Where the control group of this process is mounted.
    """
    cpus = usable_cpus(cgroup)
    numbers = sorted({0, 1, 2, max(1, int(cpus))} if workers is None else {0, *workers})
    keep_heap(LoaderOptions().kept_heap_bytes)  # as loaders do, with which reading is compared
    here = make(_config(0))
    is_remote = any(source.is_remote for source in here.reader.sources)
    latency = _read_latency(here)
    disk = _disk_bytes()
    cold = _read_alone(here, here.plan, seconds)
    disk = None if disk is None else (_disk_bytes() or 0) - disk
    reading = cold, _read_alone(here, here.plan, seconds)
    measured, stages = _measure_workers(make, numbers, kinds, seconds)
    diagnosis = Diagnosis(
        cpus,
        reading,
        measured,
        {name: figures["share"] for name, figures in stages.items()},
        read_latency_seconds=latency,
        read_bytes_per_second=reading[1] * _mean_bytes(here),
        slices={} if is_remote else _read_slices(here, seconds / 2),
        is_remote=is_remote,
        disk_bytes=disk,
        present_slice=max(leaf.slice_samples for leaf in here.plan.leaves),
        transfer_per_second=_transfer_alone(here, seconds / 2) if "process" in kinds else None,
        stage_per_second={name: figures["per_second"] for name, figures in stages.items()},
    )
    diagnosis.advice.extend(advice_for(diagnosis))
    if diagnosis.recommends_workers:
        diagnosis = replace(diagnosis, confirmation=_confirm(make, diagnosis, seconds))
    diagnosis.symptoms.extend(surroundings(here, cgroup=cgroup))
    return diagnosis


def _measure_workers(
    make: MakeDataset,
    numbers: Sequence[int],
    kinds: Sequence[Literal["process", "thread"]],
    seconds: float,
) -> tuple[list[Measured], dict[str, dict[str, float]]]:
    """Measure numbers and kinds of workers, and the best of them with more batches ahead.

    Returns:
        The rates, and what each stage takes without workers.
    """
    measured: list[Measured] = []
    stages: dict[str, dict[str, float]] = {}
    for number in numbers:
        for kind in kinds if number else kinds[:1]:
            rates, shares = _measure(make(_config(number)), kind, seconds)
            measured.append(rates)
            stages = stages if number else shares
    best = max(measured, key=lambda each: each.samples_per_second)
    if best.workers:
        dataset = make(_config(best.workers))
        measured.append(_measure(dataset, best.kind, seconds, prefetch=LONG_PREFETCH)[0])
    return measured, stages


def _confirm(make: MakeDataset, diagnosis: Diagnosis, seconds: float) -> Confirmation:
    """Measure again what was found to be faster, right after what it is faster than."""
    before, after = (
        _measure(make(_config(each.workers)), each.kind, seconds, prefetch=each.prefetch)[0]
        for each in (diagnosis.inline, diagnosis.best)
    )
    return Confirmation(before, after, diagnosis.gain)


def _config(num_workers: int) -> WorkerConfig:
    return WorkerConfig(rank=0, world_size=1, num_workers=num_workers)


def _read_alone(dataset: SavableDataset, recipe: PlanRecipe, seconds: float) -> float:
    """Return how many samples a second are read in an order, doing nothing with them."""
    step = max(1, min(MAX_READ_ROWS, int(ALONE_BYTES / max(1, _mean_bytes(dataset)))))
    plan, rows = recipe(1), 0
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        planned = plan.rows(0, rows, step)
        if not len(planned.leaf):
            break
        dataset.reader.read(planned).samples(0, len(planned.leaf))
        rows += len(planned.leaf)
    return rows / (time.perf_counter() - begun)


def _read_latency(dataset: SavableDataset) -> float:
    """Return how long it takes to read a single sample, in seconds."""
    plan, taken = dataset.plan(1), []
    samples = sum(leaf.num_samples for leaf in dataset.plan.leaves)
    for number in range(SINGLE_READS):
        planned = plan.rows(0, number * samples // SINGLE_READS, 1)
        begun = time.perf_counter()
        dataset.reader.read(planned).samples(0, 1)
        taken.append(time.perf_counter() - begun)
    return median(taken[1:])  # the first one opens the data


def _read_slices(dataset: SavableDataset, seconds: float) -> dict[int, float]:
    """Return how many samples a second are read with longer and shorter slices."""
    recipe, rates = dataset.plan, {}
    present = max(leaf.slice_samples for leaf in recipe.leaves)
    for length in (max(1, present // SLICE_FACTOR), present * SLICE_FACTOR):
        if length != present:
            leaves = tuple(replace(leaf, slice_samples=length) for leaf in recipe.leaves)
            rates[length] = _read_alone(dataset, replace(recipe, leaves=leaves), seconds)
    return rates


def _disk_bytes() -> int | None:
    """Return how much this process has read from disk; None if the system does not report it."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None


def _mean_bytes(dataset: SavableDataset) -> float:
    sources = dataset.reader.sources
    total = sum(len(source) * source.mean_sample_bytes for source in sources)
    return total / max(1, sum(map(len, sources)))


@dataclass(frozen=True)
class SameBatch:
    """A pipeline that yields the same batch again and again, to measure what sending it costs."""

    batch: Any
    worker_config: WorkerConfig
    default_lanes: int = 1
    virtual_epoch_length: int = 0
    restart: bool = False

    def open_lane(self, lane: Lane, state: State | None) -> DatasetIterator[Any]:
        """Return the batches of `lane`."""
        return _SameBatches(self.batch)

    def num_batches(self, lane: int, lanes: int) -> int | None:
        """Return None: it has no end."""
        return None

    def fingerprint(self, lanes: int) -> dict[str, Any]:
        """Return nothing: this is never saved."""
        return {}


class _SameBatches(DatasetIterator[Any]):
    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __next__(self) -> Any:
        return self.batch

    def state_dict(self) -> State:
        return {}


def _transfer_alone(dataset: SavableDataset, seconds: float) -> float | None:
    """Return how many samples a second one process sends if its batch is ready."""
    with get_loader(dataset, verdict_seconds=None) as loader:
        batch = next(iter(loader), None)
        samples = loader.stats().get("samples", 0) / max(1, loader.stats()["batches"])
    with get_loader(SameBatch(batch, _config(1)), verdict_seconds=None) as loader:
        batches, count = iter(loader), 0
        next(batches)
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            next(batches)
            count += 1
        return float(samples * count / (time.perf_counter() - begun))


def _measure(
    dataset: SavableDataset,
    kind: Literal["process", "thread"],
    seconds: float,
    *,
    prefetch: int = PREFETCH,
) -> tuple[Measured, dict[str, dict[str, float]]]:
    number = dataset.worker_config.num_workers
    with get_loader(
        dataset, workers=kind, prefetch_factor=prefetch, verdict_seconds=None
    ) as loader:
        batches = _without_end(loader)
        begun = time.perf_counter()
        next(batches, None)
        first = time.perf_counter() - begun
        count, until = 0, begun + first + seconds
        while (now := time.perf_counter()) < until or count < FEWEST_BATCHES:
            if now > until + MOST_PERIODS * seconds or next(batches, None) is None:
                break
            count += 1
        stats = loader.stats()
    run = stats["run"]
    waits = [each["cpu_wait_share"] or 0.0 for each in stats["workers"]]
    stages = {
        name: {
            "share": round(figures["share"], 4),
            "per_second": 1 / max(1e-9, figures["seconds_per_sample"]),
        }
        for name, figures in run["stages"].items()
        if figures["share"] > SEEN
    }
    fetched = sum(each.get("bytes_read", 0) for each in run["stores"].values()) / run["seconds"]
    rate, waited = run["samples_per_second"], sum(waits) / max(1, len(waits))
    return Measured(number, kind, rate, first, prefetch, fetched, waited), stages


def _without_end(loader: BasicDataLoader) -> Iterator[Any]:
    """Yield batches in one loop for each pass over the data, as training programs should."""
    try:
        length = len(loader)
    except TypeError:  # of pipelines without a length
        yield from loader
        return
    has_batches = True
    while has_batches:
        has_batches = False
        for batch in islice(loader, length):
            has_batches = True
            yield batch


def require_dataset(found: Any, target: str) -> SavableDataset:
    """Return the result of a user's function, if it can be measured.

    Raises:
        ConfigError: If it cannot.
    """
    if not isinstance(found, SavableDataset):
        raise ConfigError(
            f"{target} returned {type(found).__name__}, expected the result of get_train_dataset"
        )
    return found
