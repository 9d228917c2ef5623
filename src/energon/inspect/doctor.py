"""Measure the limits of a run on this machine, and recommend settings.

Reading alone (one sample and many at a time), the whole pipeline in this process, the transfer of
its batches alone, and workers of both kinds are measured one after the other for a few seconds
each, over the same data in the same order. From that, and the settings of the machine, follow the
limit of the run and better settings. `surroundings` finds problems of the machine and the
installation that slow down or break runs.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

from energon.errors import ConfigError
from energon.installation import SIGN
from energon.loader.loader import BasicDataLoader
from energon.loader.memory import keep_heap
from energon.loader.monitoring.accounts import READ
from energon.loader.monitoring.verdict import remedy_for
from energon.loader.options import LoaderOptions
from energon.loader.savable import get_loader
from energon.loader.transport.pickling import BatchPickler
from energon.stages.base import DatasetIterator, State
from energon.stages.lane import Lane
from energon.surroundings import CGROUP, cpu_quota, usable_cpus, usable_memory
from energon.task_encoder.dataset import SavableDataset
from energon.version import __version__
from energon.worker import WorkerConfig

SHARED_MEMORY_BYTES = 1 << 30
DESCRIPTORS = 4096
CLOCK = 1_600_000_000
"""Seconds since 1970: a clock before this is wrong, and stores refuse signed requests."""


@dataclass(frozen=True)
class Symptom:
    """A problem of the machine or the installation.

    Args:
        what: What was found, what was expected, and what to do.
        is_bad: Whether it makes runs fail or crawl.
    """

    what: str
    is_bad: bool = False


def surroundings(
    dataset: SavableDataset | None = None, *, cgroup: Path = CGROUP
) -> Iterator[Symptom]:
    """Yield problems of this machine and installation that slow down or break runs.

    Args:
        dataset: The dataset to be read; None for none in particular.
        cgroup: Where the control group of this process is mounted.
    """
    yield from _machine(cgroup)
    try:
        import simplejpeg  # noqa: F401  (decoders do without one that is damaged, too)
    except ImportError:
        yield Symptom(
            "simplejpeg (libjpeg-turbo) is not installed, so JPEG images are decoded by Pillow, "
            "which takes twice as long: pip install 'energon-loader[fast-jpeg]'"
        )
    if any(os.path.exists(os.path.join(folder, SIGN)) for folder in sys.path):
        yield Symptom(
            "megatron-energon is installed as well, and the two packages overwrite each other's "
            "files; uninstall it",
            is_bad=True,
        )
    yield from _versions()
    if dataset is not None:
        yield from _data(dataset, cgroup)


def _versions() -> Iterator[Symptom]:
    """Yield installed packages that do not fit together."""
    try:
        installed = version("energon-loader")
    except PackageNotFoundError:
        installed = __version__  # run from a folder, without an installation
    if installed != __version__:
        yield Symptom(
            f"this is energon {__version__} of {Path(__file__).parents[1]}, and energon-loader "
            f"{installed} is installed: worker processes or commands may import the other one; "
            "keep only one of them",
            is_bad=True,
        )
    copies = {
        os.path.realpath(file)
        for folder in sys.path
        if os.path.exists(file := os.path.join(folder, "energon", "version.py"))
    }
    if len(copies) > 1:
        yield Symptom(
            f"energon is on the path {len(copies)} times ({', '.join(sorted(copies))}), and the "
            "first one is used; keep only one of them",
        )
    if problem := _arrays_of_torch():
        yield Symptom(
            f"torch cannot turn numpy arrays into tensors ({problem}): the two are built for "
            "different versions; install matching releases",
            is_bad=True,
        )


def _arrays_of_torch() -> str | None:
    """Return why torch accepts no numpy arrays; None if it does, or is not installed."""
    try:
        import torch
    except ImportError:
        return None
    import numpy as np

    try:
        torch.from_numpy(np.zeros(1, np.uint8))
    except Exception as error:
        return str(error)
    return None


def _machine(cgroup: Path) -> Iterator[Symptom]:
    quota = cpu_quota(cgroup)
    if quota is not None and quota < (os.cpu_count() or 1):
        yield Symptom(
            f"the control group may use {quota:g} of {os.cpu_count()} CPUs; workers beyond that "
            "only wait for one another"
        )
    if os.path.isdir("/dev/shm"):
        size = shutil.disk_usage("/dev/shm").total
        if size < SHARED_MEMORY_BYTES:
            yield Symptom(
                f"/dev/shm has {size >> 20} MiB, expected 1024 MiB for what PyTorch shares; "
                "start the container with --shm-size=8g (energon itself does not need it)"
            )
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit < DESCRIPTORS:
            yield Symptom(
                f"a process may open {limit} files, expected {DESCRIPTORS} or more; raise it with "
                f"`ulimit -n {DESCRIPTORS}`",
                is_bad=limit < DESCRIPTORS // 8,
            )
    except ImportError:  # not on Windows
        pass
    if time.time() < CLOCK:
        yield Symptom("the clock is wrong by years; stores refuse signed requests", is_bad=True)


def _data(dataset: SavableDataset, cgroup: Path) -> Iterator[Symptom]:
    local = [source for source in dataset.reader.sources if not source.is_remote]
    size = sum(len(source) * source.mean_sample_bytes for source in local)
    memory = usable_memory(cgroup)
    if memory is not None and size > memory:
        yield Symptom(
            f"the dataset has {size / 2**30:,.0f} GiB, memory {memory / 2**30:,.0f} GiB: each "
            "epoch is read from disk, not from the page cache"
        )


PREFETCH, LONG_PREFETCH = 2, 8
"""What loaders do by default, and the alternatives that are tried."""
SCALES = 0.8
"""Workers are not too many if they reach this share of what as many processes could do."""
KEPT = 0.1
"""Data comes from memory if stores sent a smaller share of its bytes than this."""
GAIN = 1.15
"""Settings that are faster by less than this are not worth a change."""
SENT = 2.0
"""Sending batches takes a good part of the time if it is not this much faster than making them."""
BUSY = 0.2
"""The machine is busy if a single process waits for a CPU for a larger share of its time."""


@dataclass(frozen=True)
class Measured:
    """The speed of one way of loading.

    Args:
        workers: How many; 0 loads in this process.
        kind: Processes or threads.
        prefetch: `prefetch_factor`.
        samples_per_second: After the first batch.
        seconds_to_first_batch: How long the first batch took.
        fetched_bytes_per_second: What came from stores, after the first batch.
        cpu_wait_share: The share of the time that those who made batches waited for a CPU.
    """

    workers: int
    kind: Literal["process", "thread"]
    samples_per_second: float
    seconds_to_first_batch: float
    prefetch: int = PREFETCH
    fetched_bytes_per_second: float = 0.0
    cpu_wait_share: float = 0.0

    @property
    def settings(self) -> str:
        """Describe the settings."""
        if not self.workers:
            return "num_workers=0"
        text = f"num_workers={self.workers}, workers={self.kind!r}"
        return text if self.prefetch == PREFETCH else f"{text}, prefetch_factor={self.prefetch}"


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and the conclusions.

    Args:
        cpus: How many CPUs may be used.
        read_per_second: Samples a second of reading alone, the first time and again from the page
            cache.
        read_latency_seconds: How long it takes to read a single sample.
        read_bytes_per_second: Bytes a second of reading alone, from the page cache.
        transfer_per_second: Samples a second that a worker process sends if it does nothing else;
            None if no processes were measured.
        sent_bytes: The size of a sample in a batch that is sent.
        needed_per_second: The samples a second that training needs; None if that is not known.
        stage_per_second: Samples a second of each stage if it had one process to itself.
        is_remote: Whether data comes from a store. Reading alone then happens without read-ahead,
            one request after the other, and does not limit loaders.
        disk_bytes: What the first reading took from disk; None if the system does not report it.
        measured: All ways of loading.
        stages: The share of each stage of the time in one process, by name, the longest first.
        advice: What limits the run and what to change, in sentences.
        symptoms: Problems of the machine and the installation.
    """

    cpus: float
    read_per_second: tuple[float, float]
    measured: Sequence[Measured]
    stages: dict[str, float]
    read_latency_seconds: float = 0.0
    read_bytes_per_second: float = 0.0
    transfer_per_second: float | None = None
    sent_bytes: float = 0.0
    needed_per_second: float | None = None
    stage_per_second: dict[str, float] = field(default_factory=dict)
    is_remote: bool = False
    disk_bytes: int | None = None
    advice: list[str] = field(default_factory=list)
    symptoms: list[Symptom] = field(default_factory=list)

    @property
    def best(self) -> Measured:
        """The fastest way of loading; one whose batches take more memory only if that pays off."""
        return max(
            self.measured,
            key=lambda each: each.samples_per_second / (1 if each.prefetch == PREFETCH else GAIN),
        )

    @property
    def inline(self) -> Measured:
        """Loading in this process."""
        return next(each for each in self.measured if not each.workers)

    @property
    def gain(self) -> float:
        """How many times as fast the fastest way of loading is as loading in this process."""
        return self.best.samples_per_second / max(self.inline.samples_per_second, 1e-9)

    @property
    def recommends_workers(self) -> bool:
        """Whether workers are faster than none by enough to use them."""
        return self.best.workers > 0 and self.gain > GAIN

    @property
    def store_bounds(self) -> bool:
        """Whether reading takes most of the time, and takes it for requests to a store."""
        return self.is_remote and next(iter(self.stages), "") == READ and not self.is_kept

    @property
    def is_kept(self) -> bool:
        """Whether data came from memory, which holds what was fetched before."""
        sample_bytes = self.read_bytes_per_second / max(self.read_per_second[1], 1e-9)
        used = self.inline.samples_per_second * sample_bytes
        return self.inline.fetched_bytes_per_second < KEPT * used

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {**asdict(self), "best": asdict(self.best)}


