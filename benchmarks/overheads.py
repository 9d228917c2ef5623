"""Measure what a run costs beside its hooks, for docs/benchmarks_parts.md.

    python benchmarks/overheads.py [--rounds 5] [--only WORD] [--data FOLDER]

Opening datasets, starting workers, sending batches to the trainer, the lanes of a new run, and
seeds of hooks: the page has each figure and its goal. Every figure comes from a
fresh process; ratios are medians over chunks of two loaders that take turns in it. Five rounds take
about four minutes.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from results import Benchmark, Case, Results, in_fresh_process, rounds_of, shown, versions_of

BATCH_SIZE = 32
CHUNK_SAMPLES = 16_000
CHUNKS = 8
DATASETS = 300

# Programs that are timed from their first line on must not find modules that this one imports.
IMPORT = """
import time
start = time.perf_counter()
from energon import get_train_dataset
print('{"value": %f}' % (time.perf_counter() - start))
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
print('{{"value": %f}}' % ({figure}))
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
        program: What a fresh process runs; None for one of the functions in `MEASURED`.
        of: The function and the name of its figure, if it returns several.
    """

    title: str
    goal: str
    scale: float
    unit: str
    program: str | None = None
    of: tuple[str, str] = ("", "")


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
    "parent": Figure(
        "CPU time of the trainer for a text sample from a worker",
        "1.5",
        1e6,
        "µs",
        of=("transport", "parent"),
    ),
    "child": Figure(
        "CPU time of a worker, relative to in-line", "1.3", 1, "x", of=("transport", "child")
    ),
    "pickles": Figure("of which pickling the batches", "", 1, "x", of=("transport", "pickles")),
    "child-busy": Figure(
        "the same with hooks of 5 µs a sample", "1.3", 1, "x", of=("transport-busy", "child")
    ),
    "child-arrays": Figure(
        "the same with hooks that make arrays, and the default `batch`",
        "1.3",
        1,
        "x",
        of=("transport-arrays", "child"),
    ),
    "hook": Figure(
        "speed of 2 workers with hooks of 5 µs a sample, relative to in-line", "1.3", 1, "x"
    ),
    "hook-arrays": Figure("the same with lists of arrays", "1.3", 1, "x"),
    "lanes": Figure("CPU time of text with the default lanes, relative to one", "1.05", 1, "x"),
    "lanes-cooker": Figure("the same with a cooker", "1.05", 1, "x"),
    "seeds": Figure(
        "CPU time of text with a hook and seeded batches, relative to unseeded ones", "", 1, "x"
    ),
}


def main() -> None:
    """Measure, and write the page."""
    parser = BENCHMARK.parser(__doc__, data="overheads")
    parser.add_argument("--one", metavar="FIGURE")
    arguments = BENCHMARK.parsed(parser)
    if arguments.one:
        print(json.dumps(MEASURED[arguments.one](arguments.data)), flush=True)
        return
    make_data(arguments.data)

    def fresh(case: Case) -> dict[str, Any]:
        name = case["figure"]
        program = FIGURES[name].program if name in FIGURES else None
        command = [__file__, "--data", str(arguments.data), "--one", name]
        if program is not None:
            command = ["-c", program.replace("{folder}", str(arguments.data))]
        return in_fresh_process([sys.executable, *command])

    measured = dict.fromkeys(figure.of[0] or name for name, figure in FIGURES.items())
    versions = versions_of(sys.executable, energon="energon-loader")
    BENCHMARK.run(arguments, [{"figure": name} for name in measured], fresh, versions)


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


def info(folder: Path) -> dict[str, float]:
    """Return the seconds of a command."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "energon", "info", str(folder / "text")]
    subprocess.run(command, check=True, capture_output=True)
    return {"value": time.perf_counter() - start}


