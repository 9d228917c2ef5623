"""Measure what a run costs beside its hooks, and write docs/benchmarks_overheads.md.

    python benchmarks/overheads.py [--rounds 5] [--only WORD] [--data FOLDER]

Opening datasets, starting workers, sending batches to the trainer, the lanes of a new run, and
hooks that draw no random numbers: the page has each figure and its goal. Every figure comes from a
fresh process, and all take turns within a round. Of the times, the shortest of all rounds counts,
which other work on the machine affects least; of the ratios, the median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks_overheads.md"
BATCH_SIZE = 32
CHUNK_SAMPLES = 16_000
CHUNKS = 12
DATASETS = 300

# Programs that are timed from their first line on must not find modules that this one imports.
IMPORT = """
import time
start = time.perf_counter()
from energon import get_train_dataset
print(time.perf_counter() - start)
"""
OPEN = """
import time
from energon import WorkerConfig, get_loader, get_train_dataset
config = WorkerConfig(rank=0, world_size=1, num_workers={workers})
start = time.perf_counter()
dataset = get_train_dataset({path!r}, worker_config=config, batch_size=32)
opened = time.perf_counter() - start
loader = get_loader(dataset)
start = time.perf_counter()
batches = iter(loader)
for _ in range({batches}):
    next(batches)
