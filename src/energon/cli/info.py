"""`energon info`."""

from __future__ import annotations

import sys

import click

from energon.cli.main import RefusedCommandError, echo_json, echo_lines
from energon.cli.options import allow_option, json_option, logging_to_terminal


@click.command("info")
@click.argument("path")
@click.option(
    "--split-config",
    default="split.yaml",
    show_default=True,
    metavar="NAME",
    help="File below .nv-meta that lists the splits.",
)
@click.option(
    "--dataset-config",
    default="dataset.yaml",
    show_default=True,
    metavar="NAME",
    help="File below .nv-meta that describes samples.",
)
@click.option(
    "--parts/--no-parts", default=True, help="Count parts and their sizes, from all indexes."
)
@json_option
@allow_option
def command(path: str, split_config: str, dataset_config: str, parts: bool, as_json: bool) -> None:
    """Show what the dataset or metadataset at PATH contains.

    Exits with 2 if a dataset cannot be opened or its description is invalid, after describing
    the rest.

    \b
    Example:
      energon info ./coco
      energon info ./coco --json | jq .splits.train.samples
      energon info s3://bucket/blend.yaml --no-parts
    """
    from energon.inspect.info import describe, has_problems, info_lines

    with logging_to_terminal():
        described = describe(
            path, split_config=split_config, dataset_config=dataset_config, parts=parts
        )
    if as_json:
        echo_json(described)
    else:
        echo_lines(info_lines(described))
    if has_problems(described):
        sys.exit(RefusedCommandError.exit_code)
