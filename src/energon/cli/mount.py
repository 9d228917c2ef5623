"""`energon mount`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from energon.cli.main import RefusedCommandError, echo_lines
from energon.cli.options import allow_option, logging_to_terminal
from energon.errors import ConfigError
from energon.messages import shell_word

if TYPE_CHECKING:
    from energon.sources.tree import BrowsedFolder

MOUNT_POLL_SECONDS = 0.05
END_SECONDS = 10


@click.command("mount")
@click.argument("path")
@click.argument("mountpoint", type=click.Path(path_type=Path))
@click.option("-s", "--sample-folders", is_flag=True, help="Show each sample as a folder.")
@click.option("-d", "--detach", is_flag=True, help="Run in the background.")
@click.option("-w", "--allow-slow", is_flag=True, hidden=True)
@allow_option
def command(
    path: str, mountpoint: Path, sample_folders: bool, detach: bool, allow_slow: bool
) -> None:
    """Mount the dataset at PATH as a read-only folder, MOUNTPOINT.

    For a metadataset, shows all datasets of its splits, with their auxiliary data. Runs until
    Ctrl-C or `umount MOUNTPOINT`.

    \b
    Example:
      energon mount ./coco /mnt/coco --detach
      energon mount s3://bucket/coco /mnt/coco --sample-folders
    """
    from energon.io.address import redact
    from energon.sources.open_tree import TreeOpener

    _check_mountpoint(mountpoint)
    mountpoint = mountpoint.absolute()
    if detach:
        _serve_in_background(path, mountpoint, sample_folders)
        return
    with logging_to_terminal():
        root = TreeOpener(sample_folders=sample_folders).open(path)
        _check_shows(root, redact(path))
        # Needs libfuse. Problems with PATH are reported first.
        from energon.cli.mount_fuse import serve

        try:
            serve(root, str(mountpoint), name=redact(path).replace(",", ";"))
        except RuntimeError as error:
            raise click.ClickException(
                f"{mountpoint}: cannot be mounted (code {error}); is this user allowed to mount? "
                "Unless run by root, this needs fusermount3 from the package fuse3, and in "
                "containers the device /dev/fuse"
            ) from error


def _check_mountpoint(mountpoint: Path) -> None:
    """Raise ConfigError unless it is an empty folder on which nothing is mounted."""
    if not mountpoint.is_dir():
        raise ConfigError(f"{mountpoint}: no such folder; create an empty one to mount on")
    if mountpoint.is_mount():
        raise ConfigError(f"{mountpoint}: is already a mount point; `umount {mountpoint}` first")
    if any(mountpoint.iterdir()):
        raise ConfigError(
            f"{mountpoint}: is not empty, and its contents would be hidden; choose an empty folder"
        )


def _check_shows(root: BrowsedFolder, path: str) -> None:
    """Raise an error unless there is a file to show, and it can be opened."""
    from energon.sources.tree import first_file

    file = first_file(root)
    if file is None:
        raise ConfigError(
            f"{path}: has no samples, so there is nothing to show; see `energon info "
            f"{shell_word(path)}`"
        )
    file.open().close()


def _serve_in_background(path: str, mountpoint: Path, sample_folders: bool) -> None:
    """Mount in another process, and return once it is mounted.

    It is a new process and not a fork: connections to object stores do not survive a fork.
    """
    options = ["--sample-folders"] if sample_folders else []
    words = [sys.executable, "-m", "energon.cli.main", "mount", path, str(mountpoint), *options]
    with tempfile.TemporaryFile("w+") as output:
        running = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
        try:
            while not (is_mounted := os.path.ismount(mountpoint)) and running.poll() is None:
                time.sleep(MOUNT_POLL_SECONDS)
            problem = _look_into(mountpoint) if is_mounted else None
        except BaseException:
            _end(running)
            raise
        if problem is not None or not is_mounted:
            _end(running)
        output.seek(0)
        warnings = output.read().strip()
    if problem is not None or not is_mounted:
        refused = running.returncode == RefusedCommandError.exit_code
        kind = RefusedCommandError if refused else click.ClickException
        # What ends the process repeats what it has warned of.
        reason = warnings.rpartition("Error: ")[2]
        raise kind("\n".join(filter(None, [problem, reason])))
    if warnings:
        echo_lines(warnings.splitlines(), err=True)
    running.returncode = 0  # it continues without being waited for


def _end(running: subprocess.Popen[bytes]) -> None:
    """Let a process unmount and end; it may be stuck in a store."""
    running.send_signal(signal.SIGINT)
    try:
        running.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


def _look_into(mountpoint: Path) -> str | None:
    """Return the problem of a mounted folder; None if it shows something."""
    try:
        with os.scandir(mountpoint) as entries:
            is_empty = next(entries, None) is None
    except OSError as error:
        return f"{mountpoint}: was mounted, but cannot be read: {error.strerror}"
    return f"{mountpoint}: was mounted, but shows nothing" if is_empty else None
