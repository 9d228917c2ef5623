"""Measure how long pages of `energon view` take, as a browser asks for them.

    python benchmarks/view.py [--samples 10000000] [--data FOLDER] [--rounds 5]

Writes the datasets first if they are not there: one of many small texts, of a kilobyte of disk
each, and one of JPEGs of 70 kB. Each round starts a server of its own, so that nothing has
been opened, decoded or kept; its start is not counted, but printed. A gallery is its page, and
then all thumbnails over six connections. Prints a table of medians in milliseconds.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import local

PER_SHARD = 10_000
JPEGS = 600
CONNECTIONS = 6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data-made/view")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    texts = arguments.data / f"texts-{arguments.samples}"
    images = arguments.data / "images"
    if not (texts / ".nv-meta/.info.json").exists():
        write_texts(texts, arguments.samples)
    if not (images / ".nv-meta/.info.json").exists():
        write_images(images)
    found: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name, milliseconds in [*measure_texts(texts), *measure_images(images)]:
            found.setdefault(name, []).append(milliseconds)
    print("| | ms |\n|---|---|")
    for name, each in found.items():
        print(f"| {name} | {statistics.median(each):.0f} |")


def measure_texts(path: Path) -> Iterator[tuple[str, float]]:
    """Yield what is asked of a large dataset, and how long the answer takes."""
    with viewing(path) as (port, start):
        many = f"{_shards(path) * PER_SHARD:,} samples"
        yield "start of the server", start
        yield f"first page, {many}", _timed(port, "/")
        yield f"gallery in the middle, {many}", _timed(port, f"/s/0/0?from={PER_SHARD * 3 + 7}")
        yield f"search by the beginning of a key, {many}", _timed(port, "/s/0/0?key=text_000777")


def measure_images(path: Path) -> Iterator[tuple[str, float]]:
    """Yield how long a gallery of images takes."""
    with viewing(path) as (port, _):
        begin = time.perf_counter()
        page = _get(port, "/s/0/0").decode()
        thumbnails = re.findall(r'<img src="(.*?)"', page)
        with ThreadPoolExecutor(CONNECTIONS) as browser:
            sizes = list(browser.map(lambda address: len(_get(port, address)), thumbnails))
        assert len(sizes) == 60
        assert min(sizes) > 1000
        yield "gallery of 60 JPEGs of 70 kB", (time.perf_counter() - begin) * 1000


@contextmanager
def viewing(path: Path) -> Iterator[tuple[int, float]]:
    """Run the server; yields its port, and how many milliseconds it took to start."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "energon", "view", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        _connections.__dict__.clear()
        try:
            yield (
                int(address.rstrip("/").rpartition(":")[2]),
                (time.perf_counter() - begin) * 1000,
            )
        finally:
            server.kill()


_connections = local()


def _get(port: int, path: str) -> bytes:
    connection = _connections.__dict__.setdefault(port, HTTPConnection("127.0.0.1", port))
    connection.request("GET", path)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return content


def _timed(port: int, path: str) -> float:
    begin = time.perf_counter()
    _get(port, path)
    return (time.perf_counter() - begin) * 1000


def _shards(path: Path) -> int:
    return len(list((path / "shards").glob("*.tar")))


def write_texts(folder: Path, samples: int) -> None:
    """Write and prepare a dataset of small texts."""
    from energon import ShardWriter
    from energon.prepare.dataset import Indexing, prepare_dataset

    with ShardWriter(f"{folder}/shards/%05d.tar", maxcount=PER_SHARD) as writer:
        for number in range(samples):
            writer.write({"__key__": f"text_{number:08}", "txt": b"text %08d" % number})
    indexing = Indexing(sqlite=False)
    prepare_dataset(
        folder, split_parts=["train:.*"], sample_type="CrudeWebdataset", indexing=indexing
    )


def write_images(folder: Path) -> None:
    """Write and prepare a dataset of JPEGs of 70 kB."""
    import numpy as np
    from PIL import Image

    from energon import ShardWriter
    from energon.prepare.dataset import prepare_dataset

    rng = np.random.default_rng(0)
    with ShardWriter(f"{folder}/shards/%04d.tar", maxcount=JPEGS) as writer:
        for number in range(JPEGS):
            coarse = rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC)
            noise = rng.normal(0, 6, (480, 640, 3))
            pixels = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG", quality=79)
            writer.write({"__key__": f"image_{number:04}", "jpg": buffer.getvalue()})
    prepare_dataset(folder, split_parts=["train:.*"], sample_type="CrudeWebdataset")


if __name__ == "__main__":
    main()