print({figure})
"""
OPENED, FIRST_BATCH, EACH_WORKER = (
    "opened",
    "time.perf_counter() - start",
    "(time.perf_counter() - start) / {batches}",
)


class Figure(NamedTuple):
    """A line of the page.

    Args:
        title: What is measured.
        goal: What it should be.
        scale: By what it is multiplied for the page.
        unit: Stands behind it.
        of_rounds: Which of the rounds count.
        program: What a fresh process runs; None for one of the functions in `MEASURED`.
    """

    title: str
    goal: str
    scale: float
    unit: str
    of_rounds: Callable[[list[float]], float] = min
    program: str | None = None


def opening(data: str, figure: str = OPENED, *, workers: int = 0, batches: int = 1) -> str:
    """Return a program that opens a dataset and draws some batches."""
    told = figure.format(batches=batches)
    return OPEN.format(path=f"{{folder}}/{data}", workers=workers, batches=batches, figure=told)


FIGURES = {
    "import": Figure("`from energon import get_train_dataset`", "200", 1e3, "ms", program=IMPORT),
    "numpy": Figure(
        "of which numpy", "", 1e3, "ms", program=IMPORT.replace("from energon", "import numpy #")
    ),
    "open": Figure("first open of a dataset", "30", 1e3, "ms", program=opening("text")),
    "open-10000": Figure(
        "first open of a dataset of 10,000 shards",
        "100",
        1e3,
        "ms",
        program=opening("shards10k"),
    ),
    "open-300": Figure(
        f"first open of a blend of {DATASETS} datasets",
        "500",
        1e3,
        "ms",
        program=opening("many/blend.yaml"),
    ),
    "first": Figure(
        "first batch after that, one dataset, no workers",
        "",
        1e3,
        "ms",
        program=opening("text", FIRST_BATCH),
    ),
    "worker": Figure(
        "first batch with one worker, including the server that starts workers",
        "",
        1e3,
        "ms",
        program=opening("text", FIRST_BATCH, workers=1),
    ),
    "workers": Figure(
        "a batch from each of 8 workers: time per worker",
        "150",
        1e3,
        "ms",
        program=opening("text", EACH_WORKER, workers=8, batches=8),
    ),
    "info": Figure("`energon info`, the whole command", "300", 1e3, "ms"),
    "parent": Figure("CPU time of the trainer for a text sample from a worker", "1.5", 1e6, "µs"),
    "child": Figure("CPU time of a worker, relative to in-line", "1.3", 1, "x", median),
    "hook": Figure(
        "speed of 2 workers with hooks of 5 µs a sample, relative to in-line", "1.3", 1, "x", max
    ),
    "lanes": Figure(
        "CPU time of text with the default lanes, relative to one", "1.05", 1, "x", median
    ),
    "lanes-cooker": Figure("the same with a cooker", "1.05", 1, "x", median),
    "draws": Figure(
        "CPU time of hooks that use globals but draw nothing, relative to others",
        "1",
        1,
        "x",
        median,
    ),
}
ABOUT_WORKERS = """\
A worker does everything that in-line loading does, and more. For samples of 240 bytes, the extra \
work takes these shares of the CPU time of in-line loading: 6 % to record the row in case the \
worker dies; 34 % to turn the batch into columns and compare its sources with them; 30 % to pickle \
and transfer the columns. Hosting a single lane saves 16 %. The larger the samples and the slower \
the hooks, the smaller these shares are.
"""


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="figures whose names contain this; no page")
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks/data-made/overheads")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        sys.stdout.write(json.dumps(MEASURED[arguments.one](arguments.data)) + "\n")
        sys.stdout.flush()
        return
    make_data(arguments.data)
    names = [name for name in FIGURES if arguments.only in name]
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            found[name].append(run(name, arguments.data))
    table = "\n".join(line(FIGURES[name], rounds) for name, rounds in found.items())
    sys.stdout.write(table + "\n")
    if not arguments.only:
        arguments.page.write_text(page(table, arguments.rounds))


def make_data(folder: Path) -> None:
    """Write and prepare what is not there."""
    import yaml

    from data import write
    from energon.prepare.dataset import prepare_dataset

    sizes = {"text": (20_000, 4), "shards10k": (20_000, 10_000)}
    sizes |= {f"many/{number}": (200, 4) for number in range(DATASETS)}
    for name, (samples, shards) in sizes.items():
        path = folder / name
        if not (path / ".nv-meta/dataset.yaml").exists():
            write(path, "text", num_samples=samples, num_shards=shards)
            prepare_dataset(path, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    entries = [{"path": f"./{n}", "weight": n % 7 + 1} for n in range(DATASETS)]
    document = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": entries}},
    }
    (folder / "many/blend.yaml").write_text(yaml.safe_dump(document))


def run(name: str, folder: Path) -> float:
    """Return a figure, from a fresh process."""
    program = FIGURES[name].program
    if program is None:
        command = [__file__, "--data", str(folder), "--one", name]
    else:
        command = ["-c", program.replace("{folder}", str(folder))]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    found = float(done.stdout.splitlines()[-1])
    print(name, found, file=sys.stderr, flush=True)
    return found


def info(folder: Path) -> float:
    """Return the seconds of a command."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "energon", "info", str(folder / "text")]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def encoder(kind: str, busy: int = 0) -> Any:
    """Return a task encoder that hands samples on, with a hook of some kind."""
    from energon import Cooker, DefaultTaskEncoder, stateless

    @stateless
    def pass_on(sample: Any) -> Any:
        return sample

    class Plain(DefaultTaskEncoder):
        decoder = None

        @stateless
        def batch(self, samples: list[Any]) -> list[Any]:
            return samples

    class Cooking(Plain):
        cookers = (Cooker(pass_on),)

    class Encoding(Plain):
        @stateless
        def encode_sample(self, sample: Any) -> Any:
            return sample

    class Asking(Plain):
        @stateless
        def encode_sample(self, sample: Any) -> Any:
            BATCH_SIZE  # noqa: B018 - code that names something may draw, for all that is known
            return sample

    class Busy(Plain):
        @stateless
        def encode_sample(self, sample: Any) -> Any:
            for _ in range(busy):
                pass
            return sample

    kinds = {"plain": Plain, "cooker": Cooking, "encode": Encoding, "ask": Asking, "busy": Busy}
    return kinds[kind]()


def batches(path: Path, task_encoder: Any, **config: Any) -> Iterator[Any]:
    """Yield lists of samples without an end."""
    from energon import WorkerConfig, get_savable_loader, get_train_dataset

    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, **{"num_workers": 0, **config}),
        batch_size=BATCH_SIZE,
        max_samples_per_sequence=100,
        task_encoder=task_encoder,
    )
    with get_savable_loader(dataset) as loader:
        yield from loader


