"""Draw the diagrams of the pages as SVG: `python -m docs.site.diagrams` (`make diagrams`).

What can be computed is computed: lanes of ranks, rows of a plan and layers of the package come
from the code, the chart from the results of the benchmarks. Colors follow the reader's theme.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from html import escape
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

from energon import Balance, WorkerConfig
from energon.plan.balance import BalancedOrder
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/images"
LIBRARIES = {
    "ours": "energon",
    "megatron_energon": "Megatron-Energon",
    "web_dataset": "webdataset",
    "lit_data": "LitData",
}
WIDTH = 760
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 11px; } .title { font-weight: 600; } .middle { text-anchor: middle; }
.paper { fill: #ffffff; } .box { fill: #f3f5f8; stroke: #8c959f; } .line { stroke: #57606a; }
.head { fill: #57606a; }
.c0 { fill: #cfe3ff; stroke: #3b76c4; } .c1 { fill: #ffe2c2; stroke: #c4752b; }
.c2 { fill: #d3f0d6; stroke: #3f9150; } .c3 { fill: #f3d6ee; stroke: #a8479a; }
.c4 { fill: #fdf3bf; stroke: #a38a1c; } .c5 { fill: #d5eef0; stroke: #3a8d93; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .paper { fill: #161b22; } .box { fill: #21262d; stroke: #8b949e; }
  .line { stroke: #8b949e; } .head { fill: #8b949e; }
  .c0 { fill: #1c3a63; } .c1 { fill: #5a3613; } .c2 { fill: #1d4425; } .c3 { fill: #4d2047; }
  .c4 { fill: #4a4010; } .c5 { fill: #17454a; }
}
""".strip()


class Drawing:
    """Boxes, texts and arrows on paper that grows downwards."""

    def __init__(self, about: str) -> None:
        self.about = about
        self.parts: list[str] = []
        self.height = 0.0

    def dot(self, x: float, y: float, number: int, title: str = "") -> None:
        """Draw a dot of a series; pointing at it shows its title."""
        about = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f'<circle class="c{number}" cx="{x:.1f}" cy="{y:g}" r="6">{about}</circle>'
        )

    def rule(self, x: float, top: float, bottom: float, *, strong: bool) -> None:
        """Draw a vertical line of a grid."""
        opacity = 0.9 if strong else 0.25
        self.parts.append(
            f'<line class="line" x1="{x:.1f}" y1="{top:g}" x2="{x:.1f}" y2="{bottom:g}" '
            f'opacity="{opacity}"/>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "box"
    ) -> None:
        """Draw a box with lines of text in its middle."""
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            'rx="4"/>'
        )
        first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 16 * number, line, kind="middle")
        self.height = max(self.height, y + height)

    def text(self, x: float, y: float, text: str, *, kind: str = "") -> None:
        """Write a line that begins at `x`, or has its middle there."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')
        self.height = max(self.height, y + 4)

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a straight arrow."""
        self.parts.append(f'<path class="line" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>')
        flat = abs(x2 - x1) > abs(y2 - y1)
        back = -7 if (x2 > x1 if flat else y2 > y1) else 7
        ends = ((back, -4), (back, 4)) if flat else ((-4, back), (4, back))
        points = " ".join(f"{x2 + dx:g},{y2 + dy:g}" for dx, dy in [(0, 0), *ends])
        self.parts.append(f'<polygon class="head" points="{points}"/>')

    def svg(self) -> str:
        """Return the file."""
        height = self.height + 16
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
                f'role="img" aria-label="{escape(self.about)}">',
                f"<style>{STYLE}</style>",
                f'<rect class="paper" width="{WIDTH}" height="{height:g}" rx="8"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def lanes() -> Drawing:
    """Draw which rank delivers which global batch, for two world sizes."""
    drawing = Drawing("Global batches are dealt to lanes, and lanes to ranks")
    count, batches = 6, 18
    drawing.text(
        16, 28, f"Global batches of a run with {count} lanes: colors are lanes", kind="title"
    )
    size = (WIDTH - 32) / batches
    for batch in range(batches):
        drawing.box(16 + batch * size, 40, size - 3, 28, str(batch), kind=f"c{batch % count}")
    y = 100.0
    for world_size in (2, 3):
        drawing.text(16, y, f"{world_size} ranks deliver", kind="title")
        for rank in range(world_size):
            y += 12
            mine = WorkerConfig(rank=rank, world_size=world_size, num_workers=0).rank_lanes(count)
            drawing.text(16, y + 18, f"rank {rank}")
            delivered = [batch for batch in range(batches) if batch % count in mine]
            for place, batch in enumerate(delivered):
                x = 76 + place * size
                drawing.box(x, y, size - 3, 26, str(batch), kind=f"c{batch % count}")
            y += 22
        y += 36
    drawing.text(16, y - 8, "Step by step, both read the same batches in the same order.")
    return drawing


