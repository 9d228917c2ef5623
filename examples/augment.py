"""Augment shards offline, many in parallel: read images, crop them, write new shards.

    python examples/augment.py FOLDER TARGET [--engine local|dask|ray] [--address ADDRESS]

FOLDER and TARGET are folders or addresses like s3://bucket/train. Each shard of FOLDER (keys with
jpg or png, and json) becomes a shard of the same name in TARGET, with a random crop as png and the
class as cls. Samples stream through: a worker holds one at a time. Crops depend only on the key, so
writing a shard again produces the same shard.

If the command is interrupted, even by kill -9, run it again to continue: shards appear only when
they are complete. If FOLDER does not exist, the program creates it with eight small shards.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from random import Random
from typing import Any

import click
import numpy as np
from PIL import Image

import energon.webdataset as wds
from energon.prepare.engines import ENGINES, Engine
from energon.webdataset.tools import map_shards

SHARDS = 8
SAMPLES = 6
SIZE = 64


def main(arguments: Sequence[str] | None = None) -> None:
    """Augment a folder of shards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("target")
    parser.add_argument("--engine", choices=ENGINES, default="local")
    parser.add_argument("--address", help="of the scheduler of Dask, or the head of Ray")
    parser.add_argument("--num-workers", type=int, default=2)
    options = parser.parse_args(arguments)
    if "://" not in options.folder and not os.path.exists(options.folder):
        make_shards(options.folder)
    inputs = wds.expand_urls(options.folder.rstrip("/") + "/")
    outputs = [f"{options.target}/{url.rpartition('/')[2]}" for url in inputs]
    if "://" not in options.target:
        os.makedirs(options.target, exist_ok=True)
    made = map_shards(
        augment,
        inputs,
        outputs,
        engine=Engine(options.engine, options.address, options.num_workers),
        progress=lambda done, total: click.echo(f"{done} of {total} shards"),
    )
    click.echo(f"wrote {len(made)} shards, {len(inputs) - len(made)} already existed")


def augment(source: str, target: str) -> None:
    """Write a shard with a crop of each image of another one."""
    samples = wds.DataPipeline(
        wds.SimpleShardList(source),
        wds.tarfile_to_samples(),
        wds.decode("pil"),
        wds.to_tuple("__key__", "jpg;png", "json"),
    )
    with wds.TarWriter(target) as sink:
        for key, image, about in samples:
            sink.write({"__key__": key, "png": crop(key, image), "cls": class_of(about)})


def crop(key: str, image: Image.Image) -> Image.Image:
    """Return a random part of an image, with half of its width and height, maybe mirrored."""
    random = Random(key)
    width, height = image.width // 2, image.height // 2
    left, top = random.randint(0, width), random.randint(0, height)
    part = image.crop((left, top, left + width, top + height))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else part


def class_of(about: dict[str, Any]) -> int:
    """Return the class of an image; 0 if it is not labeled."""
    annotations = about.get("annotations", [])
    return int(annotations[0]["category_id"]) if annotations else 0


def make_shards(folder: str) -> None:
    """Write shards of small images with annotations."""
    os.makedirs(folder)
    with wds.ShardWriter(f"{folder}/train-%06d.tar", maxcount=SAMPLES) as sink:
        for number in range(SHARDS * SAMPLES):
            pixels = np.random.default_rng(number).integers(0, 255, (SIZE, SIZE, 3), np.uint8)
            about = {"annotations": [{"category_id": number % 10}]}
            sink.write({"__key__": f"{number:06}", "jpg": pixels, "json": json.dumps(about)})


if __name__ == "__main__":
    main()
