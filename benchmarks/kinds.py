"""Measure token files and Parquet files against what people train on them with today.

    make servers
    .venv/bin/python benchmarks/kinds.py [--rounds 5] [--only tokens|start|images|bucket]

Every figure comes from a fresh process; rounds are interleaved. The bucket is a real S3 server on
this machine behind a proxy: every request takes 30 ms longer. Five rounds take ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from results import (
    ROOT,
    Benchmark,
    Case,
    Results,
    in_fresh_process,
    ratio,
    rounds_of,
    shown,
    versions_of,
)

LENGTH, BATCH = 2048, 8
DOCUMENTS, SIMULATED = 40_000, 10_000_000
IMAGES, IMAGE_FILES, IMAGE_BATCH = 3_000, 12, 32
BUCKET_FILES, BUCKET_ROWS = 1_000, 40
SECONDS = 3.0
RESUMED = {"1 %": 0.01, "99 %": 0.99, "epoch 1,000": 1000.5}
"""Where runs are resumed, in epochs."""
OURS = "energon (this)"
GPT, MEMMAP = "GPTDataset's logic", "numpy memmap loop"
STREAMING, MAP_STYLE = "`datasets`, streaming", "`datasets`, map-style"


def main() -> None:
    """Measure, and write the page."""
    parser = BENCHMARK.parser(__doc__, data="kinds")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = BENCHMARK.parsed(parser)
    if arguments.measure:
        sys.path.insert(0, str(ROOT))
        name, address = arguments.measure
        sys.stdout.write(json.dumps(MEASURED[name](address)) + "\n")
        sys.stdout.flush()
        os._exit(0)  # workers of peers do not always end
    versions = versions_of(
        sys.executable, energon="energon-loader", datasets="datasets", pyarrow="pyarrow"
    )
    with ExitStack() as stack:
        make = {
            "tokens": lambda folder: make_tokens(folder / "tokens", DOCUMENTS),
            "start": make_simulated_index,
            "images": lambda folder: make_images(folder / "images", IMAGES, IMAGE_FILES),
            "bucket": lambda folder: stack.enter_context(filled_bucket(folder)),
        }

        @cache
        def made(data: str) -> Any:
            return make[data](arguments.data)

        def measure(case: Case) -> dict[str, Any]:
            address, environment = made(case["data"]), {}
            if case["data"] == "bucket":
                address, environment = address
            if case["data"] == "images":
                environment = {"HF_DATASETS_CACHE": str(arguments.data / "hf")}
                environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            name = NAMES[case["data"], case["library"]]
            name += f"_{case['workers']}" if case["data"] == "images" else ""
            command = [sys.executable, __file__, "--measure", name, str(address)]
            return in_fresh_process(command, **environment)

        BENCHMARK.run(arguments, cases(), measure, versions, seconds=SECONDS)


def cases() -> Iterator[Case]:
    """Yield all measurements."""
    for data, library in NAMES:
        for workers in (0, 2) if data == "images" else (0,):
            yield {"data": data, "library": library, "workers": workers}


def rate(items: Iterator[int]) -> dict[str, float]:
    """Return how many items come in a second, and what CPU time each takes, workers included."""
    from measure import tree_cpu_seconds

    for _ in range(30):
        next(items)
    count, start, cpu = 0, time.perf_counter(), tree_cpu_seconds()
    while (elapsed := time.perf_counter() - start) < SECONDS:
        count += next(items)
    return {"rate": count / elapsed, "cpu_us": 1e6 * (tree_cpu_seconds() - cpu) / count}


# Tokens


def tokens_ours(path: str) -> dict[str, float]:
    """Shuffled windows over shuffled documents, with a state after each batch."""
    from energon import WorkerConfig, get_savable_loader, get_train_dataset

    read = {"unit": "sequence", "length": LENGTH + 1, "overlap": 1}
    dataset = get_train_dataset(
        {"splits": {"train": {"path": f"{path}.idx", "read": read}}},
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=BATCH,
    )
    with get_savable_loader(dataset) as loader:
        return rate(len(batch.tokens) for batch in loader)


def tokens_memmap(path: str) -> dict[str, float]:
    """Random windows over documents as they lie, as small trainers have it."""
    data = np.memmap(f"{path}.bin", np.uint16, "r")
    generator = np.random.default_rng(0)

    def batches() -> Iterator[int]:
        while True:
            starts = generator.integers(0, len(data) - LENGTH - 1, BATCH).tolist()
            rows = [data[start : start + LENGTH + 1].astype(np.int64) for start in starts]
            yield len(np.stack(rows))

    return rate(batches())


def tokens_gpt(path: str) -> dict[str, float]:
    """Windows over shuffled documents by three indexes, as Megatron-LM describes GPTDataset.

    One lists documents in their order, one says where each window begins on the line of these
    documents, and one shuffles the windows. A window is joined of pieces of documents.
    """
    import torch

    from energon.formats.tokens import TokenIndex

    index = TokenIndex.parse(
        Path(f"{path}.idx").read_bytes(), num_bytes=os.path.getsize(f"{path}.bin"), origin=path
    )
    data = np.memmap(f"{path}.bin", np.uint16, "r")
    lengths = np.asarray(index.document_lengths(0, index.num_documents))
    begins = np.cumsum(lengths) - lengths
    generator = np.random.default_rng(0)
    documents = generator.permutation(len(lengths))
    ends = np.concatenate(([0], np.cumsum(lengths[documents])))
    starts = np.arange(0, ends[-1] - LENGTH, LENGTH)
    first = np.searchsorted(ends, starts, side="right") - 1
    samples = np.stack([first, starts - ends[first]], axis=1).astype(np.int32)
    shuffled = generator.permutation(len(samples) - 1)

    ones, places = torch.ones(LENGTH), torch.arange(LENGTH)

    class Windows(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(shuffled)

        def __getitem__(self, at: int) -> dict[str, Any]:
            number = shuffled[at]
            (low, offset), (high, stop) = samples[number], samples[number + 1]
            pieces = []
            for place in range(low, high + 1):
                document = documents[place]
                begin = begins[document] + (offset if place == low else 0)
                last = stop + 1 if place == high else lengths[document]
                pieces.append(data[begin : begins[document] + last])
            tokens = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
            about = {"loss_mask": ones, "position_ids": places}
            return {"tokens": tokens[:-1], "labels": tokens[1:], **about}

    loader = torch.utils.data.DataLoader(Windows(), batch_size=BATCH, drop_last=True)

    def batches() -> Iterator[int]:
        while True:
            for batch in loader:
                yield len(batch["tokens"])

    return rate(batches())


def token_table(results: Results) -> str:
    """Return the table of token sequences."""
    lines = [
        "### Token sequences",
        "",
        f"Sequences of {LENGTH:,} tokens (int64) in batches of {BATCH}, in-line, from "
        f"{DOCUMENTS:,} documents in the page cache. energon yields tokens and the starts of "
        "documents, and keeps a state. GPTDataset, rebuilt from its description, yields tokens, "
        "labels, positions and loss masks through torch's DataLoader. The memmap loop cuts random "
        "windows out of the file, without documents, epochs or state. The last column compares CPU "
        "time.",
        "",
        "| | sequences/s | CPU µs per sequence | relative to the memmap loop |",
        "|---|---:|---:|---:|",
    ]
    least = rounds_of(results, data="tokens", library=MEMMAP)
    for library in (OURS, GPT, MEMMAP):
        own = rounds_of(results, data="tokens", library=library)
        lines.append(
            f"| {library} | {shown(own, 'rate')} | {shown(own, 'cpu_us', 1)} | "
            f"{ratio(least, own, 'cpu_us'):.2f} x |"
        )
    return "\n".join(lines)


def make_tokens(folder: Path, count: int) -> Path:
    """Write documents of random tokens, of about a thousand each."""
    from energon.formats.tokens import token_index_bytes

    prefix = folder / "corpus"
    if not prefix.with_suffix(".idx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(0)
        lengths = generator.lognormal(6.5, 1, count).astype(int) + 1
        generator.integers(0, 50_000, lengths.sum()).astype(np.uint16).tofile(
            prefix.with_suffix(".bin")
        )
        with open(prefix.with_suffix(".idx"), "wb") as file:
            file.writelines(token_index_bytes(np.dtype(np.uint16), lengths.tolist()))
    return prefix


def token_start(path: str) -> dict[str, float]:
    """Return seconds to the first batch of a corpus, and how much memory it takes at most."""
    from energon import WorkerConfig, get_savable_loader, get_train_dataset

    before = status_mb("RssAnon")
    start, cpu = time.perf_counter(), time.process_time()
    read = {"unit": "sequence", "length": LENGTH + 1, "overlap": 1}
    dataset = get_train_dataset(
        {"splits": {"train": {"path": f"{path}.idx", "read": read}}},
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=BATCH,
    )
    with get_savable_loader(dataset) as loader:
        next(iter(loader))
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "cpu": time.process_time() - cpu,
            "peak_mb": status_mb("VmHWM"),
            "own_mb": status_mb("RssAnon") - before,
        }


def status_mb(name: str) -> float:
    """Return a figure of the memory of this process."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]


