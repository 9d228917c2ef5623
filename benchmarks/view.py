"""Measure how long pages of `energon view` take, as a browser asks for them; see docs/explore.md.

    python benchmarks/view.py [--rounds 5] [--samples 10000000] [--per-shard 10000] [--data FOLDER]

Writes the datasets first if they are not there: one of many small texts, of a kilobyte of disk
each, and one of JPEGs of 70 kB. Each round starts a server of its own, so that nothing has
been opened, decoded or kept. A gallery is its page, and then all thumbnails over six connections.
The table has milliseconds until the answer was there, and CPU time of the server, which other
programs change less. Five rounds take half a minute, once the datasets are there.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

from results import Benchmark, Case, Results, shown, versions_of

JPEGS = 600
CONNECTIONS = 6


def main() -> None:
    """Measure, and write the table between the marks of the page."""
    parser = BENCHMARK.parser(__doc__, data="view")
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--per-shard", type=int, default=10_000)
    arguments = BENCHMARK.parsed(parser)
    texts = arguments.data / f"texts-{arguments.samples}-{arguments.per_shard}"
    images = arguments.data / "images"
    if not (texts / ".nv-meta/.info.json").exists():
        write_texts(texts, arguments.samples, arguments.per_shard)
    if not (images / ".nv-meta/.info.json").exists():
        write_images(images)

    def measure(case: Case) -> dict[str, Any]:
        is_text = case["data"] == "texts"
        taken = measure_texts(texts, arguments.samples) if is_text else measure_images(images)
        return {
            f"{name}, {kind}": getattr(each, kind) for name, each in taken for kind in Taken._fields
        }

    BENCHMARK.run(
        arguments,
        [{"data": "texts"}, {"data": "images"}],
        measure,
        versions_of(sys.executable, energon="energon-loader"),
        samples=arguments.samples,
    )


def tables(results: Results) -> str:
    """Return the time and the CPU time of each page."""
    lines = ["| | ms | ms of CPU |", "|---|---|---|"]
    for case in results["cases"]:
        for figure in case["rounds"][0]:
            name, _, kind = figure.rpartition(", ")
            if kind == "wall":
                cells = [shown(case["rounds"], f"{name}, {each}") for each in Taken._fields]
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


class Taken(NamedTuple):
    """What an answer took, in milliseconds."""

    wall: float
    cpu: float


def measure_texts(path: Path, samples: int) -> Iterator[tuple[str, Taken]]:
    """Yield what is asked of a large dataset, and how long the answer takes."""
    with viewing(path) as (server, port, start):
        many = f"{samples:,} samples in {_shards(path):,} shards"
        yield "start of the server", start
        for name, page in {
            f"first page, {many}": "/",
            f"gallery in the middle, {many}": f"/s/0/0?from={samples // 2 + 7}",
            f"search by the beginning of a key, {many}": "/s/0/0?key=text_000777",
        }.items():
            yield name, _taken(server, lambda page=page: _get(port, page))


def measure_images(path: Path) -> Iterator[tuple[str, Taken]]:
    """Yield how long a gallery of images takes."""

    def gallery() -> None:
        page = _get(port, "/s/0/0").decode()
        thumbnails = re.findall(r'<img src="(.*?)"', page)
        with ThreadPoolExecutor(CONNECTIONS) as browser:
            sizes = list(browser.map(lambda address: len(_get(port, address)), thumbnails))
        assert len(sizes) == 60
        assert min(sizes) > 1000

    with viewing(path) as (server, port, _):
        yield "gallery of 60 JPEGs of 70 kB", _taken(server, gallery)


@contextmanager
def viewing(path: Path) -> Iterator[tuple[int, int, Taken]]:
    """Run the server; yields its process, its port, and what it took to start."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "energon", "view", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        _connections.__dict__.clear()
        try:
            port = int(address.rstrip("/").rpartition(":")[2])
            start = Taken((time.perf_counter() - begin) * 1000, _cpu(server.pid))
            yield server.pid, port, start
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


def _taken(server: int, ask: Callable[[], object]) -> Taken:
    begin, cpu = time.perf_counter(), _cpu(server)
    ask()
    return Taken((time.perf_counter() - begin) * 1000, _cpu(server) - cpu)


def _cpu(process: int) -> float:
    """Return the CPU time that a process has taken, in milliseconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def _shards(path: Path) -> int:
    return len(list((path / "shards").glob("*.tar")))


def write_texts(folder: Path, samples: int, per_shard: int) -> None:
    """Write and prepare a dataset of small texts."""
    from energon import ShardWriter
    from energon.prepare.dataset import Indexing, prepare_dataset

    with ShardWriter(f"{folder}/shards/%05d.tar", maxcount=per_shard) as writer:
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


BENCHMARK = Benchmark(
    __file__,
    tables,
    conditions="each round had a server that had opened nothing",
    page="explore.md",
)

if __name__ == "__main__":
    main()
