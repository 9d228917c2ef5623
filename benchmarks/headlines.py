"""Write the sentences in which other pages repeat figures of the benchmarks.

    python benchmarks/headlines.py

All benchmarks do this after they have written their page. A test compares the pages with the
results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("ours", "megatron_energon")
WORKERS = (0, 2)
WAYS = ("in-line", "with 2 workers")
HEADLINE = ("encode", "text")
OTHER_PROGRAMS = {
    ("cooker", "text"): "small texts that a cooker passes on",
    ("cooker", "interleaved"): "interleaved samples that a cooker passes on",
    ("cooker", "image"): "undecoded images",
    ("cooker", "large"): "samples of 8 MB",
    ("packed", "text"): "packs of texts",
    ("typed", "captions"): "captions with decoded images",
}
"""What the programs beside the one with an encoder load."""
Row = tuple[str, str, int, str]
"""Program, data, workers, library."""


def speed() -> str:
    """Return what `benchmarks/run.py` and `benchmarks/prepare.py` have measured."""
    in_line, with_workers = map(_short, _faster(*HEADLINE))
    others = {
        each: f"{what}, {how}"
        for (program, data), what in OTHER_PROGRAMS.items()
        for each, how in zip(_faster(program, data), WAYS, strict=True)
    }
    least, most = min(others), max(others)
    shares = [
        _ours_of_peer("pss_mb", program, data, workers)
        for program, data in (HEADLINE, *OTHER_PROGRAMS)
        for workers in WORKERS
    ]
    return (
        f"* **Fast.** Small text samples load {in_line} times as fast as with Megatron-Energon "
        f"in-line, and {with_workers} times with 2 workers, through the same cooker and encoder. "
        f"The ratios of {len(OTHER_PROGRAMS)} other programs range from {_short(least)} "
        f"({others[least]}) to {_short(most)} ({others[most]}). All take {100 * min(shares):.0f} "
        f"to {100 * max(shares):.0f} % of the memory ([benchmarks](docs/benchmarks.md)). `energon "
        f"prepare` is {_span(_prepare())} times as fast "
        "([measured](docs/benchmarks.md#preparation))."
    )


def remote() -> str:
    """Return what `benchmarks/remote.py` has measured with large shards."""
    rows = {row[0]: row for row in _table("benchmarks.md", "Shards of 400 images:")}
    ways = ("in-line", "2 workers")
    share = min(float(rows[f"energon (this), {way}"][2].rstrip("%")) for way in ways)
    reached = "is as fast as" if share >= 95 else f"reaches {share:.0f} % of the speed of"
    ratios = [float(rows[f"Megatron-Energon, {way}"][3].rstrip("x")) for way in ways]
    return (
        "* **From disk or object store.** `s3://`, `gs://`, `az://`, `https://`, `hf://` and "
        "more. The order is known, so range requests are planned ahead. Over a slow link, energon "
        f"{reached} a plain range reader, and is {_span(ratios)} times as fast as "
        "Megatron-Energon ([measured](docs/benchmarks.md#training-from-an-object-store))."
    )


def streams() -> str:
    """Return what `benchmarks/stream.py` has measured."""
    ratios: dict[str, list[float]] = {}
    for case, _, _, _, ratio, _ in _table("benchmarks.md", "<!-- made by benchmarks/stream.py -->"):
        ratios.setdefault(case, []).append(float(ratio.strip("* x")))
    return (
        "Use it for streams, for existing pipelines, and for data that you cannot prepare. It "
        f"reads text {_span(ratios['text, raw'])} times as fast as webdataset, and images "
        f"{_span(ratios['image, raw'])} times, or {_span(ratios['image, decoded'])} times if they "
        "are decoded ([measured](benchmarks.md#streams-of-plain-tar-files)). With `energon "
        "prepare` and [task encoders](hooks.md), you also get an order that is the same on any "
        "topology, blends, and packing."
    )


def workers() -> str:
    """Return what `benchmarks/decode.py` has measured with a loader."""
    rows = _table("benchmarks_parts.md", "## Threads and processes")
    times = [_short(float(row[3].strip("* x"))) for row in rows if row[1] != "in-line"]
    return (
        f"Decoding to 224 by 224 pixels on two cores, two threads reach {times[0]} times the speed "
        f"of `num_workers=0`, and two processes {times[1]} times. With a millisecond of Python per "
        f"image, threads reach {times[2]} times, and processes {times[3]} times "
        "([measured](benchmarks_parts.md#threads-and-processes))."
    )


SENTENCES: dict[str, Sequence[tuple[str, Callable[[], str]]]] = {
    "README.md": (("* **Fast.** ", speed), ("* **From disk or object store.** ", remote)),
    "docs/operate.md": (("Decoding to 224 by 224 pixels", workers),),
    "docs/webdataset.md": (("Use it for streams, ", streams),),
}
"""By page: how the line of the sentences begins, and what writes it."""


def written(page: str) -> str:
    """Return a page with the figures that the benchmarks have measured last."""
    lines = (ROOT / page).read_text().split("\n")
    for beginning, write in SENTENCES[page]:
        (number,) = (n for n, line in enumerate(lines) if line.startswith(beginning))
        lines[number] = write()
    return "\n".join(lines)


def main() -> None:
    """Write all pages."""
    for page in SENTENCES:
        (ROOT / page).write_text(written(page))


def _faster(program: str, data: str) -> list[float]:
    """Return how many times as fast ours is, in-line and with workers."""
    return [_ours_of_peer("samples_per_second", program, data, workers) for workers in WORKERS]


def _ours_of_peer(figure: str, program: str, data: str, workers: int) -> float:
    """Return a figure of ours as a multiple of that of the peer."""
    ours, peer = (_measured(figure, program, data, workers, each) for each in LIBRARIES)
    return ours / peer


def _prepare() -> list[float]:
    _, section, _ = (
        (ROOT / "docs/benchmarks.md").read_text().split("<!-- made by benchmarks/prepare.py -->")
    )
    rows = [
        line.split(" | ") for line in section.splitlines() if line.startswith("| energon (this) ")
    ]
    return [float(row[1].partition("(")[2].rstrip("x)")) for row in rows]


def _measured(figure: str, *row: str | int) -> float:
    """Return the median of the rounds, which the page of benchmarks shows."""
    results = json.loads((ROOT / "docs/benchmarks.json").read_text())["programs"]
    (rounds,) = (
        each["rounds"]
        for each in results
        if (each["program"], each["data"], each["workers"], each["library"]) == row
    )
    return float(median(each[figure] for each in rounds))


def _table(page: str, before: str) -> list[list[str]]:
    """Return the rows below the heading of the first table that follows some words."""
    rest = (ROOT / "docs" / page).read_text().partition(before)[2]
    lines = rest[rest.index("\n| ") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _span(ratios: Sequence[float]) -> str:
    least, most = _short(min(ratios)), _short(max(ratios))
    return least if least == most else f"{least} to {most}"


def _short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 9.5 else f"{ratio:.1f}"


if __name__ == "__main__":
    main()
