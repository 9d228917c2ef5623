"""What `energon prepare` is to do: from its options, from answers, or by default."""

from __future__ import annotations

import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from energon.cli.options import option, parse_field_map
from energon.errors import ConfigError
from energon.io.epath import AnyPath

if TYPE_CHECKING:
    from energon.prepare.assistant.dialog import Choices
    from energon.prepare.description import Description
    from energon.prepare.splits import SplitRequest


@dataclass(frozen=True)
class PrepareOptions:
    """The options of the command, see its help."""

    ratio: str | None = option(
        "--split-ratio", metavar="RATIO", help="Splits by ratio: 8,1,1 or train:9,holdout:1."
    )
    parts: Sequence[str] = option(
        "--split-parts",
        metavar="NAME:REGEX",
        multiple=True,
        help="Shards of a split, by a regular expression for their paths. May be repeated.",
    )
    by_folder: bool = option(
        "--split-by-folder", is_flag=True, help="Make each folder of shards a split."
    )
    unit: str = option(
        "--split-unit",
        type=click.Choice(["auto", "shard", "sample"]),
        default="auto",
        show_default=True,
        help="What to divide by ratio. auto: shards, or samples if there are too few shards.",
    )
    shuffle: bool = option(
        "--shuffle-tars", is_flag=True, help="Shuffle shards before dividing them by ratio."
    )
    exclude_from: Sequence[str] = option(
        metavar="PLACE",
        multiple=True,
        help="Exclude what a quarantine file lists (lines of SHARD or SHARD/KEY, or of JSON), or "
        "the file for this dataset in a folder.",
    )
    sample_type: str | None = option(
        metavar="CLASS", help="Type of the samples, such as CaptioningSample or CrudeWebdataset."
    )
    field_map: str | None = option(
        metavar="JSON", help='The parts of each field: {"image": "jpg,png"}.'
    )
    sample_loader: bool = option(
        is_flag=True,
        help="Create samples with code: write a template of .nv-meta/sample_loader.py.",
    )
    dataset_config: str = option(
        "--dataset-config",
        "--dataset-yaml-name",
        default="dataset.yaml",
        show_default=True,
        metavar="NAME",
        help="File below .nv-meta that describes samples.",
    )
    skip_dataset_yaml: bool = option(is_flag=True, help="Do not write dataset.yaml.")
    write: bool = option("-y", "--yes", is_flag=True, help="Write without confirmation.")
    exclude: tuple[str, ...] = option(
        metavar="REGEX", multiple=True, help="Skip shards whose path matches."
    )
    fix_duplicates: bool = option(is_flag=True, help="Rewrite shards that contain duplicate keys.")
    no_sqlite: bool = option(
        is_flag=True, help="Do not write index.sqlite; `energon index` can do so later."
    )
    tar_index_only: bool = option(
        is_flag=True, help="Reindex the known shards; see `energon index`."
    )
    non_interactive: bool = option(is_flag=True, help="Never prompt.")
    tmp_path: str | None = option(hidden=True)
    overwrite: bool = option(
        "--overwrite", "--force-overwrite", is_flag=True, help="Prepare again without confirmation."
    )
    as_json: bool = option("--json", is_flag=True, help="Print JSON, for scripts; never prompt.")

    @property
    def split_settings(self) -> dict[str, Any]:
        """Settings of splits that are never prompted for."""
        return {"unit": self.unit, "shuffle": self.shuffle, "exclude_from": self.exclude_from}

    def split(self) -> SplitRequest | None:
        """Return how to split the dataset, or None if no option says so."""
        from energon.prepare.splits import SplitRequest, parse_ratio

        if not (self.ratio or self.parts or self.by_folder):
            return None
        return SplitRequest(
            ratio=parse_ratio(self.ratio) if self.ratio else None,
            parts=self.parts,
            by_folder=self.by_folder,
            **self.split_settings,
        )


def decide(
    path: Path,
    shards: Sequence[str],
    options: PrepareOptions,
    *,
    ask: bool,
    piped: bool,
    source: AnyPath,
) -> tuple[SplitRequest, Description]:
    """Return how to split a dataset, and how to describe its samples.

    Args:
        path: Folder of the dataset.
        shards: Its shards.
        options: The options of the command.
        ask: Whether to prompt for the rest.
        piped: Whether a script provides answers on standard input.
        source: Where the contents of the shards are: the folder, or the one it stands for.

    Raises:
        ConfigError: If something without a default is missing, or something is invalid.
        click.Abort: If the dataset is not to be prepared.
    """
    from energon.prepare.assistant.dialog import Choices
    from energon.prepare.description import Description

    choices = Choices(
        split=options.split(),
        split_settings=options.split_settings,
        sample_type=options.sample_type,
        field_map=parse_field_map(options.field_map),
        sample_loader=_loader(path, shards, options, source) if options.sample_loader else None,
        describe=not options.skip_dataset_yaml,
        dataset_yaml_name=options.dataset_config,
        write=options.write,
    )
    if piped:
        choices = _piped(path, shards, choices, source)
    else:
        choices = _asked(path, shards, choices, source) if ask else _usual(choices)
    if choices.split is None:
        raise click.Abort
    return choices.split, Description(
        choices.sample_type if choices.describe else None,
        choices.field_map,
        choices.sample_loader,
        choices.dataset_yaml_name,
    )


