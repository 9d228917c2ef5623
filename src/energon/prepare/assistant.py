"""The assistant of `energon prepare`: shows a folder of shards, and asks how to prepare it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from energon.errors import ConfigError, EnergonError
from energon.formats.meta.info import META, SPLIT_WORDS, DatasetInfo
from energon.io.epath import AnyPath
from energon.messages import counted, escape_line
from energon.prepare.dataset import CRUDE, LOADER_FILE, Description
from energon.prepare.sample_fields import (
    SeenSample,
    check_field,
    check_field_map,
    first_samples,
    is_required,
    known_ways,
    loader_template,
    own_fields,
    part_names,
    suggest,
)
from energon.prepare.splits import (
    SplitRequest,
    parse_ratio,
    present_split,
    split_by_folder,
    split_dataset,
)
from energon.samples.display import describe_value, half_blocks
from energon.samples.sample_types import resolve_class, sample_types

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Choices:
    """How to prepare a dataset. The assistant prompts for whatever is None or empty.

    Args:
        split: How to split it.
        split_settings: Settings of splits without a prompt: unit, shuffle, exclude_from.
        sample_type: The type of samples.
        field_map: How parts become fields.
        sample_loader: Code that makes samples, instead of a field map.
        describe: Whether to write dataset.yaml.
        dataset_yaml_name: Name of that file.
        write: Whether to write everything without asking.
    """

    split: SplitRequest | None = None
    split_settings: Mapping[str, Any] = field(default_factory=dict)
    sample_type: str | None = None
    field_map: Mapping[str, str] | None = None
    sample_loader: str | None = None
    describe: bool = True
    dataset_yaml_name: str = "dataset.yaml"
    write: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to ask."""
        if self.split is None:
            return False
        made = self.field_map is not None or self.sample_loader is not None
        return not self.describe or self.sample_type == CRUDE or bool(self.sample_type and made)

    @property
    def description(self) -> Description:
        """How the samples are described.

        Raises:
            ConfigError: If that is invalid.
        """
        sample_type = self.sample_type if self.describe else None
        return Description(sample_type, self.field_map, self.sample_loader, self.dataset_yaml_name)


T = TypeVar("T")


class Prompt:
    """Asks questions at a terminal, or takes the answers of a script from standard input.

    Scripts write the answers to the questions of Megatron-Energon in their order: the ratio,
    whether to describe samples, the number of a sample type, whether to map fields, and the part of
    each field. Nothing is shown to them, and an invalid answer ends the command.

    Args:
        console: Where to show samples, and errors in an answer.
        read: Reads a line after showing a prompt; raises EOFError at the end.
        is_scripted: Whether the answers are those of a script.
    """

    def __init__(
        self, console: Console, read: Callable[[str], str] = input, *, is_scripted: bool = False
    ) -> None:
        self.console = console
        self.read = read
        self.is_scripted = is_scripted

    def ask(
        self,
        question: str,
        check: Callable[[str], T],
        *,
        default: str | None = None,
        words: Sequence[str] = (),
    ) -> T:
        """Return the checked value of an answer.

        Args:
            question: The question.
            check: Converts an answer; raises ConfigError if it is invalid.
            default: The value of an empty answer; None requires an answer.
            words: Words that the Tab key completes.

        Raises:
            ConfigError: If the answer of a script is missing or invalid.
        """
        hint = "" if not default else f" [{default}]"
        while True:
            try:
                with _completing(words):
                    answer = self.read(f"{question}{hint}: ").strip() or default
                if answer is None:
                    raise ConfigError(f"{question!r} needs an answer")
                return check(answer)
            except ConfigError as error:
                if self.is_scripted:
                    raise
                from rich.text import Text

                self.console.print(Text(str(error), style="red"))
            except EOFError:
                if not self.is_scripted:
                    raise
                raise ConfigError(
                    f"standard input ends before an answer to {question!r}; choose the splits with "
                    "--split-ratio or --split-parts or --split-by-folder, to skip the prompts"
                ) from None

    def confirm(self, question: str, *, default: bool) -> bool:
        """Return whether the answer is yes."""
        answers = {"y": True, "yes": True, "n": False, "no": False}

        def check(answer: str) -> bool:
            if answer.lower() not in answers:
                raise ConfigError(f"{answer!r} is neither yes nor no")
            return answers[answer.lower()]

        return self.ask(f"{question} (y/n)", check, default="y" if default else "n")

    def accepts(self, proposal: str) -> bool:
        """Return whether the user accepts a proposal, which is a question that scripts lack."""
        return not self.is_scripted and self.confirm(proposal, default=True)


@contextmanager
def _completing(words: Sequence[str]) -> Iterator[None]:
    """Let the Tab key complete words, if the terminal supports it."""
    try:
        import readline
    except ImportError:  # as on systems without GNU readline or editline
        yield
        return
    before = readline.get_completer(), readline.get_completer_delims()

    def complete(start: str, number: int) -> str | None:
        matches = [word for word in words if word.startswith(start)]
        return matches[number] if number < len(matches) else None

    readline.set_completer(complete)
    readline.set_completer_delims(", ")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before[0])
        readline.set_completer_delims(before[1])


