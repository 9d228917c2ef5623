"""Measure on this machine what bounds a run, and say which settings to change.

Reading alone, the whole pipeline in this process, and workers of both kinds are measured one after
the other, each for a few seconds, over the same data in the same order.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from energon.errors import ConfigError
from energon.installation import SIGN
from energon.loader.getters import get_loader
from energon.messages import counted
from energon.surroundings import CGROUP, cpu_quota, usable_cpus
from energon.task_encoder.dataset import SavableDataset
from energon.worker import WorkerConfig

MakeDataset = Callable[[WorkerConfig], SavableDataset]

GAIN = 1.15
"""Settings that are faster by less than this are not worth a change."""
SHARED_MEMORY_BYTES = 1 << 30
DESCRIPTORS = 4096
CLOCK = 1_600_000_000
"""Seconds since 1970: a clock that is before this is wrong, and signed requests are refused."""


@dataclass(frozen=True)
class Measured:
    """How fast one way of loading is.

    Args:
        workers: How many; 0 loads in this process.
        kind: Processes or threads.
        samples_per_second: After the first batch.
        seconds_to_first_batch: How long that took.
    """

    workers: int
    kind: Literal["process", "thread"]
    samples_per_second: float
    seconds_to_first_batch: float

    @property
    def settings(self) -> str:
        """The settings in words."""
        if not self.workers:
            return "num_workers=0"
        return f"num_workers={self.workers}, workers={self.kind!r}"


@dataclass(frozen=True)
class Symptom:
    """Something of the surroundings that is not as it should be.

    Args:
        what: What was found, what was expected, and what to do.
        is_bad: Whether runs fail or crawl on account of it.
    """

    what: str
    is_bad: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and what follows from it.

    Args:
        cpus: How many CPUs may be used.
        read_per_second: Samples a second of reading alone, as they come first and, from the cache
            of the system, again.
        measured: All ways of loading.
        stages: What each stage takes of the time in one process, by name, the longest first.
        advice: What bounds the run and what to change, in sentences.
        symptoms: What is wrong with the surroundings.
    """

    cpus: float
    read_per_second: tuple[float, float]
    measured: Sequence[Measured]
    stages: dict[str, float]
    advice: list[str] = field(default_factory=list)
    symptoms: list[Symptom] = field(default_factory=list)

    @property
    def best(self) -> Measured:
        """The fastest way of loading."""
        return max(self.measured, key=lambda each: each.samples_per_second)

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
    here = make(_config(0))
    reading = _read_alone(here, seconds), _read_alone(here, seconds)
    measured: list[Measured] = []
    stages: dict[str, float] = {}
    for number in numbers:
        for kind in kinds if number else kinds[:1]:
            found, shares = _measure(make(_config(number)), kind, seconds)
            measured.append(found)
            stages = stages if number else shares
    diagnosis = Diagnosis(cpus, reading, measured, stages)
    diagnosis.advice.extend(_advice(diagnosis))
    diagnosis.symptoms.extend(surroundings(here, cgroup=cgroup))
    return diagnosis


def _config(num_workers: int) -> WorkerConfig:
    return WorkerConfig(rank=0, world_size=1, num_workers=num_workers)


def _read_alone(dataset: SavableDataset, seconds: float) -> float:
    """Return how many samples a second are read, with nothing done to them."""
    plan, rows, step = dataset.plan(1), 0, 64
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        planned = plan.rows(0, rows, step)
        if not len(planned.leaf):
            break
        dataset.reader.read(planned)
        rows += len(planned.leaf)
    return rows / (time.perf_counter() - begun)


def _measure(
    dataset: SavableDataset, kind: Literal["process", "thread"], seconds: float
) -> tuple[Measured, dict[str, float]]:
    number = dataset.worker_config.num_workers
    with get_loader(dataset, workers=kind, verdict_seconds=None) as loader:
        batches = iter(loader)
        begun = time.perf_counter()
        next(batches, None)
        first = time.perf_counter() - begun
        while time.perf_counter() - begun < first + seconds and next(batches, None) is not None:
            pass
        run = loader.stats()["run"]
    stages = {name: round(about["share"], 4) for name, about in run["stages"].items()}
    return Measured(number, kind, run["samples_per_second"], first), stages


def _advice(diagnosis: Diagnosis) -> Iterator[str]:
    best, (cold, cached) = diagnosis.best, diagnosis.read_per_second
    inline = next(each for each in diagnosis.measured if not each.workers)
    if diagnosis.stages:
        stage, share = next(iter(diagnosis.stages.items()))
        yield f"one process spends {share:.0%} of its time in {stage}"
    if cold * GAIN < cached and best.samples_per_second > cold / GAIN:
        yield (
            f"storage bounds the run: it gives {cold:,.0f} samples/s at first, and the cache of "
            f"the system {cached:,.0f}; read larger slices, or copy the data to a faster disk"
        )
    if cached:
        share = best.samples_per_second / cached
        yield f"the best settings reach {share:.0%} of what reading alone does from the cache"
    if best.workers and best.samples_per_second > GAIN * inline.samples_per_second:
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
    else:
        yield "num_workers=0 is as fast as workers: batches cost as much to send as to make"
    if (
        best.workers >= diagnosis.cpus
        and best.samples_per_second < GAIN * inline.samples_per_second
    ):
        yield f"there are {diagnosis.cpus:g} CPUs, all of which are busy"


def surroundings(
    dataset: SavableDataset | None = None, *, cgroup: Path = CGROUP
) -> Iterator[Symptom]:
    """Yield what of this machine and installation slows runs down or breaks them.

    Args:
        dataset: What is going to be read; None for nothing in particular.
        cgroup: Where the control group of this process is shown.
    """
    yield from _machine(cgroup)
    if not _has_turbojpeg():
        yield Symptom(
            "simplejpeg (libjpeg-turbo) is not installed, so JPEG images are decoded by Pillow, "
            "which takes twice as long: install energon-loader[fast-jpeg]"
        )
    if any(os.path.exists(os.path.join(folder, SIGN)) for folder in sys.path):
        yield Symptom(
            "megatron-energon is installed beside energon, and both overwrite each other's files; "
            "uninstall it",
            is_bad=True,
        )
    if dataset is not None:
        yield from _data(dataset)


def _has_turbojpeg() -> bool:
    try:
        import simplejpeg
    except ImportError:
        return False
    return simplejpeg is not None


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
                "start the container with --shm-size=8g (energon itself does without it)"
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


def _data(dataset: SavableDataset) -> Iterator[Symptom]:
    local = [source for source in dataset.reader.sources if not source.is_remote]
    size = sum(len(source) * source.mean_sample_bytes for source in local)
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return
    if size > memory:
        yield Symptom(
            f"the data have {size / 2**30:,.0f} GiB, memory {memory / 2**30:,.0f} GiB: epochs are "
            "read from disk each time, not from the cache of the system"
        )


def report_lines(diagnosis: Diagnosis) -> Iterable[str]:
    """Yield a diagnosis as text."""
    cold, cached = diagnosis.read_per_second
    yield f"CPUs that may be used: {diagnosis.cpus:g}"
    yield f"reading alone: {cold:,.0f} samples/s, again {cached:,.0f} samples/s"
    for each in diagnosis.measured:
        mark = "  <- best" if each is diagnosis.best else ""
        yield (
            f"{each.settings}: {each.samples_per_second:,.0f} samples/s, first batch after "
            f"{each.seconds_to_first_batch:.1f} s{mark}"
        )
    shares = ", ".join(f"{name} {share:.0%}" for name, share in diagnosis.stages.items())
    yield f"in one process: {shares or 'too quick to tell'}"
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
