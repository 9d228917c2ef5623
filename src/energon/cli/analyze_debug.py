"""`energon analyze-debug`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from energon.cli.command_group import echo, echo_json
from energon.errors import FormatError
from energon.formats.json_text import parse_json
from energon.messages import counted


@click.command("analyze-debug")
@click.argument("logs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--include-modality", default="train", show_default=True, help="train, val or both.")
@click.option(
    "--most", type=click.IntRange(1), default=10, show_default=True, help="Number of keys to show."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(logs: tuple[Path, ...], include_modality: str, most: int, as_json: bool) -> None:
    """Count the samples in LOGS that LogSampleDataset wrote: how often each was seen.

    LOGS are files, or folders of .jsonl files.

    \b
    Example:
      energon analyze-debug logs/*.jsonl
    """
    modes = set(include_modality.split(","))
    files = [
        file for log in logs for file in (sorted(log.glob("*.jsonl")) if log.is_dir() else [log])
    ]
    lines = [line for log in files for line in _read(log) if line.get("m") in modes]
    if not lines:
        raise click.ClickException(
            f"no line of the modes {', '.join(sorted(modes))} in {counted(len(files), 'file')}"
        )
    keys = Counter(key for line in lines for key in line.get("keys") or ())
    ranks = Counter(line["r"] for line in lines)
    times = Counter(keys.values())
    if as_json:
        about = {
            "batches": len(lines),
            "samples": keys.total(),
            "different": len(keys),
            "ranks": {str(rank): number for rank, number in sorted(ranks.items())},
            "seen": {str(number): seen for number, seen in sorted(times.items())},
            "most": [{"key": key, "times": number} for key, number in keys.most_common(most)],
        }
        echo_json(about)
        return
    batches = counted(len(lines), "batch", grouped=True)
    samples = counted(keys.total(), "sample", grouped=True)
    echo(f"{batches}, {samples}, {counted(len(keys), 'different one', grouped=True)}")
    for rank, number in sorted(ranks.items()):
        echo(f"rank {rank}: {counted(number, 'batch', grouped=True)}")
    for number, seen in sorted(times.items()):
        often = counted(number, "time")
        echo(f"seen {often}: {counted(seen, 'sample', grouped=True)}")
    for key, number in keys.most_common(most):
        echo(f"{number:>6}  {key}")


def _read(log: Path) -> Iterator[dict[str, Any]]:
    with log.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                content = parse_json(line, origin="JSON")
            except FormatError as error:
                raise click.ClickException(f"{log}:{number}: no line of JSON: {error}") from error
            if isinstance(content, dict) and content.get("t") == "yield_batch":
                yield content