SHOWN_SAMPLES = 2
DEFAULT_RATIO = "8,1,1"
_NEWER_TYPES = frozenset({"TokensSample", "VQAOCRSample"})
"""Come after those that scripts select by number."""


class Assistant:
    """Asks about everything that is not decided yet for a folder of shards.

    Args:
        dataset: The folder.
        shards: Paths below it.
        prompt: Asks the questions.
        source: The real location of the shards, if the folder only stands for a remote one.
    """

    def __init__(
        self,
        dataset: Path,
        shards: Sequence[str],
        prompt: Prompt,
        *,
        source: AnyPath | None = None,
    ) -> None:
        self.dataset = dataset
        self.source = dataset if source is None else source
        self.shards = shards
        self.prompt = prompt
        self.console = prompt.console
        self.samples = first_samples(self.source, shards, SHOWN_SAMPLES)

    def run(self, choices: Choices) -> Choices | None:
        """Return all that is to be done; None for nothing.

        Raises:
            ConfigError: If a choice is invalid.
            EOFError: If no one answers.
        """
        self.show()
        if choices.field_map is not None and choices.sample_type not in (None, CRUDE):
            sample_type = resolve_class("megatron.energon", str(choices.sample_type))
            check_field_map(sample_type, choices.field_map, self.samples)
        split = choices.split
        if split is None:
            split = self.ask_split(**choices.split_settings)
            choices = replace(choices, split=split)
        if choices.describe and choices.sample_type is None:
            choices = self.ask_description(choices)
        choices = self.ask_loading(choices)
        self.review(choices, split)
        question = (
            f"Index {counted(len(self.shards), 'shard')} and write this to {self.source / META}?"
        )
        if choices.write or self.prompt.confirm(question, default=True):
            return choices
        return None

    def show(self) -> None:
        """Show the first samples."""
        for table in map(show_sample, self.samples[:SHOWN_SAMPLES]):
            self.console.print(table)
        names = (
            ", ".join(map(escape_line, part_names(self.samples))) or "none: no file has a sample"
        )
        self._say(f"Parts of samples: {names}")

    def ask_split(self, **settings: Any) -> SplitRequest:
        """Return how to split the dataset."""
        folders = self._split_folders()
        if folders and self.prompt.accepts(f"Are the folders {', '.join(folders)} the splits?"):
            return SplitRequest(by_folder=True, **settings)
        prefixes = {} if folders else self._split_prefixes()
        question = f"Do shard names start with the split name: {', '.join(prefixes)}?"
        if prefixes and self.prompt.accepts(question):
            return SplitRequest(parts=list(prefixes.values()), **settings)
        self._say(
            "Splits by ratio: 8,1,1 for train, val and test, or names as in train:9,holdout:1"
        )
        ratio = self.prompt.ask("Split ratio", parse_ratio, default=DEFAULT_RATIO)
        return SplitRequest(ratio=ratio, **settings)

    def ask_description(self, choices: Choices) -> Choices:
        """Return the choices with a sample type, or without a description."""
        file = choices.dataset_yaml_name
        if self.prompt.is_scripted and not self.prompt.confirm(f"Write {file}?", default=True):
            return replace(choices, describe=False)
        present = self.dataset / META / file
        if present.is_file():
            self._show_file(file, present.read_text(errors="replace"))
            if self.prompt.accepts(f"Keep this {file}?"):
                return replace(choices, describe=False)
        names = [*sorted(set(sample_types()) - _NEWER_TYPES), CRUDE, *sorted(_NEWER_TYPES)]
        self.console.print(_type_table(names))

        def check(answer: str) -> str:
            if answer.isdigit() and int(answer) < len(names):
                return names[int(answer)]
            if answer.lower() in (CRUDE.lower(), "crude sample", "crude"):
                return CRUDE
            return str(resolve_class("megatron.energon", answer).__name__)

        chosen = self.prompt.ask(
            "Sample type, by number or name", check, default=CRUDE, words=names
        )
        return replace(choices, sample_type=chosen)

    def ask_loading(self, choices: Choices) -> Choices:
        """Return the choices with a way to make samples from parts."""
        made = choices.field_map is not None or choices.sample_loader is not None
        if made or not choices.describe or choices.sample_type in (None, CRUDE):
            return choices
        sample_type = resolve_class("megatron.energon", str(choices.sample_type))
        question = "Map fields to parts? (no: write a template of sample_loader.py instead)"
        if not self.prompt.confirm(question, default=True):
            return replace(choices, sample_loader=self._ask_loader(sample_type))
        return replace(choices, field_map=self._ask_field_map(sample_type))

    def review(self, choices: Choices, split: SplitRequest) -> None:
        """Show what will be written."""
        counts = DatasetInfo(dict.fromkeys(self.shards, 0))
        nonempty = [name for name, part in (split.ratio or {}).items() if part > 0]
        by_shard = split.unit == "shard" or len(self.shards) >= len(nonempty)
        if split.unit != "sample" and by_shard:
            dealt = split_dataset(counts, split, present_split(self.dataset))
            self._show_file("split.yaml", dealt.to_yaml())
        else:
            self._say("split.yaml: samples will be divided by ratio once they are counted")
        for name, content in choices.description.documents():
            self._show_file(name, content)

    def _ask_field_map(self, sample_type: type) -> dict[str, str]:
        ways = known_ways(self.samples)
        self._say(
            "For each field: a part such as jpg, a value in it such as json[caption], or several "
            "of them separated by commas. Tab completes. A minus omits a field."
        )
        mapping = {}
        for own in own_fields(sample_type):
            required = is_required(own)
            likely = None if self.prompt.is_scripted else suggest(own.name, self.samples)

            def check(answer: str, name: str = own.name, must: bool = required) -> str | None:
                if answer in ("", "-"):
                    if must:
                        raise ConfigError(f"{sample_type.__name__} needs the field {name!r}")
                    return None
                for value in check_field(name, answer, self.samples)[:SHOWN_SAMPLES]:
                    self._say(f"  = {_line(value)}")
                return answer

            way = self.prompt.ask(
                f"{own.name} ({_type_name(own.type)}{'' if required else ', optional'})",
                check,
                default=likely if likely is not None or required else "-",
                words=list(ways),
            )
            if way is not None:
                mapping[own.name] = way
        return mapping

    def _ask_loader(self, sample_type: type) -> str:
        present = self.dataset / META / LOADER_FILE
        if present.is_file() and self.prompt.accepts(f"Keep {self.source / META / LOADER_FILE}?"):
            return present.read_text()
        return loader_template(sample_type, self.samples)

    def _split_folders(self) -> list[str]:
        try:
            names = list(split_by_folder(self.shards))
        except ConfigError:
            return []
        are_splits = all(name.lower() in SPLIT_WORDS for name in names)
        return names if are_splits and len(names) > 1 else []

    def _split_prefixes(self) -> dict[str, str]:
        """Return by split the pattern of its shards, if all names begin with a split."""
        patterns: dict[str, str] = {}
        words = "|".join(SPLIT_WORDS)
        for shard in self.shards:
            match = re.match(rf"({words})(?=[^a-zA-Z])", shard.rpartition("/")[2])
            if match is None:
                return {}
            patterns[match[1]] = f"{match[1]}:(?:.*/)?{match[1]}[^a-zA-Z/][^/]*$"
        return patterns if len(patterns) > 1 else {}

    def _say(self, text: str) -> None:
        from rich.text import Text

        self.console.print(Text(text))

    def _show_file(self, name: str, content: str) -> None:
        from rich.panel import Panel
        from rich.syntax import Syntax

        language = "python" if name.endswith(".py") else "yaml"
        content = "\n".join(escape_line(line) for line in content.splitlines())
        self.console.print(Panel(Syntax(content, language), title=name, title_align="left"))


