"""Ask somebody at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from energon.errors import ConfigError
from energon.prepare.describe import CRUDE
from energon.prepare.splits import SplitRequest

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Choices:
    """How a dataset is to be prepared. None and nothing stand for what is to be asked.

    Args:
        split: How it is split.
        split_settings: All about it that is not asked: unit, shuffle, exclude_from.
        sample_type: What samples become.
        field_map: How parts become fields.
        sample_loader: Code that makes samples instead.
        describe: Whether to write dataset.yaml at all.
        dataset_yaml_name: What it is called.
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
        """Whether there is nothing to ask."""
        if self.split is None:
            return False
        made = self.field_map is not None or self.sample_loader is not None
        return not self.describe or self.sample_type == CRUDE or bool(self.sample_type and made)


T = TypeVar("T")


class Prompt:
    """Asks questions until they have an answer that makes sense.

    Args:
        console: Where what is wrong with an answer is shown.
        read: Reads a line after showing a prompt; ends with EOFError.
    """

    def __init__(self, console: Console, read: Callable[[str], str] = input) -> None:
        self.console = console
        self.read = read

    def ask(
        self,
        question: str,
        check: Callable[[str], T],
        *,
        default: str | None = None,
        words: Sequence[str] = (),
    ) -> T:
        """Return what `check` makes of an answer.

        Args:
            question: What is asked.
            check: Raises ConfigError for answers that make no sense.
            default: What an empty answer stands for; None wants an answer.
            words: What the Tab key completes.
        """
        hint = "" if not default else f" [{default}]"
        while True:
            with _completing(words):
                answer = self.read(f"{question}{hint}: ").strip()
            if not answer:
                if default is None:
                    self._complain("please answer")
                    continue
                answer = default
            try:
                return check(answer)
            except ConfigError as error:
                self._complain(str(error))

    def confirm(self, question: str, *, default: bool) -> bool:
        """Return whether the answer is yes."""
        answers = {"y": True, "yes": True, "n": False, "no": False}

        def check(answer: str) -> bool:
            if answer.lower() not in answers:
                raise ConfigError(f"{answer!r} is neither yes nor no")
            return answers[answer.lower()]

        return self.ask(f"{question} (y/n)", check, default="y" if default else "n")

    def _complain(self, text: str) -> None:
        from rich.text import Text

        self.console.print(Text(text, style="red"))


@contextmanager
def _completing(words: Sequence[str]) -> Iterator[None]:
    """Let the Tab key complete words, where the terminal can."""
    try:
        import readline
    except ImportError:  # as on systems without GNU readline or editline
        yield
        return
    before = readline.get_completer(), readline.get_completer_delims()

    def complete(start: str, number: int) -> str | None:
        found = [word for word in words if word.startswith(start)]
        return found[number] if number < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(", ")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before[0])
        readline.set_completer_delims(before[1])
