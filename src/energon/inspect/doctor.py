"""Measure on this machine what bounds a run, and say which settings to change.

Reading alone (with slices of several lengths, one sample and many at a time), the whole pipeline in
this process, the transfer of its batches alone, and workers of both kinds are measured one after
the other, each for a few seconds, over the same data in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

from energon.errors import ConfigError
from energon.inspect.machine_checks import Symptom, surroundings
from energon.loader.getters import get_loader
from energon.loader.loader import BasicDataLoader
from energon.loader.memory import keep_heap
from energon.loader.monitoring.profiler import READ
from energon.loader.monitoring.verdict import remedy_for
from energon.loader.options import LoaderOptions
from energon.messages import counted
from energon.plan.recipe import PlanRecipe
from energon.stages.base import DatasetIterator, State
from energon.stages.lane import Lane
from energon.surroundings import CGROUP, usable_cpus
from energon.task_encoder.dataset import SavableDataset
from energon.worker import WorkerConfig

PREFETCH, LONG_PREFETCH = 2, 8
"""What loaders do unless told otherwise, and what is tried beside it."""
SLICE_FACTOR = 8
"""Slices are tried that are longer and shorter by this."""
SLICE_GAIN = 1.5
"""Slices change the order of the run, so that has to pay."""
SCALES = 0.8
"""Workers that reach this share of what as many processes could do are not too many."""
SEEN = 0.01
"""What takes less of the time than this is seen too seldom to be measured."""
SINGLE_READS = 20
FEWEST_BATCHES, MOST_PERIODS = 10, 4
"""Fewer batches say little of a rate, so for them a measurement takes so many times as long."""
READ_BYTES, MAX_READ_ROWS = 8 << 20, 1024
"""Reading alone takes as many samples at a time as are so large together, and so many at most."""

MakeDataset = Callable[[WorkerConfig], SavableDataset]

GAIN = 1.15
"""Settings that are faster by less than this are not worth a change."""


@dataclass(frozen=True)
class Measured:
    """How fast one way of loading is.

    Args:
        workers: How many; 0 loads in this process.
        kind: Processes or threads.
        prefetch: `prefetch_factor`.
        samples_per_second: After the first batch.
        seconds_to_first_batch: How long that took.
    """

    workers: int
    kind: Literal["process", "thread"]
    samples_per_second: float
    seconds_to_first_batch: float
    prefetch: int = PREFETCH

    @property
    def settings(self) -> str:
        """The settings in words."""
        if not self.workers:
            return "num_workers=0"
        found = f"num_workers={self.workers}, workers={self.kind!r}"
        return found if self.prefetch == PREFETCH else f"{found}, prefetch_factor={self.prefetch}"


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and what follows from it.

    Args:
        cpus: How many CPUs may be used.
        read_per_second: Samples a second of reading alone, as they come first and, from the cache
            of the system, again.
        read_latency_seconds: How long one sample takes that is read alone.
        read_bytes_per_second: Bytes a second of reading alone, again.
        slices: Samples a second of reading alone by length of slices, beside the present one.
        present_slice: The length of slices of the run; the longest, if datasets differ.
        transfer_per_second: Samples a second that a worker process sends if it does nothing else;
            None if no processes were measured.
        stage_per_second: Samples a second of each stage, if it had one process to itself.
        is_remote: Whether data come from a store. Reading alone is then without reading ahead, one
            request after the other, and no limit for loaders.
        disk_bytes: What the first reading took from disk; None if the system does not tell.
        measured: All ways of loading.
        stages: What each stage takes of the time in one process, by name, the longest first.
        advice: What bounds the run and what to change, in sentences.
        symptoms: What is wrong with the surroundings.
    """

    cpus: float
    read_per_second: tuple[float, float]
    measured: Sequence[Measured]
    stages: dict[str, float]
    read_latency_seconds: float = 0.0
    read_bytes_per_second: float = 0.0
    slices: dict[int, float] = field(default_factory=dict)
    present_slice: int = 1
    transfer_per_second: float | None = None
    stage_per_second: dict[str, float] = field(default_factory=dict)
    is_remote: bool = False
    disk_bytes: int | None = None
    advice: list[str] = field(default_factory=list)
    symptoms: list[Symptom] = field(default_factory=list)

    @property
    def best(self) -> Measured:
        """The fastest way of loading; with batches that take more memory only if that pays."""
        return max(
            self.measured,
            key=lambda each: each.samples_per_second / (1 if each.prefetch == PREFETCH else GAIN),
        )

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {**asdict(self), "best": asdict(self.best)}


