"""Measure balanced batches, and write their section of docs/benchmarks_parts.md.

    make servers && benchmarks/peers.sh
    python benchmarks/balance.py [--rounds 3] [--only SECTION]

Sections: `order` (simulated times of steps), `deal` (a step against the best greedy deal), `packs`
(padding and times of planned packs), `planning` (CPU time and memory), `training` (a transformer
on two ranks), `store` and `restore` (one rank reads images of a distant S3 server, see remote.py,
and continues there), `disk` (it continues on a local disk). All but the last four are arithmetic,
so they run at full size. Three rounds take about fifteen minutes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data import write
from remote import BUCKET, distant_server
from results import (
    PEERS,
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

Floats = NDArray[np.float64]
Batches = list[list[list[int]]]
"""The samples of each rank in each step."""

ADAPTERS = Path(__file__).parent / "adapters"
RANKS, BATCH_SIZE, STEPS = 64, 4, 256
HF_STEPS = 32
"""Of the sampler, which takes long for all ranks."""
PLANNED_STEPS = 128
SAMPLES = 10**9
"""Samples of the simulated dataset, whose costs repeat those of a table."""
TABLE = 1 << 20
SLICE = 64
TOKENS_OF_TILE = 256
HF = "Hugging Face `batch_rebalance`"
WAYS: dict[str, dict[str, Any] | None] = {
    "unbalanced": None,
    HF: None,
    '`window="step"`': {"window": "step"},
    "`window=16`": {"window": 16},
    "`window=64`": {"window": 64},
    "`window=64, pool=8`": {"window": 64, "pool": 8},
    "`window=64, pool=1`": {"window": 64, "pool": 1},
}
MIXTURES = ("multimodal", "text")
TRAINED = ("unbalanced", HF, '`window="step"`', "`window=16`")
TRAINED_RANKS, TRAINED_STEPS, SHORTENED = 2, 32, 16
"""The lengths of the text mixture are divided by the last one."""
SHAPES = ((64, 4), (64, 16), (512, 4))
STORE_WAYS: dict[str, dict[str, Any] | None] = {
    "unbalanced": None,
    "`window=16`": {"window": 16},
    "`window=64`": {"window": 64},
    "`window=64, pool=2`": {"window": 64, "pool": 2},
    '`window=64, pool="all"`': {"window": 64, "pool": "all"},
    '`window="step"`': {"window": "step"},
}
STORE_RANKS, STORE_SECONDS, STORE_WARM_SECONDS, RESTORES = 8, 4.0, 3.0, 9
IMAGES, IMAGE_SHARDS = 6000, 15
PACKED_WINDOWS = 4
CONTEXTS = ((8192,), (8192, 16))
"""Tokens of a pack, and tiles of images."""


def main() -> None:
    """Measure, and write the page."""
    parser = BENCHMARK.parser(__doc__, data="balance")
    parser.add_argument("--one", help="a case as JSON, in this process")
    arguments = BENCHMARK.parsed(parser)
    if arguments.one:
        case = json.loads(arguments.one)
        print(json.dumps(SECTIONS[case.pop("section")](**case)))
        return

    versions = versions_of(sys.executable, energon="energon-loader", torch="torch")
    make_images(arguments.data)
    with distant_server(arguments.data) as (_, environment):

        def fresh(case: Case) -> dict[str, Any]:
            command = [sys.executable, __file__, "--one", json.dumps(case)]
            return in_fresh_process(command, **environment, BALANCE_IMAGES=str(arguments.data))

        BENCHMARK.run(arguments, cases(), fresh, {**versions, "transformers": "5.24.0"})


@cache
def lengths_of(mixture: str) -> tuple[Floats, Floats]:
    """Return the tokens of each sample, and how many of them are of images; seeded.

    Of the multimodal mixture, 40 % are text, 45 % have one image, 15 % two to six, of 1 to 16 tiles
    each; all have a text, log-normal with a median of 500 tokens, from 50 to 16,000. Of the text
    mixture, 30 % are documents with a median of 3,000 tokens, cut at 8,192.
    """
    rng = np.random.default_rng(37)
    text = rng.lognormal(np.log(500), 1.2, TABLE)
    kind = rng.random(TABLE)
    if mixture == "text":
        documents = rng.lognormal(np.log(3000), 0.9, TABLE)
        return np.clip(np.where(kind < 0.3, documents, text), 50, 8192).round(), np.zeros(TABLE)
    images = np.where(kind < 0.4, 0, np.where(kind < 0.85, 1, rng.integers(2, 7, TABLE)))
    of_images = images * rng.integers(1, 17, TABLE) * float(TOKENS_OF_TILE)
    return np.clip(text, 50, 16_000).round() + of_images, of_images


@cache
def table_of(mixture: str) -> Floats:
    """Return the cost of each sample: linear and attention work, and that of the image encoder."""
    tokens, of_images = lengths_of(mixture)
    return tokens + tokens**2 / 8192 + 1.5 * of_images


def plan_of(mixture: str, settings: Mapping[str, Any] | None, *, ranks: int = RANKS) -> Any:
    """Return the plan of a run whose batches have equally many samples."""
    from energon.plan.balance import Balance, BalancedOrder

    table, order = table_of(mixture), None
    if settings is not None:
        balance = Balance(cost="tokens", **settings)
        order = BalancedOrder(lambda rows: table[rows.ordinal % TABLE], balance, BATCH_SIZE, ranks)
    return simulated(order, BATCH_SIZE, ranks)


def simulated(order: Any, batch_size: int, ranks: int) -> Any:
    """Return the plan of a run over a simulated dataset."""
    from energon.plan.leaves.leaf import PlanLeaf
    from energon.plan.recipe import PlanRecipe

    leaf = PlanLeaf("simulated", SAMPLES, slice_samples=SLICE)
    recipe = PlanRecipe(
        "blend", (leaf,), 0, stripe=batch_size, batch_size=batch_size, balance=order
    )
    return recipe(ranks)


def batches_of(mixture: str, way: str, *, ranks: int, steps: int) -> Batches:
    """Return the samples of the first steps, as numbers in the table."""
    plan = plan_of(mixture, WAYS[way], ranks=ranks)
    lanes = [plan.rows(lane, 0, steps * BATCH_SIZE).ordinal % TABLE for lane in range(ranks)]
    samples = np.stack(lanes).reshape(-1, steps, BATCH_SIZE).swapaxes(0, 1)
    if way != HF:
        batches: Batches = samples.tolist()
        return batches
    flat = samples.ravel()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lengths.npy"
        np.save(file, lengths_of(mixture)[0][flat])
        program = [str(PEERS), str(ADAPTERS / "batch_rebalance.py")]
        found = in_fresh_process([*program, str(file), str(ranks), str(BATCH_SIZE)], peer=True)
    return [[flat[numbers].tolist() for numbers in step] for step in found["batches"]]


def order(mixture: str, way: str) -> dict[str, float]:
    """Return how long the steps of an order take, over the mean of their ranks."""
    table, steps = table_of(mixture), HF_STEPS if way == HF else STEPS
    batches = batches_of(mixture, way, ranks=RANKS, steps=steps)
    loads = np.array([[table[numbers].sum() for numbers in step] for step in batches])
    padded = np.array([[table[n].max() * len(n) for n in step] for step in batches])
    return {
        "slowest": float(loads.max(axis=1).sum() / loads.mean(axis=1).sum()),
        "padded": float(padded.max(axis=1).sum() / loads.mean(axis=1).sum()),
    }


def deal_of_step(ranks: int, batch_size: int) -> dict[str, float]:
    """Return how even a step is compared with the best greedy deal, and the samples it moves."""
    from energon.plan.balance import COST_SLACK
    from energon.plan.deal import deal, deal_to_lanes

    rng, table = np.random.default_rng(1), table_of("multimodal")
    homes = np.repeat(np.arange(ranks), batch_size)
    worst, moved, slowest = [], [], []
    for _ in range(20):
        costs = rng.choice(table, len(homes)).round().astype(np.int64)
        slack = int(costs.sum() * COST_SLACK) // ranks
        dealt = deal_to_lanes(costs, homes, ranks, ranks, slack=slack)[:, 0]
        most, greedy = (costs[each].sum(axis=1).max() for each in (dealt, deal(costs, ranks)))
        worst.append(most / greedy)
        slowest.append(most * ranks / costs.sum())
        moved.append((homes[dealt] != np.arange(ranks)[:, None]).mean())
    return {"ratio": max(worst), "moved": float(np.mean(moved)), "slowest": float(np.mean(slowest))}


def packs(mixture: str, context: list[int]) -> dict[str, float]:
    """Return how full planned packs are, and how long steps take over the mean of their ranks."""
    from energon.plan.balance import Balance
    from energon.plan.fill import PACK_ROWS, Budget
    from energon.plan.packs import PackedOrder
    from energon.task_encoder.train_plan import PACKED_STEPS

    tokens, of_images = lengths_of(mixture)
    table = np.stack((tokens, of_images // TOKENS_OF_TILE), axis=1)[:, : len(context)]
    fits = (table <= context).all(axis=1)
    fullest = float((table[fits].sum(axis=0) / len(table) / context).max())
    order = PackedOrder(
        lambda rows: tokens[rows.ordinal % TABLE] ** 2,
        Balance(cost="squared length", window=PACKED_STEPS),
        1,
        RANKS,
        lengths=lambda rows: table[rows.ordinal % TABLE].astype(np.int64),
        budget=Budget(tuple(context)),
        rows=round(PACKED_STEPS * max(1.0, 1 / fullest)),
        identity={},
    )
    plan = simulated(order, 1, RANKS)
    filled, steps, cpu = np.zeros(len(context)), 0, 0.0
    slowest = mean = 0.0
    for number in range(PACKED_WINDOWS):
        began = time.process_time()
        window = plan.window(0, number)
        cpu += time.process_time() - began
        chosen = window.lane >= 0
        numbers = window.samples.ordinal[chosen] % TABLE
        filled += table[numbers].sum(axis=0)
        loads = np.zeros((window.steps, RANKS))
        np.add.at(
            loads, (window.row[chosen] // PACK_ROWS, window.lane[chosen]), tokens[numbers] ** 2
        )
        slowest += loads.max(axis=1).sum()
        mean += loads.mean(axis=1).sum()
        steps += window.steps
    return {
        "padding": 1 - float((filled / context).max()) / (steps * RANKS),
        "slowest": slowest / mean,
        "step_ms": 1e3 * cpu / steps,
        "left_out": 1 - float(fits.mean()),
    }


def planning(ranks: int, way: str) -> dict[str, float]:
    """Return the CPU time of planning a step, and the memory."""
    table_of("multimodal")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = plan_of("multimodal", WAYS[way], ranks=ranks)
    rows = 8 * BATCH_SIZE
    start = SAMPLES // ranks * 3 // rows * rows  # in the fourth epoch
    began = time.process_time()
    plan.rows(ranks - 1, start, BATCH_SIZE)
    first = time.process_time() - began
    for row in range(start, start + PLANNED_STEPS * BATCH_SIZE, rows):
        plan.rows(ranks - 1, row, rows)
    return {
        "first_ms": 1e3 * first,
        "step_ms": 1e3 * (time.process_time() - began) / PLANNED_STEPS,
        "memory_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def training(way: str) -> dict[str, float]:
    """Return the time of a training run with an order of the text mixture."""
    lengths = np.maximum(1, lengths_of("text")[0] // SHORTENED).astype(int)
    batches = batches_of("text", way, ranks=TRAINED_RANKS, steps=TRAINED_STEPS)
    of_ranks = [[lengths[numbers].tolist() for numbers in step] for step in batches]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "batches.json"
        file.write_text(json.dumps(of_ranks))
        return in_fresh_process([sys.executable, str(ADAPTERS / "train_balanced.py"), str(file)])


def make_images(folder: Path) -> None:
    """Write and prepare the images that `store` reads."""
    from energon.prepare.dataset import prepare_dataset

    write(folder / "images", "image", num_samples=IMAGES, num_shards=IMAGE_SHARDS)
    if not (folder / "images" / ".nv-meta").exists():
        prepare_dataset(folder / "images", split_parts=["train:.*"], sample_type="CrudeWebdataset")


def drawn_cost(measures: Mapping[str, Floats]) -> Floats:
    """Return costs that are distributed as those of the multimodal mixture, for any sample."""
    spread = measures["jpg:bytes"].astype(np.int64) * 7919
    return table_of("multimodal")[spread % TABLE]


def loader_of(
    way: str, state: Any = None, *, images: str = f"s3://{BUCKET}/images", workers: int = 0
) -> Any:
    """Return the loader of a rank that reads images with an order, perhaps restored."""
    from energon import (
        Balance,
        DefaultTaskEncoder,
        WorkerConfig,
        get_savable_loader,
        get_train_dataset,
    )

    class Raw(DefaultTaskEncoder):
        decoder = None

        def batch(self, samples: list[Any]) -> list[Any]:
            return samples

    table_of("multimodal")
    settings = STORE_WAYS[way]
    dataset = get_train_dataset(
        images,
        worker_config=WorkerConfig(
            rank=0, world_size=STORE_RANKS, num_workers=workers, lanes=STORE_RANKS
        ),
        batch_size=BATCH_SIZE,
        max_samples_per_sequence=SLICE,
        balance=None if settings is None else Balance(cost=drawn_cost, **settings),
        task_encoder=Raw(),
    )
    loader = get_savable_loader(dataset)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def read_for(batches: Iterator[Any], seconds: float) -> int:
    """Return how many samples come in some seconds."""
    samples, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        samples += len(next(batches))
    return samples


def store(way: str) -> dict[str, float]:
    """Return what a rank reads of a distant store with an order."""
    from energon.io.files import all_statistics

    def requests() -> float:
        return sum(each["requests"] for each in all_statistics().values())

    batches = iter(loader_of(way))
    read_for(batches, STORE_WARM_SECONDS)
    before, started = requests(), time.perf_counter()
    samples = read_for(batches, STORE_SECONDS)
    seconds, made = time.perf_counter() - started, requests() - before
    return {"samples_per_second": samples / seconds, "requests_per_sample": made / samples}


def restore(way: str, **where: Any) -> dict[str, float]:
    """Return how long a restored rank takes until its first batch, by default from a store."""
    loader, restored = loader_of(way, **where), []
    read_for(iter(loader), STORE_WARM_SECONDS)
    state = loader.state_dict()
    for _ in range(RESTORES):
        loader.close()
        started = time.perf_counter()
        loader = loader_of(way, state, **where)
        next(iter(loader))
        restored.append(time.perf_counter() - started)
    return {"restored_seconds": median(restored)}


def restore_on_disk(way: str) -> dict[str, float]:
    """Return how long a restored rank takes until its first batch from a local disk."""
    images = f"{os.environ['BALANCE_IMAGES']}/images"
    return {
        f"seconds_{workers}_workers": restore(way, images=images, workers=workers)[
            "restored_seconds"
        ]
        for workers in (0, 1)
    }


SECTIONS: dict[str, Callable[..., dict[str, float]]] = {
    "order": order,
    "deal": deal_of_step,
    "packs": packs,
    "planning": planning,
    "training": training,
    "store": store,
    "restore": restore,
    "disk": restore_on_disk,
}


def cases() -> Iterator[Case]:
    """Yield the cases of all sections."""
    for mixture in MIXTURES:
        for way in WAYS:
            yield {"section": "order", "mixture": mixture, "way": way}
    for ranks, batch_size in SHAPES:
        yield {"section": "deal", "ranks": ranks, "batch_size": batch_size}
    for mixture in MIXTURES:
        yield {"section": "packs", "mixture": mixture, "context": list(CONTEXTS[0])}
    yield {"section": "packs", "mixture": MIXTURES[0], "context": list(CONTEXTS[1])}
    for ranks in (64, 4096):
        for way in ('`window="step"`', "`window=16`"):
            yield {"section": "planning", "ranks": ranks, "way": way}
    for way in TRAINED:
        yield {"section": "training", "way": way}
    for way in STORE_WAYS:
        yield {"section": "store", "way": way}
        yield {"section": "restore", "way": way}
        yield {"section": "disk", "way": way}


def tables(results: Results) -> str:
    """Return the tables of the page."""
    lines = [
        f"Times of {STEPS} steps ({HF_STEPS} for Hugging Face) of {RANKS} ranks with micro-batches "
        f"of {BATCH_SIZE} over the time if no rank waited; *padded* if all samples of a "
        "micro-batch take as long as its largest. The last column is the CPU time of the slowest "
        f"rank over the mean in a training of {TRAINED_STEPS} steps on {TRAINED_RANKS} ranks over "
        "the text mixture, unpadded:",
        "",
        "| order | images and text | padded | text | padded | training, 2 ranks |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for way in WAYS:
        cells = [
            f"{middle(rounds_of(results, section='order', mixture=mixture, way=way), name):.2f}"
            for mixture in MIXTURES
            for name in ("slowest", "padded")
        ]
        if way in TRAINED:
            rounds = rounds_of(results, section="training", way=way)
            cells.append(shown(rounds, "slowest", 2))
        else:
            cells.append("")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    lines += [
        "",
        '`window="step"` against the deal of the largest sample first to the least loaded '
        "micro-batch, with equal counts (images and text, the worst of 20 steps):",
        "",
        "| ranks x micro-batch | slowest over mean | slowest over the deal | samples moved |",
        "|---|---:|---:|---:|",
    ]
    for ranks, batch_size in SHAPES:
        rounds = rounds_of(results, section="deal", ranks=ranks, batch_size=batch_size)
        lines.append(
            f"| {ranks} x {batch_size} | {middle(rounds, 'slowest'):.2f} | "
            f"{middle(rounds, 'ratio'):.3f} | {middle(rounds, 'moved'):.1%} |"
        )
    lines += [
        "",
        f"Planned packs of {RANKS} ranks, in {PACKED_WINDOWS} windows; longer samples are left "
        "out, and a second number of the context is that of image tiles. The time of a pack is the "
        "sum of its squared lengths:",
        "",
        "| samples | context | left out | padding | slowest over mean | CPU of a step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case in (each for each in cases() if each["section"] == "packs"):
        rounds = rounds_of(results, **case)
        name = "images and text" if case["mixture"] == "multimodal" else case["mixture"]
        lines.append(
            f"| {name} | {', '.join(f'{each:,}' for each in case['context'])} | "
            f"{middle(rounds, 'left_out'):.1%} | {middle(rounds, 'padding'):.2%} | "
            f"{middle(rounds, 'slowest'):.3f} | {shown(rounds, 'step_ms', 1, unit=' ms')} |"
        )
    lines += [
        "",
        f"CPU time of planning in a worker, for {SAMPLES:,} samples of images and text and "
        f"micro-batches of {BATCH_SIZE}:",
        "",
        "| ranks | window | each step | first batch | growth of memory |",
        "|---|---|---:|---:|---:|",
    ]
    for ranks in (64, 4096):
        for way in ('`window="step"`', "`window=16`"):
            rounds = rounds_of(results, section="planning", ranks=ranks, way=way)
            lines.append(
                f"| {ranks:,} | {way} | {shown(rounds, 'step_ms', 1, unit=' ms')} | "
                f"{shown(rounds, 'first_ms', unit=' ms')} | "
                f"{middle(rounds, 'memory_mb'):,.0f} MB |"
            )
    if any(case["section"] == "store" for case in results["cases"]):  # it needs servers
        lines += store_table(results)
    return "\n".join(lines)


def store_table(results: Results) -> list[str]:
    """Return the lines of the table of `store`."""
    lines = [
        "",
        f"One of {STORE_RANKS} ranks reads images of about 64 kB, in slices of {SLICE}, of an S3 "
        "server whose answers take 30 ms, in the training process and with micro-batches of "
        f"{BATCH_SIZE}; costs are those of images and text. The last columns are the time from "
        "before the loader is built until the first batch after a restore, from the store and from "
        "a local disk, there in the training process and with a worker process:",
        "",
        "| order | requests a sample | of unbalanced | images/s | of unbalanced | restored, store "
        "| disk | disk, worker |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    unbalanced = rounds_of(results, section="store", way="unbalanced")
    for way in STORE_WAYS:
        rounds = rounds_of(results, section="store", way=way)
        restores = rounds_of(results, section="restore", way=way)
        disk = rounds_of(results, section="disk", way=way)
        lines.append(
            f"| {way} | {middle(rounds, 'requests_per_sample'):.3f} | "
            f"{ratio(rounds, unbalanced, 'requests_per_sample'):.2f}x | "
            f"{shown(rounds, 'samples_per_second')} | "
            f"{ratio(rounds, unbalanced, 'samples_per_second'):.2f}x | "
            f"{middle(restores, 'restored_seconds'):.2f} s | "
            f"{1000 * middle(disk, 'seconds_0_workers'):.0f} ms | "
            f"{1000 * middle(disk, 'seconds_1_workers'):.0f} ms |"
        )
    return lines


BENCHMARK = Benchmark(__file__, tables)

if __name__ == "__main__":
    main()
