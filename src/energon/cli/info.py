"""`energon info`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from energon.errors import ConfigError, EnergonError


@click.command("info")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--split-config", default="split.yaml", show_default=True, metavar="NAME")
@click.option("--dataset-config", default="dataset.yaml", show_default=True, metavar="NAME")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def command(path: Path, split_config: str, dataset_config: str, as_json: bool) -> None:
    """Show what the prepared dataset at PATH holds.

    \b
    Example:
      energon info ./coco
      energon info ./coco --json | jq .splits.train.samples
    """
    about = describe(path, split_config=split_config, dataset_config=dataset_config)
    if as_json:
        click.echo(json.dumps(about, indent=2))
        return
    click.echo(f"# {about['name']}")
    for title in ("path", "sample_type", "samples", "shards", "bytes", "energon_version"):
        click.echo(f"- {title.replace('_', ' ')}: {about[title]}")
    for name, split in about["splits"].items():
        share = 100 * split["samples"] / max(1, about["samples"])
        click.echo(
            f"- split {name}: {split['samples']} samples ({share:.1f} %), {split['shards']} shards"
        )


def describe(path: Path, *, split_config: str, dataset_config: str) -> dict[str, Any]:
    """Return what is known about a dataset, as plain data.

    Raises:
        DatasetNotFoundError: If it is not prepared.
    """
    from energon.formats.info import load_info
    from energon.formats.split import load_split

    info = load_info(path)
    split = load_split(path, split_config)
    sizes = {shard: _size(path / shard) for shard in info.shard_counts}
    splits = {}
    for name in split.split_parts:
        shards = split.shards(name)
        splits[name] = {
            "samples": sum(info.shard_counts.get(shard, 0) for shard in shards),
            "shards": len(shards),
        }
    return {
        "name": path.resolve().name,
        "path": str(path),
        "sample_type": _sample_type(path, dataset_config),
        "samples": info.num_samples,
        "shards": len(info.shard_counts),
        "bytes": sum(size for size in sizes.values() if size is not None),
        "missing_shards": [shard for shard, size in sizes.items() if size is None],
        "energon_version": info.energon_version,
        "excluded": list(split.exclude),
        "splits": splits,
    }


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _sample_type(path: Path, name: str) -> str | None:
    from energon.metadataset.dataset_config import load_dataset_config

    try:
        config = load_dataset_config(path, name)
    except ConfigError:
        return None
    except EnergonError as error:
        return f"unreadable: {error}"
    if config.crude:
        return "CrudeWebdataset"
    return config.sample_type[1] if config.sample_type else None