def diagnose(
    make: MakeDataset,
    *,
    seconds: float = 3.0,
    workers: Sequence[int] | None = None,
    kinds: Sequence[Literal["process", "thread"]] = ("process", "thread"),
    cgroup: Path = CGROUP,
) -> Diagnosis:
    """Return what bounds a run on this machine, and what to change.

    Args:
        make: Returns the dataset of the run for a worker config.
        seconds: For how long each way of loading is measured.
        workers: Which numbers of workers; None for 0, 1, 2 and as many as there are CPUs.
        kinds: Which kinds of workers.
        cgroup: Where the control group of this process is shown.
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
    measured: list[Measured] = []
    stages: dict[str, dict[str, float]] = {}
    for number in numbers:
        for kind in kinds if number else kinds[:1]:
            found, shares = _measure(make(_config(number)), kind, seconds)
            measured.append(found)
            stages = stages if number else shares
    best = max(measured, key=lambda each: each.samples_per_second)
    if best.workers:
        dataset = make(_config(best.workers))
        measured.append(_measure(dataset, best.kind, seconds, prefetch=LONG_PREFETCH)[0])
    diagnosis = Diagnosis(
        cpus,
        reading,
        measured,
        {name: about["share"] for name, about in stages.items()},
        read_latency_seconds=latency,
        read_bytes_per_second=reading[1] * _mean_bytes(here),
        slices={} if is_remote else _read_slices(here, seconds / 2),
        is_remote=is_remote,
        disk_bytes=disk,
        present_slice=max(leaf.slice_samples for leaf in here.plan.leaves),
        transfer_per_second=_transfer_alone(here, seconds / 2) if "process" in kinds else None,
        stage_per_second={name: about["per_second"] for name, about in stages.items()},
    )
    diagnosis.advice.extend(_advice(diagnosis))
    diagnosis.symptoms.extend(surroundings(here, cgroup=cgroup))
    return diagnosis


def _config(num_workers: int) -> WorkerConfig:
    return WorkerConfig(rank=0, world_size=1, num_workers=num_workers)


def _read_alone(dataset: SavableDataset, recipe: PlanRecipe, seconds: float) -> float:
    """Return how many samples a second are read in an order, with nothing done to them."""
    step = max(1, min(MAX_READ_ROWS, int(READ_BYTES / max(1, _mean_bytes(dataset)))))
    plan, rows = recipe(1), 0
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        planned = plan.rows(0, rows, step)
        if not len(planned.leaf):
            break
        dataset.reader.read(planned)
        rows += len(planned.leaf)
    return rows / (time.perf_counter() - begun)


def _read_latency(dataset: SavableDataset) -> float:
    """Return how long it takes to read one sample alone, in seconds."""
    plan, taken = dataset.plan(1), []
    samples = sum(leaf.num_samples for leaf in dataset.plan.leaves)
    for number in range(SINGLE_READS):
        planned = plan.rows(0, number * samples // SINGLE_READS, 1)
        begun = time.perf_counter()
        dataset.reader.read(planned)
        taken.append(time.perf_counter() - begun)
    return median(taken[1:])  # the first one opens the data


def _read_slices(dataset: SavableDataset, seconds: float) -> dict[int, float]:
    """Return how many samples a second are read with longer and shorter slices."""
    recipe, found = dataset.plan, {}
    present = max(leaf.slice_samples for leaf in recipe.leaves)
    for length in (max(1, present // SLICE_FACTOR), present * SLICE_FACTOR):
        if length != present:
            leaves = tuple(replace(leaf, slice_samples=length) for leaf in recipe.leaves)
            found[length] = _read_alone(dataset, replace(recipe, leaves=leaves), seconds)
    return found


def _disk_bytes() -> int | None:
    """Return how much this process has read from disk; None if the system does not tell."""
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
    """A pipeline that yields a batch that it has, again and again, to see what sending it costs."""

    batch: Any
    worker_config: WorkerConfig
    default_lanes: int = 1
    virtual_epoch_length: int = 0
    restart: bool = False

    def open_lane(self, lane: Lane, state: State | None) -> DatasetIterator[Any]:
        """Return the batches of `lane`."""
        return _SameBatches(self.batch)

    def num_batches(self, lane: int, lanes: int) -> int | None:
        """Return None: there is no end."""
        return None

    def fingerprint(self, lanes: int) -> dict[str, Any]:
        """Return nothing: nobody saves this."""
        return {}


class _SameBatches(DatasetIterator[Any]):
    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __next__(self) -> Any:
        return self.batch

    def state_dict(self) -> State:
        return {}


def _transfer_alone(dataset: SavableDataset, seconds: float) -> float | None:
    """Return how many samples a second one process sends that has its batch already."""
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
        run = loader.stats()["run"]
    stages = {
        name: {
            "share": round(about["share"], 4),
            "per_second": 1 / max(1e-9, about["seconds_per_sample"]),
        }
        for name, about in run["stages"].items()
        if about["share"] > SEEN
    }
    return Measured(number, kind, run["samples_per_second"], first, prefetch), stages


def _without_end(loader: BasicDataLoader) -> Iterator[Any]:
    """Yield batches in one loop for each pass over the data, as training programs should."""
    try:
        length = len(loader)
    except TypeError:  # of pipelines that do not know
        yield from loader
        return
    found = True
    while found:
        found = False
        for batch in islice(loader, length):
            found = True
            yield batch


def _advice(diagnosis: Diagnosis) -> Iterator[str]:
    best, (cold, cached) = diagnosis.best, diagnosis.read_per_second
    inline = next(each for each in diagnosis.measured if not each.workers)
    if diagnosis.stages:
        stage, share = next(iter(diagnosis.stages.items()))
        alone = diagnosis.stage_per_second.get(stage, 0.0)
        yield (
            f"one process spends {share:.0%} of its time in {stage}, which alone would let it do "
            f"{alone:,.0f} samples/s{_faster(stage, diagnosis)}"
        )
    if diagnosis.is_remote:
        if next(iter(diagnosis.stages), "") == READ:
            yield (
                "the store limits the run: more workers make more requests at a time; larger "
                "shards and slices make fewer, and ENERGON_STORAGE_CACHE_SHARDS=1 keeps what was "
                "read on local disk"
            )
        cached = 0.0
    elif (
        diagnosis.disk_bytes != 0 and cold * GAIN < cached and best.samples_per_second > cold / GAIN
    ):
        yield (
            f"storage limits the run: it gives {cold:,.0f} samples/s at first, and the cache of "
            f"the system {cached:,.0f}; read larger slices, or copy the data to a faster disk"
        )
    if cached:
        share = best.samples_per_second / cached
        yield (
            f"the best settings reach {share:.0%} of what reading alone does from the cache"
            if share < 1
            else "the best settings are as fast as reading alone from the cache of the system"
        )
    yield from _slice_advice(diagnosis)
    sent = diagnosis.transfer_per_second
    sending_bounds = sent is not None and sent < GAIN * inline.samples_per_second
    if sending_bounds:
        yield (
            f"sending batches limits worker processes: one sends {sent:,.0f} samples/s at most, "
            f"num_workers=0 makes {inline.samples_per_second:,.0f}; send less (uint8 instead of "
            "floats, arrays instead of objects)"
        )
    if best.workers and best.samples_per_second > GAIN * inline.samples_per_second:
        yield from _worker_advice(diagnosis, inline)
    elif sending_bounds:
        yield "use num_workers=0, where nothing is sent"
    else:
        yield _why_not_faster(diagnosis)


def _why_not_faster(diagnosis: Diagnosis) -> str:
    """Return why workers are not faster than none."""
    why = "batches cost as much to send as to make"
    if all(each.kind == "thread" for each in diagnosis.measured if each.workers):
        why = "threads take turns where hooks run Python code (--kind process measures processes)"
    if max(each.workers for each in diagnosis.measured) >= diagnosis.cpus:
        why += f", or the CPUs ({diagnosis.cpus:g}) are busy with something else"
    return f"num_workers=0 is as fast as workers: {why}"


def _faster(stage: str, diagnosis: Diagnosis) -> str:
    """Return what makes a stage faster; "" for local reading, of which more is measured."""
    if stage == READ and not diagnosis.is_remote:
        return ""
    return f"; to make that faster, {remedy_for(stage, is_remote=diagnosis.is_remote)}"


def _worker_advice(diagnosis: Diagnosis, inline: Measured) -> Iterator[str]:
    """Yield which workers to use, where they are faster than none."""
    best = diagnosis.best
    gain = best.samples_per_second / max(inline.samples_per_second, 1e-9)
    yield f"use {best.settings}: {gain:.1f} times as fast as in the training process"
    enough = [
        each
        for each in diagnosis.measured
        if 0 < each.workers < best.workers
        and each.samples_per_second * GAIN > best.samples_per_second
    ]
    if enough:
        yield f"{min(enough, key=lambda each: each.workers).settings} is about as fast"
    elif best.workers == max(each.workers for each in diagnosis.measured) and gain > (
        SCALES * best.workers
    ):
        yield (
            f"each of these workers adds as much as the training process does alone, so more may "
            f"be faster still: measure them with --try-workers {2 * best.workers}"
        )


def _slice_advice(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield which slices to read, where reading is what takes the time."""
    present, best = diagnosis.read_per_second[1], diagnosis.best.samples_per_second
    if not diagnosis.slices or best * GAIN < present / 2:
        return  # reading is not what bounds the run
    length, rate = max(diagnosis.slices.items(), key=lambda item: item[1])
    if rate > SLICE_GAIN * present:
        yield (
            f"read slices of {length} samples (max_samples_per_sequence={length}): reading alone "
            f"is {rate / present:.1f} times as fast as with {diagnosis.present_slice}"
        )


