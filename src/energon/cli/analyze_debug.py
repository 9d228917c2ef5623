"""`energon analyze-debug`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click


@click.command("analyze-debug")
@click.argument(
    "logs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--include-modality", default="train", show_default=True, help="train, val or both.")
@click.option("--most", type=click.IntRange(1), default=10, show_default=True, help="Keys shown.")
def command(logs: tuple[Path, ...], include_modality: str, most: int) -> None:
    """Count the samples in LOGS that LogSampleDataset wrote: how often which one came.

    \b
    Example:
      energon analyze-debug logs/*.jsonl
    """
    modes = set(include_modality.split(","))
    lines = [line for log in logs for line in _read(log) if line.get("m") in modes]
    if not lines:
        raise click.ClickException(
            f"no line of the modes {', '.join(sorted(modes))} in {len(logs)} files"
        )
    keys = Counter(key for line in lines for key in line.get("keys") or ())
    ranks = Counter(line["r"] for line in lines)
    click.echo(f"{len(lines):,} batches, {keys.total():,} samples, {len(keys):,} different ones")
    for rank, batches in sorted(ranks.items()):
        click.echo(f"rank {rank}: {batches:,} batches")
    times = Counter(keys.values())
    for number, samples in sorted(times.items()):
        click.echo(f"seen {number} times: {samples:,} samples")
    for key, number in keys.most_common(most):
        click.echo(f"{number:>6}  {key}")


def _read(log: Path) -> Iterator[dict[str, Any]]:
    with log.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                content = json.loads(line)
            except ValueError as error:
                raise click.ClickException(f"{log}:{number}: no line of JSON: {error}") from error
            if isinstance(content, dict) and content.get("t") == "yield_batch":
                yield content
