"""Continue after a problem, so that a call reports all problems and not only the first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from energon.errors import ConfigError, DatasetNotFoundError, FormatError
from energon.metadataset.document import BrokenMetadataset, paths_in
from energon.metadataset.inherit import absolute
from energon.metadataset.kind import dataset_kind

_PLACE = re.compile(r"(\S.*?):(\d+):(\d+): ")


class Problems:
    """What was found on the way through documents."""

    def __init__(self) -> None:
        self._found: list[Exception] = []

    @contextmanager
    def kept(self, place: str = "") -> Iterator[None]:
        """Keep a problem that is raised in here, instead of raising it.

        Args:
            place: Goes before the message, if that names no other.
        """
        try:
            yield
        except (ConfigError, DatasetNotFoundError, FormatError) as exc:
            self._found.append(_placed(exc, place))

    def keep_broken(self, document: BrokenMetadataset, split_part: str) -> None:
        """Keep what is wrong with a document, and which paths in a split of it lead nowhere."""
        self._found.append(ConfigError(document.message))
        for place, path in paths_in(document.raw, split_part):
            try:
                dataset_kind(absolute(path, document.folder))
            except (ConfigError, DatasetNotFoundError) as exc:
                self._found.append(DatasetNotFoundError(f"{place}: {exc}"))

    def raise_all(self) -> None:
        """Raise what was found, if anything, as one error.

        Raises:
            ConfigError: If problems are of several kinds; else, of that kind.
        """
        if not self._found:
            return
        if len(self._found) == 1:
            raise self._found[0]
        kinds = {type(problem) for problem in self._found}
        kind = kinds.pop() if len(kinds) == 1 else ConfigError
        messages = dict.fromkeys(
            message for problem in self._found for message in _messages(str(problem))
        )
        raise kind("\n".join(_in_order(messages)))


def _placed(problem: Exception, place: str) -> Exception:
    if not place or str(problem).startswith(place) or _PLACE.match(str(problem)):
        return problem
    placed = type(problem)(f"{place}: {problem}")
    placed.__cause__ = problem
    return placed


def _messages(text: str) -> list[str]:
    """Return the messages in a text: each begins with a place, and may span several lines."""
    found: list[str] = []
    for line in text.splitlines():
        if found and not _PLACE.match(line):
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return found


def _in_order(messages: Iterable[str]) -> list[str]:
    """Return messages by where they point to in each file, the files as they were come upon."""
    files: dict[str, int] = {}

    def place(message: str) -> tuple[int, ...]:
        match = _PLACE.match(message)
        if match is None:
            return (len(files),)
        file, row, column = match.groups()
        return files.setdefault(file, len(files)), int(row), int(column)

    places = {message: place(message) for message in messages}
    return sorted(places, key=places.__getitem__)
