"""Measure decoding of JPEGs to the size of training, and write docs/benchmarks_decode.md.

    benchmarks/peers.sh
    python benchmarks/decode.py [--rounds 5] [--peers PYTHON]

One program for all: bytes of JPEGs become batches of 64 images of 224 by 224, uint8. What differs
is the function that makes the array of the bytes: `SampleDecoder`; simplejpeg and cv2.resize; or
floats and torch's interpolate, as programs do that resize after a loader. Then the same through a
loader, in-line, in threads and in processes. Every figure comes from a fresh process; all take
turns within a round. Processor time counts user and system time of all threads and processes,
and hardly depends on what else the machine does. A round takes two minutes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from measure import process_tree

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks_decode.md"
MARK = "<!-- made by benchmarks/decode.py -->"
SIDE, BATCH = 224, 64
SIZES = ((500, 375), (1024, 768))
TASKS = {"resize": "resized", "crop": "random resized crop"}
HOWS = {
    "energon": "`SampleDecoder(image_size=224)`",
    "exact": "with `exact_resize=True`",
    "cv2": "decoded in full, `cv2.resize`, area",
    "torch": "floats, `F.interpolate`, antialiased",
    "codes": "the limit: Huffman codes only",
}
ROWS = [row for row in product(TASKS, HOWS) if row != ("crop", "codes")]
WORKERS = {"in-line": (0, "thread"), "2 threads": (2, "thread"), "2 processes": (2, "process")}
HOOKS = {
    "decoder": "the decoder alone",
    "python": "the decoder, and 1 ms of Python in `encode_sample`",
}
Decode = Callable[[bytes, int], Any]
Result = dict[str, float]


def jpegs(width: int, height: int, count: int = 16) -> list[bytes]:
    """Return JPEGs with smooth areas and noise, about 0.3 bytes a pixel."""
    random = np.random.default_rng(7)
    found = []
    for _ in range(count):
        coarse = Image.fromarray(random.integers(0, 255, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
        pixels = np.clip(smooth + random.normal(0, 13, (height, width, 3)), 0, 255)
        buffer = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG", quality=85)
        found.append(buffer.getvalue())
    return found


def with_energon(task: str, *, exact: bool = False) -> Decode:
    """Decode by SampleDecoder."""
    from energon import SampleDecoder

    decoder = SampleDecoder(
        "torchrgb8", image_size=SIDE, random_resized_crop=task == "crop", exact_resize=exact
    )
    return lambda data, number: decoder.decode("a.jpg", data, seed=number).numpy()


def part(task: str, pixels: Any, number: int) -> Any:
    """Return which part of the image is taken: all, or a random one as torchvision draws it."""
    if task == "resize":
        return pixels
    height, width = pixels.shape[:2]
    random = np.random.default_rng(number)
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1)
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        wide, high = round(float(np.sqrt(area * ratio))), round(float(np.sqrt(area / ratio)))
        if 0 < wide <= width and 0 < high <= height:
            top = random.integers(0, height - high + 1)
            left = random.integers(0, width - wide + 1)
            return pixels[top : top + high, left : left + wide]
    return pixels


def with_cv2(task: str) -> Decode:
    """Decode in full, and scale by the filter of cv2 that does not alias."""
    import cv2
    import simplejpeg

    cv2.setNumThreads(1)

    def decode(data: bytes, number: int) -> Any:
        pixels = part(task, simplejpeg.decode_jpeg(data), number)
        return cv2.resize(pixels, (SIDE, SIDE), interpolation=cv2.INTER_AREA)

    return decode


def with_torch(task: str) -> Decode:
    """Decode in full to floats, and scale them."""
    import simplejpeg
    import torch

    torch.set_num_threads(1)

    def decode(data: bytes, number: int) -> Any:
        pixels = np.ascontiguousarray(part(task, simplejpeg.decode_jpeg(data), number))
        floats = torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32).div_(255)
        scaled = torch.nn.functional.interpolate(
            floats[None], (SIDE, SIDE), mode="bilinear", antialias=True
        )
        return (scaled[0] * 255).round_().to(torch.uint8).numpy()

    return decode


def with_codes(task: str) -> Decode:
    """Decode as little as the format permits: all Huffman codes, and an eighth in gray of it."""
    import simplejpeg

    def decode(data: bytes, number: int) -> Any:
        return simplejpeg.decode_jpeg(data, colorspace="GRAY", min_height=1, min_width=1)

    return decode


DECODES: dict[str, Callable[[str], Decode]] = {
    "energon": with_energon,
    "exact": partial(with_energon, exact=True),
    "cv2": with_cv2,
    "torch": with_torch,
    "codes": with_codes,
}


def processor_seconds() -> float:
    """Return the user and system time of this process and of those below it."""
    ticks = 0
    for pid in process_tree():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(batches: Iterator[Any], seconds: float) -> Result:
    """Return images a second, and milliseconds of processor time an image."""
    for _ in range(4):
        next(batches)
    count, start, used = 0, time.perf_counter(), processor_seconds()
    while (elapsed := time.perf_counter() - start) < seconds:
        count += len(next(batches))
    return {
        "speed": count / elapsed,
        "processor_ms": 1000 * (processor_seconds() - used) / count,
    }


def bare(how: str, task: str, size: tuple[int, int], threads: int) -> Iterator[Any]:
    """Yield batches that a pool of threads decodes."""
    decode, images = DECODES[how](task), cycle(enumerate(jpegs(*size)))
    with ThreadPoolExecutor(threads) as pool:
        while True:
            numbers, datas = zip(*islice(images, BATCH), strict=True)
            yield np.stack(list(pool.map(decode, datas, numbers)))


def make_dataset(folder: Path) -> None:
    """Write 1,600 images into two shards."""
    from energon import ShardWriter
    from energon.prepare.dataset import prepare_dataset

    with ShardWriter(str(folder / "images-%03d.tar"), maxcount=800) as writer:
        for number, data in enumerate(islice(cycle(jpegs(*SIZES[0])), 1600)):
            writer.write({"__key__": f"{number:05}", "jpg": data})
    prepare_dataset(
        folder, split_parts=["train:.*"], sample_type="ImageSample", field_map={"image": "jpg"}
    )


def loaded(folder: Path, hooks: str, workers: str) -> Iterator[Any]:
    """Yield batches that a loader has decoded."""
    from energon import (
        DefaultTaskEncoder,
        SampleDecoder,
        WorkerConfig,
        get_savable_loader,
        get_train_dataset,
    )

    class Images(DefaultTaskEncoder):  # type: ignore[type-arg]
        decoder = SampleDecoder("torchrgb8", image_size=SIDE)

        def batch(self, samples: list[Any]) -> Any:
            return super().batch(samples).image

    class Busy(Images):
        def encode_sample(self, sample: Any) -> Any:
            sum(range(60_000))
            return sample

    encoder = Images() if hooks == "decoder" else Busy()
    num_workers, kind = WORKERS[workers]
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, lanes=2)
    dataset = get_train_dataset(
        folder, worker_config=config, batch_size=BATCH, task_encoder=encoder
    )
    with get_savable_loader(dataset, workers=kind) as loader:
        yield from loader


def one(arguments: argparse.Namespace) -> None:
    """Measure one case in this process, and print a line of JSON."""
    kind, how, task, width, threads = arguments.one
    if kind == "loader":
        batches = loaded(arguments.data, how, task)
    else:
        size = next(size for size in SIZES if size[0] == int(width))
        batches = bare(how, task, size, int(threads))
    print(json.dumps(measure(batches, arguments.seconds)))
    batches.close()  # type: ignore[attr-defined]


def main() -> None:
    """Measure all cases, or one if it is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--one", nargs=5, metavar=("KIND", "HOW", "TASK", "WIDTH", "THREADS"))
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments)
        return
    cases = [
        *(
            ("bare", how, task, str(size[0]), str(threads))
            for size, (task, how), threads in product(SIZES, ROWS, (1, 2))
        ),
        *(("loader", how, each, "", "") for how, each in product(HOOKS, WORKERS)),
    ]
    found: dict[tuple[str, ...], list[Result]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        arguments.data = Path(folder)
        make_dataset(arguments.data)
        for _, case in product(range(arguments.rounds), cases):
            python = arguments.peers if case[1] in ("cv2", "torch") else sys.executable
            found[case].append(run(python, case, arguments))
    medians = {
        case: {name: median(each[name] for each in results) for name in results[0]}
        for case, results in found.items()
    }
    arguments.page.write_text(page(medians, arguments.rounds))


def run(python: str, case: tuple[str, ...], arguments: argparse.Namespace) -> Result:
    """Measure a case in a fresh process."""
    command = [python, __file__, "--data", str(arguments.data), "--one", *case]
    command += ["--seconds", str(arguments.seconds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: Result = json.loads(done.stdout.splitlines()[-1])
    print(*case, {name: round(value, 2) for name, value in result.items()}, file=sys.stderr)
    return result


def page(found: dict[tuple[str, ...], Result], rounds: int) -> str:
    """Return the page of the documentation."""
    return (
        "# Benchmarks: decoding images\n\n"
        "`benchmarks/peers.sh && .venv/bin/python benchmarks/decode.py` measures and writes the "
        "tables below; a round takes two minutes.\n\n"
        "Each row decodes JPEGs into batches of 64 uint8 images of 224 by 224 pixels. The programs "
        "differ only in the function that turns the bytes of a JPEG into an array; `threads` is "
        "the size of a `ThreadPoolExecutor`. The JPEGs have smooth areas and a lot of noise (0.3 "
        "bytes per pixel, quality 85). Decoding any part of a JPEG requires decoding all Huffman "
        'codes before it: the row "the limit" does that and next to nothing else. Decoding at a '
        "smaller scale saves only the rest: the transform, the colors and the pixels to resize."
        "\n\n"
        f"{MARK}\n\n"
        f"Measured on {date.today()} with {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, simplejpeg {version('simplejpeg')}, energon "
        f"{version('energon-loader')}. Medians of {rounds} rounds, each in a fresh "
        "process. Times are milliseconds of CPU time per image; ratios are relative to cv2.\n\n"
        f"{bare_table(found)}\n\n"
        "## Threads and processes\n\n"
        "The images of 500 by 375 pixels again, read from a dataset by a loader with "
        '`SampleDecoder("torchrgb8", image_size=224)`:\n\n'
        f"{loader_table(found)}\n"
    )


def bare_table(found: dict[tuple[str, ...], Result]) -> str:
    """Return what decoding takes, as Markdown."""
    lines = [
        "| | | one thread, ms | ratio | 1 thread, images/s | 2 threads, images/s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for (width, height), (task, how) in product(SIZES, ROWS):
        alone, both = (found["bare", how, task, str(width), threads] for threads in ("1", "2"))
        reference = found["bare", "cv2", task, str(width), "1"]["processor_ms"]
        lines.append(
            f"| {width} x {height}, {TASKS[task]} | {HOWS[how]} | {alone['processor_ms']:.2f} | "
            f"**{reference / alone['processor_ms']:.1f} x** | {alone['speed']:,.0f} | "
            f"{both['speed']:,.0f} |"
        )
    return "\n".join(lines)


def loader_table(found: dict[tuple[str, ...], Result]) -> str:
    """Return what a loader reaches with each kind of workers, as Markdown."""
    lines = [
        "| hooks | workers | images/s | relative to in-line | CPU ms per image |",
        "|---|---|---:|---:|---:|",
    ]
    for hooks, workers in product(HOOKS, WORKERS):
        result, alone = (found["loader", hooks, each, "", ""] for each in (workers, "in-line"))
        lines.append(
            f"| {HOOKS[hooks]} | {workers} | {result['speed']:,.0f} | "
            f"**{result['speed'] / alone['speed']:.1f} x** | {result['processor_ms']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
