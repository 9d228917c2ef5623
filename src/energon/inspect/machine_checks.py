"""Look for what slows down or breaks runs on this machine and installation."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from energon.installation import SIGN
from energon.io.address import is_remote, split_address
from energon.io.backends.object_stores import HUB_ENDPOINT, azure_options, s3_options
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
    """Yield what slows down or breaks runs on this machine and installation.

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
    parts, found = split_address(address), os.environ.get
    host = parts.root.partition("://")[2].partition("?")[0].rpartition("@")[2]
    match parts.scheme:
        case "http" | "https":
            return f"{parts.scheme}://{host}"
        case "s3":
            own = s3_options(os.environ).get("endpoint") or found("AWS_ENDPOINT_URL")
            return own or "https://s3.amazonaws.com"
        case "gs":
            return found("GOOGLE_BASE_URL") or "https://storage.googleapis.com"
        case "hf":
            return found("HF_ENDPOINT") or HUB_ENDPOINT
        case "az" | "azure":
            options = azure_options(found("AZURE_STORAGE_CONNECTION_STRING", ""))
            name = options.get("account_name") or found("AZURE_STORAGE_ACCOUNT_NAME")
            own = options.get("endpoint") or found("AZURE_STORAGE_ENDPOINT")
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