def batch() -> Drawing:
    """Draw the stages that a batch goes through."""
    drawing = Drawing("The stages from the plan to the training step")
    stages = [
        ("plan", "row to leaf,", "epoch, sample"),
        ("read", "blocks of", "bytes"),
        ("load or cook", "decode,", "map fields"),
        ("encode_sample", "your code,", "seeded"),
        ("pack, group", "only if the", "you define them"),
        ("batch", "collate,", "encode_batch"),
    ]
    width = (WIDTH - 32 - 5 * 16) / 6
    for number, (name, *about) in enumerate(stages):
        x = 16 + number * (width + 16)
        drawing.box(x, 48, width, 78, name, "", kind=f"c{number}")
        for line, words in enumerate(about):
            drawing.text(x + width / 2, 98 + 14 * line, words, kind="small middle")
        if number:
            drawing.arrow(x - 16, 87, x - 2, 87)
    drawing.text(16, 30, "In a worker: a process, a thread, or the training process", kind="title")
    middle = WIDTH - 16 - width / 2
    drawing.arrow(middle, 126, middle, 166)
    drawing.text(270, 152, "shared memory: the batch, and the state of its lane after it")
    drawing.box(
        middle - 330,
        168,
        330 + width / 2,
        40,
        "loader: delivers lanes in turn, keeps each last state",
    )
    drawing.arrow(middle - 330, 188, middle - 372, 188)
    drawing.box(16, 168, middle - 372 - 20, 40, "your training step", kind="c4")
    return drawing