def advice_for(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the limits of the run and settings to change, in sentences."""
    best, (cold, cached) = diagnosis.best, diagnosis.read_per_second
    inline = diagnosis.inline
    if inline.cpu_wait_share > BUSY:
        yield (
            f"the machine is busy: num_workers=0 waited for a CPU {inline.cpu_wait_share:.0%} of "
            "the time, so a run alone on this machine would be faster, and other settings may be "
            "best for it; measure again when nothing else runs"
        )
    if diagnosis.stages:
        stage, share = next(iter(diagnosis.stages.items()))
        alone = diagnosis.stage_per_second.get(stage, 0.0)
        remedy = ""
        if stage != READ or diagnosis.is_remote:  # more is measured about local reading
            advice = remedy_for(stage, is_remote=diagnosis.is_remote)
            remedy = f"; to make that faster, {advice}"
        yield (
            f"one process spends {share:.0%} of its time in {stage}; doing nothing else, it would "
            f"reach {alone:,.0f} samples/s{remedy}"
        )
    if diagnosis.is_remote:
        yield from _store_advice(diagnosis)
        cached = 0.0
    elif (
        diagnosis.disk_bytes != 0 and cold * GAIN < cached and best.samples_per_second > cold / GAIN
    ):
        yield (
            f"storage limits the run: it delivers {cold:,.0f} samples/s at first, and the page "
            f"cache {cached:,.0f}; read larger slices, or copy the data to a faster disk"
        )
    if cached:
        share = best.samples_per_second / cached
        reached = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        yield (
            f"the best settings reach {reached} of what reading alone does from the page cache"
            if share < 1
            else "the best settings are as fast as reading alone from the page cache"
        )
    sent = diagnosis.transfer_per_second
    sending_bounds = sent is not None and sent < GAIN * inline.samples_per_second
    if sending_bounds:
        yield (
            f"sending batches limits worker processes: one sends at most {sent:,.0f} samples/s, "
            f"while num_workers=0 makes {inline.samples_per_second:,.0f}; send less (uint8 "
            "instead of floats, arrays instead of objects)"
        )
    if diagnosis.recommends_workers:
        yield from _worker_advice(diagnosis)
    elif sending_bounds:
        yield "use num_workers=0, where nothing is sent"
    else:
        yield _why_not_faster(diagnosis)
    if diagnosis.sent_bytes and not sending_bounds and not diagnosis.store_bounds:
        yield from _remote_advice(diagnosis)


def _store_advice(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield whether the store limits the run, and what needs less of it."""
    best, inline = diagnosis.best, diagnosis.inline
    if diagnosis.is_kept:
        yield (
            "the store is read in the first epoch only: the data fits in "
            "ENERGON_STORAGE_READ_AHEAD_BYTES and is kept in memory"
        )
    elif diagnosis.store_bounds:
        rate = max(each.fetched_bytes_per_second for each in diagnosis.measured) / 1e6
        more = "more workers make more requests at a time"
        if best.samples_per_second < GAIN * inline.samples_per_second:
            more = f"it delivers {rate:,.1f} MB/s, no matter how many workers ask"
        yield (
            f"the store limits the run: {more}; larger shards and slices need fewer requests, and "
            "ENERGON_STORAGE_CACHE_SHARDS=1 keeps what was read on local disk"
        )


def _why_not_faster(diagnosis: Diagnosis) -> str:
    """Return why workers are no faster than none."""
    if diagnosis.store_bounds:
        return "num_workers=0 is as fast as workers, which all wait for the store"
    sent, rate = diagnosis.transfer_per_second, diagnosis.inline.samples_per_second
    if all(each.kind == "thread" for each in diagnosis.measured if each.workers):
        why = (
            "threads take turns where hooks run Python code (--worker-kind process measures "
            "processes)"
        )
    elif sent is not None and sent < SENT * rate:
        why = f"one process sends {sent:,.0f} samples/s, and making them takes hardly longer"
    elif diagnosis.inline.cpu_wait_share > BUSY:
        why = f"the CPUs ({diagnosis.cpus:g}) are busy with something else"
    else:
        why = f"more than {diagnosis.cpus:g} CPUs are needed for them to gain anything"
    return f"num_workers=0 is as fast as workers: {why}"


def _worker_advice(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield which workers to use, which are faster than none."""
    best, gain = diagnosis.best, diagnosis.gain
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


def _remote_advice(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the samples that Ray actors on other machines would add, and their bytes."""
    best, cpus, needed = diagnosis.best, diagnosis.cpus, diagnosis.needed_per_second
    each = diagnosis.inline.samples_per_second
    sent = each * diagnosis.sent_bytes / 1e6
    if needed is not None:
        if (missing := math.ceil(needed / each - cpus)) > 0:
            yield (
                f"{needed:,.0f} samples/s take the time of about {needed / each:,.0f} CPUs, and "
                f"this machine has {cpus:g}: add RayWorkers(num_actors={missing}) on other "
                f"machines, which send {missing * sent:,.1f} MB/s over the network"
            )
    elif diagnosis.recommends_workers and best.workers >= int(cpus):
        yield (
            f"all {cpus:g} CPUs are used: if training needs more samples, each Ray actor on "
            f"another machine adds about {each:,.0f} samples/s, and sends {sent:,.1f} MB/s over "
            "the network"
        )


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
    needed_per_second: float | None = None,
    cgroup: Path = CGROUP,
) -> Diagnosis:
    """Return the limits of a run on this machine, and settings to change.

    Args:
        make: Returns the dataset of the run for a worker config.
        seconds: How long to measure each way of loading.
        workers: Numbers of workers; None for 0, 1, 2 and the number of CPUs.
        kinds: Kinds of workers.
        needed_per_second: The samples a second that training needs; None if that is not known.
        cgroup: Where the control group of this process is mounted.
    """
    cpus = usable_cpus(cgroup)
    numbers = sorted({0, 1, 2, max(1, int(cpus))} if workers is None else {0, *workers})
    keep_heap(LoaderOptions().kept_heap_bytes)  # as loaders do, with which reading is compared
    here = make(_config(0))
    is_remote = any(source.is_remote for source in here.reader.sources)
    latency = _read_latency(here)
    disk = _disk_bytes()
    cold = _read_alone(here, seconds)
    disk = None if disk is None else (_disk_bytes() or 0) - disk
    reading = cold, _read_alone(here, seconds)
    measured, stages = _measure_workers(make, numbers, kinds, seconds)
    transfer, sent_bytes = _transfer_alone(here, seconds / 2) if "process" in kinds else (None, 0.0)
    diagnosis = Diagnosis(
        cpus,
        reading,
        measured,
        {name: figures["share"] for name, figures in stages.items()},
        read_latency_seconds=latency,
        read_bytes_per_second=reading[1] * _mean_bytes(here),
        is_remote=is_remote,
        disk_bytes=disk,
        transfer_per_second=transfer,
        sent_bytes=sent_bytes,
        needed_per_second=needed_per_second,
        stage_per_second={name: figures["per_second"] for name, figures in stages.items()},
    )
    diagnosis.advice.extend(advice_for(diagnosis))
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


def _config(num_workers: int) -> WorkerConfig:
    return WorkerConfig(rank=0, world_size=1, num_workers=num_workers)


def _read_alone(dataset: SavableDataset, seconds: float) -> float:
    """Return how many samples a second are read, doing nothing with them."""
    step = max(1, min(MAX_READ_ROWS, int(ALONE_BYTES / max(1, _mean_bytes(dataset)))))
    plan, rows = dataset.plan(1), 0
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
    plan, seconds = dataset.plan(1), []
    samples = sum(leaf.num_samples for leaf in dataset.plan.leaves)
    for number in range(SINGLE_READS):
        planned = plan.rows(0, number * samples // SINGLE_READS, 1)
        begun = time.perf_counter()
        dataset.reader.read(planned).samples(0, 1)
        seconds.append(time.perf_counter() - begun)
    return median(seconds[1:])  # the first one opens the data


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


def _transfer_alone(dataset: SavableDataset, seconds: float) -> tuple[float, float]:
    """Return how many samples a second one process sends if its batch is ready, and their size."""
    with get_loader(dataset, verdict_seconds=None) as loader:
        batch, stats = next(iter(loader), None), loader.stats()
        samples = stats.get("samples", 0) / max(1, stats["batches"])
    with get_loader(SameBatch(batch, _config(1)), verdict_seconds=None) as loader:
        batches, count = iter(loader), 0
        next(batches)
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            next(batches)
            count += 1
        rate = samples * count / (time.perf_counter() - begun)
    file = io.BytesIO()
    pickler = BatchPickler(file)
    pickler.dump(batch)
    sent = file.tell() + sum(buffer.raw().nbytes for buffer in pickler.buffers)
    return rate, sent / max(1, samples)


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


def require_dataset(result: Any, target: str) -> SavableDataset:
    """Return the result of a user's function, if it can be measured.

    Raises:
        ConfigError: If it cannot.
    """
    if not isinstance(result, SavableDataset):
        raise ConfigError(
            f"{target} returned {type(result).__name__}, expected the result of get_train_dataset"
        )
    return result
