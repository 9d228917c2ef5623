"""`energon doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from energon.arguments import load_named
from energon.cli.main import echo_json, echo_lines
from energon.cli.options import allow_option, json_option
from energon.messages import counted

if TYPE_CHECKING:
    from energon.inspect.doctor import Diagnosis


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
@json_option
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
    from energon.inspect.doctor import diagnose

    diagnosis = diagnose(
        _maker(target, batch_size),
        seconds=seconds,
        workers=try_workers or None,
        kinds=kinds,
        needed_per_second=at_least,
    )
    rate = diagnosis.best.samples_per_second
    failed = "; ".join(symptom.what for symptom in diagnosis.symptoms if symptom.is_bad) or None
    if failed is None and at_least is not None and rate < at_least:
        failed = f"{rate:,.0f} samples/s at best, expected {at_least:,.0f}"
    if as_json:
        echo_json({**diagnosis.to_json(), "failed": failed})
    else:
        echo_lines(_report_lines(diagnosis))
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
        function = load_named("energon doctor", target)
        return lambda config: require_dataset(function(config), target)

    class ListBatches(DefaultTaskEncoder[Any, Any, Any, Any]):
        """Decodes samples, but does not stack them into batches, since not all can be stacked."""

        def batch(self, samples: list[Any]) -> Any:
            return samples

    return lambda config: get_train_dataset(
        target, worker_config=config, batch_size=batch_size, task_encoder=ListBatches()
    )


def _report_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield a diagnosis as lines of text."""
    cold, cached = diagnosis.read_per_second
    yield f"available CPUs: {diagnosis.cpus:g}"
    how = " without reading ahead" if diagnosis.is_remote else ""
    yield f"reading alone{how}: {cold:,.0f} samples/s, again {cached:,.0f} samples/s"
    yield (
        f"storage: a single sample takes {1e3 * diagnosis.read_latency_seconds:.2f} ms, many "
        f"together {diagnosis.read_bytes_per_second / 1e6:,.0f} MB/s"
    )
    if diagnosis.transfer_per_second is not None:
        yield f"transfer alone, one process: {diagnosis.transfer_per_second:,.0f} samples/s"
    for each in diagnosis.measured:
        mark = "  <- best" if each is diagnosis.best else ""
        yield (
            f"{each.settings}: {each.samples_per_second:,.0f} samples/s, first batch after "
            f"{each.seconds_to_first_batch:.1f} s{mark}"
        )
    shares = ", ".join(f"{name} {share:.0%}" for name, share in diagnosis.stages.items())
    yield f"in one process: {shares or 'too fast to measure'}"
    for name, rate in diagnosis.stage_per_second.items():
        yield f"{name} alone, one process: {rate:,.0f} samples/s"
    yield from diagnosis.advice
    for symptom in diagnosis.symptoms:
        yield f"{'problem' if symptom.is_bad else 'note'}: {symptom.what}"
    bad = sum(symptom.is_bad for symptom in diagnosis.symptoms)
    yield counted(bad, "problem")