def report_lines(diagnosis: Diagnosis) -> Iterable[str]:
    """Yield a diagnosis as text."""
    cold, cached = diagnosis.read_per_second
    yield f"available CPUs: {diagnosis.cpus:g}"
    how = " without reading ahead" if diagnosis.is_remote else ""
    yield f"reading alone{how}: {cold:,.0f} samples/s, again {cached:,.0f} samples/s"
    yield (
        f"storage: one sample alone takes {1e3 * diagnosis.read_latency_seconds:.2f} ms, many "
        f"together {diagnosis.read_bytes_per_second / 1e6:,.0f} MB/s"
    )
    for length, rate in diagnosis.slices.items():
        yield (
            f"reading alone with slices of {length} instead of {diagnosis.present_slice}: "
            f"{rate:,.0f} samples/s"
        )
    if diagnosis.transfer_per_second is not None:
        yield f"transfer alone, one process: {diagnosis.transfer_per_second:,.0f} samples/s"
    for each in diagnosis.measured:
        mark = "  <- best" if each is diagnosis.best else ""
        yield (
            f"{each.settings}: {each.samples_per_second:,.0f} samples/s, first batch after "
            f"{each.seconds_to_first_batch:.1f} s{mark}"
        )
    shares = ", ".join(f"{name} {share:.0%}" for name, share in diagnosis.stages.items())
    yield f"in one process: {shares or 'too quick to tell'}"
    for name, rate in diagnosis.stage_per_second.items():
        yield f"{name} alone, one process: {rate:,.0f} samples/s"
    yield from diagnosis.advice
    for symptom in diagnosis.symptoms:
        yield f"{'problem' if symptom.is_bad else 'note'}: {symptom.what}"
    bad = sum(symptom.is_bad for symptom in diagnosis.symptoms)
    yield counted(bad, "problem")


def check_speed(diagnosis: Diagnosis, at_least: float | None) -> str | None:
    """Return why a machine does not do, as for tests in CI; None if it does."""
    bad = [symptom.what for symptom in diagnosis.symptoms if symptom.is_bad]
    if bad:
        return "; ".join(bad)
    found = diagnosis.best.samples_per_second
    if at_least is not None and found < at_least:
        return f"{found:,.0f} samples/s at best, expected {at_least:,.0f}"
    return None


def require_dataset(found: Any, target: str) -> SavableDataset:
    """Return what a function of the user made, if it can be measured.

    Raises:
        ConfigError: If it is something else.
    """
    if not isinstance(found, SavableDataset):
        raise ConfigError(
            f"{target} returned {type(found).__name__}, expected what get_train_dataset returns"
        )
    return found