def slices() -> Drawing:
    """Draw the rows of a plan: slices of a dataset, dealt to lanes and mixed in windows."""
    drawing = Drawing("Slices of a dataset are dealt to lanes and mixed in windows")
    samples, length, window, count = 48, 4, 2, 2
    leaf = PlanLeaf("data", samples, slice_samples=length, parallel_slices=window)
    plan = PlanRecipe("blend", (leaf,), 5)(count)
    size = (WIDTH - 32) / 24
    drawing.text(
        16,
        28,
        f"A dataset of {samples} samples in slices of {length}, each read at once",
        kind="title",
    )
    owner = {}
    for lane in range(count):
        for sample in plan.rows(lane, 0, samples // count).ordinal.tolist():
            owner[sample] = lane
    # Slices begin at an offset that changes with the epoch.
    begin = next(sample for sample in range(1, samples) if owner[sample] != owner[sample - 1])
    for sample in range(samples):
        x, y = 16 + sample % 24 * size, 40 + sample // 24 * 32
        gap = 6 if (sample + 1 - begin) % length == 0 else 1
        drawing.box(x, y, size - gap, 26, str(sample), kind=f"c{owner[sample]}")
    y = 130.0
    per_window = length * window
    for lane in range(count):
        drawing.text(16, y, f"lane {lane}: windows of {window} slices, mixed", kind="title")
        for place, sample in enumerate(plan.rows(lane, 0, samples // count).ordinal.tolist()):
            gap = 6 if place % per_window == per_window - 1 else 1
            x = 16 + place * size
            drawing.box(
                x,
                y + 12,
                size - gap,
                26,
                str(sample),
                kind=f"c{2 + (sample - begin) // length % 4}",
            )
        y += 66
    drawing.text(
        16, y - 6, "In the lanes, a color is a slice. Every sample comes once in an epoch."
    )
    return drawing


def state() -> Drawing:
    """Draw what a state holds."""
    drawing = Drawing("A state holds lanes, a fingerprint and a position for each lane")
    drawing.text(16, 28, "A state: plain JSON, a few kilobytes", kind="title")
    drawing.box(16, 40, 350, 196)
    drawing.box(30, 54, 322, 30, "format, version, order version", kind="c4")
    drawing.box(30, 92, 322, 30, "number of lanes", kind="c0")
    drawing.box(
        30,
        130,
        322,
        44,
        "fingerprint: sizes and hashes of the data,",
        "weights, seed, batch size, …",
        kind="c1",
    )
    for lane in range(4):
        drawing.box(30 + lane * 82, 182, 76, 42, f"lane {lane}", "next row", kind="c2")
    drawing.text(394, 28, "Not in it, because it can be computed", kind="title")
    absent = [
        "samples, or buffers of samples",
        "ranks, workers, processes",
        "states of random generators",
        "lists of samples read",
        "pickled objects",
    ]
    for number, line in enumerate(absent):
        drawing.box(394, 40 + number * 40, 350, 32, line)
    return drawing


def resume() -> Drawing:
    """Draw how the lanes of a state are hosted by other ranks."""
    drawing = Drawing("The lanes of a state are hosted by other ranks after a restore")
    count = 12
    size = (WIDTH - 32) / count
    y = 40.0
    for title, world_size, workers in (
        ("saved: 4 ranks with 3 workers each", 4, 3),
        ("resumed: 3 ranks with 2 workers each", 3, 2),
        ("resumed: 1 rank without workers", 1, 0),
    ):
        drawing.text(16, y - 8, title, kind="title")
        for rank in range(world_size):
            config = WorkerConfig(rank=rank, world_size=world_size, num_workers=workers)
            for lane in config.rank_lanes(count):
                drawing.box(
                    16 + lane * size,
                    y,
                    size - 4,
                    40,
                    f"lane {lane}",
                    f"rank {rank}",
                    kind=f"c{rank}",
                )
        y += 80
    drawing.text(
        16, y - 16, "Each lane continues at its own row: the order of global batches is the same."
    )
    return drawing


def layers() -> Drawing:
    """Draw the layers that import-linter checks."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    rows = next(each["layers"] for each in contracts if each["type"] == "layers")
    drawing = Drawing("The packages by layer; imports go down only")
    drawing.text(
        16, 28, "Imports go down only; packages of one layer do not import each other", kind="title"
    )
    for number, row in enumerate(rows):
        packages = [name.strip().removeprefix("energon.") for name in row.split("|")]
        width = (WIDTH - 32) / len(packages)
        for column, package in enumerate(packages):
            kind = "c1" if package == "compat" else f"c{(0, 5)[number % 2]}"
            drawing.box(16 + column * width, 40 + number * 34, width - 4, 28, package, kind=kind)
    return drawing


def cpu() -> Drawing:
    """Draw the CPU time of the same program on each library, as measured by benchmarks/run.py.

    Dots on a logarithmic axis: the length of a bar would say nothing there.
    """
    drawing = Drawing("CPU time of the same program on each library")
    times: dict[tuple[str, int], dict[str, float]] = {}
    for found in json.loads((ROOT / "docs/benchmarks.json").read_text())["programs"]:
        cost = median(each["cpu_seconds_per_1000"] for each in found["rounds"])
        times.setdefault((found["title"], found["workers"]), {})[found["library"]] = cost
    rows = {row: costs for row, costs in times.items() if "megatron_energon" in costs}
    left, right, top = 340.0, WIDTH - 24.0, 76.0
    bottom = top + 30 * len(rows)
    drawing.text(16, 28, "CPU time of the same program, energon = 1, less is better", kind="title")
    for place, name in enumerate(LIBRARIES.values()):
        drawing.dot(16 + 8 + 150 * place, 52, place)
        drawing.text(16 + 20 + 150 * place, 56, name, kind="small")
    ratios = [cost / costs["ours"] for costs in rows.values() for cost in costs.values()]
    least, most = min(ratios) / 1.3, max(ratios) * 1.3

    def x(ratio: float) -> float:
        return left + (right - left) * math.log(ratio / least) / math.log(most / least)

    for tick in (0.5, 1, 2, 5, 10, 20, 50):
        if least < tick < most:
            drawing.rule(x(tick), top, bottom, strong=tick == 1)
            drawing.text(x(tick), bottom + 16, f"{tick:g}x", kind="small middle")
    for number, ((program, workers), costs) in enumerate(rows.items()):
        y = top + 30 * number + 15
        suffix = f", {workers} workers" if workers else ""
        for long, short in (("cooker that passes samples on", "cooker"), (", default batches", "")):
            program = program.replace(long, short)
        drawing.text(16, y + 4, program + suffix)
        for place, (library, name) in enumerate(LIBRARIES.items()):
            if library in costs:
                about = f"{name}: {1000 * costs[library]:.3g} ms for 1,000 samples"
                drawing.dot(x(costs[library] / costs["ours"]), y, place, about)
    return drawing


def balance() -> Drawing:
    """Draw the samples of three steps on four ranks: as drawn, dealt, and sorted in a window."""
    drawing = Drawing("Balanced steps take as long as the mean of their ranks")
    ranks, batch_size, steps = 4, 2, 3
    costs = np.array([2, 1, 9, 3, 1, 2, 4, 6, 12, 2, 5, 1, 3, 3, 8, 2, 1, 7, 2, 4, 3, 1, 5, 2.0])
    leaf = PlanLeaf("samples", len(costs), shuffle_over_epochs=None, slice_samples=batch_size)
    windows: dict[str, Literal["step"] | int | None] = {
        "without balancing": None,
        'window="step"': "step",
        "window=3": 3,
    }
    homes: dict[int, int] = {}
    for column, (title, window) in enumerate(windows.items()):
        order = None
        if window is not None:
            settings = Balance(cost="tokens", window=window)
            order = BalancedOrder(lambda rows: costs[rows.ordinal], settings, batch_size, ranks)
        plan = PlanRecipe("blend", (leaf,), 0, stripe=batch_size, balance=order)(ranks)
        left, width = 16 + 250 * column, 228 / 16
        drawing.text(left, 28, title, kind="title")
        for step in range(steps):
            top = 46 + 86 * step
            slowest = 0.0
            for rank in range(ranks):
                x = 0.0
                for sample in plan.rows(rank, step * batch_size, batch_size).ordinal.tolist():
                    home = homes.setdefault(sample, rank)
                    size = float(costs[sample])
                    y = top + 17 * rank
                    drawing.box(left + x * width, y, size * width - 1, 14, kind=f"c{home}")
                    x += size
                slowest = max(slowest, x)
            drawing.rule(left + slowest * width, top - 3, top + 17 * ranks, strong=True)
    drawing.text(
        16,
        drawing.height + 26,
        "Each row is a rank, each box a sample as wide as its cost, in the color of the rank that "
        "has it without balancing.",
        kind="small",
    )
    drawing.text(
        16, drawing.height + 14, "A step ends at the line: its slowest rank is done.", kind="small"
    )
    return drawing


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "lanes": lanes,
    "batch": batch,
    "slices": slices,
    "state": state,
    "resume": resume,
    "balance": balance,
    "layers": layers,
    "benchmark_cpu": cpu,
}


def draw(name: str) -> str:
    """Return the text of a diagram."""
    return DIAGRAMS[name]().svg()


if __name__ == "__main__":
    for each in DIAGRAMS:
        (FOLDER / f"{each}.svg").write_text(draw(each))
