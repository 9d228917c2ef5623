"""`energon mount`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from energon.cli.allow_option import allow_option
from energon.cli.indexing_options import logging_to_terminal
from energon.errors import ConfigError

POLL_SECONDS = 0.05


@click.command("mount")
@click.argument("path")
@click.argument("mountpoint", type=click.Path(path_type=Path))
@click.option("-s", "--sample-folders", is_flag=True, help="A folder for each sample.")
@click.option("-d", "--detach", is_flag=True, help="Go on in the background.")
@allow_option
def command(path: str, mountpoint: Path, sample_folders: bool, detach: bool) -> None:
    """Show the dataset at PATH as files in the folder MOUNTPOINT, read-only.

    PATH may be a metadataset: then all datasets of its splits are shown, and their auxiliary data.
    Goes on until the folder is unmounted, with `umount MOUNTPOINT` or Ctrl-C.

    \b
    Example:
      energon mount ./coco /mnt/coco --detach
      energon mount s3://bucket/coco /mnt/coco --sample-folders
    """
    from energon.cli.mount_fuse import serve
    from energon.io.address import redact
    from energon.sources.browse_tree import TreeOpener

    _check_mountpoint(mountpoint)
    if detach:
        _serve_in_background(path, mountpoint, sample_folders)
        return
    with logging_to_terminal():
        root = TreeOpener(sample_folders=sample_folders).open(path)
        try:
            serve(root, str(mountpoint), name=redact(path).replace(",", ";"))
        except RuntimeError as error:
            raise click.ClickException(
                f"{mountpoint}: cannot be mounted (code {error}); may this user mount? Without the "
                "rights of root, fusermount3 of the package fuse3 is needed, and in containers "
                "the device /dev/fuse"
            ) from error


def _check_mountpoint(mountpoint: Path) -> None:
    """Raise ConfigError unless there is an empty folder that nothing is mounted on."""
    if not mountpoint.is_dir():
        raise ConfigError(f"{mountpoint}: there is no such folder to mount on; make an empty one")
    if mountpoint.is_mount():
        raise ConfigError(f"{mountpoint}: something is mounted there; `umount {mountpoint}` first")
    if any(mountpoint.iterdir()):
        raise ConfigError(f"{mountpoint}: is not empty; what is in it would be hidden")


def _serve_in_background(path: str, mountpoint: Path, sample_folders: bool) -> None:
    """Mount by another process, and return once it is mounted.

    A process of its own and no fork: connections to object stores do not outlive a fork.
    """
    options = ["--sample-folders"] if sample_folders else []
    words = [sys.executable, "-m", "energon.cli.main", "mount", path, str(mountpoint), *options]
    with tempfile.TemporaryFile("w+") as said:
        running = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        while not os.path.ismount(mountpoint):
            if running.poll() is not None:
                said.seek(0)
                raise click.ClickException(said.read().strip().removeprefix("Error: "))
            time.sleep(POLL_SECONDS)
    running.returncode = 0  # it goes on; nobody waits for it
