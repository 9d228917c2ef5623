"""`energon info`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click


@click.command("info")
@click.argument("path")
@click.option("--split-config", default="split.yaml", show_default=True, metavar="NAME")
@click.option("--dataset-config", default="dataset.yaml", show_default=True, metavar="NAME")
@click.option(
    "--parts/--no-parts", default=True, help="Count parts and their sizes, from all indexes."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def command(path: str, split_config: str, dataset_config: str, parts: bool, as_json: bool) -> None:
    """Show what the dataset or metadataset at PATH holds.

    \b
    Example:
      energon info ./coco
      energon info ./coco --json | jq .splits.train.samples
      energon info s3://bucket/blend.yaml --no-parts
    """
    from energon.inspect.info import describe

    about = describe(path, split_config=split_config, dataset_config=dataset_config, parts=parts)
    if as_json:
        click.echo(json.dumps(about, indent=2))
    elif about["kind"] == "metadataset":
        _show_metadataset(about)
    else:
        _show_dataset(about)
        _show_media(about.get("media", {}))


def _show_dataset(about: Mapping[str, Any]) -> None:
    click.echo(f"# {about['name']}")
    if about["kind"] == "filesystem":
        click.echo(f"- path: {about['path']}")
        return
    for title in ("path", "sample_type", "samples", "shards", "bytes", "energon_version"):
        click.echo(f"- {title.replace('_', ' ')}: {about[title]}")
    if about["missing_shards"]:
        click.echo(f"- missing shards: {', '.join(about['missing_shards'])}")
    for name, split in about["splits"].items():
        share = 100 * split["samples"] / max(1, about["samples"])
        click.echo(
            f"- split {name}: {split['samples']} samples ({share:.1f} %), {split['shards']} shards"
        )
    for name, part in about.get("parts", {}).items():
        click.echo(
            f"- part {name}: {part['count']} with {part['bytes']} bytes, {part['mean']:.0f} on "
            f"average, from {part['min']} to {part['max']}"
        )


def _show_media(media: Mapping[str, Any]) -> None:
    for name, found in media.items():
        if name == "images":
            width, height = found["width"], found["height"]
            click.echo(
                f"- images: {found['count']} ({', '.join(found['formats'])}), {width['min']} to "
                f"{width['max']} by {height['min']} to {height['max']} pixels"
            )
        else:
            click.echo(
                f"- {name}: {found['count']} of {found['seconds']} s in all, from "
                f"{found['shortest']} to {found['longest']} s"
            )


def _show_metadataset(about: Mapping[str, Any]) -> None:
    click.echo(f"# {about['name']}")
    click.echo(f"- path: {about['path']}")
    for name, split in about["splits"].items():
        click.echo(f"- split {name}: {split['samples']} samples")
        for leaf in split["leaves"]:
            click.echo(f"  - {leaf['path']} ({leaf['split_part']}): {leaf['samples']} samples")
    for problem in about["problems"]:
        click.echo(f"- problem: {problem}")