def _type_table(names: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table("", "sample type", "fields; in brackets those with a default")
    for number, name in enumerate(names):
        if name == CRUDE:
            text = "none: samples stay dicts of parts, to be converted by cookers of the program"
        else:
            text = ", ".join(
                own.name if is_required(own) else rf"\[{own.name}]"
                for own in own_fields(sample_types()[name])
            )
        table.add_row(str(number), name, text)
    return table


def _type_name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "any")


TEXT_LETTERS = 200
IMAGE_COLUMNS = 32
IMAGE_ROWS = 12


def show_sample(sample: SeenSample) -> Table:
    """Return a table of the parts of a sample: name, size, and content."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{sample.shard}: {escape_line(sample.key)}"), title_justify="left")
    table.add_column("part", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("content")
    for part, size in sample.sizes.items():
        content: Any = Text("too large to show")
        if part in sample.decoded:
            content = preview(sample.decoded[part])
        table.add_row(Text(escape_line(part)), f"{size:,}", content)
    return table


def preview(value: Any) -> Any:
    """Return a few lines about a value: a text, or an image in colored blocks."""
    from rich.console import Group
    from rich.text import Text

    if isinstance(value, EnergonError):
        return Text(escape_line(f"cannot be decoded: {value}"), style="red")
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[2:] == (3,):
        height, width, _ = value.shape
        lines = half_blocks(value, IMAGE_COLUMNS, IMAGE_ROWS)
        return Group(
            Text(f"image, {width} by {height} pixels"),
            Text.from_ansi("\n".join(lines), no_wrap=True),
        )
    return Text(_line(value))


def _line(value: Any) -> str:
    text = escape_line(describe_value(value))
    return text if len(text) <= TEXT_LETTERS else text[: TEXT_LETTERS - 1] + "…"
