"""`energon preview`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from energon.cli.command_group import echo_json, echo_lines
from energon.cli.options import ADDRESS, allow_option
from energon.errors import ConfigError
from energon.io.address import redact
from energon.io.epath import any_path
from energon.messages import counted
from energon.samples.notebook import as_pixels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from energon.io.epath import AnyPath

DRAWN_COLUMNS = 48


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
@click.option("--key", "keys", metavar="KEY", multiple=True, help="The samples with this key.")
@click.option(
    "--where",
    metavar="CONDITIONS",
    help="Samples that fulfil conditions, like 'has:jpg json.width>=512', from --start on.",
)
@click.option(
    "--state",
    "states",
    metavar="FILE",
    multiple=True,
    type=ADDRESS,
    help="With --step: a state or checkpoint of the run; may be repeated for files of ranks.",
)
@click.option("--step", type=click.IntRange(0), help="The samples of a step of the run of --state.")
@click.option("--world-size", type=click.IntRange(1), help="With --state: how many ranks it had.")
@click.option("--html", metavar="FILE", help="Write the samples as one page of HTML.")
@click.option(
    "--images/--no-images",
    default=None,
    help="Draw images with blocks of color.",
    show_default="on terminals",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@partial(allow_option, expose_value=True)
def command(
    path: str,
    split_part: str,
    dataset_config: str | None,
    count: int,
    start: int,
    keys: tuple[str, ...],
    where: str | None,
    states: tuple[AnyPath, ...],
    step: int | None,
    world_size: int | None,
    html: str | None,
    images: bool | None,
    as_json: bool,
    allow: tuple[str, ...],
) -> None:
    """Show samples of the dataset or metadataset at PATH, as hooks get them.

    Those of crude datasets are shown part by part, decoded. On terminals, images are drawn.

    \b
    Example:
      energon preview ./my_dataset --split val --count 5
      energon preview ./my_dataset --where 'json.width>=1024 lacks:txt' --html wide.html
      energon preview blend.yaml --state checkpoints/data --world-size 8 --step 41200
    """
    from energon.decode.sample_decoder import SampleDecoder
    from energon.task_encoder.encoder import DefaultTaskEncoder, TaskEncoder
    from energon.task_encoder.getters import get_val_dataset
    from energon.worker import WorkerConfig

    if sum([bool(keys), where is not None, step is not None]) > 1:
        raise click.UsageError("give one of --key, --where and --step")
    if bool(states) != (step is not None):
        raise click.UsageError("--state and --step go together")
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
    if keys or where is not None or step is not None:
        shown = _Chosen(path, split_part, allow)
        if keys:
            places = shown.with_keys(keys)
        elif where is not None:
            places = list(islice(shown.where(where, start), count))
        else:
            places = shown.of_step(states, step or 0, world_size)
        samples = [dataset.restore_sample((leaf, 0, ordinal)) for leaf, ordinal in places]
    else:
        samples = list(islice(dataset, start, start + count))
        if not samples:
            total = len(dataset)
            raise ConfigError(
                f"--start {start}: split {split_part!r} of {redact(path)} has only "
                f"{counted(total, 'sample')}, numbered from 0"
            )
    if html is not None:
        _write_html(html, redact(path), samples)
    if as_json:
        echo_json([_plain_sample(sample) for sample in samples])
    elif html is None:
        drawn = sys.stdout.isatty() if images is None else images
        for sample in samples:
            _show(sample, drawn)


class _Chosen:
    """The samples of a split by what is known about them, as numbers of datasets and samples."""

    def __init__(self, path: str, split_part: str, allow: tuple[str, ...]) -> None:
        from energon.viewer.shown import Shown

        self.shown = Shown(path, allow=allow)
        names = [split.name for split in self.shown.splits]
        self.split = names.index(split_part)
        self.leaves = self.shown.splits[self.split].leaves

    def with_keys(self, keys: Sequence[str]) -> list[tuple[int, int]]:
        """Return the samples that have these keys."""
        found = []
        for key in keys:
            places = [
                (n, ordinal)
                for n, leaf in enumerate(self.leaves)
                for ordinal in leaf.source.find(key)
            ]
            if not places:
                raise ConfigError(
                    f"no dataset has a sample {key!r}; keys are the paths of files in a shard up "
                    "to the first dot of their names"
                )
            found += places
        return found

    def where(self, conditions: str, start: int) -> Iterator[tuple[int, int]]:
        """Yield the samples that fulfil conditions, from a number on in each dataset."""
        from energon.inspect.where import Where

        matches = Where(conditions)
        for number, leaf in enumerate(self.leaves):
            for ordinal in range(start, len(leaf)):
                parts = leaf.sample(ordinal).parts
                if matches({part.name: part.file for part in parts}):
                    yield number, ordinal

    def of_step(
        self, states: Sequence[AnyPath], step: int, world_size: int | None
    ) -> list[tuple[int, int]]:
        """Return the samples of a step of a saved run."""
        from energon.inspect.planned_run import open_saved_run
        from energon.loader.state_files import read_states
        from energon.viewer.run import show_saved_run

        path, split_part = self.shown.path, self.shown.splits[self.split].name
        saved = open_saved_run(
            path, read_states(states), world_size=world_size, split_part=split_part
        )
        run = show_saved_run(path, split_part, self.split, saved)
        ((_, seen),) = run.samples(step, 1)
        return [(leaf, each.ordinal) for each, leaf in seen]


def _show(sample: Any, drawn: bool) -> None:
    fields = _all_fields(sample)
    echo_lines(_lines(sample))
    for value in fields.values() if drawn else ():
        pixels = as_pixels(value)
        if pixels is not None:
            click.echo("\n".join(half_blocks(pixels)), color=True)
    echo_lines([""])


def half_blocks(pixels: NDArray[np.uint8], columns: int = DRAWN_COLUMNS) -> Iterator[str]:
    """Yield lines that draw an image: each character is two pixels, one above the other."""
    from PIL import Image

    height, width = pixels.shape[:2]
    columns = min(columns, width)
    rows = max(1, round(height / width * columns / 2)) * 2
    small = Image.fromarray(np.ascontiguousarray(pixels)).resize((columns, rows))
    lines = np.asarray(small).reshape(rows // 2, 2, columns, 3)
    for upper, lower in lines.tolist():
        cells = (
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m▀"
            for a, b in zip(upper, lower, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"


def _write_html(file: str, title: str, samples: Sequence[Any]) -> None:
    from energon.inspect.contact_sheet import contact_sheet

    page = contact_sheet(
        f"{counted(len(samples), 'sample')} of {title}",
        [
            (
                str(_all_fields(sample)["__key__"]),
                {
                    name: value if as_pixels(value) is not None else _text(value)
                    for name, value in _all_fields(sample).items()
                    if not name.startswith("__") or name == "__sources__"
                },
            )
            for sample in samples
        ],
    )
    any_path(file).write_bytes(page.encode("utf-8", "replace"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _short(value)


def _all_fields(sample: Any) -> dict[str, Any]:
    return sample if isinstance(sample, dict) else _fields(sample)


def _lines(sample: Any) -> Iterator[str]:
    fields = _all_fields(sample)
    yield f"{type(sample).__name__} {fields['__key__']!r}"
    for name in ("__subflavors__", "__sources__"):
        if fields.get(name):
            yield f"  {name.strip('_')}: {_short(fields[name])}"
    for name, value in fields.items():
        if not name.startswith("__"):
            yield f"  {name}: {_short(value)}"


def _plain_sample(sample: Any) -> dict[str, Any]:
    fields = _all_fields(sample)
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
