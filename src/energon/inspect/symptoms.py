"""Problems of a machine and an installation that slow down or break runs."""

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
from energon.surroundings import CGROUP, cpu_quota, usable_memory
from energon.task_encoder.dataset import SavableDataset
from energon.version import __version__

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
