"""Train on plain tar files with a pipeline in the style of webdataset, and resume it.

    python examples/webdataset_style.py SHARDS

SHARDS is a folder with tar files; if it does not exist, small ones are created there. Nothing is
prepared: shards are read as streams. A program for webdataset needs only another import.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np

import energon.webdataset as wds

BATCH_SIZE = 16


def main(arguments: Sequence[str] | None = None) -> bool:
    """Read an epoch, then stop in the middle of one and resume; return whether it is the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path)
    options = parser.parse_args(arguments)
    if not options.shards.exists():
        make_shards(options.shards)
    total = sum(len(classes) for _, classes in open_loader(options.shards))
    click.echo(f"an epoch: {total} samples")
    loader = open_loader(options.shards)
    batches = iter(loader)
    images, classes = next(batches)
    click.echo(f"a batch: images {images.shape} {images.dtype}, classes {classes.tolist()[:4]}…")
    state = loader.state_dict()
    expected = [classes.tolist() for _, classes in islice(batches, 3)]
    resumed = open_loader(options.shards)
    resumed.load_state_dict(state)
    found = [classes.tolist() for _, classes in islice(resumed, 3)]
    click.echo(f"resumed after a batch: {'the same' if found == expected else 'other'} batches")
    return found == expected


def open_loader(shards: Path) -> Any:
    """Return the batches of an epoch."""
    dataset = (
        wds.WebDataset(str(shards), shardshuffle=True)
        .shuffle(50)
        .decode("rgb")
        .to_tuple("png", "cls")
        .batched(BATCH_SIZE)
    )
    return wds.WebLoader(dataset, batch_size=None, num_workers=0)


def make_shards(folder: Path) -> None:
    """Write images of a single shade, which is their class."""
    with wds.ShardWriter(str(folder / "train-%06d.tar"), maxcount=50) as sink:
        for number in range(200):
            image = np.full((8, 8, 3), number, np.uint8)
            sink.write({"__key__": f"{number:06}", "png": image, "cls": number})


if __name__ == "__main__":
    main()
