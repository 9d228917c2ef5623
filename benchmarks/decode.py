"""Measure decoding of JPEGs to the size of training, for docs/benchmarks_parts.md.

    benchmarks/peers.sh
    python benchmarks/decode.py [--rounds 5] [--only WORD] [--peers PYTHON]

One program for all: bytes of JPEGs become batches of 64 images of 224 by 224, uint8. What differs
is the function that makes the array of the bytes: `SampleDecoder`; simplejpeg and cv2.resize; or
floats and torch's interpolate, as programs do that resize after a loader. Then the same through a
loader, in-line, in threads and in processes. Every case has a fresh process. Processor time counts
user and system time of all threads and processes, and hardly depends on what else the machine
does. The images are photographs (`photos.py`), and some with a lot of noise. Five rounds take about
thirteen minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np

from measure import process_tree
from photos import jpegs, noise
from results import (
    Benchmark,
    Case,
    Results,
    in_fresh_process,
    middle,
    ratio,
    rounds_of,
    shown,
    versions_of,
)

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
PHOTOS = "photographs, quality 85"
IMAGES = {
    PHOTOS: partial(jpegs, quality=85),
    "photographs, quality 95": partial(jpegs, quality=95),
    "noise, quality 85": noise,
}
COMPARED = ("energon", "enlarged", "cv2", "codes")
"""With other images, too."""
WORKERS = {"in-line": (0, "thread"), "2 threads": (2, "thread"), "2 processes": (2, "process")}
HOOKS = {
    "decoder": "the decoder alone",
    "python": "the decoder, and 1 ms of Python in `encode_sample`",
}
Decode = Callable[[bytes, int], Any]
Result = dict[str, float]


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


def bare(how: str, task: str, datas: Sequence[bytes], threads: int) -> Iterator[Any]:
    """Yield batches that a pool of threads decodes, or this thread alone."""
    decode, images = DECODES[how](task), cycle(enumerate(datas))
    # Waiting for each image of a pool takes 0.05 to 0.1 ms.
    pool = ThreadPoolExecutor(threads) if threads > 1 else None
    while True:
        numbers, batch = zip(*islice(images, BATCH), strict=True)
        yield np.stack(list((pool.map if pool else map)(decode, batch, numbers)))


def write_images(folder: Path, wheels: Path) -> None:
    """Write the JPEGs of each kind and size."""
    wheels.mkdir(parents=True, exist_ok=True)
    for (name, make), (width, height) in product(IMAGES.items(), SIZES):
        into = of_kind(folder, name, width)
        into.mkdir()
        for number, data in enumerate(make(wheels, width, height)):
            (into / f"{number:02}.jpg").write_bytes(data)


def of_kind(folder: Path, images: str, width: int) -> Path:
    """Return where the JPEGs of a kind and size are."""
    return folder / f"{images}, {width}"


def read_images(folder: Path, images: str, width: int) -> list[bytes]:
    """Return the JPEGs of a kind and size."""
    return [path.read_bytes() for path in sorted(of_kind(folder, images, width).iterdir())]


def make_dataset(folder: Path, datas: Sequence[bytes]) -> None:
    """Write 1,600 images into two shards."""
    from energon import ShardWriter
    from energon.prepare.dataset import prepare_dataset

    with ShardWriter(str(folder / "images-%03d.tar"), maxcount=800) as writer:
        for number, data in enumerate(islice(cycle(datas), 1600)):
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
    how, *rest = arguments.one
    if how == "loader":
        hooks, workers = rest
        batches = loaded(arguments.data / "dataset", hooks, workers)
        # Batches of several workers come in bursts.
        found = measure(batches, 2 * arguments.seconds, warm=4)
        batches.close()  # type: ignore[attr-defined]
    else:
        task, width, images = rest
        datas = read_images(arguments.data, images, int(width))
        found = measure(bare(how, task, datas, 1), arguments.seconds)
        if images == PHOTOS:
            two = measure(bare(how, task, datas, 2), arguments.seconds)
            found["speed_of_2_threads"] = two["speed"]
        found["bytes_per_pixel"] = bytes_per_pixel(datas, int(width))
    print(json.dumps(found))


def bytes_per_pixel(datas: Sequence[bytes], width: int) -> float:
    """Return how densely JPEGs are encoded."""
    return sum(map(len, datas)) / (len(datas) * width * dict(SIZES)[width])


def cases() -> Iterator[Case]:
    """Yield what is measured."""
    for (width, _), images in product(SIZES, IMAGES):
        for task, how in ROWS:
            if images == PHOTOS or (task == "resize" and how in COMPARED):
                yield {"how": how, "task": task, "width": width, "images": images}
    for hooks, workers in product(HOOKS, WORKERS):
        yield {"how": "loader", "hooks": hooks, "workers": workers}


def main() -> None:
    """Measure all cases, or one if it is named."""
    parser = BENCHMARK.parser(__doc__, data="photographs")
    parser.add_argument("--seconds", type=float, default=1.0, help="that each is measured for")
    parser.add_argument("--one", nargs="+", metavar="WORD", help="the values of a case")
    arguments = BENCHMARK.parsed(parser)
    if arguments.one:
        one(arguments)
        return
    versions = versions_of(sys.executable, energon="energon-loader", simplejpeg="simplejpeg")
    versions |= versions_of(arguments.peers, torch="torch")
    versions["cv2"] = in_fresh_process([arguments.peers, "-c", ASK_CV2])["cv2"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, arguments.data)
        make_dataset(folder / "dataset", read_images(folder, PHOTOS, SIZES[0][0]))
        options = ["--data", name, "--seconds", str(arguments.seconds), "--one"]

        def fresh(case: Case) -> dict[str, Any]:
            is_peer = case["how"] in ("cv2", "torch")
            python = arguments.peers if is_peer else sys.executable
            words = [str(value) for value in case.values()]
            return in_fresh_process([python, __file__, *options, *words], peer=is_peer)

        BENCHMARK.run(arguments, cases(), fresh, versions, seconds=arguments.seconds)


# It may come from one of several distributions.
ASK_CV2 = "import cv2, json; print(json.dumps({'cv2': cv2.__version__}))"


def tables(results: Results) -> str:
    """Return what decoding takes, alone and in a loader."""
    return (
        "CPU milliseconds per image; ratios are relative to cv2.\n\n"
        f"{bare_table(results)}\n\n"
        "Images with more bytes per pixel, in one thread:\n\n"
        f"{density_table(results)}\n\n"
        "### Threads and processes\n\n"
        "The images of 500 by 375 pixels, read by a loader with "
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
        found, reference = (
            rounds_of(results, how=each, task=task, width=width, images=PHOTOS)
            for each in (how, "cv2")
        )
        lines.append(
            f"| {width} x {height}, {TASKS[task]} | {HOWS[how]} | "
            f"{shown(found, 'processor_ms', 2)} | "
            f"**{ratio(reference, found, 'processor_ms'):.1f} x** | {shown(found, 'speed')} | "
            f"{shown(found, 'speed_of_2_threads')} |"
        )
    return "\n".join(lines)


def density_table(results: Results) -> str:
    """Return what decoding takes by the bytes of a pixel, as Markdown."""
    others = [how for how in COMPARED if how != "cv2"]
    lines = [
        f"| | bytes per pixel | {HOWS['cv2']}, ms | "
        + " | ".join(HOWS[how] for how in others)
        + " |",
        "|---|" + "---:|" * (2 + len(others)),
    ]
    for (width, height), images in product(SIZES, IMAGES):
        found = {
            how: rounds_of(results, how=how, task="resize", width=width, images=images)
            for how in COMPARED
        }
        ratios = [
            f"{middle(found[how], 'processor_ms'):.2f}: "
            f"**{ratio(found['cv2'], found[how], 'processor_ms'):.1f} x**"
            for how in others
        ]
        lines.append(
            f"| {width} x {height}, {images} | {middle(found['cv2'], 'bytes_per_pixel'):.2f} | "
            f"{middle(found['cv2'], 'processor_ms'):.2f} | {' | '.join(ratios)} |"
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