def make_simulated_index(folder: Path) -> Path:
    """Write an index of many documents, and a file of tokens that takes no room."""
    prefix = folder / "simulated" / "corpus"
    if not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        count, size = SIMULATED, 1000
        with open(prefix.with_suffix(".idx"), "wb") as file:
            file.write(b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\x08")
            file.write(count.to_bytes(8, "little") + (count + 1).to_bytes(8, "little"))
            file.write(np.full(count, size, "<i4").tobytes())
            file.write((2 * size * np.arange(count, dtype="<i8")).tobytes())
            file.write(np.arange(count + 1, dtype="<i8").tobytes())
        with open(prefix.with_suffix(".bin"), "wb") as file:
            file.truncate(2 * size * count)  # nothing but zeros
    return prefix


def start_table(results: Results) -> str:
    """Return the table of the start on a large corpus."""
    own = rounds_of(results, data="start")
    return "\n".join(
        [
            "### Start on 10 billion tokens",
            "",
            f"An index of {SIMULATED:,} documents of 1,000 simulated tokens each. Time from the "
            "call of `get_train_dataset` to the first batch, in-line. Peak memory includes Python "
            "and its packages.",
            "",
            "| | first batch, s | CPU for it, s | memory for it, MB | peak memory, MB |",
            "|---|---:|---:|---:|---:|",
            f"| {OURS} | {shown(own, 'seconds', 2)} | {shown(own, 'cpu', 2)} | "
            f"{shown(own, 'own_mb')} | {shown(own, 'peak_mb')} |",
        ]
    )


# Parquet


def decoded(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its image as an array: what every contender does to it."""
    from adapters.thumbnail import thumbnail

    return {"image": thumbnail(row["image"]["bytes"]), "caption": row["caption"]}


def images_ours(workers: int) -> Callable[[str], dict[str, float]]:
    """Return what measures rows as samples, shuffled, decoded in a hook."""

    def measure(path: str) -> dict[str, float]:
        from adapters.thumbnail import thumbnail
        from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset

        class Encoder(DefaultTaskEncoder):
            decoder = None

            def encode_sample(self, sample: Any) -> Any:
                sample["image"] = thumbnail(sample["image"])
                return sample

        dataset = get_train_dataset(
            {"splits": {"train": {"path": path, "read": {"columns": ["image", "caption"]}}}},
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
            batch_size=IMAGE_BATCH,
            task_encoder=Encoder(),
        )
        with get_savable_loader(dataset) as loader:
            return rate(len(batch["caption"]) for batch in loader)

    return measure


def images_streaming(workers: int) -> Callable[[str], dict[str, float]]:
    """Return what measures `datasets` as a stream, shuffled by a buffer of a thousand rows."""

    def measure(path: str) -> dict[str, float]:
        import datasets

        stream = datasets.load_dataset(
            "parquet", data_files=f"{path}/*.parquet", split="train", streaming=True
        )
        stream = stream.cast_column("image", datasets.Image(decode=False))
        shuffled = stream.shuffle(seed=0, buffer_size=1000).map(decoded)
        return torch_rate(shuffled, workers)

    return measure


def images_map_style(workers: int) -> Callable[[str], dict[str, float]]:
    """Return what measures `datasets` as a table on disk, shuffled by the DataLoader."""

    def measure(path: str) -> dict[str, float]:
        import datasets

        table = datasets.load_dataset("parquet", data_files=f"{path}/*.parquet", split="train")
        table = table.cast_column("image", datasets.Image(decode=False))
        table = table.with_transform(decoded_columns)
        return torch_rate(table, workers, shuffle=True)

    return measure


def decoded_columns(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return columns of rows with their images as arrays."""
    from adapters.thumbnail import thumbnail

    return {
        "image": [thumbnail(image["bytes"]) for image in rows["image"]],
        "caption": rows["caption"],
    }


def torch_rate(dataset: Any, workers: int, **settings: Any) -> dict[str, float]:
    """Return how fast a DataLoader of torch makes batches, epoch after epoch."""
    import torch

    loader = torch.utils.data.DataLoader(
        dataset, batch_size=IMAGE_BATCH, num_workers=workers, collate_fn=stacked, **settings
    )

    def batches() -> Iterator[int]:
        while True:
            for batch in loader:
                yield len(batch["caption"])

    return rate(batches())


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rows as a batch."""
    return {
        "image": np.stack([row["image"] for row in rows]),
        "caption": [row["caption"] for row in rows],
    }


def image_table(results: Results) -> str:
    """Return the table of images in Parquet files."""
    lines = [
        "### Images in Parquet files",
        "",
        f"{IMAGES:,} JPEGs of about 70 kB in {IMAGE_FILES} files, shuffled, decoded to 224 x 224 "
        f"by the same function, in batches of {IMAGE_BATCH}. CPU ms are per image, over all "
        "processes, and nearly all for the decoder. `datasets` runs with torch's DataLoader: its "
        "stream shuffles files, and rows in a buffer of 1,000; its table was converted to Arrow "
        "beforehand.",
        "",
        "| | images/s | with 2 workers | CPU ms | with 2 workers |",
        "|---|---:|---:|---:|---:|",
    ]
    for library in (OURS, STREAMING, MAP_STYLE):
        both = [
            rounds_of(results, data="images", library=library, workers=workers)
            for workers in (0, 2)
        ]
        cells = [shown(rounds, "rate") for rounds in both]
        cells += [shown(rounds, "cpu_us", 2, scale=0.001) for rounds in both]
        lines.append(f"| {library} | {' | '.join(cells)} |")
    return "\n".join(lines)


def make_images(folder: Path, rows: int, files: int, *, size: int | None = None) -> Path:
    """Write images and captions as `datasets` does; with a size, bytes that are no images."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from data import image

    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for file in range(files):
        table = []
        for number in range(file * rows // files, (file + 1) * rows // files):
            content = generator.bytes(size) if size else image(number, generator)["jpg"]
            about = {"image": {"bytes": content, "path": f"{number}.jpg"}}
            table.append({**about, "caption": f"picture {number}"})
        pq.write_table(
            pa.Table.from_pylist(table), folder / f"{file:05}.parquet", row_group_size=50
        )
    (folder / "done").touch()
    return folder


# A bucket


def bucket_start(address: str) -> dict[str, float]:
    """Return seconds to the first batch, and to the first behind states of a run."""
    # What takes seconds to import is not counted.
    import obstore  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
    from energon.inspect.saved_state import skip_steps

    class Encoder(DefaultTaskEncoder):
        decoder = None

    def seconds(state: Any = None) -> tuple[float, Any]:
        start = time.perf_counter()
        dataset = get_train_dataset(
            address,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=1),
            batch_size=IMAGE_BATCH,
            task_encoder=Encoder(),
        )
        with get_savable_loader(dataset) as loader:
            if state is not None:
                loader.restore_state_rank(state)
            next(iter(loader))
            return time.perf_counter() - start, loader.save_state_rank()

    first, state = seconds()
    found = {"first": first}
    for name, share in RESUMED.items():
        steps = int(share * BUCKET_FILES * BUCKET_ROWS) // IMAGE_BATCH
        found[name], _ = seconds(skip_steps(state, steps, world_size=1).state)
    return found


@contextmanager
def filled_bucket(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the address of many prepared files in a distant bucket, and the environment for it."""
    from remote import distant_server

    sys.path.insert(0, str(ROOT))
    rows = make_images(
        folder / "bucket" / "rows", BUCKET_FILES * BUCKET_ROWS, BUCKET_FILES, size=2_000
    )
    with distant_server(rows.parent) as (_, environment), TemporaryDirectory() as none:
        environment["ENERGON_STORAGE_CACHE_DIR"] = none
        prepare = [sys.executable, "-m", "energon.cli.main", "prepare", "s3://bench/rows"]
        subprocess.run(prepare, env={**os.environ, **environment}, check=True)
        yield "s3://bench/rows", environment


def bucket_table(results: Results) -> str:
    """Return the table of the start on many files far away."""
    from remote import LATENCY_SECONDS

    own = rounds_of(results, data="bucket")
    cells = [shown(own, name, 2) for name in ("first", *RESUMED)]
    return "\n".join(
        [
            f"### {BUCKET_FILES:,} Parquet files on a bucket",
            "",
            f"Seconds from the call of `get_train_dataset` to the first batch of {IMAGE_BATCH}, "
            "in-line, for new and resumed runs. The files were prepared; a proxy adds "
            f"{LATENCY_SECONDS * 1000:.0f} ms to each request.",
            "",
            f"| | start | {' | '.join(f'resumed at {name}' for name in RESUMED)} |",
            f"|---|{'---:|' * len(cells)}",
            f"| {OURS} | {' | '.join(cells)} |",
        ]
    )


def tables(results: Results) -> str:
    """Return all tables."""
    return "\n\n".join(
        table(results) for table in (token_table, start_table, image_table, bucket_table)
    )


NAMES = {
    ("tokens", OURS): "tokens_ours",
    ("tokens", GPT): "tokens_gpt",
    ("tokens", MEMMAP): "tokens_memmap",
    ("start", OURS): "token_start",
    ("images", OURS): "images_ours",
    ("images", STREAMING): "images_streaming",
    ("images", MAP_STYLE): "images_map_style",
    ("bucket", OURS): "bucket_start",
}
"""What measures a library on some data; that for images has the workers behind its name."""
MEASURED: dict[str, Callable[[str], dict[str, float]]] = {
    "tokens_ours": tokens_ours,
    "tokens_memmap": tokens_memmap,
    "tokens_gpt": tokens_gpt,
    "token_start": token_start,
    "bucket_start": bucket_start,
}
for _workers in (0, 2):
    MEASURED[f"images_ours_{_workers}"] = images_ours(_workers)
    MEASURED[f"images_streaming_{_workers}"] = images_streaming(_workers)
    MEASURED[f"images_map_style_{_workers}"] = images_map_style(_workers)
BENCHMARK = Benchmark(__file__, tables, page="benchmarks.md")

if __name__ == "__main__":
    main()
