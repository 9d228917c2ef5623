"""`energon preview`."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from energon.cli.main import echo, echo_json, echo_lines, write_output
from energon.cli.options import (
    ADDRESS,
    allow_option,
    logging_to_terminal,
    option,
    options_object,
)
from energon.errors import ConfigError, SampleError
from energon.io.address import redact
from energon.io.epath import any_path
from energon.messages import counted
from energon.samples.display import (
    as_pixels,
    contact_sheet,
    describe_value,
    half_blocks,
    sources_in_words,
)

if TYPE_CHECKING:
    from energon.inspect.saved_run import SavedRun
    from energon.inspect.where import Where
    from energon.io.epath import AnyPath
    from energon.task_encoder.dataset import SavableDataset
    from energon.viewer.shown import ShownLeaf

DRAWN_COLUMNS = 48
DRAWN_ROWS = 48


@dataclass(frozen=True)
class PreviewOptions:
    """The options of the command, see its help."""

    split_part: str | None = option(
        "--split", "--split-part", metavar="NAME", help="Split to read.", show_default="train"
    )
    split_parts: str | None = option(
        hidden=True, help="Splits, separated by commas, whose samples --prompt shows."
    )
    prompt: bool = option(
        is_flag=True, help="Show the samples one by one, with a prompt after each."
    )
    dataset_config: str | None = option(
        metavar="NAME",
        help="File below .nv-meta that describes samples.",
        show_default="dataset.yaml",
    )
    count: int = option(
        type=click.IntRange(1), default=3, show_default=True, help="Number of samples."
    )
    start: int = option(
        type=click.IntRange(0), default=0, show_default=True, help="Number of the first sample."
    )
    keys: tuple[str, ...] = option(
        "--key",
        metavar="KEY",
        multiple=True,
        help="Show the samples with this key; may be repeated.",
    )
    where: str | None = option(
        metavar="CONDITIONS",
        help="Show samples that match, such as 'has:jpg json.width>=512', beginning at --start.",
    )
    states: tuple[AnyPath, ...] = option(
        "--state",
        metavar="FILE",
        multiple=True,
        type=ADDRESS,
        help="With --step: state or checkpoint of the run; may be repeated for files of ranks.",
    )
    step: int | None = option(
        type=click.IntRange(0), help="With --state: show the samples of this step of the run."
    )
    world_size: int | None = option(
        type=click.IntRange(1), help="With --state: number of ranks of the run."
    )
    html: str | None = option(
        metavar="FILE", help="Write the samples to a self-contained HTML page."
    )
    save: str | None = option(
        metavar="FOLDER", help="Write the page as index.html, and images and texts as files."
    )
    images: bool | None = option(
        "--images/--no-images",
        default=None,
        help="Draw images with colored characters.",
        show_default="on terminals",
    )
    as_json: bool = option("--json", is_flag=True, help="Print the result as JSON.")


@click.command("preview")
@click.argument("path", required=False)
@options_object(PreviewOptions)
@allow_option
@click.pass_context
def command(context: click.Context, path: str | None, options: PreviewOptions) -> None:
    """Show samples of the dataset or metadataset at PATH as hooks receive them.

    Crude samples are shown part by part, decoded. Images are drawn on terminals; those of more
    than 8 bits are scaled from their darkest to their brightest pixel.

    \b
    Example:
      energon preview ./my_dataset --split val --count 5
      energon preview ./my_dataset --where 'json.width>=1024 lacks:txt' --html wide.html
      energon preview --state checkpoints/data --step 41200
    """
    if sum([bool(options.keys), options.where is not None, options.step is not None]) > 1:
        raise click.UsageError("pass one of --key, --where and --step")
    if bool(options.states) != (options.step is not None):
        raise click.UsageError("--state and --step require each other")
    context.with_resource(logging_to_terminal())
    saved: SavedRun | None = None
    if options.states:
        from energon.inspect.saved_run import open_saved_run
        from energon.loader.state_files import read_states

        saved = open_saved_run(
            read_states(options.states),
            path=path,
            split_part=options.split_part,
            world_size=options.world_size,
        )
        read_from = saved.read_from
        path = os.fspath(read_from.path)
        config = options.dataset_config or read_from.dataset_config
        options = replace(options, split_part=read_from.split_part, dataset_config=config)
    if path is None:
        raise click.UsageError("pass the PATH of a dataset or metadataset, or the --state of a run")
    if options.prompt or options.split_parts is not None:
        for name in (options.split_parts or options.split_part or "train").split(","):
            if not _go_through(_open(path, name, options.dataset_config)):
                return
        return
    samples = _samples(path, options, saved)
    if samples is None:
        return
    if options.html is not None:
        _write_html(options.html, redact(path), samples)
    if options.save is not None:
        _save(options.save, redact(path), samples)
    if options.as_json:
        echo_json([_plain_sample(sample) for sample in samples])
    elif options.html is None and options.save is None:
        _draw(samples, options.images)


def _samples(path: str, options: PreviewOptions, saved: SavedRun | None) -> list[Any] | None:
    """Return the samples that the options choose; None after saying that there are none."""
    split_part = options.split_part or "train"
    dataset = _open(path, split_part, options.dataset_config)
    name = f"split {split_part!r} of {redact(path)}"
    if not (options.keys or options.where is not None or saved is not None):
        rows = dataset.plan(1).rows(0, options.start, options.count)
        if not len(rows.leaf):
            total = counted(len(dataset), "sample")
            raise ConfigError(f"--start {options.start}: {name} has only {total}, numbered from 0")
        return _restored(dataset, zip(*(column.tolist() for column in rows), strict=True))
    keys = list(_chosen(path, split_part, options, saved))
    if not keys and not options.as_json:
        echo(f"no sample of {name} matches")
        return None
    return _restored(dataset, keys)


def _restored(dataset: SavableDataset, keys: Iterable[tuple[int, int, int]]) -> list[Any]:
    """Return the samples with keys (dataset, epoch and number), without those that are damaged."""
    samples = []
    for key in keys:
        try:
            samples.append(dataset.restore_sample(key))
        except SampleError as error:
            echo(f"skipped a sample: {error}", err=True)
    return samples


def _draw(samples: Iterable[Any], images: bool | None) -> None:
    """Show samples on the terminal; `images`: with images, or None for terminals that can."""
    if images is None:
        images = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    for sample in samples:
        echo_lines(_sample_lines(sample))
        for value in _sample_fields(sample).values() if images else ():
            pixels = as_pixels(value)
            if pixels is not None:
                columns = min(DRAWN_COLUMNS, shutil.get_terminal_size().columns)
                write_output("\n".join(half_blocks(pixels, columns, DRAWN_ROWS)), color=True)
        echo_lines([""])


def _open(path: str, split_part: str, dataset_config: str | None) -> SavableDataset:
    """Return the samples of a split in order, one by one, decoded to be looked at."""
    from energon.decode.images import IMAGE_EXTENSIONS
    from energon.decode.sample_decoder import SampleDecoder
    from energon.task_encoder.encoder import DefaultTaskEncoder, TaskEncoder
    from energon.task_encoder.getters import get_val_dataset
    from energon.viewer.images import visible_pixels
    from energon.worker import WorkerConfig

    encoder: TaskEncoder[Any, Any, Any, Any] = DefaultTaskEncoder()
    encoder.decoder = SampleDecoder(
        image_decode="rgb8", decoders=dict.fromkeys(IMAGE_EXTENSIONS, visible_pixels)
    )
    return get_val_dataset(
        path,
        split_part=split_part,
        dataset_config=dataset_config,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        task_encoder=encoder,
    )


def _go_through(samples: Iterable[Any]) -> bool:
    """Show samples until the user stops; return whether all were shown."""
    for number, sample in enumerate(samples):
        echo(f"Sample {number}")
        for name, value in _sample_fields(sample).items():
            echo(f" - {name} ({type(value)}): {describe_value(value)}")
        try:
            if not click.confirm("Continue?", default=True):
                return False
        except click.Abort:  # also if there is no terminal to answer at
            return False
    return True


def _chosen(
    path: str, split_part: str, options: PreviewOptions, saved: SavedRun | None
) -> Iterator[tuple[int, int, int]]:
    """Yield dataset, epoch and number of the samples that a step, conditions or keys choose."""
    from energon.inspect.where import Where
    from energon.viewer.run import show_saved_run
    from energon.viewer.shown import Shown

    splits = Shown(path).splits
    number = [split.name for split in splits].index(split_part)
    leaves = splits[number].leaves
    if saved is not None:
        ((_, seen),) = show_saved_run(number, saved).samples(options.step or 0, 1)
        yield from ((leaf, 0, each.ordinal) for each, leaf in seen)
    elif options.where is not None:
        yield from islice(_matching(leaves, Where(options.where), options.start), options.count)
    for key in options.keys:
        ordinals = [(n, o) for n, leaf in enumerate(leaves) for o in leaf.source.find(key)]
        if not ordinals:
            raise ConfigError(
                f"no dataset has a sample {key!r}; in a shard, keys are the paths of files up "
                "to the first dot of their names"
            )
        yield from ((leaf, 0, ordinal) for leaf, ordinal in ordinals)


def _matching(
    leaves: Sequence[ShownLeaf], matches: Where, start: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the samples that fulfil conditions, from a number on in each dataset."""
    for number, leaf in enumerate(leaves):
        for ordinal in range(start, len(leaf)):
            sample = leaf.sample(ordinal)
            if matches({part.name: part.file for part in sample.parts}, sample.where.key):
                yield number, 0, ordinal


