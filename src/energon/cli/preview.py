"""`energon preview`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from math import isfinite
from typing import Any

import click

from energon.cli.command_group import echo_json, echo_lines
from energon.cli.options import allow_option
from energon.errors import ConfigError
from energon.io.address import redact
from energon.messages import counted


@click.command("preview")
@click.argument("path")
@click.option(
    *("--split", "--split-part", "split_part"),
    default="train",
    metavar="NAME",
    help="Which split.",
)
@click.option("--dataset-config", metavar="FILE", help="File below .nv-meta, not dataset.yaml.")
@click.option("--count", type=click.IntRange(1), default=3, show_default=True, help="Samples.")
@click.option("--start", type=click.IntRange(0), default=0, show_default=True, help="The first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@partial(allow_option, expose_value=True)
def command(
    path: str,
    split_part: str,
    dataset_config: str | None,
    count: int,
    start: int,
    as_json: bool,
    allow: tuple[str, ...],
) -> None:
    """Show samples of the dataset or metadataset at PATH, as hooks get them.

    Those of crude datasets are shown part by part, decoded.

    \b
    Example:
      energon preview ./my_dataset --split val --count 5
    """
    from energon.decode.sample_decoder import SampleDecoder
    from energon.task_encoder.encoder import DefaultTaskEncoder, TaskEncoder
    from energon.task_encoder.getters import get_val_dataset
    from energon.worker import WorkerConfig

    encoder: TaskEncoder[Any, Any, Any, Any] = DefaultTaskEncoder()
    encoder.decoder = SampleDecoder(image_decode="rgb8", allow=allow)
    dataset = get_val_dataset(
        path,
        split_part=split_part,
        dataset_config=dataset_config,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        task_encoder=encoder,
        allow=allow,
    )
    samples = list(islice(dataset, start, start + count))
    if not samples:
        total = len(dataset)
        raise ConfigError(
            f"--start {start}: split {split_part!r} of {redact(path)} has only "
            f"{counted(total, 'sample')}, numbered from 0"
        )
    if as_json:
        echo_json([_plain_sample(sample) for sample in samples])
        return
    for sample in samples:
        echo_lines((*_lines(sample), ""))


def _lines(sample: Any) -> Iterator[str]:
    fields = sample if isinstance(sample, dict) else _fields(sample)
    yield f"{type(sample).__name__} {fields['__key__']!r}"
    for name in ("__subflavors__", "__sources__"):
        if fields.get(name):
            yield f"  {name.strip('_')}: {_short(fields[name])}"
    for name, value in fields.items():
        if not name.startswith("__"):
            yield f"  {name}: {_short(value)}"


def _plain_sample(sample: Any) -> dict[str, Any]:
    fields = sample if isinstance(sample, dict) else _fields(sample)
    values = {name: _plain(value) for name, value in fields.items() if not name.startswith("__")}
    return {"type": type(sample).__name__, "key": fields["__key__"], "fields": values}


def _plain(value: Any) -> Any:
    """Return text, numbers and what is made of them as it is, and of all else what it is."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)  # JSON has no NaN
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    about: dict[str, Any] = {"type": type(value).__name__}
    if hasattr(value, "shape"):
        return {**about, "shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, bytes | bytearray | memoryview):
        return {**about, "bytes": len(value)}
    return {**about, "text": _short(value)}


def _fields(sample: Any) -> dict[str, Any]:
    from dataclasses import fields

    return {each.name: getattr(sample, each.name) for each in fields(sample)}


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} {tuple(shape)} {value.dtype}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes, {value[:16]!r}…" if len(value) > 16 else repr(value)
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
