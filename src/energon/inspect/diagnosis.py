"""Draw conclusions from measurements of a pipeline, and from the settings of the machine.

They name the limit of a run and better settings. `doctor` measures.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from energon.installation import SIGN
from energon.io.address import is_remote, split_address
from energon.io.backends.object_stores import HUB_ENDPOINT, azure_options, s3_options
from energon.loader.monitoring.accounts import READ
from energon.loader.monitoring.verdict import remedy_for
from energon.messages import counted
from energon.surroundings import CGROUP, cpu_quota, usable_memory
from energon.task_encoder.dataset import SavableDataset
from energon.version import __version__

SHARED_MEMORY_BYTES = 1 << 30
DESCRIPTORS = 4096
CLOCK = 1_600_000_000
"""Seconds since 1970: a clock before this is wrong, and stores refuse signed requests."""
SKEW_SECONDS = 60
"""How far a clock may be off without a remark; the time in answers of stores is rounded."""
REFUSED_SKEW_SECONDS = 15 * 60
"""Beyond this, S3 and Azure refuse signed requests."""
HOST_SECONDS = 5
"""How long to wait for the answer of a host."""


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
    if not _has_turbojpeg():
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
        yield from _clocks(dataset)


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


def _clocks(dataset: SavableDataset) -> Iterator[Symptom]:
    remote = [source for source in dataset.reader.sources if source.is_remote]
    hosts = dict.fromkeys(host_of(os.fspath(path)) for source in remote for path in source.paths)
    for host in filter(None, hosts):
        skew = _clock_skew(host)
        if skew is not None and abs(skew) >= SKEW_SECONDS:
            yield Symptom(
                f"the clock of this machine is {abs(skew) / 60:,.0f} minutes "
                f"{'ahead of' if skew > 0 else 'behind'} that of {host}; stores refuse requests "
                "signed at another time, S3 beyond 15 minutes: synchronize it, e.g. by NTP",
                is_bad=abs(skew) >= REFUSED_SKEW_SECONDS,
            )


def host_of(address: str) -> str | None:
    """Return the URL of the host that serves an address; None if that is not known."""
    if not is_remote(address):
        return None
    parts, setting = split_address(address), os.environ.get
    host = parts.root.partition("://")[2].partition("?")[0].rpartition("@")[2]
    match parts.scheme:
        case "http" | "https":
            return f"{parts.scheme}://{host}"
        case "s3":
            own = s3_options(os.environ).get("endpoint") or setting("AWS_ENDPOINT_URL")
            return own or "https://s3.amazonaws.com"
        case "gs":
            return setting("GOOGLE_BASE_URL") or "https://storage.googleapis.com"
        case "hf":
            return setting("HF_ENDPOINT") or HUB_ENDPOINT
        case "az" | "azure":
            options = azure_options(setting("AZURE_STORAGE_CONNECTION_STRING", ""))
            name = options.get("account_name") or setting("AZURE_STORAGE_ACCOUNT_NAME")
            own = options.get("endpoint") or setting("AZURE_STORAGE_ENDPOINT")
            return own or (name and f"https://{name}.blob.core.windows.net")
        case "abfs" | "abfss" | "adl":
            return f"https://{host}"
    return None


def _clock_skew(host: str) -> float | None:
    """Return how many seconds this machine is ahead of a host; None if that does not tell."""
    from email.utils import parsedate_to_datetime
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    begun = time.time()
    try:
        with urlopen(Request(host, method="HEAD"), timeout=HOST_SECONDS) as answer:
            headers = answer.headers
    except HTTPError as error:
        headers = error.headers
    except (OSError, ValueError):
        return None
    present = (begun + time.time()) / 2
    try:
        return present - parsedate_to_datetime(headers["Date"]).timestamp()
    except (TypeError, ValueError):
        return None


PREFETCH, LONG_PREFETCH = 2, 8
"""What loaders do by default, and the alternatives that are tried."""
SLICE_GAIN = 1.5
"""Slices change the order of the run, so a change must gain at least this much."""
SCALES = 0.8
"""Workers are not too many if they reach this share of what as many processes could do."""
KEPT = 0.1
"""Data comes from memory if stores sent a smaller share of its bytes than this."""
GAIN = 1.15
"""Settings that are faster by less than this are not worth a change."""
UNSURE = 1.5
"""If a gain falls short of what was expected by more than this, the measurements are doubtful."""
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
class Confirmation:
    """What the recommended workers gain when they are measured again, beside none.

    The fastest of many measurements is partly the luckiest one, so its gain is not proof.

    Args:
        before: Loading in the training process.
        after: Loading with the recommended workers.
        expected_gain: How many times as fast they were expected to be.
    """

    before: Measured
    after: Measured
    expected_gain: float

    @property
    def gain(self) -> float:
        """How many times as fast they are."""
        return self.after.samples_per_second / max(self.before.samples_per_second, 1e-9)

    def __str__(self) -> str:
        text = (
            f"measured again: {self.after.settings} is {self.gain:.1f} times as fast as "
            f"{self.before.settings}"
        )
        if self.gain * UNSURE < self.expected_gain:
            text += (
                f", expected {self.expected_gain:.1f}: measurements differ on this machine; take "
                "longer ones with --seconds, when nothing else runs"
            )
        return text


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and the conclusions.

    Args:
        cpus: How many CPUs may be used.
        read_per_second: Samples a second of reading alone, the first time and again from the page
            cache.
        read_latency_seconds: How long it takes to read a single sample.
        read_bytes_per_second: Bytes a second of reading alone, from the page cache.
        slices: Samples a second of reading alone by length of slices, except the current one.
        present_slice: The length of slices of the run; the longest if datasets differ.
        transfer_per_second: Samples a second that a worker process sends if it does nothing else;
            None if no processes were measured.
        stage_per_second: Samples a second of each stage if it had one process to itself.
        is_remote: Whether data comes from a store. Reading alone then happens without read-ahead,
            one request after the other, and does not limit loaders.
        disk_bytes: What the first reading took from disk; None if the system does not report it.
        measured: All ways of loading.
        stages: The share of each stage of the time in one process, by name, the longest first.
        advice: What limits the run and what to change, in sentences.
        symptoms: Problems of the machine and the installation.
        confirmation: What the recommended workers really gain; None if none are recommended.
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
    confirmation: Confirmation | None = None

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
        plain = {**asdict(self), "best": asdict(self.best)}
        if self.confirmation is not None:
            plain["confirmation"]["gain"] = self.confirmation.gain
        return plain


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
        yield (
            f"one process spends {share:.0%} of its time in {stage}; doing nothing else, it would "
            f"reach {alone:,.0f} samples/s{_faster(stage, diagnosis)}"
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
    yield from _slice_advice(diagnosis)
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


def _faster(stage: str, diagnosis: Diagnosis) -> str:
    """Return advice for a stage; "" for local reading, about which more is measured."""
    if stage == READ and not diagnosis.is_remote:
        return ""
    return f"; to make that faster, {remedy_for(stage, is_remote=diagnosis.is_remote)}"


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


def _slice_advice(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield which slices to read, if reading takes most of the time."""
    present, best = diagnosis.read_per_second[1], diagnosis.best.samples_per_second
    # Reading alone takes many samples at a time, so a run may be far slower and still wait for it.
    is_limit = best * GAIN >= present / 2 or diagnosis.stages.get(READ, 0.0) > 0.5
    if not diagnosis.slices or not is_limit:
        return
    length, rate = max(diagnosis.slices.items(), key=lambda item: item[1])
    if rate > SLICE_GAIN * present:
        yield (
            f"read slices of {length} samples (max_samples_per_sequence={length}): reading alone "
            f"is {rate / present:.1f} times as fast as with {diagnosis.present_slice}"
        )


