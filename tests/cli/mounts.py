"""Mount for tests, by the command."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from ctypes.util import find_library
from pathlib import Path

import pytest

from tests.servers.process import lack

_PROBE = """
import sys, mfusepy
mfusepy.FUSE(mfusepy.Operations(), sys.argv[1], foreground=True, ro=True)
"""


@pytest.fixture(scope="session")
def libfuse(tmp_path_factory) -> None:
    """Skip tests on machines where nothing can be mounted by FUSE."""
    folder = tmp_path_factory.mktemp("fuse")
    command = [sys.executable, "-c", _PROBE, str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as probe:
        while probe.poll() is None and not folder.is_mount():
            time.sleep(0.01)
        if not folder.is_mount():
            lack("libfuse")
        unmount(folder)


def unmount(folder: Path) -> None:
    """Take away what is mounted on a folder, as root or as the user who has mounted it."""
    for command in (["umount"], ["fusermount3", "-u"], ["fusermount", "-u"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, folder], stderr=subprocess.DEVNULL).returncode
        ):
            return
    raise RuntimeError(f"{folder} cannot be unmounted")


@contextlib.contextmanager
def mounting(
    path, mountpoint: Path, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run `energon mount` until the end of the block, if not ended before; give the process."""
    running = subprocess.Popen(
        _words(path, mountpoint, *options), stderr=subprocess.PIPE, text=True, env=env
    )
    deadline = time.monotonic() + 100
    try:
        while not mountpoint.is_mount():
            assert time.monotonic() < deadline, "was not mounted in time"
            if running.poll() is not None:
                raise RuntimeError(f"mounting has ended: {running.stderr.read()}")
            time.sleep(0.02)
        yield running
    finally:
        if mountpoint.is_mount():
            unmount(mountpoint)
            running.wait(100)
        running.kill()
        running.wait()
        running.stderr.close()


@contextlib.contextmanager
def mounted(path, mountpoint: Path, *options: str) -> Iterator[Path]:
    """Mount until the end of the block."""
    mountpoint.mkdir(exist_ok=True)
    with mounting(path, mountpoint, *options):
        yield mountpoint


def call_mount(
    path, mountpoint: Path, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `energon mount` to its end, which is soon if it detaches or fails."""
    return subprocess.run(
        _words(path, mountpoint, *options), capture_output=True, text=True, timeout=100, env=env
    )


def libraries() -> dict[str, dict[str, str]]:
    """The versions of libfuse of this machine, and the environment in which each is used."""
    found = {name: find_library(name) for name in ("fuse", "fuse3")}
    return {
        name: {**os.environ, "FUSE_LIBRARY_PATH": library}
        for name, library in found.items()
        if library is not None
    }


def _words(*arguments) -> list[str]:
    return [sys.executable, "-m", "energon.cli.main", "mount", *map(str, arguments)]


def files_of(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
