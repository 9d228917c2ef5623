"""`energon analyze-debug`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from energon.cli.main import echo, echo_json
from energon.cli.options import option, options_object
from energon.errors import ConfigError, FormatError
from energon.formats.text import parse_json
from energon.messages import counted


@dataclass(frozen=True)
class AnalyzeOptions:
    """The options of the command, see its help."""

    include_modality: str = option(
        default="train", show_default=True, help="train, val, or train,val."
    )
    most: int = option(
        type=click.IntRange(1), default=10, show_default=True, help="Number of keys to show."
    )
    skip: int = option(type=click.IntRange(0), default=0, help="Batches of each rank to skip.")
    heatmap_path: Path | None = option(
        type=click.Path(path_type=Path),
        help="Write a .png plot of when each sample was seen: steps by samples.",
    )
    heatmap_steps: int = option(
        type=click.IntRange(1), default=1000, help="Maximum number of columns."
    )
    heatmap_samples: int = option(
        type=click.IntRange(1), default=1000, help="Maximum number of rows."
    )
    heatmap_gain: float = option(
        type=click.FloatRange(0), default=10, help="Brightness of a sample, in %."
    )
    force_loading_order: bool = option(is_flag=True, hidden=True)
    no_colors: bool = option(is_flag=True, hidden=True)
    as_json: bool = option("--json", is_flag=True, help="Print the result as JSON.")


@click.command("analyze-debug")
@click.argument("logs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@options_object(AnalyzeOptions)
def command(logs: tuple[Path, ...], options: AnalyzeOptions) -> None:
    """Count how often each sample occurs in LOGS that LogSampleDataset wrote.

    LOGS are files, or folders of .jsonl files.

    \b
    Example:
      energon analyze-debug logs/*.jsonl
      energon analyze-debug logs --heatmap-path seen.png
    """
    modes = set(options.include_modality.split(","))
    files = [
        file for log in logs for file in (sorted(log.glob("*.jsonl")) if log.is_dir() else [log])
    ]
    if not files:
        raise ConfigError(f"{', '.join(map(str, logs))}: there are no .jsonl files")
    if not options.as_json:
        echo(f"Analyzing {counted(len(files), 'log')}")
    records = (line for log in files for line in _read(log) if line.get("m") in modes)
    lines = [line for line in records if (line.get("idx") or 0) >= options.skip]
    if not lines:
        raise click.ClickException(
            f"no line of the modes {', '.join(sorted(modes))} in {counted(len(files), 'file')}"
        )
    keys = Counter(key for line in lines for key in line.get("keys") or ())
    ranks = Counter(line["r"] for line in lines)
    if options.heatmap_path is not None:
        _draw(lines, options.heatmap_path, options)
    if options.as_json:
        result = {
            "batches": len(lines),
            "samples": keys.total(),
            "different": len(keys),
            "ranks": {str(rank): number for rank, number in sorted(ranks.items())},
            "seen": {str(number): seen for number, seen in sorted(Counter(keys.values()).items())},
            "most": [
                {"key": key, "times": number} for key, number in keys.most_common(options.most)
            ],
        }
        echo_json(result)
        return
    _show(lines, keys, ranks, options.most)


def _show(
    lines: Sequence[Mapping[str, Any]], keys: Counter[str], ranks: Counter[int], most: int
) -> None:
    steps = -(-len(lines) // len(ranks))
    unique = counted(len(keys), "unique sample key", grouped=True)
    echo(f"Found {unique}, {counted(steps, 'step', grouped=True)}")
    batches = counted(len(lines), "batch", grouped=True)
    samples = counted(keys.total(), "sample", grouped=True)
    echo(f"{batches}, {samples}, {counted(len(keys), 'different one', grouped=True)}")
    for rank, number in sorted(ranks.items()):
        echo(f"rank {rank}: {counted(number, 'batch', grouped=True)}")
    for number, seen in sorted(Counter(keys.values()).items()):
        often = counted(number, "time")
        echo(f"seen {often}: {counted(seen, 'sample', grouped=True)}")
    for key, number in keys.most_common(most):
        echo(f"{number:>6}  {key}")


def _draw(lines: Sequence[Mapping[str, Any]], path: Path, options: AnalyzeOptions) -> None:
    """Draw how often samples were seen over time, as brightness."""
    import numpy as np
    from PIL import Image

    keys = sorted({key for line in lines for key in line.get("keys") or ()})
    numbers = {key: number for number, key in enumerate(keys)}
    # A lane counts its own batches; those of all lanes are the columns.
    ordered = sorted(lines, key=lambda line: (line.get("idx") or 0, line.get("w") or 0))
    height = min(options.heatmap_samples, len(numbers))
    width = min(options.heatmap_steps, len(ordered))
    seen = np.zeros((height, width))
    for column, line in enumerate(ordered):
        for key in line.get("keys") or ():
            seen[numbers[key] * height // len(numbers), column * width // len(ordered)] += 1
    pixels = np.minimum(255, seen * options.heatmap_gain * 2.55).astype(np.uint8)
    Image.fromarray(pixels).save(path, "PNG")


def _read(log: Path) -> Iterator[dict[str, Any]]:
    with log.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                content = parse_json(line, origin="JSON")
            except FormatError as error:
                raise click.ClickException(f"{log}:{number}: not JSON: {error}") from error
            if isinstance(content, dict) and content.get("t") == "yield_batch":
                yield content
