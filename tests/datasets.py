"""Datasets that tests build for themselves."""

from __future__ import annotations

import io
import json
import logging
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from energon.prepare.dataset import prepare_dataset

CAPTIONING = {"image": "jpg", "caption": "txt"}
CRUDE = {"split_parts": ["train:.*"], "sample_type": "CrudeWebdataset"}
"""How datasets of undecoded samples are prepared that are all to be trained on."""


def _prepare_alike(root: Path, **arguments: object) -> None:
    """Prepare a dataset whose splits are the same shards, without the warning that they are."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        prepare_dataset(root, **arguments)  # type: ignore[arg-type]
    finally:
        logging.disable(level)


def write_shard(path: Path, samples: Sequence[tuple[str, Mapping[str, bytes]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, parts in samples:
            for part, content in parts.items():
                member = tarfile.TarInfo(f"{key}.{part}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_crude(root: Path, *shards: Sequence[tuple[str, Mapping[str, bytes]]]) -> Path:
    """A crude dataset of these shards, `0.tar` and so on; all of them are the split "train"."""
    for number, samples in enumerate(shards):
        write_shard(root / f"{number}.tar", samples)
    prepare_dataset(root, **CRUDE)  # type: ignore[arg-type]
    return root


def jpeg(seed: int, *, size: tuple[int, int] = (12, 8)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def make_captions(
    root: Path, shard_counts: Sequence[int], *, prefix: str = "s", **settings: object
) -> Path:
    """A captioning dataset; sample n has the key `<prefix><n>` and the caption `caption <n>`."""
    number = 0
    for shard, count in enumerate(shard_counts):
        samples = []
        for _ in range(count):
            samples.append(
                (
                    f"{prefix}{number}",
                    {
                        "jpg": jpeg(number),
                        "txt": f"caption {number}".encode(),
                        "json": json.dumps({"n": number}).encode(),
                    },
                )
            )
            number += 1
        write_shard(root / f"shards/{shard:03}.tar", samples)
    arguments = {
        "split_parts": ["train:.*", "val:.*"],
        "sample_type": "CaptioningSample",
        "field_map": CAPTIONING,
        **settings,
    }
    _prepare_alike(root, **arguments)
    return root


def make_crude(root: Path, shard_counts: Sequence[int], *, prefix: str = "s") -> Path:
    """A crude dataset of texts; sample n has the key `<prefix><n>` and the text `text <n>`."""
    number = 0
    for shard, count in enumerate(shard_counts):
        samples = []
        for _ in range(count):
            samples.append((f"{prefix}{number}", {"txt": f"text {number}".encode()}))
            number += 1
        write_shard(root / f"{shard:03}.tar", samples)
    _prepare_alike(root, split_parts=["train:.*", "val:.*"], sample_type="CrudeWebdataset")
    return root
