"""`energon doctor`."""

from __future__ import annotations

import os
from typing import Any

import click

from energon.cli.command_group import echo_json, echo_lines
from energon.cli.options import allow_option


@click.command("doctor")
@click.argument("target", metavar="PATH|MODULE:FUNCTION")
@click.option("--batch-size", default=32, type=click.IntRange(min=1), help="Batch size for PATH.")
@click.option(
    "--seconds", default=3.0, type=click.FloatRange(min=0.05), help="Length of each measurement."
)
@click.option(
    "--try-workers",
    multiple=True,
    type=click.IntRange(min=0),
    metavar="NUMBER",
    help="Number of workers to measure; may be repeated.",
    show_default="1, 2, and the number of CPUs",
)
@click.option(
    "--worker-kind",
    "kinds",
    multiple=True,
    type=click.Choice(["process", "thread"]),
    default=["process", "thread"],
    help="Kind of workers to measure; may be repeated.",
)
@click.option(
    "--at-least",
    type=float,
    metavar="NUMBER",
    help="Exit with 1 if no settings reach this many samples per second.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@allow_option
def command(
    target: str,
    batch_size: int,
    seconds: float,
    try_workers: tuple[int, ...],
    kinds: tuple[Any, ...],
    at_least: float | None,
    as_json: bool,
) -> None:
    """Measure what limits loading on this machine, and suggest settings to change.

    Pass the PATH of a dataset or metadataset, to decode its samples, or MODULE:FUNCTION, which
    takes a WorkerConfig and returns the result of get_train_dataset with your task encoder.
    Exits with 1 if the machine would break runs, or if --at-least is not reached.

    \b
    Example:
      energon doctor ./coco
      energon doctor my_training:make_dataset --try-workers 4 --try-workers 8
      energon doctor ./coco --at-least 500 --json
    """
    from energon.inspect.doctor import check_speed, diagnose, report_lines

    diagnosis = diagnose(
        _maker(target, batch_size),
        seconds=seconds,
        workers=try_workers or None,
        kinds=kinds,
        needed_per_second=at_least,
    )
    failed = check_speed(diagnosis, at_least)
    if as_json:
        echo_json({**diagnosis.to_json(), "failed": failed})
    else:
        echo_lines(report_lines(diagnosis))
        if failed:
            echo_lines([f"not good enough: {failed}"])
    if failed:
        raise SystemExit(1)


def _maker(target: str, batch_size: int) -> Any:
    from energon.inspect.doctor import require_dataset
    from energon.task_encoder.encoder import DefaultTaskEncoder
    from energon.task_encoder.getters import get_train_dataset

    module, _, name = target.partition(":")
    if name.isidentifier() and not os.path.exists(target) and "/" not in module:
        from energon.arguments import load_named

        function = load_named("energon doctor", target)
        return lambda config: require_dataset(function(config), target)

    class ListBatches(DefaultTaskEncoder[Any, Any, Any, Any]):
        """Decodes samples, but does not stack them into batches, since not all can be stacked."""

        def batch(self, samples: list[Any]) -> Any:
            return samples

    return lambda config: get_train_dataset(
        target, worker_config=config, batch_size=batch_size, task_encoder=ListBatches()
    )