def chunk(found: Iterator[Any], clock: Callable[[], float] = time.process_time) -> float:
    """Return what a sample takes, in the next thousands."""
    done, start = 0, clock()
    while done < CHUNK_SAMPLES:
        done += len(next(found))
    return (clock() - start) / done


def ratio(one: Iterator[Any], other: Iterator[Any], clock: Callable[[], float]) -> float:
    """Return what a sample of one takes, as a multiple of the other; chunks take turns."""
    for each in (one, other, one, other):
        chunk(each)
    found = []
    for number in range(2 * CHUNKS):
        pair = (one, other) if number % 2 else (other, one)
        spent = {id(each): chunk(each, clock) for each in pair}
        found.append(spent[id(one)] / spent[id(other)])
    return median(found)


def transport(folder: Path) -> tuple[float, float]:
    """Return what a sample of a worker takes in the trainer, and in the worker against in-line."""
    inline = batches(folder / "text", encoder("cooker"))
    workers = batches(folder / "text", encoder("cooker"), num_workers=2)
    chunk(inline), chunk(workers)
    parent, ratios = [], []
    for _ in range(CHUNKS):
        alone = chunk(inline)
        before = children_seconds()
        parent.append(chunk(workers))
        ratios.append((children_seconds() - before) / CHUNK_SAMPLES / alone)
    workers.close()  # type: ignore[attr-defined]
    return min(parent), median(ratios)


def children_seconds() -> float:
    """Return the CPU time that the descendants of this process have taken."""
    from measure import process_tree

    nanoseconds = 0
    for pid in process_tree()[1:]:
        for task in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def hook(folder: Path) -> float:
    """Return how much faster 2 workers are than none, with hooks of 5 µs a sample."""
    turns, spent = 1000, 0.0
    while spent < 1.0:  # of a million turns, for 5 µs each
        start = time.process_time()
        for _ in range(turns):
            pass
        spent, turns = time.process_time() - start, 2 * turns
    busy = max(1, round(5e-6 * turns / 2 / spent))
    alone = batches(folder / "text", encoder("busy", busy))
    workers = batches(folder / "text", encoder("busy", busy), num_workers=2)
    found = ratio(alone, workers, time.perf_counter)
    workers.close()  # type: ignore[attr-defined]
    return found


def lanes(folder: Path, kind: str) -> float:
    """Return what the default number of lanes takes against a single one."""
    default = batches(folder / "text", encoder(kind))
    return ratio(default, batches(folder / "text", encoder(kind), lanes=1), time.process_time)


def draws(folder: Path) -> float:
    """Return what a hook that might draw takes against one of which it is known that it cannot."""
    asking = batches(folder / "text", encoder("ask"))
    return ratio(asking, batches(folder / "text", encoder("encode")), time.process_time)


MEASURED: dict[str, Callable[[Path], float]] = {
    "info": info,
    "parent": lambda folder: transport(folder)[0],
    "child": lambda folder: transport(folder)[1],
    "hook": hook,
    "lanes": partial(lanes, kind="plain"),
    "lanes-cooker": partial(lanes, kind="cooker"),
    "draws": draws,
}


def line(figure: Figure, rounds: list[float]) -> str:
    """Return a line of the table."""
    found = figure.scale * figure.of_rounds(rounds)
    digits = 0 if found >= 10 else 1 if found >= 3 else 2
    goal = f"{figure.goal} {figure.unit}" if figure.goal else ""
    return f"| {figure.title} | {found:,.{digits}f} {figure.unit} | {goal} |"


def page(table: str, rounds: int) -> str:
    """Return the page of the documentation."""
    return (
        "# Benchmarks of opening, starting and sending\n\n"
        f"Made by `benchmarks/overheads.py` on {date.today()} with {os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}. Of {rounds} rounds, each in "
        "a fresh process, the table has the shortest time, the highest speed, and the median of "
        "other ratios; data in the page cache. See [all benchmarks](benchmarks.md).\n\n"
        "| | | goal |\n|---|---:|---:|\n"
        f"{table}\n\n"
        f"{ABOUT_WORKERS}"
    )


if __name__ == "__main__":
    main()
