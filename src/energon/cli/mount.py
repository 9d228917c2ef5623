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

    root = TreeOpener(sample_folders=sample_folders).open(path)
    serve(root, str(mountpoint), name=redact(path).replace(",", ";"), foreground=not detach)
