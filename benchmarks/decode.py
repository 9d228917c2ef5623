"""Measure decoding of JPEGs to the size of training, and write docs/benchmarks_decode.md.

    benchmarks/peers.sh
    python benchmarks/decode.py [--rounds 5] [--only WORD] [--peers PYTHON]

One program for all: bytes of JPEGs become batches of 64 images of 224 by 224, uint8. What differs
is the function that makes the array of the bytes: `SampleDecoder`; simplejpeg and cv2.resize; or
floats and torch's interpolate, as programs do that resize after a loader. Then the same through a
loader, in-line, in threads and in processes. Every case has a fresh process. Processor time counts
user and system time of all threads and processes, and hardly depends on what else the machine
does. Five rounds take about eleven minutes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from measure import process_tree
from results import Benchmark, Case, Results, in_fresh_process, ratio, rounds_of, shown, versions_of

SIDE, BATCH = 224, 64
SIZES = ((500, 375), (1024, 768))
TASKS = {"resize": "resized", "crop": "random resized crop"}
HOWS = {
    "energon": "`SampleDecoder(image_size=224)`",
    "exact": "with `exact_resize=True`",
    "enlarged": "with `max_enlargement=1.2`, less sharp",
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


def with_energon(task: str, **settings: Any) -> Decode:
    """Decode by SampleDecoder."""
    from energon import SampleDecoder

    decoder = SampleDecoder(
        "torchrgb8", image_size=SIDE, random_resized_crop=task == "crop", **settings
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
    "exact": partial(with_energon, exact_resize=True),
    "enlarged": partial(with_energon, max_enlargement=1.2),
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


def measure(batches: Iterator[Any], seconds: float, warm: int = 2) -> Result:
    """Return images a second, and milliseconds of processor time an image."""
    for _ in range(warm):
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
    kind, first, second = arguments.one
    if kind == "loader":
        batches = loaded(arguments.data, first, second)
        # Batches of several workers come in bursts.
        found = measure(batches, 2 * arguments.seconds, warm=4)
        batches.close()  # type: ignore[attr-defined]
    else:
        how, task, width = kind, first, int(second)
        size = next(size for size in SIZES if size[0] == width)
        both = {n: measure(bare(how, task, size, n), arguments.seconds) for n in (1, 2)}
        found = {**both[1], "speed_of_2_threads": both[2]["speed"]}
    print(json.dumps(found))


def main() -> None:
    """Measure all cases, or one if it is named."""
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each is measured for")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "FIRST", "SECOND"))
    arguments = BENCHMARK.parsed(parser)
    if arguments.one:
        one(arguments)
        return
    cases: list[Case] = [
        {"how": how, "task": task, "width": size[0]} for size, (task, how) in product(SIZES, ROWS)
    ]
    cases += [
        {"how": "loader", "hooks": how, "workers": each} for how, each in product(HOOKS, WORKERS)
    ]
    versions = versions_of(sys.executable, energon="energon-loader", simplejpeg="simplejpeg")
    versions |= versions_of(arguments.peers, torch="torch")
    versions["cv2"] = in_fresh_process([arguments.peers, "-c", ASK_CV2])["cv2"]
    with tempfile.TemporaryDirectory() as folder:
        make_dataset(Path(folder))
        options = ["--data", folder, "--seconds", str(arguments.seconds), "--one"]

        def fresh(case: Case) -> dict[str, Any]:
            is_peer = case["how"] in ("cv2", "torch")
            python = arguments.peers if is_peer else sys.executable
            names = [str(value) for value in case.values()]
            return in_fresh_process([python, __file__, *options, *names], peer=is_peer)

        BENCHMARK.run(arguments, cases, fresh, versions, seconds=arguments.seconds)


# It may come from one of several distributions.
ASK_CV2 = "import cv2, json; print(json.dumps({'cv2': cv2.__version__}))"


def tables(results: Results) -> str:
    """Return what decoding takes, alone and in a loader."""
    return (
        "Times are milliseconds of CPU time per image; ratios are relative to cv2.\n\n"
        f"{bare_table(results)}\n\n"
        "## Threads and processes\n\n"
        "The images of 500 by 375 pixels again, read from a dataset by a loader with "
        '`SampleDecoder("torchrgb8", image_size=224)`:\n\n'
        f"{loader_table(results)}"
    )


def bare_table(results: Results) -> str:
    """Return what decoding takes, as Markdown."""
    lines = [
        "| | | one thread, ms | ratio | 1 thread, images/s | 2 threads, images/s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for (width, height), (task, how) in product(SIZES, ROWS):
        found = rounds_of(results, how=how, task=task, width=width)
        reference = rounds_of(results, how="cv2", task=task, width=width)
        lines.append(
            f"| {width} x {height}, {TASKS[task]} | {HOWS[how]} | "
            f"{shown(found, 'processor_ms', 2)} | "
            f"**{ratio(reference, found, 'processor_ms'):.1f} x** | {shown(found, 'speed')} | "
            f"{shown(found, 'speed_of_2_threads')} |"
        )
    return "\n".join(lines)


def loader_table(results: Results) -> str:
    """Return what a loader reaches with each kind of workers, as Markdown."""
    lines = [
        "| hooks | workers | images/s | relative to in-line | CPU ms per image |",
        "|---|---|---:|---:|---:|",
    ]
    for hooks, workers in product(HOOKS, WORKERS):
        found, alone = (
            rounds_of(results, how="loader", hooks=hooks, workers=each)
            for each in (workers, "in-line")
        )
        lines.append(
            f"| {HOOKS[hooks]} | {workers} | {shown(found, 'speed')} | "
            f"**{ratio(found, alone, 'speed'):.1f} x** | {shown(found, 'processor_ms', 2)} |"
        )
    return "\n".join(lines)


BENCHMARK = Benchmark(__file__, tables, conditions="the images were in memory")

if __name__ == "__main__":
    main()
