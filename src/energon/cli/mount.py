"""`energon mount`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("mount")
@click.argument("path")
@click.argument("mountpoint", type=click.Path(path_type=Path))
@click.option("-s", "--sample-folders", is_flag=True, help="A folder for each sample.")
@click.option("-d", "--detach", is_flag=True, help="Go on in the background.")
def command(path: str, mountpoint: Path, sample_folders: bool, detach: bool) -> None:
    """Show the dataset at PATH as files in the folder MOUNTPOINT, read-only.

    Goes on until the folder is unmounted, with `umount MOUNTPOINT` or Ctrl-C.

    \b
    Example:
      energon mount ./coco /mnt/coco --detach
      energon mount s3://bucket/coco /mnt/coco --sample-folders
    """
    from energon.cli.mount_fuse import serve
    from energon.io.address import redact
    from energon.sources.browse_dataset import FlatFolder, SampleFinder, SampleFolder
    from energon.sources.shards import ShardPool

    samples = SampleFinder(path, ShardPool())
    root = SampleFolder(samples) if sample_folders else FlatFolder(samples)
    serve(root, str(mountpoint), name=redact(path).replace(",", ";"), foreground=not detach)