def answers_from_a_pipe(options: PrepareOptions) -> bool:
    """Return whether a script provides answers to the prompts on standard input.

    A command whose options say how to split prompts for nothing, so it leaves its standard input
    to others, such as the shell loop that reads a list of folders from it.
    """
    stdin = sys.stdin
    if options.split() is not None or stdin is None or stdin.closed or stdin.isatty():
        return False
    try:
        readable, _, _ = select.select([stdin], [], [], 0)
    except (OSError, ValueError):  # in memory, where programs and tests put answers
        return _has_more(stdin)
    return bool(readable)


def _has_more(stream: TextIO) -> bool:
    """Return whether there is something left to read, and leave it there."""
    if not stream.seekable():
        return False
    here = stream.tell()
    more = bool(stream.read(1))
    stream.seek(here)
    return more


def says_yes() -> bool:
    """Return whether the next answer in the pipe is yes; the end of the pipe counts as no."""
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _piped(path: Path, shards: Sequence[str], choices: Choices, source: AnyPath) -> Choices:
    """Return the choices with the answers in a pipe, in the order in which scripts write them.

    That is: the ratio, whether to describe samples, the number of a sample type in alphabetical
    order (crude samples come last), whether to map fields, and the parts of each field.

    Raises:
        ConfigError: If answers are missing or invalid.
    """
    from energon.prepare.assistant.fields import (
        check_field,
        first_samples,
        is_required,
        loader_template,
        own_fields,
    )
    from energon.prepare.description import CRUDE
    from energon.prepare.splits import SplitRequest, parse_ratio
    from energon.samples.registry import resolve_class, sample_types

    ratio = _answer("the ratio of the splits, like 8,1,1")
    split = SplitRequest(ratio=parse_ratio(ratio), **choices.split_settings)
    choices = replace(choices, split=split, write=True)
    if not choices.describe or not _yes("whether to describe the samples"):
        return replace(choices, describe=False)
    names = [*sorted(set(sample_types()) - _NEWER_TYPES), CRUDE]
    number = _answer("the number of a sample type")
    if not number.isdigit() or int(number) >= len(names):
        numbered = ", ".join(f"{n} {name}" for n, name in enumerate(names))
        raise ConfigError(f"{number!r} is not the number of a sample type: {numbered}")
    name = names[int(number)]
    if name == CRUDE:
        return replace(choices, sample_type=CRUDE)
    sample_type = resolve_class("megatron.energon", name)
    samples = first_samples(source, shards, 2)
    if not _yes("whether to map fields to parts"):
        loader = loader_template(sample_type, samples)
        return replace(choices, sample_type=name, sample_loader=loader)
    mapping = {}
    for own in own_fields(sample_type):
        way = _answer(f"the part of the field {own.name!r}", optional=not is_required(own))
        if way:
            check_field(own.name, way, samples)
            mapping[own.name] = way
    return replace(choices, sample_type=name, field_map=mapping)


_NEWER_TYPES = frozenset({"TokensSample", "VQAOCRSample"})
"""Have no number in the list that scripts know."""


def _answer(what: str, *, optional: bool = False) -> str:
    line = sys.stdin.readline()
    answer = line.strip()
    if not line or (not answer and not optional):
        raise ConfigError(
            f"standard input ends before {what}; choose the splits with --split-ratio or "
            "--split-parts or --split-by-folder, to skip the prompts"
        )
    return answer


def _yes(what: str) -> bool:
    answer = _answer(what, optional=True).lower()
    if answer not in ("", "y", "yes", "n", "no"):
        raise ConfigError(f"{answer!r} does not answer {what}; expected y or n")
    return answer in ("", "y", "yes")


def _usual(choices: Choices) -> Choices:
    """Return the choices with a sample type, without prompting."""
    from energon.prepare.description import CRUDE

    if choices.split is None:
        raise ConfigError(
            "choose the splits with --split-ratio, --split-parts or --split-by-folder"
        )
    if choices.describe and choices.sample_type is None:
        return replace(choices, sample_type=CRUDE)
    return choices


def _asked(path: Path, shards: Sequence[str], choices: Choices, source: AnyPath) -> Choices:
    """Return the choices with the answers given at the terminal."""
    from rich.console import Console

    from energon.prepare.assistant.dialog import Assistant, Prompt

    if choices.is_complete:
        return choices
    try:
        answered = Assistant(path, shards, Prompt(Console()), source=source).run(choices)
    except EOFError:
        answered = None
    if answered is None:
        raise click.Abort
    return answered


def _loader(path: Path, shards: Sequence[str], options: PrepareOptions, source: AnyPath) -> str:
    """Return the code that makes samples: the existing file, or a template."""
    from energon.formats.meta.info import META
    from energon.prepare.assistant.fields import first_samples, loader_template
    from energon.prepare.description import CRUDE, LOADER_FILE
    from energon.samples.registry import resolve_class

    if options.sample_type in (None, CRUDE):
        raise ConfigError("--sample-loader needs a --sample-type whose fields the code makes")
    present = path / META / LOADER_FILE
    if present.is_file():
        return present.read_text()
    samples = first_samples(source, shards, 1)
    return loader_template(resolve_class("megatron.energon", str(options.sample_type)), samples)