def encoder(kind: str, busy: int = 0) -> Any:
    """Return a task encoder that hands samples on, with a hook of some kind."""
    import numpy as np

    from energon import Cooker, DefaultTaskEncoder, Sample, basic_sample_keys, edataclass, stateless

    @edataclass
    class Tokens(Sample):
        tokens: np.ndarray

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

    class Unseeded(Encoding):
        seeds_global_generators = False

    class Busy(Plain):
        @stateless
        def encode_sample(self, sample: Any) -> Any:
            for _ in range(busy):
                pass
            return sample

    @stateless
    def tokenize(sample: Any) -> Tokens:
        tokens = np.frombuffer(sample["txt"], np.uint8)[:64].astype(np.int64)
        return Tokens(**basic_sample_keys(sample), tokens=tokens)

    class Tokenizing(DefaultTaskEncoder):
        decoder = None
        cookers = (Cooker(tokenize),)

    class BusyTokenizing(Busy):
        cookers = (Cooker(tokenize),)

    kinds = {"plain": Plain, "cooker": Cooking, "encode": Encoding, "busy": Busy}
    kinds |= {"unseeded": Unseeded, "arrays": Tokenizing, "busy-arrays": BusyTokenizing}
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
    start = clock()
    for _ in islice(found, CHUNK_SAMPLES // BATCH_SIZE):
        pass
    return (clock() - start) / CHUNK_SAMPLES


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


def transport(folder: Path, kind: str) -> dict[str, float]:
    """Return what a sample of a worker takes in the trainer, and in the worker against in-line."""
    busy = turns_in(5e-6) if kind == "busy" else 0
    inline = batches(folder / "text", encoder(kind, busy))
    workers = batches(folder / "text", encoder(kind, busy), num_workers=2)
    chunk(inline), chunk(workers)
    found: dict[str, list[float]] = {"parent": [], "child": [], "pickles": []}
    for _ in range(CHUNKS):
        alone = chunk(inline)
        before = seconds_of_idle_children()
        found["parent"].append(chunk(workers))
        spent = seconds_of_idle_children() - before
        found["child"].append(spent / CHUNK_SAMPLES / alone)
        found["pickles"].append(pickling(inline) / alone)
    workers.close()  # type: ignore[attr-defined]
    return {name: median(values) for name, values in found.items()}


def pickling(found: Iterator[Any]) -> float:
    """Return the CPU seconds that a worker takes to pickle a sample."""
    from energon.loader.transport.pickling import BatchPickler

    pickler = BatchPickler(io.BytesIO())
    seconds = 0.0
    for batch in list(islice(found, CHUNK_SAMPLES // BATCH_SIZE)):
        start = time.process_time()
        pickler.dump(batch)
        seconds += time.process_time() - start
    return seconds / CHUNK_SAMPLES


def seconds_of_idle_children() -> float:
    """Return their CPU time once they wait: they have made as many batches ahead as they may."""
    found, before = children_seconds(), -1.0
    while found - before > 1e-3:
        time.sleep(0.05)
        found, before = children_seconds(), found
    return found


def children_seconds() -> float:
    """Return the CPU time that the descendants of this process have taken."""
    from measure import process_tree

    nanoseconds = 0
    for pid in process_tree()[1:]:
        for task in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def hook(folder: Path, kind: str) -> dict[str, float]:
    """Return how much faster 2 workers are than none, with hooks of 5 µs a sample."""
    busy = turns_in(5e-6)
    alone = batches(folder / "text", encoder(kind, busy))
    workers = batches(folder / "text", encoder(kind, busy), num_workers=2)
    found = ratio(alone, workers, time.perf_counter)
    workers.close()  # type: ignore[attr-defined]
    return {"value": found}


def turns_in(seconds: float) -> int:
    """Return how often an empty loop turns in a time."""
    turns, spent = 1000, 0.0
    while spent < 1.0:
        start = time.process_time()
        for _ in range(turns):
            pass
        spent, turns = time.process_time() - start, 2 * turns
    return max(1, round(seconds * turns / 2 / spent))


def lanes(folder: Path, kind: str) -> dict[str, float]:
    """Return what the default number of lanes takes against a single one."""
    default = batches(folder / "text", encoder(kind))
    single = batches(folder / "text", encoder(kind), lanes=1)
    return {"value": ratio(default, single, time.process_time)}


def seeds(folder: Path) -> dict[str, float]:
    """Return the time with seeded global generators, as a multiple of that without."""
    seeded = batches(folder / "text", encoder("encode"))
    unseeded = batches(folder / "text", encoder("unseeded"))
    return {"value": ratio(seeded, unseeded, time.process_time)}


MEASURED: dict[str, Callable[[Path], dict[str, float]]] = {
    "info": info,
    "transport": partial(transport, kind="cooker"),
    "transport-busy": partial(transport, kind="busy"),
    "transport-arrays": partial(transport, kind="arrays"),
    "hook": partial(hook, kind="busy"),
    "hook-arrays": partial(hook, kind="busy-arrays"),
    "lanes": partial(lanes, kind="plain"),
    "lanes-cooker": partial(lanes, kind="cooker"),
    "seeds": seeds,
}


def tables(results: Results) -> str:
    """Return the figures beside their goals."""
    lines = ["| | | goal |", "|---|---:|---:|"]
    for name, figure in FIGURES.items():
        case, value = figure.of if figure.of[0] else (name, "value")
        found = rounds_of(results, figure=case)
        least = figure.scale * min(each[value] for each in found)
        digits = 0 if least >= 10 else 1 if least >= 3 else 2
        cell = shown(found, value, digits, scale=figure.scale, unit=f" {figure.unit}")
        goal = f"{figure.goal} {figure.unit}" if figure.goal else ""
        lines.append(f"| {figure.title} | {cell} | {goal} |")
    return "\n".join(lines)


BENCHMARK = Benchmark(__file__, tables)

if __name__ == "__main__":
    main()