def _save(folder: str, title: str, samples: Sequence[Any]) -> None:
    """Write a page and, as files beside it, the images and texts of samples."""
    from PIL import Image

    target = any_path(folder)
    if isinstance(target, Path):
        target.mkdir(parents=True, exist_ok=True)
    for number, sample in enumerate(samples):
        for name, value in _sample_fields(sample).items():
            # Names of parts may be anything; what files are called is letters.
            plain = f"{number:04d}_{re.sub('[^A-Za-z0-9]+', '_', name)[:60]}"
            pixels = as_pixels(value)
            if pixels is not None:
                buffer = io.BytesIO()
                Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG")
                (target / f"{plain}.png").write_bytes(buffer.getvalue())
            elif isinstance(value, str) and not name.startswith("__"):
                (target / f"{plain}.txt").write_bytes(value.encode("utf-8", "replace"))
    _write_html(str(target / "index.html"), title, samples)


def _write_html(file: str, title: str, samples: Sequence[Any]) -> None:
    heading = f"{counted(len(samples), 'sample')} of {title}"
    page = contact_sheet(heading, map(_sample_fields, samples))
    any_path(file).write_bytes(page.encode("utf-8", "replace"))


def _sample_fields(sample: Any) -> dict[str, Any]:
    """Return the fields of a sample of any type by name, with those about its origin."""
    if isinstance(sample, dict):
        return sample
    return {each.name: getattr(sample, each.name) for each in fields(sample)}


def _sample_lines(sample: Any) -> Iterator[str]:
    """Yield a sample as lines of text: its key, its origin, and each field."""
    values = _sample_fields(sample)
    yield f"{type(sample).__name__} {values['__key__']!r}"
    if values.get("__subflavors__"):
        yield f"  subflavors: {describe_value(values['__subflavors__'])}"
    if values.get("__sources__"):
        yield f"  sources: {', '.join(sources_in_words(values['__sources__']))}"
    for name, value in values.items():
        if not name.startswith("__"):
            yield f"  {name}: {describe_value(value)}"


def _plain_sample(sample: Any) -> dict[str, Any]:
    """Return a sample as plain data, for JSON: of images, arrays and bytes, what they are."""
    values = _sample_fields(sample)
    plain = {name: _plain(value) for name, value in values.items() if not name.startswith("__")}
    return {"type": type(sample).__name__, "key": values["__key__"], "fields": plain}


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
    described: dict[str, Any] = {"type": type(value).__name__}
    if hasattr(value, "shape"):
        return {**described, "shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, bytes | bytearray | memoryview):
        return {**described, "bytes": len(value)}
    return {**described, "text": describe_value(value)}