def report_lines(diagnosis: Diagnosis) -> Iterable[str]:
    """Yield a diagnosis as lines of text."""
    cold, cached = diagnosis.read_per_second
    yield f"available CPUs: {diagnosis.cpus:g}"
    how = " without reading ahead" if diagnosis.is_remote else ""
    yield f"reading alone{how}: {cold:,.0f} samples/s, again {cached:,.0f} samples/s"
    yield (
        f"storage: a single sample takes {1e3 * diagnosis.read_latency_seconds:.2f} ms, many "
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
    yield f"in one process: {shares or 'too fast to measure'}"
    for name, rate in diagnosis.stage_per_second.items():
        yield f"{name} alone, one process: {rate:,.0f} samples/s"
    yield from diagnosis.advice
    if diagnosis.confirmation is not None:
        yield str(diagnosis.confirmation)
    for symptom in diagnosis.symptoms:
        yield f"{'problem' if symptom.is_bad else 'note'}: {symptom.what}"
    bad = sum(symptom.is_bad for symptom in diagnosis.symptoms)
    yield counted(bad, "problem")


def check_speed(diagnosis: Diagnosis, at_least: float | None) -> str | None:
    """Return why a machine fails the check, as in CI; None if it passes."""
    bad = [symptom.what for symptom in diagnosis.symptoms if symptom.is_bad]
    if bad:
        return "; ".join(bad)
    rate = diagnosis.best.samples_per_second
    if at_least is not None and rate < at_least:
        return f"{rate:,.0f} samples/s at best, expected {at_least:,.0f}"
    return None
